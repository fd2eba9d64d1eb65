"""--checkpoint-activations recomputes each transformer layer, with groups of any size and any partition."""

from unittest import mock

import pytest
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed_checkpointing
from torch.autograd.graph import saved_tensors_hooks

from megatron.model.gpt_model import ParallelTransformerLayerPipe
from tests.distributed.parity import one_process
from tests.support.layouts import (
    DROPOUT,
    FP32_BOUND,
    SEQ,
    Row,
    build_engine,
    config_of,
    relative_errors,
    train,
)
from tests.support.pool import run_world


def forwards_per_layer(row, together):
    """Returns how often each transformer layer of this rank ran forward in a step of one micro-batch, and the
    losses."""
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


@pytest.mark.parametrize(("pp", "together"), [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2)])
def test_each_layer_runs_twice_in_groups_of_any_size_on_every_stage(pp, together):
    row = Row(pp=pp, recompute=True, micro_batch=4)
    plain, expected = run_world(1, forwards_per_layer, Row(micro_batch=4), 1)[0]
    assert plain == [1, 1, 1, 1]
    for counts, history in run_world(pp, forwards_per_layer, row, together):
        assert counts == [2] * (4 // pp)
        assert history[0] == pytest.approx(expected[0], rel=1e-6)


THROUGH_DEEPSPEED = {"partition_activations": True, "checkpoint_in_cpu": True}
DOCUMENTS = {"data": {"reset_attention_mask": True}}
STEPS = 6


def kept_scores_and_history(row, changes):
    """Returns (number of score matrices that autograd keeps in a step, losses and grad norms of 6 steps)."""
    engine = build_engine(config_of(row, model=DROPOUT, **changes))
    kept = []

    def keep(tensor):
        kept.append(tensor.shape)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        history = train(engine, range(1))
    scores = [shape for shape in kept if len(shape) == 4 and shape[2:] == (SEQ, SEQ)]
    return len(scores), history + train(engine, range(1, STEPS))


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("row", [Row(micro_batch=2), Row(tp=2, pp=2, micro_batch=2, positions="alibi")])
def test_selective_recomputation_keeps_no_scores_and_changes_no_number(row):
    changes = {"training": {"recompute_granularity": "selective"}}
    for plain, selective in zip(
        run_world(row.world_size, kept_scores_and_history, row, {}),
        run_world(row.world_size, kept_scores_and_history, row, changes),
        strict=True,
    ):
        assert plain[0] > 0 and selective[0] == 0
        assert max(relative_errors(selective[1], plain[1])) < 1e-6


def history_and_parts(row, changes):
    """Returns (losses and grad norms of 6 steps, sizes of the layer inputs that DeepSpeed kept in the first
    step)."""
    engine = build_engine(config_of(row, **changes))
    sizes, keep = set(), deepspeed_checkpointing.extract_tensors

    def note(all_objects):
        sizes.update(
            thing.saved_data.numel()
            for thing in all_objects
            if getattr(thing, "saved_data", None) is not None
        )
        return keep(all_objects)

    with mock.patch.object(deepspeed_checkpointing, "extract_tensors", note):
        history = train(engine, range(1))
    return sizes, history + train(engine, range(1, STEPS))


@pytest.mark.full
@pytest.mark.parametrize(
    ("row", "flags", "changes"),
    [
        (Row(tp=2, recompute=True), ("partition_activations",), {}),
        (Row(tp=2, recompute=True, micro_batch=2), tuple(THROUGH_DEEPSPEED), DOCUMENTS),
        (
            Row(tp=2, pp=2, recompute=True),
            tuple(THROUGH_DEEPSPEED),
            {"training": {"checkpoint_num_layers": 2}},
        ),
        (Row(dp=2, zero=1, recompute=True, positions="rotary"), ("checkpoint_in_cpu",), DOCUMENTS),
        (Row(pp=2, recompute=True), ("checkpoint_in_cpu",), {"parallel": {"pipeline_schedule": "dualpipev"}}),
    ],
    ids=str,
)
def test_parts_and_copies_of_the_inputs_give_the_same_numbers(row, flags, changes):
    """DeepSpeed keeps the TP rank's shard of each input, and recomputes the layers from the gathered
    tensor."""
    training = changes.get("training", {}) | dict.fromkeys(flags, True)
    numbers = {"model": DROPOUT, "data": changes.get("data", {})}
    reference = one_process(row, STEPS, **numbers)
    results = run_world(row.world_size, history_and_parts, row, {**numbers, **changes, "training": training})
    part = row.micro_batch * SEQ * 32 // row.tp
    for sizes, history in results:
        # With one TP rank the inputs are not partitioned, and on a CPU there is no copy.
        assert sizes == ({part} if row.tp > 1 else set())
        assert max(relative_errors(history, reference)) < FP32_BOUND
