"""Tests the chosen implementation of attention for every combination of features, and that all
implementations have equal results."""

from __future__ import annotations

import itertools
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron.arguments import parse_args
from megatron.model.attention import choice as attention_choice
from megatron.model.attention import core_attention
from megatron.model.attention.choice import (
    AttentionRequirements,
    Implementation,
    choose_attention,
    implementation_for,
)
from megatron.model.attention.core_attention import CoreAttention
from megatron.model.layer_context import LayerContext
from megatron.model.position import AttentionMasks, document_ids_of
from megatron.mpu.compilation import compile_in_place
from megatron.mpu.context_parallel import positions_of
from megatron.mpu.mesh import ONE_RANK, Axis
from megatron.mpu.random import DropoutRNG
from tests.support.rows import for_each

BOTH = (False, True)
KERNELS = (None, "MEGATRON_KERNELS=pytorch is set")


@for_each(
    "dropout, alibi, documents, seq, head_dim, on_cpu, window, context, kernels, flash, sink, cap",
    itertools.product(
        *((0.0, 0.1), BOTH, BOTH, (2048, 2049), (128, 256, 264), BOTH, (None, 64), BOTH, KERNELS, BOTH),
        *(BOTH, (None, 50.0)),
    ),
)
def test_every_combination(
    dropout, alibi, documents, seq, head_dim, on_cpu, window, context, kernels, flash, sink, cap
):
    if on_cpu:
        kernels, flash = "the device is a CPU", False
    requirements = (
        *(dropout, alibi, documents, seq, head_dim, on_cpu, kernels, window, context, flash),
        *(sink, cap),
    )
    choice, reason = choose_attention(AttentionRequirements(*requirements))
    plain = not (dropout or alibi or documents or window or sink or cap)
    assert (choice == Implementation.SDPA) == plain
    of_flash = not plain and not (dropout or alibi or documents or cap)
    by_flash = of_flash and flash and kernels is None and head_dim <= 256
    assert (choice == Implementation.FLASH_WINDOW) == bool(by_flash)
    fits = not plain and not by_flash and kernels is None and head_dim == 128
    assert (choice == Implementation.TRITON) == fits
    is_dense = choice in (Implementation.UNFUSED, Implementation.BIASED_SDPA)
    if context or (not on_cpu and seq > 2048):
        assert not is_dense
    if is_dense:
        assert (choice == Implementation.UNFUSED) == (dropout > 0 or sink or cap is not None)
    words = ("dropout 0.1", "ALiBi", "document boundaries", "a window of 64 tokens", "a sink", "capped at 50")
    for word, used in zip(words, (dropout, alibi, documents, window, sink, cap), strict=True):
        assert (word in reason) == bool(used)
    if choice in (Implementation.BLOCKS, Implementation.UNFUSED, Implementation.BIASED_SDPA):
        assert (kernels or f"heads of {head_dim} are larger than 128") in reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_of_a_group_are_kept_once_and_give_what_copies_give(dtype, monkeypatch):
    """The layer has 64 query heads with 8 key heads."""
    flags = (
        "--dry-run --num-layers 1 --hidden-size 512 --num-attention-heads 64 --vocab-size 100 "
        "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 1 "
        "--lr 1 --train-iters 1 --group-query-attention --num-query-groups 8 --attention-dropout 0"
    )
    core = CoreAttention(LayerContext(parse_args(flags.split(), {}), ONE_RANK, DropoutRNG(1)), 3)
    torch.manual_seed(1)
    query, key, value, grad = (torch.randn(32, 2, n, 8).to(dtype) for n in (64, 8, 8, 64))
    kept, results = [], []
    for shares in (False, True):
        accepts = core_attention._flash_kernel_accepts if shares else lambda *_: False
        monkeypatch.setattr(core_attention, "_flash_kernel_accepts", accepts)
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        storages = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, storages=storages: storages.setdefault(x.data_ptr(), x), lambda x: x
        ):
            output = core(*inputs, None)
        kept.append(sum(x.numel() for x in storages.values() if x.dtype == dtype and x.dim() == 4))
        gradients = torch.autograd.grad(output, inputs, grad.flatten(2))
        results.append([x.detach().float() for x in (output, *gradients)])
        monkeypatch.undo()
    # Without sharing: query, output and copies of keys and values. With sharing: keys and values once.
    assert kept == [(2 + 2) * query.numel(), 2 * query.numel() + 2 * key.numel()]
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.full
def test_a_compiled_layer_asks_for_the_flash_kernel_of_cuda_between_two_graphs():
    """dynamo cannot trace the question whether the flash kernel accepts the tensors."""

    class Copies(torch.nn.Module):
        def forward(self, query, key, value):
            accepts = core_attention._flash_kernel_of_cuda_accepts(query * 2, key, value)
            return key * 2 if accepts else value * 2

    torch._dynamo.reset()
    compile_in_place(module := Copies())
    found = torch._dynamo.explain(module.forward)(*(torch.randn(8, 2, n, 16) for n in (4, 2, 2)))
    assert (found.graph_count, found.graph_break_count) == (2, 1)


