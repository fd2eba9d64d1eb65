"""Positions and masks: document ids, learned positions, ALiBi biases, rotary angles, attention masks.

A packed sample may hold several documents, separated by the end-of-document token. With
--reset-attention-mask a token attends only to its own document. With --reset-position-ids positions restart
at zero in each document. Both flags use `document_ids` [batch, seq]: the number of each token's document
within its sample. The document ids come from the data set if it knows the boundaries; otherwise they are
computed once per micro-batch from the tokens. Stages send them together with the hidden states.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.config.registries import ROPE_SCALINGS
from megatron.kernels.rotary import NO_NORMS, HeadNorms, Heads, split_and_rotate
from megatron.kernels.selection import uses_kernels
from megatron.model.attention.cache import KeyValueCache
from megatron.mpu.compilation import not_compiled
from megatron.mpu.context_parallel import positions_of, shard_sequence
from megatron.mpu.embedding import embedding
from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import new_parameter


def document_ids_of(tokens: Tensor, eod: int | None) -> Tensor:
    """Returns each token's document number in its sample, int64 [batch, seq]. A document ends with `eod`."""
    if eod is None:
        raise ValueError("document boundaries are needed, but the end-of-document token is unknown")
    ends = (tokens == eod).to(torch.int64)
    return ends.cumsum(dim=1) - ends


def positions_within_documents(document_ids: Tensor | None) -> Tensor:
    """Returns the position of each token from the start of its document, int64 [batch, seq]."""
    document_ids = _require_document_ids(document_ids)
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values


