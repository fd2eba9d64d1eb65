"""QK-clip: the weights after each step equal a plain scaling, and every layout trains as one process."""

import pytest
import torch

from tests.distributed.parity import LAYOUTS, assert_same_numbers, assert_same_on, rows_of
from tests.distributed.test_latent_attention import LATENT, PLAIN_QUERIES, SIZES
from tests.distributed.test_model_variants import LLAMA
from tests.distributed.test_muon import MUON
from tests.reference.plain_gpt import Variant, plain_gpt_logits
from tests.support.layouts import (
    STEPS,
    VOCAB,
    Row,
    build_engine,
    config_of,
    full_weights,
    global_batch,
    train,
    weights_of,
)
from tests.support.pool import run_world

ALPHA = 0.3
LARGE = {"init_method_std": 0.1}
GROUPS, GATE = {**LLAMA, **LARGE}, {**LLAMA, **LARGE, "attention_output_gate": True}
WINDOW_HEADS = {
    **{**GATE, "window_size": 20, "window_pattern": ("F", "W"), "num_query_groups": 1},
    **{"window_num_attention_heads": 8, "window_num_query_groups": 4},
}
ALIBI = {"position_embedding_type": "alibi", **LARGE}  # with biases, which are not scaled


def clipped(threshold, optimizer=MUON):
    return {**optimizer, "qk_clip": True, "qk_clip_alpha": ALPHA, "qk_clip_threshold": threshold}


def largest_logits(weights, tokens, model):
    """Returns the largest logits [heads] of each layer, computed by the GPT in plain PyTorch."""
    found, latent = [], model.get("multi_latent_attention")
    sizes = {**SIZES, "value": model["v_head_dim"], "largest": found} if latent else None
    has_gate, heads = "attention_output_gate" in model, model.get("window_num_attention_heads")
    windows = {"heads": heads, "groups": model["window_num_query_groups"]} if heads else None
    plain_gpt_logits(
        weights,
        tokens,
        **{"layers": 4, "heads": 4, "vocab": VOCAB, "latent": sizes, "window": model.get("window_size")},
        positions=model["position_embedding_type"],
        glu=model.get("glu_activation"),
        groups=model.get("num_query_groups") if model.get("group_query_attention") else None,
        pattern="".join(model.get("window_pattern", "W")),
        variant=Variant(has_gate=has_gate, largest=None if latent else found, windows=windows),
    )
    return found


def scale_plainly(weights, index, largest, threshold, model):
    """Scales the weights of a layer in place, head by head. Returns the number of scaled heads."""
    name, count = f"{index}.self_attention", 0
    eta = [min(1.0, threshold / logit) if logit > 0 else 1.0 for logit in largest.tolist()]
    if model.get("multi_latent_attention"):
        queries = weights.get(f"{name}.q_proj.weight", weights.get(f"{name}.q_up_proj.weight"))
        for factor, query, both in zip(
            eta, queries.chunk(4), weights[f"{name}.kv_up_proj.weight"].chunk(4), strict=True
        ):
            query[:6] *= factor**ALPHA
            query[6:] *= factor
            both[:6] *= factor ** (1 - ALPHA)
            count += factor < 1
        return count
    groups = model["num_query_groups"] if model.get("group_query_attention") else 4
    if len(eta) == model.get("window_num_attention_heads"):
        groups = model["window_num_query_groups"]
    shared, gate = len(eta) // groups, "attention_output_gate" in model
    for group, rows in enumerate(weights[f"{name}.query_key_value.weight"].chunk(groups)):
        factor = min(eta[group * shared : (group + 1) * shared])
        rows[: shared * 8] *= factor**ALPHA
        key = shared * 8 * (1 + gate)
        rows[key : key + 8] *= factor ** (1 - ALPHA)
        count += shared * (factor < 1)
    return count


