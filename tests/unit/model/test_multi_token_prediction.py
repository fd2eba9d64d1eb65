"""Tests what layers for multi-token prediction cost, and what they leave unchanged."""

from __future__ import annotations

import pytest
import torch

from megatron.config import ConfigError
from megatron.model.flops import iteration_flops, palm_flops
from megatron.model.inference.single_process import GPTModel
from megatron.pipeline.stages import flops_of_layers, plan_stages
from tests.distributed.test_experts import GLM
from tests.distributed.test_model_variants import LLAMA
from tests.support.layouts import EOD, SEQ, VOCAB, Row, config_of

MTP = {"mtp_num_layers": 2}


def test_generation_has_the_logits_of_the_main_model() -> None:
    tokens = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(1))
    models = [GPTModel(config_of(Row(), model=LLAMA | more), VOCAB, EOD).eval() for more in (MTP, {})]
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.normal_(std=0.1)
        state = models[0].state_dict()
        models[1].load_state_dict({name: state[name] for name in models[1].state_dict()})
        assert torch.equal(models[0](tokens), models[1](tokens))
    added = state.keys() - models[1].state_dict().keys()
    assert {name.split(".")[0] for name in added} == {"11", "12"}, "after L + 6, also in fp32"


@pytest.mark.parametrize("model", [LLAMA, GLM])
@pytest.mark.parametrize("recompute", [False, True])
def test_flops_count_a_transformer_layer_a_projection_and_the_head(model: dict, recompute: bool) -> None:
    config = config_of(Row(recompute=recompute), model=model)
    more = config.with_settings({"model.mtp_num_layers": 2})
    tokens, hidden, padded = 8 * SEQ, 32, 104
    one_more = config_of(
        Row(recompute=recompute),
        model={**model, "num_layers": 5, **({"moe_layer_freq": tuple("DEEEE")} if model is GLM else {})},
    )
    layer = iteration_flops(one_more, VOCAB) - iteration_flops(config, VOCAB)
    passes = 4 if recompute else 3
    added = layer + passes * 2 * tokens * 2 * hidden**2 + 3 * 2 * tokens * hidden * padded
    assert iteration_flops(more, VOCAB) - iteration_flops(config, VOCAB) == 2 * added
    plans = [plan_stages(each, VOCAB) for each in (config, more, one_more)]
    numbers = [
        palm_flops(c, VOCAB, p.active_parameters)
        for c, p in zip((config, more, one_more), plans, strict=True)
    ]
    per_layer = numbers[2] - numbers[0] + 6 * tokens * (2 * hidden**2 + 3 * hidden + hidden * padded)
    assert numbers[1] - numbers[0] == pytest.approx(2 * per_layer, rel=1e-9)
    flops = flops_of_layers(more, plans[1].layers, VOCAB)
    assert flops[11] == flops[12] and flops[11] >= flops[6] + flops[9]


def test_the_last_stage_gets_fewer_layers() -> None:
    for untied in (False, True):
        model = {**LLAMA, "mtp_num_layers": 1, "untie_embeddings_and_output_weights": untied}
        parallel = {"partition_method": "time"}
        with_layers, without = (
            plan_stages(config_of(Row(pp=2), model=m, parallel=parallel), VOCAB) for m in (model, LLAMA)
        )
        assert [with_layers.num_transformer_layers(stage) for stage in (0, 1)] == [3, 1]
        assert [without.num_transformer_layers(stage) for stage in (0, 1)] == [2, 2]
        titles = [layer.title for layer in with_layers.layers_of(1) if layer.title]
        copy = ["embedding"] if untied else []
        assert titles == ["transformer layer", "final norm", "LM head", "multi-token prediction", *copy]
        alone = plan_stages(config_of(Row(), model=model), VOCAB)
        assert alone.stage_parameters(0) == sum(alone.parameters) - sum(
            n for layer, n in zip(alone.layers, alone.parameters, strict=True) if layer.is_tied
        )


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model": {"position_embedding_type": "absolute"}}, "--position-embedding-type rotary"),
        ({"model": {"embed_layernorm": True}}, "only the first stage has the norm"),
        ({"training": {"cuda_graph_impl": "local"}}, "remove --cuda-graph-impl"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict, named: str) -> None:
    from megatron.arguments import parse_args

    words = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr 1 "
        "--global-batch-size 1 --train-iters 1 --dry-run --vocab-size 100 --mtp-num-layers 1"
    ).split()
    settings = {"position_embedding_type": "rotary"} | changes.get("model", {}) | changes.get("training", {})
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    with pytest.raises(ConfigError, match=named):
        parse_args(words, {})
    with pytest.raises(ConfigError, match="mtp-num-layers"):
        parse_args([*words[:-2], "--mtp-num-layers", "0"], {})
