"""--checkpoint-activations recomputes each transformer layer, however the layers are grouped and cut."""

import pytest

from megatron.model.transformer import ParallelTransformerLayerPipe
from tests.distributed.layouts import Row, build_engine, config_of, train
from tests.distributed.pool import run_world


def forwards_per_layer(row, together):
    """How often this rank's transformer layers ran forward in one step of one micro-batch, and the losses."""
    engine = build_engine(config_of(row, training={"checkpoint_num_layers": together}))
    functions = engine.module.forward_funcs
    layers = [layer for layer in functions if isinstance(layer, ParallelTransformerLayerPipe)]
    counts = [0] * len(layers)

    def count(index):
        def hook(module, inputs):
            counts[index] += 1

        return hook

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(count(index))
    history = train(engine, range(1))
    return [c / engine.micro_batches for c in counts], history


@pytest.mark.parametrize("together", [1, 2, 3, 4])
def test_each_layer_runs_twice_in_groups_of_any_size(together):
    counts, history = run_world(1, forwards_per_layer, Row(recompute=True, micro_batch=4), together)[0]
    assert counts == [2, 2, 2, 2]
    plain, expected = run_world(1, forwards_per_layer, Row(micro_batch=4), 1)[0]
    assert plain == [1, 1, 1, 1]
    assert history[0] == pytest.approx(expected[0], rel=1e-6)


def test_each_layer_runs_twice_on_every_stage():
    results = run_world(2, forwards_per_layer, Row(pp=2, recompute=True, micro_batch=4), 2)
    assert [counts for counts, _ in results] == [[2, 2], [2, 2]]