def test_attention_with_a_bias_on_cuda_does_not_choose_cudnn(monkeypatch):
    """The tensors are stubs: only the kernels that PyTorch may choose during the call are compared."""

    def allowed(*_, **__):
        return torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()

    monkeypatch.setattr(core_attention.F, "scaled_dot_product_attention", allowed)
    found = [
        core_attention._biased_attention(SimpleNamespace(is_cuda=is_cuda), None, None, None, 1.0)
        for is_cuda in (True, False)
    ]
    assert found == [(False, True), (True, True)]


@pytest.mark.parametrize("all_have_it", BOTH)
def test_flash_attention_3_replaces_the_flash_kernels_if_all_ranks_have_it(all_have_it, monkeypatch):
    library = torch.library.Library("flash_attn_3", "DEF")
    for name in ("fwd", "bwd"):
        library.define(f"{name}(Tensor x) -> Tensor")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(attention_choice, "find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    monkeypatch.setattr(attention_choice, "gather_from_all_ranks", lambda value: [value, all_have_it])
    try:
        notes = attention_choice.use_flash_attention_3()
        assert torch.nn.attention.current_flash_attention_impl() == ("FA3" if all_have_it else None)
        assert len(notes) == all_have_it
    finally:
        torch.nn.attention.restore_flash_attention_impl()
        library._destroy()


@pytest.mark.parametrize("setting", ["", "2"])
def test_flash_attention_2_stays_if_the_package_fails_or_a_variable_says_so(setting, monkeypatch, caplog):
    def fail(name):
        raise AttributeError("undefined symbol\nin flash_attn_3")

    monkeypatch.setenv("MEGATRON_FLASH_ATTENTION", setting)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(attention_choice, "find_spec", lambda _: object())
    monkeypatch.setattr(attention_choice, "import_module", fail)
    monkeypatch.setattr(attention_choice, "gather_from_all_ranks", lambda value: [value])
    assert attention_choice.use_flash_attention_3() == []
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert ("MEGATRON_FLASH_ATTENTION=2" in caplog.text) == (setting == "")


def test_the_reason_is_logged_once(caplog):
    attention_choice._log_once.cache_clear()
    query = torch.empty(4, 1, 2, 8)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            masks = AttentionMasks([0.5, 0.25], within_documents=False)
            assert implementation_for(query, 4, 0.0, masks) == Implementation.BIASED_SDPA
    assert caplog.messages == [
        "attention: scaled_dot_product_attention with a bias per score, since the device is a CPU; ALiBi"
    ]


def training_attention(flags, cp_group=None):
    config = parse_args(
        "--dry-run --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 20 "
        "--max-position-embeddings 20 --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --train-iters 1 "
        f"--vocab-size 100 {flags}".split(),
        {},
    )
    mesh = SimpleNamespace(tp=Axis("tp", 1, 2), cp=cp_group or Axis("cp"))
    attention = CoreAttention(LayerContext(config, mesh, DropoutRNG(3, (5, 9))), 4)
    for parameter in attention.parameters():  # sinks
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(5))
    return attention