class PositionEmbedding(nn.Module):
    """Learned absolute positions: a table [max_positions, hidden], which every tensor-parallel rank holds in
    full."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        shape = (model.max_position_embeddings, model.hidden_size)
        self.weight = new_parameter(ParameterSpec(shape, init_std=model.init_method_std))

    def forward(self, positions: Tensor, batch: int) -> Tensor:
        """Returns the embeddings [batch, seq, hidden]. positions: [batch, seq], or [1, seq] for all
        samples."""
        return embedding(positions, self.weight, batch)


def alibi_slopes(num_heads: int) -> list[float]:
    """Returns ALiBi's slopes (arXiv 2108.12409): 2^(-8/n), 2^(-16/n), ... if the number n of heads is a power
    of two.

    For other n, these are the slopes for the next lower power of two, and then every second slope for the
    next higher one.
    """
    power = 2 ** math.floor(math.log2(num_heads))

    def geometric(count: int, step: float) -> list[float]:
        return [2.0 ** (-step * (i + 1)) for i in range(count)]

    slopes = geometric(power, 8 / power)
    if power < num_heads:
        slopes += geometric(2 * power, 4 / power)[0::2][: num_heads - power]
    return slopes


class AttentionMasks:
    """The additive attention bias, shared by all layers of a stage.

    Plain causal attention has no bias (None): the kernel applies the causal mask. ALiBi has one bias per
    head, and a sliding window has one bias for all heads; both are cached per shape. With document boundaries
    the bias is computed once per micro-batch. Autograd saves the bias in every layer, so one shared bias
    saves memory. Biases are contiguous and in the query's dtype, as PyTorch's memory-efficient kernel
    requires.
    """

    def __init__(
        self, alibi_slopes: list[float] | None, within_documents: bool, window: int | None = None
    ) -> None:
        """alibi_slopes: the slopes of this rank's heads. within_documents: whether tokens attend only to
        their own document. window: number of tokens that a token attends to, itself included; None: no
        limit."""
        self.slopes = alibi_slopes
        self.within_documents = within_documents
        self.window = window
        self._cache: dict[tuple, Tensor] = {}
        self._document_bias: tuple[weakref.ref, Tensor] | None = None
        self._document_ranges: tuple[weakref.ref, tuple[Tensor, Tensor]] | None = None
        self._window_ranges: tuple[tuple, tuple[Tensor, Tensor]] | None = None
        self._device_slopes: Tensor | None = None

    def window_of(self, seq: int) -> int | None:
        """Returns the window, or None if it covers a sequence of `seq` tokens."""
        return self.window if self.window is not None and self.window < seq else None

    def slopes_on(self, device: torch.device) -> Tensor | None:
        """Returns the slopes, fp32 [heads], on `device`, or None without ALiBi. They are copied only once."""
        if self.slopes is not None and self._device_slopes is None:
            self._device_slopes = torch.tensor(self.slopes, device=device)
        return self._device_slopes

    def ranges(
        self, seq: int, batch: int, device: torch.device, document_ids: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns two int32 tensors [batch, seq]: for each token, the first token that it attends to, and the
        token after the last one that attends to it. Returns (None, None) if only the causal mask applies. The
        tensors are computed once per micro-batch, or once per shape without documents."""
        window = self.window_of(seq)
        if not self.within_documents:
            return (None, None) if window is None else self._ranges_of_window(seq, batch, device, window)
        document_ids = _require_document_ids(document_ids)
        if self._document_ranges is None or self._document_ranges[0]() is not document_ids:
            ids = document_ids.contiguous()
            first = torch.searchsorted(ids, ids, out_int32=True)
            end = torch.searchsorted(ids, ids, right=True, out_int32=True)
            if window is not None:
                from_window, to_window = self._ranges_of_window(seq, batch, device, window)
                first, end = first.maximum(from_window), end.minimum(to_window)
            self._document_ranges = (weakref.ref(document_ids, self._forget), (first, end))
        return self._document_ranges[1]

    def _ranges_of_window(
        self, seq: int, batch: int, device: torch.device, window: int
    ) -> tuple[Tensor, Tensor]:
        key = (seq, batch, device)
        if self._window_ranges is None or self._window_ranges[0] != key:
            token = torch.arange(seq, dtype=torch.int32, device=device).expand(batch, seq)
            ranges = (token - (window - 1)).clamp(min=0), (token + window).clamp(max=seq)
            self._window_ranges = key, ranges
        return self._window_ranges[1]

    def bias_of_rows(
        self, rows: range, dtype: torch.dtype, device: torch.device, document_ids: Tensor | None
    ) -> Tensor:
        """Returns the bias for the queries at the positions `rows` and the keys 0 to rows.stop - 1. Plain
        causal attention also gets a bias."""
        positions = torch.arange(rows.start, rows.stop, device=device).unsqueeze(0)
        return self.bias_at(positions, rows.stop, dtype, document_ids)

    def bias_at(
        self, positions: Tensor, num_keys: int, dtype: torch.dtype, document_ids: Tensor | None
    ) -> Tensor:
        """Returns the bias for the queries at `positions` [batch or 1, queries] and the keys 0 to num_keys -
        1. Its shape is [batch or 1, heads or 1, queries, keys]."""
        bias = self._causal(positions, num_keys, dtype)
        if not self.within_documents:
            return bias
        ids = _require_document_ids(document_ids)
        return _mask_other_documents(bias, ids.gather(1, positions.expand(len(ids), -1)), ids[:, :num_keys])

    def bias(
        self, seq: int, dtype: torch.dtype, device: torch.device, document_ids: Tensor | None
    ) -> Tensor | None:
        """Returns a bias that broadcasts to [batch, heads, seq, seq], with -inf for forbidden keys; None if
        none is needed."""
        if self.slopes is None and not self.within_documents and self.window_of(seq) is None:
            return None
        return self._cached_bias(seq, dtype, device, document_ids)

    @not_compiled  # fills its cache outside of compiled graphs
    def _cached_bias(
        self, seq: int, dtype: torch.dtype, device: torch.device, document_ids: Tensor | None
    ) -> Tensor:
        if not self.within_documents:
            return self._cached_causal(seq, dtype, device)
        document_ids = _require_document_ids(document_ids)
        if self._document_bias is not None:
            bias_ids, bias = self._document_bias
            if bias_ids() is document_ids and bias.dtype == dtype:
                return bias
        bias = _mask_other_documents(self._cached_causal(seq, dtype, device), document_ids, document_ids)
        # The bias is kept for one micro-batch, and freed together with its document_ids.
        self._document_bias = (weakref.ref(document_ids, self._forget), bias)
        return bias

    def _forget(self, document_ids: weakref.ref) -> None:
        if self._document_bias is not None and self._document_bias[0] is document_ids:
            self._document_bias = None
        if self._document_ranges is not None and self._document_ranges[0] is document_ids:
            self._document_ranges = None

    def _cached_causal(self, seq: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (seq, dtype, device)
        if key not in self._cache:
            # Only one sequence length is cached: a curriculum would otherwise fill the cache with all
            # lengths.
            self._cache.clear()
            self._cache[key] = self._causal(torch.arange(seq, device=device).unsqueeze(0), seq, dtype)
        return self._cache[key]

    def _causal(self, positions: Tensor, num_keys: int, dtype: torch.dtype) -> Tensor:
        """Returns ALiBi's bias for the queries at `positions` and the keys 0 to num_keys - 1. It is -inf for
        later keys and for keys before the window."""
        device = positions.device
        keys = torch.arange(num_keys, dtype=torch.int32, device=device)
        distance = keys - positions.int()[:, None, :, None]
        forbidden = distance > 0
        if (window := self.window_of(num_keys)) is not None:
            forbidden |= distance <= -window
        slopes = self.slopes_on(device)
        if slopes is None:
            bias = torch.zeros(distance.shape, device=device)
        else:
            bias = slopes[:, None, None] * distance
        return bias.masked_fill_(forbidden, -math.inf).to(dtype)


def _require_document_ids(document_ids: Tensor | None) -> Tensor:
    if document_ids is None:
        raise ValueError("document boundaries are needed, but the layer received no document_ids")
    return document_ids


def _mask_other_documents(bias: Tensor, query_ids: Tensor, key_ids: Tensor) -> Tensor:
    """Returns the bias with -inf where the key belongs to a different document than the query. query_ids,
    key_ids: document ids [batch, queries] and [batch, keys]."""
    return bias.masked_fill(query_ids[:, None, :, None] != key_ids[:, None, None, :], -math.inf)


class RotaryEmbedding:
    """Rotary position embedding (RoPE, arXiv 2104.09864).

    The rotated pairs are the elements i and i + rotary_dim / 2 (as in GPT-NeoX and Hugging Face's Llama), or
    with --rotary-interleaved 2i and 2i + 1. Elements from rotary_dim on are not rotated (--rotary-percent).
    """

    def __init__(
        self, model: ModelConfig, cp_group: Axis | None = None, cache: KeyValueCache | None = None
    ) -> None:
        """cp_group: the ranks that share each sequence; None for whole sequences. cache: holds the positions
        of new tokens during generation."""
        self.cp_group, self.cache = cp_group or Axis("cp"), cache or KeyValueCache()
        self.dim = model.rotary_dim
        self.interleaved = model.rotary_interleaved or model.multi_latent_attention
        self.multiplier = 1.0
        # The frequencies are computed on the host for all devices: powers differ between devices in the last
        # bits, and the multiplication with positions amplifies the difference.
        with torch.device("cpu"):
            places = torch.arange(0, self.dim, 2, dtype=torch.float32)
            self.inverse_frequency = model.rotary_base ** (-places / self.dim)
            if model.rope_scaling_type is not None:
                scale = ROPE_SCALINGS.load(model.rope_scaling_type)
                self.inverse_frequency, self.multiplier = scale(self.inverse_frequency, model)
        self._cache: dict[tuple, tuple[Tensor, Tensor]] = {}

    def rotate(self, query: Tensor, key: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rotates query and key [seq, batch, heads, head_dim], whose numbers of heads may differ, in fp32.
        positions: [batch, seq], of the whole sequence; None for 0, 1, ..."""
        cosine, sine = self._angles(query.shape[0], query.device, positions)
        return self._rotate(query, cosine, sine), self._rotate(key, cosine, sine)

    def in_kernel(self, projected: Tensor) -> bool:
        """Returns whether `split_and_rotate` supports this tensor."""
        return not torch.compiler.is_compiling() and uses_kernels(projected)

    def split_and_rotate(
        self,
        projected: Tensor,
        groups: int,
        group: int,
        positions: Tensor | None,
        norms: HeadNorms = NO_NORMS,
        has_gate: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Splits a projection (see `Heads`) into query, key, value and gate, and rotates query and key, in
        one launch of a Triton kernel. norms: the norms of query and key that the kernel applies before the
        rotation."""
        cosine, sine = self._angles(projected.shape[0], projected.device, positions)
        gates = group * has_gate
        head_dim = projected.shape[-1] // (groups * (group + gates + 2))
        heads = Heads(groups, group, head_dim, self.dim, int(self.interleaved), gates)
        return split_and_rotate(projected, cosine, sine, heads, norms)

    def _rotate(self, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        if self.dim < heads.shape[-1]:
            rotated, rest = heads[..., : self.dim], heads[..., self.dim :]
            return torch.cat((self._rotate(rotated, cosine, sine), rest), dim=-1)
        return _Rotation.apply(heads, cosine, sine, self.interleaved)

    @not_compiled  # fills its cache outside of compiled graphs
    def _angles(self, seq: int, device: torch.device, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, fp32 [seq, 1 or batch, 1, rotary_dim], of `seq` tokens of this rank.
        positions: see `rotate`."""
        if self.cache.positions is not None:
            return self.cache.once_per_pass(self, lambda: self._new_angles(seq, device, positions))
        key = (seq, device)
        if positions is None and key in self._cache:
            return self._cache[key]
        table = self._new_angles(seq, device, positions)
        if positions is None:
            self._cache = {key: table}
        return table

    def _new_angles(self, seq: int, device: torch.device, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        # The frequencies stay on the device: a copy in every layer would synchronize the host with the
        # device.
        self.inverse_frequency = self.inverse_frequency.to(device)
        if positions is not None:
            positions = shard_sequence(self.cache.new_tokens(positions), self.cp_group)
        elif self.cache.positions is not None:
            positions = self.cache.positions
        else:
            positions = positions_of(self.cp_group, seq, device).unsqueeze(0)
        angles = positions.t()[:, :, None, None] * self.inverse_frequency
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), -1)
        cosine, sine = angles.cos(), angles.sin()
        if self.multiplier != 1.0:
            cosine, sine = cosine * self.multiplier, sine * self.multiplier
        return cosine, sine


class _Rotation(torch.autograd.Function):
    """Rotates pairs of elements in fp32 and rounds once, in the forward and in the backward pass. The inverse
    rotation has the negative sine. Autograd's own operations would store and move more fp32 tensors."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
        ctx.tables = cosine, sine, interleaved
        return _rotated(heads, cosine, sine, interleaved, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cosine, sine, interleaved = ctx.tables
        return _rotated(grad, cosine, sine, interleaved, -1), None, None, None


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, sign: int) -> Tensor:
    if interleaved:
        turned = torch.stack((-heads[..., 1::2], heads[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = heads.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    # The tables are fp32, so the products and the sum are fp32, too.
    return torch.add(heads * cosine, turned * sine, alpha=sign, out=torch.empty_like(turned))


@dataclass(frozen=True)
class PositionScheme:
    """The components of a position embedding type.

    table: class of the embedding that is added to the word embeddings, such as `PositionEmbedding`. rotary:
    class of the rotary embedding of queries and keys; its arguments are the ModelConfig, the context-parallel
    group and the cache. slopes: function that returns the ALiBi slopes for a number of heads.
    """

    table: Callable[[ModelConfig], nn.Module] | None = None
    rotary: type[RotaryEmbedding] | None = None
    slopes: Callable[[int], list[float]] | None = None


ABSOLUTE = PositionScheme(table=PositionEmbedding)
ROTARY = PositionScheme(rotary=RotaryEmbedding)
ALIBI = PositionScheme(slopes=alibi_slopes)
