"""The model variants of Llama, OLMo 2, GPT-NeoX and Falcon: one process is compared with a GPT in plain
PyTorch, and every layout with one process."""

from dataclasses import replace

import pytest

from tests.distributed.parity import LAYOUTS, assert_same_numbers, assert_same_on, rows_of
from tests.distributed.resharding import resume_midway, save_before, uninterrupted
from tests.reference.plain_gpt import Variant, train_plain_gpt
from tests.support.layouts import (
    CLIP,
    FP32_BOUND,
    RATE,
    STEPS,
    VOCAB,
    Row,
    build_engine,
    config_of,
    global_batch,
    relative_errors,
    train,
)
from tests.support.pool import run_world

LLAMA = {
    "position_embedding_type": "rotary",
    "normalization": "RMSNorm",
    "glu_activation": "swiglu",
    "disable_bias_linear": True,
    "ffn_hidden_size": 48,
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}
QWEN2 = {**LLAMA, "add_qkv_bias": True, "untie_embeddings_and_output_weights": False, "rotary_base": 1e6}
MULTI_QUERY = {**LLAMA, "num_query_groups": 1}
QWEN3 = {**LLAMA, "qk_layernorm": True}
# Norms of small outputs enlarge rounding errors, so the initial weights are larger.
OLMO2 = {
    **QWEN3,
    "qk_layernorm_scope": "projection",
    "layer_arrangement": "post-norm",
    "init_method_std": 0.1,
}
NEOX = {
    "position_embedding_type": "rotary",
    "rotary_percent": 0.5,
    "layer_arrangement": "parallel",
    "activation": "gelu_exact",
    "untie_embeddings_and_output_weights": True,
}
FALCON = {
    "position_embedding_type": "rotary",
    "layer_arrangement": "parallel-one-norm",
    "activation": "gelu_exact",
    "disable_bias_linear": True,
    "group_query_attention": True,
}
WINDOW = {**LLAMA, "window_size": 7}
# A head has 4 frequencies: one is unchanged, one is interpolated, and two are scaled.
ROPE = {"rope_scaling_factor": 4.0, "rope_original_max_position_embeddings": 16, "rotary_base": 50.0}
LLAMA3_ROPE = {
    **{**LLAMA, **ROPE, "rope_scaling_type": "llama3"},
    **{"rope_low_freq_factor": 0.5, "rope_high_freq_factor": 2.0},
}
YARN = {**LLAMA, **ROPE, "rope_scaling_type": "yarn", "rope_beta_slow": 0.5, "rope_beta_fast": 2.0}
OLMO2_WINDOW = {**OLMO2, "window_size": 7}
# Two of three layers have windows. Their rotary angles differ from the third layer's.
PATTERN = {
    **{**WINDOW, "window_pattern": ("W", "W", "F"), "window_rotary_base": 500.0, "rotary_base": 50.0},
    **{"rope_scaling_type": "linear", "rope_scaling_factor": 4.0},
}
GEMMA3 = {
    **{**PATTERN, "glu_activation": "geglu_tanh", "layer_arrangement": "pre-post-norm", "qk_layernorm": True},
    **{"apply_layernorm_1p": True, "scale_embeddings": True, "untie_embeddings_and_output_weights": False},
    **{"softmax_scale": 24**-0.5, "init_method_std": 0.1},
}

