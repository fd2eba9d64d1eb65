"""Tests the flags of FP8: what they imply, and with which flags they are rejected, whatever the layout."""

import pytest

from megatron.arguments import parse_args
from megatron.config.registries import GPUS
from megatron.config.sections.fp8_layers import BLOCK, MIN_SIZE, is_small
from megatron.errors import ConfigError
from megatron.planner.rates import EAGER_TRAFFIC, RATES

MODEL = (
    "--num-layers 4 --fp8-min-size 0 --hidden-size 512 --num-attention-heads 8 --seq-length 128 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 10 --vocab-size 1000 "
    "--dry-run --world-size 8"
)
ROTARY = "--position-embedding-type rotary"
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 256"


def precision(flags: str):
    return parse_args([*MODEL.split(), *flags.split()], {}).precision


@pytest.mark.parametrize(
    ("flags", "recipe", "form"),
    [
        ("", None, None),
        ("--fp8-recipe blockwise", "blockwise", "e4m3"),
        ("--fp8-recipe tensorwise", "tensorwise", "hybrid"),
        ("--fp8-format hybrid", "blockwise", "hybrid"),
        ("--fp8-format e4m3 --fp8-recipe tensorwise", "tensorwise", "e4m3"),
        ("--fp8-hybrid --no-fp8-wgrad", "blockwise", "hybrid"),  # Microsoft's
    ],
)
def test_each_flag_implies_the_other(flags, recipe, form):
    found = precision(f"--bf16 {flags}")
    assert (found.fp8_recipe, found.fp8_format, found.name) == (recipe, form, "bf16")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fp8-recipe blockwise", "--fp8-format e4m3 without --bf16"),
        ("--fp16 --fp8-recipe blockwise", "without --bf16"),
        ("--bf16 --fp8-recipe delayed", "--fp8-recipe delayed is not supported: .*set blockwise"),
        ("--bf16 --fp8-recipe mxfp8", "--fp8-recipe mxfp8 is not supported"),
        ("--bf16 --fp8-format e5m2", "expected one of e4m3, hybrid"),
        ("--bf16 --fp8-recipe blockwise --gpu a100-80gb", "--gpu a100-80gb .*Expected one of h100-80gb"),
        ("--bf16 --fp8-recipe blockwise --gpu v100-32gb", "--gpu v100-32gb"),
        (f"--bf16 --fp8-recipe tensorwise {EXPERTS}", "--fp8-recipe tensorwise with --num-experts 8"),
        (
            "--bf16 --fp8-recipe blockwise --hidden-size 576 --kv-channels 64",
            "--hidden-size 576 is not divis",
        ),
        ("--bf16 --fp8-recipe blockwise --ffn-hidden-size 1984", "--ffn-hidden-size 1984 is not divisible"),
        (
            "--bf16 --fp8-recipe blockwise --tensor-model-parallel-size 8",
            "= 512 / --tensor-model-parallel-size 8",
        ),
        (
            "--bf16 --fp8-recipe blockwise --num-query-groups 1 --group-query-attention",
            "= 640 / --tensor-model",
        ),
        (f"--bf16 --fp8-recipe blockwise {EXPERTS} --moe-ffn-hidden-size 192", "--moe-ffn-hidden-size 192"),
        (
            "--bf16 --fp8-format e4m3 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
            "--fp8-format e4m3 with --tp-comm-overlap",
        ),
        ("--bf16 --first-last-layers-bf16", "--first-last-layers-bf16 without --fp8-format"),
        ("--bf16 --fp8-format e4m3 --num-layers-at-end-in-bf16 2", "without --first-last-layers-bf16"),
        (
            "--bf16 --fp8-format e4m3 --first-last-layers-bf16 --num-layers-at-start-in-bf16 3",
            "--first-last-layers-bf16 computes 0 of 4 layers in FP8",
        ),
        (
            "--bf16 --fp8-format e4m3 --first-last-layers-bf16 --num-layers-at-start-in-bf16 0 "
            "--num-layers-at-end-in-bf16 0",
            "--first-last-layers-bf16 computes 4 of 4 layers in FP8",
        ),
        ("--bf16 --fp8-format e4m3 --fp8-layer-pattern F F", "--fp8-layer-pattern computes 4 of 4 layers"),
        ("--bf16 --fp8-format e4m3 --fp8-layer-pattern F X", "expected letters F and B"),
        (
            "--bf16 --fp8-format e4m3 --fp8-layer-pattern F B --first-last-layers-bf16",
            "--first-last-layers-bf16 with --fp8-layer-pattern F B",
        ),
        (
            "--bf16 --fp8-format e4m3 --fp8-min-size 768",
            "no matrix in FP8, because all are smaller than --fp8-min-size 768",
        ),
    ],
)
def test_what_cannot_run_is_rejected(flags, message):
    if "--num-query-groups" in flags:
        flags += " --tensor-model-parallel-size 2"
    with pytest.raises(ConfigError, match=message):
        precision(flags)


