"""Compares flash attention in Triton's interpreter with dense attention in PyTorch."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from megatron.kernels.attention import AttentionMask, flash_attention, tiles
from megatron.model.position import AttentionMasks, alibi_slopes, document_ids_of
from megatron.mpu.mesh import Axis
from megatron.mpu.random import DropoutMask, DropoutRNG, keep_mask

SALT, P = "4.self_attention.attention_dropout", 0.3
EOD = 0
# Largest errors of the kernel's results, relative to the largest value. Sums have a different order; in 16
# bits the weights and the gradients of scores are rounded.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# Name -> (seq, batch, heads, groups of heads that share keys and values, head_dim): ragged, padded and full
# tiles.
SHAPES = {
    "one token": (1, 1, 1, 1, 16),
    "ragged": (37, 2, 2, 2, 24),
    "blocks": (130, 1, 2, 2, 16),
    "full tiles": (128, 1, 1, 1, 64),
    "wide heads": (20, 1, 1, 1, 128),
    "grouped": (70, 1, 4, 2, 16),
    "one group": (33, 2, 3, 1, 16),
}
KINDS = tuple(itertools.product((False, True), repeat=3))


def some(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def documents_of(batch, seq):
    """Returns document ids. Some documents have one token, and one document ends with a block."""
    tokens = torch.ones(batch, seq, dtype=torch.int64)
    tokens[:, 0] = EOD
    tokens[-1, seq // 3 :: 7] = EOD
    tokens[0, min(63, seq - 1)] = EOD
    return document_ids_of(tokens, EOD)


def mask_of(seq, batch, slopes, documents, dropout, first_head=0, heads=1):
    """Returns the kernel's mask, document ids and RNG."""
    rng = DropoutRNG(11, (7, 2**33 + 5)[:batch])
    ids = documents_of(batch, seq) if documents else None
    mask = AttentionMask(
        slopes=torch.tensor(alibi_slopes(8)[first_head : first_head + heads]) if slopes else None,
        first_keys=torch.searchsorted(ids, ids, out_int32=True) if documents else None,
        end_queries=torch.searchsorted(ids, ids, right=True, out_int32=True) if documents else None,
        sample_keys=torch.tensor(rng.sample_keys(SALT)) if dropout else None,
        dropout=P if dropout else 0.0,
        first_head=first_head,
    )
    return mask, ids, rng


def dense_attention(query, key, value, sinks, scale, mask, ids, rng, tp_group):
    """Computes the definition in fp64. Returns [seq, batch, heads, head_dim], like the kernel."""
    seq, _, heads, _ = query.shape
    repeats = heads // key.shape[2]
    q, k, v = (x.double().permute(1, 2, 0, 3) for x in (query, key, value))
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(2, 3) * scale
    if mask.softcapping:
        scores = mask.softcapping * torch.tanh(scores / mask.softcapping)
    if mask.slopes is not None:
        place = torch.arange(seq)
        scores = scores + mask.slopes.double()[:, None, None] * (place[None, :] - place[:, None])
    forbidden = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    if ids is not None:
        forbidden = forbidden | (ids[:, None, :, None] != ids[:, None, None, :])
    scores = scores.masked_fill(forbidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((sinks.double()[:, None, None].expand(*scores.shape[:3], 1), scores), -1)
    weights = scores.softmax(-1)[..., -seq:]
    if mask.dropout:
        keep = keep_mask(weights, DropoutMask(mask.dropout, rng, SALT, 0, 1, tp_group))
        weights = weights * keep / (1.0 - mask.dropout)
    return (weights @ v).permute(2, 0, 1, 3)


def results(function, inputs, grad):
    inputs = [x.detach().clone().requires_grad_() for x in inputs if x is not None]
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad.to(output.dtype))]