SINKS = {**PATTERN, "softmax_type": "learnable", "add_qkv_bias": True}  # as gpt-oss
OFF_BY_ONE = {**QWEN3, "softmax_type": "off-by-one"}
GATE = {**QWEN3, "attention_output_gate": True, "rotary_percent": 0.5, "init_method_std": 0.1}
NO_ROTARY = {**LLAMA, "no_rope_freq": ("R", "R", "N")}  # as SmolLM3
# The scores and the logits come close to their caps.
CAPS = {
    **{"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0, "init_method_std": 0.2},
    **{**LLAMA, "num_query_groups": 1},
}
# As in Laguna and MiMo-V2: layers with a window have different numbers of heads, and value heads are small.
HEADS = {
    **{**PATTERN, "window_num_attention_heads": 8, "window_num_query_groups": 4, "num_query_groups": 1},
    **{"window_softmax_type": "learnable", "v_channels": 4, "attention_value_scale": 0.7},
    **{"attention_output_gate": True, "attention_output_gate_scope": "head", "init_method_std": 0.1},
    **{"attention_output_gate_activation": "softplus", "qk_layernorm": True, "window_rotary_percent": 0.5},
    "window_kv_channels": 12,
}
ALL_VARIANTS = {**PATTERN, **GATE, **CAPS, "no_rope_freq": ("R", "R", "N"), "softmax_type": "learnable"}

# Name -> (the changes to the tiny model, the arguments of the plain GPT).
PLAIN_CASES = {
    "absolute": ({}, {}),
    "alibi": ({"position_embedding_type": "alibi"}, {}),
    "embed-layernorm": ({"position_embedding_type": "alibi", "embed_layernorm": True}, {"embed_norm": True}),
    **{glu: ({"glu_activation": glu}, {}) for glu in ("geglu", "liglu", "reglu", "swiglu")},
    "llama": (LLAMA, {"groups": 2}),
    "qwen2": (QWEN2, {"groups": 2, "rotary": {"base": 1e6}}),
    "multi-query": ({"group_query_attention": True}, {"groups": 1}),
    "qwen3": (QWEN3, {"groups": 2}),
    "olmo2": (OLMO2, {"groups": 2, "arrangement": "post-norm"}),
    "layer-norms-of-heads": ({"qk_layernorm": True}, {}),
    "neox": (NEOX, {"arrangement": "parallel", "rotary": {"part": 0.5}, "exact_gelu": True}),
    "falcon": (FALCON, {"groups": 1, "arrangement": "parallel-one-norm", "exact_gelu": True}),
    "window": (WINDOW, {"groups": 2, "window": 7}),
    "window-pattern": (
        PATTERN,
        {
            **{"groups": 2, "window": 7, "pattern": "WWF"},
            **{"rotary": {"base": 500.0}, "full": {"base": 50.0, "factor": 4.0}},
        },
    ),
    "gemma3": (
        {**GEMMA3, "softmax_scale": None},
        {
            **{"groups": 2, "window": 7, "pattern": "WWF", "arrangement": "pre-post-norm"},
            **{"scale_embeddings": True, "zero_centered": True},
            **{"rotary": {"base": 500.0}, "full": {"base": 50.0, "factor": 4.0}},
        },
    ),
    "sinks": (
        SINKS,
        {
            **{"groups": 2, "window": 7, "pattern": "WWF"},
            **{"rotary": {"base": 500.0}, "full": {"base": 50.0, "factor": 4.0}},
        },
    ),
    "off-by-one": (OFF_BY_ONE, {"groups": 2, "variant": Variant(sink=0.0)}),
    "gate": (GATE, {"groups": 2, "rotary": {"part": 0.5}, "variant": Variant(has_gate=True)}),
    "no-rotary": (NO_ROTARY, {"groups": 2, "no_rope": "RRN"}),
    "caps": (CAPS, {"groups": 1, "variant": Variant(score_cap=0.5, logit_cap=2.0)}),
    "all-variants": (
        ALL_VARIANTS,
        {
            **{"groups": 1, "window": 7, "pattern": "WWF", "no_rope": "RRN"},
            **{"rotary": {"base": 500.0, "part": 0.5}, "full": {"base": 50.0, "factor": 4.0, "part": 0.5}},
            "variant": Variant(has_gate=True, score_cap=0.5, logit_cap=2.0),
        },
    ),
    "heads": (
        HEADS,
        {
            **{"groups": 1, "window": 7, "pattern": "WWF"},
            **{"rotary": {"base": 500.0, "part": 0.5}, "full": {"base": 50.0, "factor": 4.0}},
            "variant": Variant(
                **{
                    "has_gate": True,
                    "gates_heads": True,
                    "softplus": True,
                    "value_dim": 4,
                    "value_scale": 0.7,
                },
                windows={"heads": 8, "groups": 4, "dim": 12},
            ),
        },
    ),
    "zero-centered-layer-norm": ({"apply_layernorm_1p": True}, {"zero_centered": True}),
    "rms-norm": ({"normalization": "RMSNorm"}, {}),
    "untied": ({"untie_embeddings_and_output_weights": True}, {}),
    "no-bias": ({"disable_bias_linear": True}, {}),
    "rotary": ({"position_embedding_type": "rotary"}, {}),
    "rotary-options": (
        {
            "position_embedding_type": "rotary",
            "rotary_base": 500.0,
            "rotary_percent": 0.5,
            "rotary_interleaved": True,
        },
        {"rotary": {"base": 500.0, "part": 0.5, "interleaved": True}},
    ),
}


def initial_weights_and_history(row, changes):
    engine = build_engine(config_of(row, **changes))
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return weights, train(engine, range(STEPS))


@pytest.mark.gate(rows=4, also=["llama", "gemma3"])
@pytest.mark.parametrize("case", PLAIN_CASES)
def test_one_process_trains_as_a_gpt_in_plain_pytorch_does(case):
    model, options = PLAIN_CASES[case]
    row = Row(micro_batch=4)
    ((weights, history),) = run_world(1, initial_weights_and_history, row, {"model": model})
    plain = plain_history(weights, model, STEPS, **options)
    assert max(relative_errors(history, plain)) <= FP32_BOUND


def plain_history(weights, model, steps, **options):
    """Trains the GPT in plain PyTorch on the first steps. options: arguments of `train_plain_gpt`."""
    return train_plain_gpt(
        weights,
        [global_batch(step) for step in range(steps)],
        lr=RATE,
        vocab=VOCAB,
        clip=CLIP,
        layers=4,
        heads=4,
        positions=model.get("position_embedding_type", "absolute"),
        glu=model.get("glu_activation"),
        **options,
    )


# MULTI_QUERY with 2 ranks and LLAMA with 4 have fewer query groups than ranks.
FAMILIES = {
    **{"multi-query": MULTI_QUERY, "llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "yarn": YARN},
    **{"olmo2": OLMO2, "neox": NEOX, "falcon": FALCON, "window": WINDOW, "olmo2-window": OLMO2_WINDOW},
    **{"gemma3": GEMMA3, "pattern": PATTERN, "llama3-rope": LLAMA3_ROPE},
}
VARIANTS = {
    **{"sinks": SINKS, "off-by-one": OFF_BY_ONE, "gate": GATE, "no-rotary": NO_ROTARY, "caps": CAPS},
    **{"heads": HEADS, "all-variants": ALL_VARIANTS},
}
# Every family runs on four of the layouts. The next family runs on the next four.
ROWS = rows_of(
    {name: [*LAYOUTS][start % 6 :: 6] for start, name in enumerate(FAMILIES)}
    | dict.fromkeys(VARIANTS, LAYOUTS)
)


@pytest.mark.gate(rows=1, also=["pattern-cp2", "all-variants-tp2-cp2-sequence-recompute"])
@pytest.mark.parametrize("model, layout", ROWS)
def test_every_layout_has_the_loss_and_the_grad_norm_of_one_process(model, layout):
    numbers = {"model": (FAMILIES | VARIANTS)[model]}
    if model == "gemma3":
        # Adam's first steps are about lr x sign(gradient), even where a gradient is zero up to rounding. A
        # larger epsilon avoids this.
        numbers["optimizer"] = {"adam_eps": 1e-4}
    assert_same_on(layout, numbers)


# The layouts that save and the layouts that resume a Llama-like model with an untied head. TP 4 has more
# ranks than the model has query groups.
SAVERS = {
    "tp4": Row(tp=4, micro_batch=2),
    "tp2 pp2": Row(tp=2, pp=2, zero=1),
    "1 process": Row(micro_batch=2),
}
RESUMERS = (Row(pp=2, dp=2, zero=1), Row(tp=4, dp=2, zero=1, micro_batch=2), Row(tp=2, pp=2))


@pytest.mark.full
@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize(
    "model",
    [LLAMA, OLMO2, FALCON, HEADS, ALL_VARIANTS],
    ids=["llama", "olmo2", "falcon", "heads", "all-variants"],
)
def test_a_checkpoint_opens_on_other_layouts(model, saver, tmp_path):
    changes = {"model": {**model, "make_vocab_size_divisible_by": 8}}
    expected = uninterrupted(changes)
    run_world(SAVERS[saver].world_size, save_before, SAVERS[saver], tmp_path, changes)
    for row in RESUMERS if saver != "tp4" else RESUMERS[:1]:
        for _, history in run_world(row.world_size, resume_midway, row, tmp_path, changes):
            assert max(relative_errors(history, expected)) <= FP32_BOUND


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "model, row",
    [
        *(("llama", row) for row in (Row(), Row(tp=4, micro_batch=2), Row(tp=2, pp=2, dp=2, zero=1))),
        ("gemma3", Row(tp=2, pp=2)),
    ],
    ids=str,
)
def test_bf16_and_fp16_follow_the_fp32_loss(precision, model, row):
    assert_same_numbers(replace(row, precision=precision), numbers={"model": FAMILIES[model]})