def test_the_projection_of_multi_token_prediction_is_checked_if_the_last_layer_is_in_fp8():
    sizes = "--hidden-size 1152 --num-attention-heads 8 --kv-channels 128 --ffn-hidden-size 4096"
    flags = f"--bf16 --fp8-recipe blockwise --tensor-model-parallel-size 2 {sizes} {ROTARY}"
    assert precision(flags).fp8_recipe
    with pytest.raises(ConfigError, match="--hidden-size 1152 / --tensor-model-parallel-size 2 is not divis"):
        precision(f"{flags} --mtp-num-layers 1")
    assert precision(f"{flags} --mtp-num-layers 1 --fp8-layer-pattern F F F B").fp8_recipe


def test_the_gate_is_part_of_the_projection_whose_size_is_checked():
    """The projection with the gate is [2304, 1024] and computes in FP8. Without the gate it would be [1536,
    1024], which is small."""
    sizes = "--hidden-size 1024 --num-attention-heads 6 --kv-channels 128 --ffn-hidden-size 1024"
    groups = "--group-query-attention --num-query-groups 3 --fp8-min-size 700"
    flags = f"--bf16 --fp8-recipe blockwise {sizes} {groups}"
    with pytest.raises(ConfigError, match="computes no matrix in FP8"):
        precision(flags)
    assert precision(f"{flags} --attention-output-gate").fp8_recipe


def test_sizes_of_experts_are_not_divided_by_tensor_parallel_ranks():
    flags = f"--bf16 --fp8-recipe blockwise {EXPERTS} --moe-ffn-hidden-size 128"
    assert precision(f"{flags} --tensor-model-parallel-size 4 --sequence-parallel").fp8_recipe


@pytest.mark.parametrize(
    ("flags", "bf16_layers"),
    [
        ("", []),
        ("--first-last-layers-bf16", [0, 3]),
        ("--first-last-layers-bf16 --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 2", [2, 3]),
        ("--fp8-layer-pattern B F F B", [0, 3]),
        ("--fp8-layer-pattern 2", [1, 3]),
        ("--fp8-layer-pattern [0]+[1]*3", [0]),
    ],
)
def test_layers_in_bf16_are_chosen_by_their_number_in_the_model(flags, bf16_layers):
    model = parse_args([*MODEL.split(), *f"--bf16 --fp8-format e4m3 {flags}".split()], {}).model
    assert [layer for layer in range(4) if model.is_bf16_layer(layer)] == bf16_layers


def test_small_matrices_are_in_bf16_and_need_no_whole_blocks():
    """The rows of a gated MLP's two matrices count together. Experts of layers in bf16 are not checked."""
    assert [is_small(n, n, 768) for n in (1408, 1536)] == [True, False]
    small = "--hidden-size 2048 --ffn-hidden-size 700 --fp8-min-size 768"
    assert precision(f"--bf16 --fp8-format e4m3 {small}").fp8_min_size == 768
    with pytest.raises(ConfigError, match="--ffn-hidden-size 700 is not divisible by 128"):
        precision(f"--bf16 --fp8-format e4m3 {small} --glu-activation swiglu")
    experts = f"{EXPERTS} --moe-ffn-hidden-size 192 --moe-layer-freq E D D D"
    with pytest.raises(ConfigError, match="--moe-ffn-hidden-size 192 is not divisible"):
        precision(f"--bf16 --fp8-format e4m3 {experts}")
    assert precision(f"--bf16 --fp8-format e4m3 {experts} --fp8-layer-pattern B F F F")


def test_the_smallest_size_follows_from_the_rates_of_an_h100():
    gpu, rates = GPUS.load("h100-80gb"), RATES["h100"]
    saved = 1 / (gpu.peak_flops["bf16"] * rates.products) - 1 / (gpu.peak_flops["fp8"] * rates.fp8_products)
    moved = (2 + 1 + 4 / BLOCK) * EAGER_TRAFFIC / (gpu.bandwidth * rates.memory)
    assert moved / (4 * saved) == pytest.approx(MIN_SIZE, rel=0.02)
