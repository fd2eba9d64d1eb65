"""The check of causal attention at the start of a run finds wrong results, and all ranks reach one
decision."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator

from megatron.arguments import parse_args
from megatron.cluster.exit_codes import SharedUserError
from megatron.cluster.preflight import check_attention
from megatron.model.attention.self_test import AttentionCase, attention_cases, attention_problem
from tests.support.pool import run_world

FLAGS = (
    "--dry-run --num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 100 --seq-length 192 "
    "--max-position-embeddings 192 --micro-batch-size 1 --global-batch-size 4 --lr 1 "
    "--train-iters 1 --world-size 4 "
)
CASE = AttentionCase(seq=192, heads=6, groups=2, head_dim=16, dtype=torch.bfloat16)
NAMES = ("output", "gradient of the query", "gradient of the key", "gradient of the value")
ATTENTION = F.scaled_dot_product_attention


class Spoiled(torch.autograd.Function):
    """Attention in which one row of one result is changed: of the output (0), or of one of the gradients (1
    to 3)."""

    @staticmethod
    def forward(ctx, which, change, options, *inputs):
        ctx.which, ctx.change, ctx.options = which, change, options
        ctx.save_for_backward(*inputs)
        output = ATTENTION(*inputs, **options)
        return output if which else change_a_row(output, change)

    @staticmethod
    def backward(ctx, grad):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ATTENTION(*inputs, **ctx.options)
        gradients = list(torch.autograd.grad(output, inputs, grad))
        if ctx.which:
            gradients[ctx.which - 1] = change_a_row(gradients[ctx.which - 1], ctx.change)
        return None, None, None, *gradients


def change_a_row(x, change):
    x = x.clone()
    x[0, -1, 150] = x[0, -1, 151] if change == "next row" else torch.nan
    return x


def attention_with(which, change):
    return lambda query, key, value, **options: Spoiled.apply(which, change, options, query, key, value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_self_test_accepts_right_results(dtype):
    for case in (CASE, AttentionCase(1, 2, 2, 8, dtype), AttentionCase(70, 12, 1, 64, dtype)):
        assert attention_problem(case, "cpu") is None


@pytest.mark.parametrize("change", ["next row", "NaN"])
@pytest.mark.parametrize("which", range(4))
def test_attention_self_test_finds_one_wrong_row_of_a_result(which, change, monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention_with(which, change))
    found = attention_problem(CASE, "cpu")
    assert NAMES[which] in found and ("nan" in found) == (change == "NaN")


def outcome(wrong_rank, repaired, error=None):
    """Returns the notes or the error of the check, and whether cuDNN may still be used.

    Runs on two ranks whose CPUs pose as GPUs. The attention of rank `wrong_rank` is wrong; with `repaired` it
    is wrong only while cuDNN is enabled.
    """

    def attention(*arguments, **options):
        is_wrong = dist.get_rank() == wrong_rank
        if not is_wrong or (repaired and not torch.backends.cuda.cudnn_sdp_enabled()):
            return ATTENTION(*arguments, **options)
        if error is not None:
            raise RuntimeError(error)
        return attention_with(2, "next row")(*arguments, **options)

    before = torch.backends.cuda.cudnn_sdp_enabled()
    with (
        patch.object(get_accelerator(), "device_name", lambda: "cuda"),
        patch.object(get_accelerator(), "current_device_name", lambda: "cpu"),
        patch.object(F, "scaled_dot_product_attention", attention),
    ):
        try:
            found = check_attention(parse_args(f"{FLAGS} --attention-dropout 0 --bf16".split(), {}))
        except SharedUserError as raised:
            found = str(raised)
        finally:
            left = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(before)
        return found, left


def test_attention_self_test_of_one_rank_turns_cudnn_off_on_all():
    assert (
        run_world(2, outcome, None, True)
        == [(["causal attention by PyTorch's FLASH_ATTENTION agrees with fp32 operations"], True)] * 2
    )
    for error, words in ((None, "gradient of the key"), ("cuDNN Frontend error", "cuDNN Frontend error")):
        (first, *is_on), second = run_world(2, outcome, 1, True, error)
        assert (first, *is_on) == second and is_on == [False]
        assert len(first) == 1 and "rank 1 on " in first[0] and words in first[0]


def test_attention_self_test_is_an_error_if_attention_is_wrong_without_cudnn():
    first, second = run_world(2, outcome, 0, False)
    assert first == second
    assert first[0].startswith("causal attention is wrong by PyTorch's FLASH_ATTENTION on rank 0 on ")


@pytest.mark.parametrize(
    "flags,expected",
    [
        ("--bf16", [(192, 4, 4, None)]),
        ("--fp16 --attention-dropout 0 --tensor-model-parallel-size 2", [(192, 2, 2, None)]),
        (
            "--bf16 --group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4",
            [(192, 1, 1, None)],
        ),
        ("--bf16 --seq-length 4160 --max-position-embeddings 4160", [(1024 + 64, 4, 4, None)]),
        ("--bf16 --context-parallel-size 2", [(48, 4, 4, None)]),
        ("--bf16 --window-size 16 --window-pattern W F", [(192, 4, 4, None), (192, 4, 4, 16)]),
        (
            "--bf16 --window-size 16 --window-pattern W F --window-num-attention-heads 8 "
            "--tensor-model-parallel-size 2",
            [(192, 2, 2, None), (192, 4, 4, 16)],
        ),
        ("--bf16 --window-size 191", [(192, 4, 4, 96)]),
        ("--bf16 --window-size 16 --reset-attention-mask", []),
        ("--window-size 16", []),
        ("--bf16 --position-embedding-type alibi", []),
        ("--bf16 --reset-attention-mask", []),
        ("", []),
    ],
)
def test_attention_self_test_has_the_shape_of_a_rank(flags, expected):
    """The shape does not depend on dropout, which an evaluation does not have."""
    cases = attention_cases(parse_args([*FLAGS.split(), *flags.split()], {}))
    assert [(case.seq, case.heads, case.groups, case.window) for case in cases] == expected