def assert_close(found, expected, dtype):
    names = ("output", "query", "key", "value", "sinks")[: len(found)]
    for name, a, b in zip(names, found, expected, strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        # A gradient that should be 0, such as for a single token's query, is the difference of two sums of
        # products. Its rounding depends on the instructions of the CPU: 2.5e-8 with AVX-512.
        floor = 0.1 if dtype == torch.float32 else 1.0
        error = (a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(floor)
        assert error <= TOLERANCE[dtype], f"{name}: {error:.1e}"


def compare(
    shape, dtype, slopes, documents, dropout, rank=0, size=1, rows=None, has_sinks=False, softcapping=None
):
    """Compares the kernel with dense attention. rows: positions of the queries (None: all), with the keys up
    to the last position."""
    seq, batch, heads, groups, head_dim = SHAPES[shape]
    scale = 1.0 / math.sqrt(head_dim)
    inputs = [
        some((seq, batch, count, head_dim), seed).to(dtype)
        for seed, count in enumerate((heads, groups, groups))
    ]
    inputs += [some((heads,), 7).to(dtype)] if has_sinks else []
    mask, ids, rng = mask_of(seq, batch, slopes, documents, dropout, rank * heads, heads)
    mask = mask._replace(softcapping=softcapping)
    rows = rows or range(seq)
    own, end = slice(rows.start, rows.stop), rows.stop
    grad = some((len(rows), batch, heads, head_dim), 9).to(dtype)
    part = mask._replace(seq=seq)
    found = results(
        lambda q, k, v, sinks=None: flash_attention(q[own], k[:end], v[:end], scale, part, sinks),
        inputs,
        grad,
    )
    tp_group = Axis("tp", rank, size)
    expected = results(
        lambda q, k, v, sinks=None: dense_attention(q, k, v, sinks, scale, mask, ids, rng, tp_group)[own],
        inputs,
        grad,
    )
    assert_close(found, expected, dtype)


@pytest.mark.gate(rows=4)
@pytest.mark.parametrize("shape,kind", itertools.product(SHAPES, KINDS))
def test_fp32_is_that_of_dense_attention(shape, kind):
    """Compares output and gradients. kind: the features of the mask: ALiBi, document boundaries, dropout."""
    compare(shape, torch.float32, *kind)


@pytest.mark.gate(rows=4)
@pytest.mark.parametrize(
    "dtype,shape,kind",
    itertools.product((torch.bfloat16, torch.float16), SHAPES, ((False, False, False), (True, True, True))),
)
def test_16_bit_is_that_of_dense_attention_to_its_rounding(dtype, shape, kind):
    compare(shape, dtype, *kind)


@pytest.mark.gate(rows=4)
@pytest.mark.parametrize(
    "dtype,shape,variant",
    itertools.product(
        TOLERANCE, ("blocks", "grouped", "one token"), ((True, None), (False, 0.5), (True, 0.5))
    ),
)
def test_sinks_and_capped_scores_are_those_of_dense_attention(dtype, shape, variant):
    """Compares output and gradients; scores reach the cap. variant: (whether there are sinks, the cap)."""
    has_sinks, softcapping = variant
    for kind in ((False, False, False), (not softcapping, True, True)):
        compare(shape, dtype, *kind, has_sinks=has_sinks, softcapping=softcapping)


def test_sinks_and_capped_scores_of_a_chunk_of_queries():
    compare("grouped", torch.float32, False, True, True, rows=range(35, 70), has_sinks=True, softcapping=0.5)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("shape", ["blocks", "wide heads"])
def test_the_tiles_of_hopper_compute_equal_results(shape, monkeypatch):
    monkeypatch.setattr("megatron.kernels.attention.compute_capability", lambda _: 90)
    compare(shape, torch.bfloat16, True, True, True)


@pytest.mark.parametrize("kind", [(True, True, True)])
def test_a_tensor_parallel_rank_has_the_slopes_and_masks_of_its_heads(kind):
    compare("ragged", torch.float32, *kind, rank=1, size=4)


@pytest.mark.gate(rows=3)
@pytest.mark.parametrize(
    "shape,rows,kind",
    [
        *(("blocks", rows, (True, True, True)) for rows in (range(26, 52), range(78, 104), range(104, 130))),
        ("grouped", range(35, 70), (False, True, True)),
        ("ragged", range(1, 2), (True, False, True)),
        ("full tiles", range(96, 128), (False, False, False)),
        ("blocks", range(26), (True, True, True)),
    ],
)
def test_the_queries_of_a_context_parallel_rank_are_a_chunk_of_the_sequence(shape, rows, kind):
    compare(shape, torch.float32, *kind, rows=rows)


def test_the_dropout_mask_is_that_of_the_reference_bit_for_bit():
    """With equal scores and one-hot values the outputs are the attention weights. A dropped weight is
    zero."""
    seq, mask = 48, None
    mask, _, rng = mask_of(seq, 1, False, False, True)
    values = torch.eye(seq).view(seq, 1, 1, seq)
    zeros = torch.zeros_like(values)
    weights = flash_attention(zeros, zeros, values, 1.0, mask)[:, 0, 0]
    mask = DropoutMask(P, rng, SALT, 0, None, Axis("tp"))
    keep = keep_mask(torch.ones(1, 1, seq, seq), mask)[0, 0].bool()
    assert torch.equal(weights != 0, keep.tril())
    expected = torch.ones(seq, seq).tril() / torch.arange(1, seq + 1)[:, None] / (1 - P)
    torch.testing.assert_close(weights[weights != 0], expected[weights != 0])


def test_parts_of_a_fused_projection_are_read_in_place_and_the_layout_changes_nothing():
    """Views with strides, as the layer passes them, and copies give equal bits."""
    fused = some((20, 2, 3, 3, 16), 1)
    mask, _, _ = mask_of(20, 2, True, True, True, heads=3)
    grad = some((20, 2, 3, 16), 2)
    views = results(lambda x: flash_attention(*x.unbind(3), 0.25, mask), [fused], grad)
    copies = results(
        lambda x: flash_attention(*(part.contiguous() for part in x.unbind(3)), 0.25, mask), [fused], grad
    )
    for a, b in zip(views, copies, strict=True):
        assert torch.equal(a, b)
    transposed = fused[..., 0, :].transpose(2, 3).contiguous().transpose(2, 3)
    plain = flash_attention(*fused.unbind(3), 0.25, mask)
    assert torch.equal(flash_attention(transposed, *fused.unbind(3)[1:], 0.25, mask), plain)


def test_a_sample_does_not_depend_on_the_others_in_its_micro_batch():
    inputs = [some((20, 2, 2, 16), seed) for seed in range(3)]
    mask, ids, rng = mask_of(20, 2, True, True, True, heads=2)
    both = flash_attention(*inputs, 0.25, mask)
    second = AttentionMask(
        mask.slopes, mask.first_keys[1:], mask.end_queries[1:], mask.sample_keys[1:], mask.dropout
    )
    alone = flash_attention(*(x[:, 1:] for x in inputs), 0.25, second)
    assert torch.equal(both[:, 1:], alone)


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("kind", ["causal", "documents", "window", "window and documents"])
def test_only_blocks_with_a_pair_are_computed_and_only_blocks_with_a_forbidden_pair_are_masked(
    kind, monkeypatch
):
    """Counts the interpreter's products and selections, and compares them with the blocks of the mask."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    calls = Counter()

    def counted(name):
        original = getattr(interpreter.InterpreterBuilder, name)

        def call(self, *args, **kwargs):
            calls[name] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(interpreter.InterpreterBuilder, name, call)

    counted("create_dot")
    counted("create_select")
    seq, batch, heads, head_dim = 200, 1, 2, 16
    tokens = torch.ones(batch, seq, dtype=torch.int64)
    tokens[:, 150::7] = EOD  # the first document has blocks without a forbidden pair
    ids = document_ids_of(tokens, EOD) if "documents" in kind else None
    masks = AttentionMasks(None, "documents" in kind, 50 if "window" in kind else None)
    mask = AttentionMask(None, *masks.ranges(seq, batch, torch.device("cpu"), ids))
    inputs = [some((seq, batch, heads, head_dim), seed).requires_grad_() for seed in range(3)]
    place = torch.arange(seq)
    allowed = place[None, :] <= place[:, None]
    if "window" in kind:
        allowed = allowed & (place[None, :] > place[:, None] - 50)
    allowed = allowed.expand(batch, seq, seq)
    if ids is not None:
        allowed = allowed & (ids[:, None, :] == ids[:, :, None])

    def blocks(kernel):
        """Returns the number of blocks with an allowed pair, and how many of these also have a forbidden
        pair."""
        sizes = tiles(kernel, torch.float32, head_dim, 80)
        tiled = [
            tile
            for sample in allowed
            for rows in sample.split(sizes.queries)
            for tile in rows.split(sizes.keys, dim=1)
            if tile.any()
        ]
        return heads * len(tiled), heads * sum(not tile.all() for tile in tiled)

    output = flash_attention(*inputs, 0.25, mask)
    needed, masked = blocks("forward")
    assert 2 * needed <= calls["create_dot"] <= 1.1 * 2 * needed
    assert masked <= calls["create_select"] <= 1.1 * masked
    assert masked < needed or kind == "window and documents"
    calls.clear()
    output.sum().backward()
    (of_query, _), (of_key, _) = blocks("query"), blocks("key")
    assert 3 * of_query + 4 * of_key <= calls["create_dot"] <= 1.1 * (3 * of_query + 4 * of_key)


def test_only_inputs_output_and_one_number_per_row_are_kept():
    inputs = [some((64, 1, 2, 16), seed).requires_grad_() for seed in range(3)]
    mask, _, _ = mask_of(64, 1, False, False, True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()), lambda x: x):
        flash_attention(*inputs, 0.25, mask)
    assert sorted(kept) == [64 * 2, *([64 * 2 * 16] * 4)]


def test_rows_far_apart_in_memory_are_found():
    """The last row of a block begins more than 2^31 elements after the first row. Fails if an offset
    overflows 32 bits."""
    seq, dtype, stride = 128, torch.bfloat16, 2**31 // 127 + 8
    dense = [some((seq, 1, 1, 16), seed).to(dtype) for seed in range(3)]
    # Only the pages of the rows get memory.
    distant = [
        torch.empty((seq - 1) * stride + 16, dtype=dtype).as_strided(x.shape, (stride, 16, 16, 1))
        for x in dense
    ]
    for x, values in zip(distant, dense, strict=True):
        x.copy_(values)
    found = []
    for inputs in (dense, distant):
        inputs = [x.requires_grad_() for x in inputs]
        output = flash_attention(*inputs, 0.25, AttentionMask())
        found.append([output, *torch.autograd.grad(output, inputs, torch.ones_like(output))])
    for near, far in zip(*found, strict=True):
        assert torch.equal(near, far)