def outputs_and_gradients(attention, document_ids, key_heads):
    inputs = [
        torch.randn(20, 2, heads, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        for seed, heads in enumerate((2, key_heads, key_heads))
    ]
    output = attention(*inputs, document_ids)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4))
    return [output, *torch.autograd.grad((output * weights).sum(), [*inputs, *attention.parameters()])]


FLAGS = {
    "dropout": "--attention-dropout 0.2",
    "alibi": "--attention-dropout 0 --position-embedding-type alibi",
    "documents": "--attention-dropout 0 --reset-attention-mask",
    "all": "--attention-dropout 0.2 --position-embedding-type alibi --reset-attention-mask",
    "window": "--attention-dropout 0 --window-size 6",
    "sinks": "--attention-dropout 0 --softmax-type learnable",
    "sink, capped scores": "--attention-dropout 0 --softmax-type off-by-one --attn-logit-softcapping 0.7",
    "sinks of documents, dropout": "--attention-dropout 0.2 --reset-attention-mask --softmax-type learnable",
    "window of documents, dropout": "--attention-dropout 0.2 --window-size 6 --reset-attention-mask",
}


@pytest.mark.parametrize("name", FLAGS)
def test_blocks_of_queries_give_what_dense_attention_gives(name, monkeypatch):
    compare(name, Implementation.BLOCKS, monkeypatch)


@pytest.mark.parametrize("name", FLAGS)
def test_the_triton_kernel_gives_what_dense_attention_gives(name, monkeypatch):
    pytest.importorskip("triton")
    compare(name, Implementation.TRITON, monkeypatch)


@pytest.mark.parametrize(
    "name,implementation",
    [
        ("plain", Implementation.SDPA),
        *((name, Implementation.BLOCKS) for name in FLAGS),
        ("window of documents, dropout", Implementation.TRITON),
        *(pytest.param(name, Implementation.TRITON, marks=pytest.mark.full) for name in list(FLAGS)[:-1]),
    ],
)
def test_the_ranks_of_a_context_parallel_group_give_what_dense_attention_gives(
    name, implementation, monkeypatch
):
    pytest.importorskip("triton")
    compare(name, implementation, monkeypatch, cp_size=2)


class Ranks:
    """Simulates the ranks of a context-parallel group, one after the other in one process."""

    def __init__(self, flags, size, monkeypatch):
        self.all = [training_attention(flags, Axis("cp", rank, size)) for rank in range(size)]
        for attention in self.all:
            attention.softmax_offset = self.all[0].softmax_offset
        # A rank gets the keys and values of the whole sequence, and keeps its own queries.
        monkeypatch.setattr(core_attention, "gather_keys_and_values", lambda key, value, _: (key, value))

    def parameters(self):
        return self.all[0].parameters()

    def __call__(self, query, key, value, document_ids):
        output = torch.zeros_like(query).flatten(2)
        for attention in self.all:
            own = positions_of(attention.cp_group, 20 // len(self.all), query.device)
            output = output.index_add(0, own, attention(query[own], key, value, document_ids))
        return output


def compare(name, implementation, monkeypatch, cp_size=1):
    flags = FLAGS.get(name, "--attention-dropout 0")
    attention = training_attention(flags)
    tokens = torch.ones(2, 20, dtype=torch.int64)
    tokens[0, 3], tokens[1, 10] = 0, 0
    document_ids = document_ids_of(tokens, 0) if "reset" in flags else None
    key_heads = 1 if "window" in name else 2  # only the kernel shares key heads, others copy them
    expected = outputs_and_gradients(attention, document_ids, key_heads)
    monkeypatch.setattr(core_attention, "QUERIES_PER_BLOCK", 7)
    monkeypatch.setattr(core_attention, "implementation_for", lambda *_: implementation)
    ranks = Ranks(flags, cp_size, monkeypatch) if cp_size > 1 else attention
    found_all = outputs_and_gradients(ranks, document_ids, key_heads)
    for found, dense in zip(found_all, expected, strict=True):
        torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-6)
