"""What a layer knows about positions: documents, ALiBi biases, rotary angles, attention masks.

A packed sample may hold several documents, separated by the end-of-document token. With
`--reset-attention-mask` a token sees only its own document, with `--reset-position-ids` positions start
again at zero in each. Both follow from `document_ids` [batch, seq]: the number of the document within the
sample, computed once from the tokens and passed along the pipeline beside the hidden states.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def document_ids_of(tokens: Tensor, eod: int) -> Tensor:
    """Number of the document within its sample for each token [batch, seq] int64; `eod` ends a document."""
    ends = (tokens == eod).to(torch.int64)
    return ends.cumsum(dim=1) - ends


def positions_within_documents(document_ids: Tensor) -> Tensor:
    """Position of each token counted from the start of its document, [batch, seq] int64."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values


def alibi_slopes(num_heads: int) -> list[float]:
    """ALiBi's slope per head (Press et al., 2022): 2^(-8/n), 2^(-16/n), ... for n heads, a power of two.

    For other counts: the slopes of the next lower power of two, then every second slope of the next higher.
    """
    power = 2 ** math.floor(math.log2(num_heads))

    def geometric(count: int, step: float) -> list[float]:
        return [2.0 ** (-step * (i + 1)) for i in range(count)]

    slopes = geometric(power, 8 / power)
    if power < num_heads:
        slopes += geometric(2 * power, 4 / power)[0::2][: num_heads - power]
    return slopes


class AttentionMasks:
    """The additive attention bias that the layers of one stage share.

    Plain causal attention needs none (None: the kernel's own causal path). ALiBi adds a bias per head, made
    once per shape and kept; document boundaries forbid what lies in another document, which is made once per
    micro-batch: autograd keeps a bias, and so all layers keep the same. Both are contiguous and in the
    query's dtype, which PyTorch's memory-efficient kernel on GPUs asks for.
    """

    def __init__(self, alibi_slopes: list[float] | None, within_documents: bool) -> None:
        """`alibi_slopes`: those of this rank's heads, or None; `within_documents`: tokens see only theirs."""
        self.slopes = alibi_slopes
        self.within_documents = within_documents
        self._kept: dict[tuple, Tensor] = {}
        self._document_bias: tuple[weakref.ref, Tensor] | None = None

    def bias(
        self, seq: int, dtype: torch.dtype, device: torch.device, document_ids: Tensor | None
    ) -> Tensor | None:
        """Bias that broadcasts to [batch, heads, seq, seq], -inf where attention is forbidden; or None."""
        if self.slopes is None and not self.within_documents:
            return None
        return self._kept_or_made(seq, dtype, device, document_ids)

    @torch.compiler.disable  # what it keeps is made outside of any compiled graph
    def _kept_or_made(
        self, seq: int, dtype: torch.dtype, device: torch.device, document_ids: Tensor | None
    ) -> Tensor:
        if not self.within_documents:
            return self._causal(seq, dtype, device)
        if document_ids is None:
            raise ValueError("document boundaries are needed, but the layer received no document_ids")
        if self._document_bias is not None:
            bias_ids, bias = self._document_bias
            if bias_ids() is document_ids and bias.dtype == dtype:
                return bias
        other_document = document_ids[:, None, :, None] != document_ids[:, None, None, :]
        bias = self._causal(seq, dtype, device).masked_fill(other_document, -math.inf)
        # The last micro-batch's alone, and only while its document_ids are in use.
        self._document_bias = (weakref.ref(document_ids, self._forget), bias)
        return bias

    def _forget(self, document_ids: weakref.ref) -> None:
        if self._document_bias is not None and self._document_bias[0] is document_ids:
            self._document_bias = None

    def _causal(self, seq: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (seq, dtype, device)
        if key not in self._kept:
            # One length at a time: a curriculum that grows the sequence must not keep all of them.
            self._kept.clear()
            future = torch.ones(seq, seq, dtype=torch.bool, device=device).triu_(1)
            if self.slopes is None:
                bias = torch.zeros(1, 1, seq, seq, device=device)
            else:
                position = torch.arange(seq, device=device, dtype=torch.float32)
                distance = position[None, :] - position[:, None]
                bias = torch.tensor(self.slopes, device=device)[None, :, None, None] * distance
            self._kept[key] = bias.masked_fill_(future, -math.inf).to(dtype)
        return self._kept[key]


class RotaryEmbedding:
    """Rotary position embedding (Su et al., 2021), the halves convention of GPT-NeoX, base 10000."""

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        self.inverse_frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self._kept: dict[tuple, tuple[Tensor, Tensor]] = {}

    def rotate(self, query: Tensor, key: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rotates query and key [seq, batch, heads, head_dim]; positions [batch, seq], None: 0, 1, 2, ..."""
        cosine, sine = self._angles(query.shape[0], query.dtype, query.device, positions)
        return _rotate(query, cosine, sine), _rotate(key, cosine, sine)

    @torch.compiler.disable  # what it keeps is made outside of any compiled graph
    def _angles(
        self, seq: int, dtype: torch.dtype, device: torch.device, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines that broadcast to [seq, batch, heads, head_dim]."""
        key = (seq, dtype, device)
        if positions is None and key in self._kept:
            return self._kept[key]
        # Kept there: a copy to the device in every layer would wait for it.
        self.inverse_frequency = self.inverse_frequency.to(device)
        if positions is None:
            places = torch.arange(seq, dtype=torch.float32, device=device)
            angles = places[:, None, None, None] * self.inverse_frequency
        else:
            angles = positions.t()[:, :, None, None] * self.inverse_frequency
        angles = torch.cat((angles, angles), dim=-1)
        table = angles.cos().to(dtype), angles.sin().to(dtype)
        if positions is None:
            self._kept = {key: table}
        return table


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


@dataclass(frozen=True)
class PositionScheme:
    """The parts of the model that a position embedding type uses.

    learned_table: position embeddings are added to the word embeddings. rotary: class of the rotary embedding
    of queries and keys, made with the head dimension. slopes: function number of heads -> ALiBi slopes.
    """

    learned_table: bool = False
    rotary: type[RotaryEmbedding] | None = None
    slopes: Callable[[int], list[float]] | None = None


ABSOLUTE = PositionScheme(learned_table=True)
ROTARY = PositionScheme(rotary=RotaryEmbedding)
ALIBI = PositionScheme(slopes=alibi_slopes)