def weights_of_both(model, optimizer, threshold, steps):
    """Trains with --qk-clip, and trains without it but with the plain scaling after each step.

    Returns (the weights of both runs, the number of scaled heads, the largest logit of each step: logged and
    plain).
    """
    ours = build_engine(config_of(Row(micro_batch=2), model=model, optimizer=clipped(threshold, optimizer)))
    plain = build_engine(config_of(Row(micro_batch=2), model=model, optimizer=optimizer))
    parameters = {name: parameter.data for name, parameter in plain.module.named_parameters()}
    count, metrics, logged = 0, ours.module.metrics, []
    for step in range(steps):
        largest = largest_logits(full_weights([weights_of(plain)]), global_batch(step)[0], model)
        with metrics.recording():
            train(ours, [step])
        found = metrics.collect(torch.device("cpu"))["max attention logit"]
        logged.append((found, torch.cat(largest).max().item()))
        train(plain, [step])
        count += sum(
            scale_plainly(parameters, 3 + layer, of_heads, threshold, model)
            for layer, of_heads in enumerate(largest)
        )
    return full_weights([weights_of(ours)]), full_weights([weights_of(plain)]), count, logged


MODELS = {
    "groups": (GROUPS, MUON, 1.0),
    "gate": (GATE, MUON, 1.0),
    "latent": (LATENT, MUON, 0.6),
    "plain-queries": (PLAIN_QUERIES, MUON, 0.4),
    "alibi-adam": (ALIBI, {}, 1.0),
    "window-heads": (WINDOW_HEADS, MUON, 1.0),
}
OTHER_MODELS = {"next-tokens": ({**GROUPS, "mtp_num_layers": 1}, MUON, 1.0), "adam": (GROUPS, {}, 1.0)}


@pytest.mark.gate(rows=1, also=["latent"])
@pytest.mark.parametrize("name", MODELS)
def test_one_process_scales_what_a_plain_scaling_does(name):
    model, optimizer, threshold = MODELS[name]
    steps = 5
    ((found, expected, count, logged),) = run_world(1, weights_of_both, model, optimizer, threshold, steps)
    heads = 4 * 2 + model.get("window_num_attention_heads", 4) * 2  # of 4 layers, 2 with a window
    assert steps * 2 < count < steps * heads - 4
    for ours, plain in logged:
        assert ours == pytest.approx(plain, rel=1e-5)
    for name, weight in expected.items():
        if not name.endswith("query_key_value.bias"):  # Adam scales up the rounding of a key's gradient
            torch.testing.assert_close(found[name], weight, rtol=0, atol=5e-6, msg=name)


ROWS = rows_of(
    {
        "groups": LAYOUTS,
        "latent": ("tp2-cp2-sequence-recompute", "tp2-dp2-zero3", "pp2-dualpipev", "cp2-pp2-zero-bubble"),
        "gate": ("tp2-dp2-zero3",),
        "window-heads": ("tp4", "tp2-pp2-dp2-zero1-dropout"),
        "plain-queries": ("tp2-cp2-sequence-recompute",),
        "alibi-adam": ("cp2", "tp4"),
        "next-tokens": ("pp2-dp2-zero1-interleaved",),
        "adam": ("dp2-zero1-offload",),
    }
)
REJECTIONS = {"groups": {"dp2-zero1-offload": "--optimizer muon with --cpu-offload"}}


def numbers_of(name):
    model, optimizer, threshold = (MODELS | OTHER_MODELS)[name]
    return {"model": model, "optimizer": clipped(threshold, optimizer)}


@pytest.mark.gate(rows=0, also=["groups-tp4", "latent-tp2-cp2-sequence-recompute"])
@pytest.mark.parametrize("model, layout", ROWS)
def test_every_layout_has_the_losses_of_one_process(model, layout):
    assert_same_on(layout, numbers_of(model), REJECTIONS.get(model))


@pytest.mark.full
def test_bf16_follows_the_fp32_losses():
    assert_same_numbers(Row(tp=2, dp=2, zero=1, precision="bf16"), STEPS, numbers_of("groups"))
