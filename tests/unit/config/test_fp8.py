"""The flags of FP8: what they imply, and with what they are rejected, whatever the layout."""

import pytest

from megatron.arguments import parse_args
from megatron.errors import ConfigError

MODEL = (
    "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 128 --micro-batch-size 1 "
    "--global-batch-size 8 --lr 1e-3 --train-iters 10 --vocab-size 1000 --dry-run --world-size 8"
)
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
        ("--bf16 --fp8-format e4m3 --first-last-layers-bf16", "--first-last-layers-bf16"),
    ],
)
def test_what_cannot_run_is_rejected(flags, message):
    if "--num-query-groups" in flags:
        flags += " --tensor-model-parallel-size 2"
    with pytest.raises(ConfigError, match=message):
        precision(flags)


def test_sizes_of_experts_are_not_divided_by_tensor_parallel_ranks():
    flags = f"--bf16 --fp8-recipe blockwise {EXPERTS} --moe-ffn-hidden-size 128"
    assert precision(f"{flags} --tensor-model-parallel-size 4 --sequence-parallel").fp8_recipe
