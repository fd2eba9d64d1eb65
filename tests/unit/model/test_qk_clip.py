"""The largest attention logit of each head equals the largest of all its scores."""

from unittest import mock

import pytest
import torch

from megatron.model.attention import qk_clip
from megatron.model.position import AttentionMasks
from megatron.mpu.context_parallel import sequence_chunks
from megatron.mpu.mesh import Axis

SEQ, BATCH, HEADS, GROUPS, DIM, SCALE = 32, 2, 4, 2, 8, 0.3
SLOPES = [0.5, 0.25, 0.125, 0.0625]
CASES = {
    "causal": {},
    "window": {"window": 5},
    "documents": {"within_documents": True},
    "alibi, documents, window": {"alibi_slopes": SLOPES, "within_documents": True, "window": 7},
}


def expected(query, key, ids, alibi_slopes=None, within_documents=False, window=SEQ):
    keys = key.float().repeat_interleave(HEADS // GROUPS, 2)
    logits = torch.einsum("ibhd,jbhd->bhij", query.float(), keys) * SCALE
    i, j = torch.arange(SEQ)[:, None], torch.arange(SEQ)[None, :]
    logits = logits + torch.tensor(alibi_slopes or [0.0] * HEADS)[:, None, None] * (j - i)
    forbidden = ((j > i) | (j <= i - window)).expand(BATCH, 1, -1, -1)
    if within_documents:
        forbidden = forbidden | (ids[:, :, None] != ids[:, None, :])[:, None]
    return logits.masked_fill(forbidden, -torch.inf).amax((0, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_largest_logits_of_blocks_are_those_of_all_scores(case, cp, dtype):
    random = torch.Generator().manual_seed(0)
    shapes = (SEQ, BATCH, HEADS, DIM), (SEQ, BATCH, GROUPS, DIM)
    query, key = (torch.randn(shape, generator=random).to(dtype) for shape in shapes)
    query.sub_(1)  # some heads have only negative logits with these keys
    key.add_(1)
    ids = torch.tensor([0, 0, 0, 1] * 8).cumsum(0).expand(BATCH, -1)
    masks = AttentionMasks(**{"alibi_slopes": None, "within_documents": False, **CASES[case]})
    logits = qk_clip.LargestLogits(HEADS, masks, SCALE).to(dtype)
    with mock.patch.object(qk_clip, "_SCORES_AT_ONCE", 5 * BATCH * HEADS * SEQ):
        for first in range(BATCH):  # two micro-batches
            sample = slice(first, first + 1)
            for rank in range(cp):
                chunks = sequence_chunks(Axis("cp", rank, cp), SEQ)
                own = torch.cat([query[chunk.start : chunk.stop, sample] for chunk in chunks])
                for _ in range(2):  # the second pass is a recomputation
                    logits.record(own.requires_grad_(), key[:, sample], ids[sample], chunks)
    wanted = expected(query.detach(), key, ids, **CASES[case])
    bound = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(logits.largest, wanted, rtol=bound, atol=bound)
    logits.reset()
    assert (logits.largest == -torch.inf).all()


@pytest.mark.parametrize("logits", [[3.0, 8.0, -2.0, 1.0], [-2.0, 0.0, -torch.inf, 2.0]])
def test_only_heads_above_the_threshold_have_a_factor(logits):
    clip = qk_clip.QKClip.__new__(qk_clip.QKClip)
    clip._options = mock.Mock(qk_clip_threshold=2.0, qk_clip_alpha=0.25)
    parts = ((4, qk_clip.Rows.QUERY), (2, qk_clip.Rows.KEY), (1, qk_clip.Rows.QUERY_OF_SHARED_KEY))
    factors = clip._factors(torch.tensor(logits), parts, 4 * 7).view(4, 7)
    for of_head, logit in zip(factors, logits, strict=True):
        eta = 2.0 / logit if logit > 2.0 else 1.0
        wanted = torch.tensor([*[eta**0.25] * 4, *[eta**0.75] * 2, eta])
        torch.testing.assert_close(of_head, wanted, rtol=1e-6, atol=0)
