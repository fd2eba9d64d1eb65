"""Latent attention: one process is compared with a GPT in plain PyTorch, and every layout with one
process."""

from dataclasses import replace

import pytest

from megatron.checkpoint.manager import load_checkpoint
from megatron.checkpoint.selection import find_checkpoint
from megatron.commands import convert_checkpoint
from megatron.mpu.parameters import spec_of
from tests.distributed.parity import (
    LAYOUTS,
    SEQUENCE_PARALLEL,
    assert_same_numbers,
    assert_same_on,
    rows_of,
)
from tests.distributed.test_model_variants import LLAMA, initial_weights_and_history, plain_history
from tests.reference.plain_experts import PlainExperts
from tests.support.checkpoints import FINGERPRINT, make_manager, state_after
from tests.support.layouts import (
    FP32_BOUND,
    STEPS,
    Row,
    build_engine,
    config_of,
    relative_errors,
    train,
    unconnected_run,
)
from tests.support.pool import run_world

# The value heads are smaller than the query heads.
LATENT = {
    **{**LLAMA, "group_query_attention": False, "num_query_groups": 1, "multi_latent_attention": True},
    **{"q_lora_rank": 12, "kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 6},
    **{"qk_layernorm": True, "init_method_std": 0.1},
}
YARN = {
    **{**LATENT, "rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rotary_base": 50.0},
    **{"rope_original_max_position_embeddings": 16, "rope_beta_slow": 0.5, "rope_beta_fast": 2.0},
    **{"mscale": 0.7, "mscale_all_dim": 1.3},
}
# Queries are not compressed, and there are no norms. The value heads are larger than the query heads, and
# attention has a window.
PLAIN_QUERIES = {**LATENT, "q_lora_rank": None, "qk_layernorm": False, "v_head_dim": 14, "window_size": 7}
# Only the output projection has a bias, and the norms are layer norms.
BIASES = {**LATENT, "disable_bias_linear": False, "normalization": "LayerNorm"}
EXPERTS = {
    **{"num_experts": 8, "moe_ffn_hidden_size": 24, "moe_layer_freq": ("D", "E", "E", "E")},
    **{"moe_router_topk": 3, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
    **{"moe_shared_expert_intermediate_size": 24, "moe_aux_loss_coeff": 0.01},
}
DEEPSEEK_V3 = {
    **{**YARN, **EXPERTS, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    **{"moe_router_bias_update_rate": 0.01, "moe_router_topk_scaling_factor": 2.5},
    "moe_router_group_score_topk": 2,
}
DEEPSEEK_V2 = {
    **{**LATENT, **EXPERTS, "q_lora_rank": None, "moe_router_pre_softmax": True},
    **{"moe_router_topk_scaling_factor": 4.0, "moe_router_group_score_topk": 1},
}

SIZES = {"plain": 6, "rotated": 4, "value": 6}
_YARN = {"factor": 4.0, "original": 16, "slow": 0.5, "fast": 2.0}
SCALED = {**SIZES, "base": 50.0, "yarn": _YARN, "mscale": 0.7, "mscale_all": 1.3}
_ROUTER = {"k": 3, "groups": 4, "group_topk": 2, "balance": "seq_aux_loss", "coefficient": 0.01}
# Name -> (the model, the arguments of the plain GPT, the arguments of its experts).
MODELS = {
    "latent": (LATENT, {"latent": SIZES}, None),
    "yarn": (YARN, {"latent": SCALED}, None),
    "plain-queries": (PLAIN_QUERIES, {"latent": {**SIZES, "value": 14}, "window": 7}, None),
    "biases": (BIASES, {"latent": SIZES}, None),
    "deepseek-v3": (
        DEEPSEEK_V3,
        {"latent": SCALED},
        {**_ROUTER, "score": "sigmoid", "factor": 2.5, "bias_rate": 0.01, "group_score": 2},
    ),
    "deepseek-v2": (
        DEEPSEEK_V2,
        {"latent": SIZES},
        {**_ROUTER, "pre_softmax": True, "factor": 4.0, "group_score": 1},
    ),
}


@pytest.mark.gate(rows=2, also=["deepseek-v2"])
@pytest.mark.parametrize("name", ["yarn", *(name for name in MODELS if name != "yarn")])
def test_one_process_trains_as_latent_attention_in_plain_pytorch_does(name):
    model, options, experts = MODELS[name]
    ((weights, history),) = run_world(1, initial_weights_and_history, Row(micro_batch=4), {"model": model})
    steps = STEPS if experts is None else STEPS // 4
    options = options if experts is None else {**options, "experts": PlainExperts(**experts)}
    plain = plain_history(weights, model, steps, **options)
    assert max(relative_errors(history[:steps], plain)) <= FP32_BOUND


ROWS = rows_of(
    {
        "yarn": LAYOUTS,
        "plain-queries": ("tp2-cp2-sequence-recompute", "tp2-pp2-partitioned-activations"),
        "biases": ("tp2-pp2-zero-bubble-sequence",),
        "deepseek-v3": (
            *("tp2-cp2-sequence-recompute", "tp2-pp2-dp2-zero1-dropout", "cp2-pp2-zero-bubble"),
            "pp2-dp2-zero1-interleaved",
        ),
        "deepseek-v2": ("tp2-dp2-zero3", "dp2-zero2"),
    }
)


@pytest.mark.gate(rows=1, also=["deepseek-v3-tp2-cp2-sequence-recompute"])
@pytest.mark.parametrize("model, layout", ROWS)
def test_every_layout_has_the_loss_and_the_grad_norm_of_one_process(model, layout):
    assert_same_on(layout, {"model": MODELS[model][0]})


@pytest.mark.full
@pytest.mark.parametrize("row", [Row(tp=2, pp=2), Row(cp=2)], ids=str)
def test_bf16_follows_the_fp32_loss(row):
    assert_same_numbers(replace(row, precision="bf16"), STEPS, {"model": YARN})


MUON = {"optimizer": "muon", "muon_extra_scale_factor": 0.2}
OPTIMIZERS = {
    "muon-tp2-cp2-sequence": (Row(tp=2, cp=2), MUON, SEQUENCE_PARALLEL),
    "muon-tp2-dp2-zero1": (Row(tp=2, dp=2, zero=1, micro_batch=2), MUON, {}),
    "muon-tp2-dp2-zero3": (Row(tp=2, dp=2, zero=3, micro_batch=2), MUON, {}),
}
EP2 = {"parallel": {"sequence_parallel": True, "expert_model_parallel_size": 2}}
WIDE = {"hidden_size": 64, "ffn_hidden_size": 100, "q_lora_rank": 72, "kv_lora_rank": 72}


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_muon_does_not_depend_on_the_layout(name):
    row, optimizer, layout = OPTIMIZERS[name]
    assert_same_numbers(row, 4, {"model": {**LATENT, **WIDE}, "optimizer": optimizer}, layout)


def matrices_of_layer():
    engine = build_engine(config_of(Row(micro_batch=4), model=LATENT))
    layer = engine.module.get_submodule("3.self_attention")
    return {name: spec_of(p).matrix_rows for name, p in layer.named_parameters() if p.dim() == 2}


def test_muon_takes_keys_values_and_the_shared_key_for_matrices_of_their_own():
    (found,) = run_world(1, matrices_of_layer)
    assert found == {
        "q_down_proj.weight": (12,),
        "q_up_proj.weight": (40,),
        "kv_down_proj.weight": (10, 4),
        "kv_up_proj.weight": (6, 6),
        "dense.weight": (32,),
    }


def save(row, folder, layout):
    options = {"save": str(folder), "save_format": "dcp"}
    engine = build_engine(config_of(row, model=DEEPSEEK_V3, checkpoint=options, **layout))
    train(engine, range(3))
    make_manager(engine, folder).save(state_after(3))
    return train(engine, range(3, 5))


def resume(row, folder, layout, **options):
    options = {"load": str(folder), **options}
    config = config_of(row, model=DEEPSEEK_V3, checkpoint=options, **layout)
    engine = build_engine(config)
    train(engine, [9])  # other weights and moments: the load must replace all
    load_checkpoint(engine, find_checkpoint(unconnected_run(config)), FINGERPRINT)
    return train(engine, range(3, 5))


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("kind", ["universal", "dcp"])
def test_a_checkpoint_of_each_format_opens_on_another_layout(kind, tmp_path):
    saved = tmp_path / "saved"
    expected, *_ = run_world(4, save, Row(tp=2, dp=2, zero=1), saved, EP2)
    folder = source = saved / "global_step3"
    if kind != "dcp":
        folder = tmp_path / kind / "global_step3"
        convert_checkpoint.run(["--from", str(source), "--to", str(folder), "--format", kind])
    options = {"universal_checkpoint": kind == "universal"}
    for history in run_world(2, resume, Row(pp=2, micro_batch=2), folder, {}, **options):
        assert max(relative_errors(history, expected)) <= FP32_BOUND
