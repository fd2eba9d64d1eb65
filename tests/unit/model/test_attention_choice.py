"""Which implementation of attention is chosen, for every combination; and that they all compute the same."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

from megatron.config.cli import parse_args
from megatron.model import attention_choice, core_attention
from megatron.model.attention_choice import (
    AttentionNeeds,
    Implementation,
    choose_attention,
    implementation_for,
)
from megatron.model.core_attention import CoreAttention
from megatron.model.layer_context import LayerContext
from megatron.model.position import document_ids_of
from megatron.mpu.layout import TPGroup
from megatron.mpu.random import DropoutRNG

ALL = itertools.product((0.0, 0.1), (False, True), (False, True), (2048, 2049), (128, 256), (False, True))


@pytest.mark.parametrize("dropout,alibi,documents,seq,head_dim,on_cpu", list(ALL))
@pytest.mark.parametrize("kernels", [None, "MEGATRON_KERNELS=pytorch is set"])
def test_every_combination(dropout, alibi, documents, seq, head_dim, on_cpu, kernels):
    if on_cpu:
        kernels = "the device is a CPU"
    choice, reason = choose_attention(
        AttentionNeeds(dropout, alibi, documents, seq, head_dim, on_cpu, kernels)
    )
    plain = not (dropout or alibi or documents)
    assert (choice == Implementation.SDPA) == plain
    assert (choice == Implementation.TRITON) == (not plain and kernels is None and head_dim == 128)
    is_dense = choice in (Implementation.UNFUSED, Implementation.BIASED_SDPA)
    if not on_cpu and seq > 2048:
        assert not is_dense
    if is_dense:
        assert (choice == Implementation.UNFUSED) == (dropout > 0)
    for word, used in (("dropout 0.1", dropout), ("ALiBi", alibi), ("document boundaries", documents)):
        assert (word in reason) == bool(used)
    if choice in (Implementation.BLOCKS, Implementation.UNFUSED, Implementation.BIASED_SDPA):
        assert (kernels or "heads of 256 are larger than 128") in reason


def test_the_reason_is_logged_once(caplog):
    attention_choice._log_once.cache_clear()
    query = torch.empty(4, 1, 2, 8)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert implementation_for(query, 0.0, True, False) == Implementation.BIASED_SDPA
    assert caplog.messages == [
        "attention: scaled_dot_product_attention with a bias per score, since the device is a CPU; ALiBi"
    ]


def attention_of(flags):
    config = parse_args(
        "--dry-run --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 20 "
        "--max-position-embeddings 20 --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --train-iters 1 "
        f"--vocab-size 100 {flags}".split(),
        {},
    )
    context = LayerContext(config, TPGroup(rank=1, size=2), DropoutRNG(3, (5, 9)))
    return CoreAttention(context, 4)


def outputs_and_gradients(attention, document_ids):
    inputs = [
        torch.randn(20, 2, 2, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        for seed in range(3)
    ]
    output = attention(*inputs, document_ids)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4))
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


FLAGS = {
    "dropout": "--attention-dropout 0.2",
    "alibi": "--attention-dropout 0 --position-embedding-type alibi",
    "documents": "--attention-dropout 0 --reset-attention-mask",
    "all": "--attention-dropout 0.2 --position-embedding-type alibi --reset-attention-mask",
}


@pytest.mark.parametrize("name", FLAGS)
def test_blocks_of_queries_give_what_dense_attention_gives(name, monkeypatch):
    compare(name, Implementation.BLOCKS, monkeypatch)


@pytest.mark.parametrize("name", FLAGS)
def test_the_triton_kernel_gives_what_dense_attention_gives(name, monkeypatch):
    pytest.importorskip("triton")
    compare(name, Implementation.TRITON, monkeypatch)


def compare(name, implementation, monkeypatch):
    attention = attention_of(FLAGS[name])
    tokens = torch.ones(2, 20, dtype=torch.int64)
    tokens[0, 3], tokens[1, 10] = 0, 0
    document_ids = document_ids_of(tokens, 0) if "reset" in FLAGS[name] else None
    expected = outputs_and_gradients(attention, document_ids)
    monkeypatch.setattr(core_attention, "QUERIES_PER_BLOCK", 7)
    monkeypatch.setattr(core_attention, "implementation_for", lambda *_: implementation)
    for found, dense in zip(outputs_and_gradients(attention, document_ids), expected, strict=True):
        torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-6)
