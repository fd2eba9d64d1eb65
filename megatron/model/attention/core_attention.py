"""Core attention: scores, mask, softmax, dropout and the weighted sum of the values.

It computes dropout(softmax(query @ key.T * scale + bias)) @ value for each sample and head. With a sink
(--softmax-type), the softmax has one additional score, which has no value. With --attn-logit-softcapping X,
each score s = query @ key.T * scale is replaced by X * tanh(s / X).
"""

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from megatron.kernels.attention import AttentionMask, flash_attention
from megatron.kernels.windowed_attention import windowed_attention
from megatron.model.activations import soft_capped
from megatron.model.attention.choice import Implementation, implementation_for
from megatron.model.attention.qk_clip import LargestLogits, records_logits
from megatron.model.layer_context import LayerContext
from megatron.mpu.compilation import not_compiled
from megatron.mpu.context_parallel import gather_keys_and_values, sequence_chunks
from megatron.mpu.parameter_spec import ParameterSpec, Shard
from megatron.mpu.parameters import new_parameter
from megatron.mpu.random import Part, device_sample_keys, dropout

QUERIES_PER_BLOCK = 512
_FLASH = (Implementation.TRITON, Implementation.FLASH_WINDOW)
"""Implementations that support queries at the end of the keys, and query heads that share a key head."""


class _Inputs(NamedTuple):
    """The inputs of attention. query, key, value: [seq, batch, heads, head_dim], or for PyTorch's functions
    [batch, heads, seq, head_dim]. document_ids: [batch, seq], or None if the mask ignores documents."""

    query: Tensor
    key: Tensor
    value: Tensor
    document_ids: Tensor | None


class CoreAttention(nn.Module):
    """Maps query [seq, batch, heads / TP, head_dim] to [seq, batch, heads / TP * size of a value head].

    key: [seq, batch, groups, head_dim]. value: [seq, batch, groups, size of a value head]. Each group serves
    an equal number of query heads. With context parallelism all inputs are [seq / CP, ...], the tokens of
    this rank. softmax_offset: the sinks of this rank's heads. It is the only parameter, exists only with
    --softmax-type learnable, and has Megatron-Core's initial values.

    `choice.choose_attention` decides which implementation computes it.
    """

    def __init__(self, context: LayerContext, layer_index: int) -> None:
        """layer_index: the layer's index. It is part of the dropout's salt, and selects the window."""
        super().__init__()
        model = context.config.model
        self.scale, self.softcapping = model.attention_scale, model.attn_logit_softcapping
        self.dropout_rate, self.value_scale = model.attention_dropout, model.attention_value_scale
        self.dropout_salt = f"{layer_index}.self_attention.attention_dropout"
        self.recompute = context.config.training.recomputes("core_attn")
        self.masks = context.masks(layer_index)
        self.tp_group, self.cp_group = context.tp_group, context.cp_group
        self.dropout_rng, self.cache, self.layer_index = context.dropout_rng, context.cache, layer_index
        self.has_sink, self.softmax_offset = model.softmax_type != "vanilla", None
        self.num_heads = model.num_attention_heads // self.tp_group.size
        self.largest_logits: Any = None
        if records_logits(context.config):
            self.largest_logits = LargestLogits(self.num_heads, self.masks, self.scale)
        if model.softmax_type == "learnable":
            options: Any = {"init_std": model.init_method_std, "weight_decay": False}
            spec = ParameterSpec((model.num_attention_heads,), (Shard(0),), **options)
            self.softmax_offset = new_parameter(spec, self.tp_group)

    @property
    def _rate(self) -> float:
        return self.dropout_rate if self.training else 0.0

    def forward(self, query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None) -> Tensor:
        """Returns the output of attention, [queries, batch, heads x value size], from tensors [seq,
        batch, heads or groups, head size]. document_ids: [batch, seq], or None if the mask does not
        depend on documents."""
        if self.value_scale != 1.0:
            value = value * self.value_scale
        size = value.shape[-1]
        output = self._attend(_Inputs(*_of_equal_size(query, key, value), document_ids))
        if size < query.shape[-1]:
            output = output.unflatten(2, (query.shape[2], -1))[..., :size].flatten(2)
        return output

    def _attend(self, inputs: _Inputs) -> Tensor:
        query, key, value, document_ids = inputs
        seq = len(query) * self.cp_group.size
        kept = self.cache.update(self.layer_index, key, value)
        if kept is not None:
            return self._attend_to_cache(_Inputs(query, *kept, document_ids))
        choice = implementation_for(query, seq, self._rate, self.masks, self.has_sink, self.softcapping)
        if self.cp_group.size > 1:
            return self._attend_chunks(inputs, choice)
        self._record_logits(inputs)
        if choice in _FLASH:
            return self._flash_attention(inputs, seq, choice).flatten(2)
        if choice == Implementation.SDPA:
            return causal_attention(query, key, value, self.scale).flatten(2)
        inputs = _heads_first(inputs, choice)
        if choice == Implementation.BLOCKS:
            output = self._attend_by_blocks(inputs, range(seq), seq)
        else:
            bias = self.masks.bias(seq, query.dtype, query.device, document_ids)
            if choice == Implementation.UNFUSED:
                output = self._unfused_attention(inputs, bias)
            else:
                output = _biased_attention(*inputs[:3], bias, self.scale)
        return output.permute(2, 0, 1, 3).flatten(2)

    def _record_logits(self, inputs: _Inputs) -> None:
        if self.training and self.largest_logits is not None:
            chunks = sequence_chunks(self.cp_group, len(inputs.key))
            self.largest_logits.record(inputs.query, inputs.key, inputs.document_ids, chunks)

    def _attend_to_cache(self, inputs: _Inputs) -> Tensor:
        """Computes the queries of new tokens [new, batch, heads, head_dim], at the cache's positions, with
        the keys and values of all tokens."""
        positions = self.cache.positions
        assert positions is not None
        parts = (positions, len(inputs.key), inputs.query.dtype, inputs.document_ids)
        bias = self.cache.once_per_pass(self.masks, lambda: self.masks.bias_at(*parts))
        inputs = _heads_first(inputs, Implementation.BIASED_SDPA)
        return self._attend_with_bias(inputs, bias).permute(2, 0, 1, 3).flatten(2)

    @not_compiled  # hashes the salt in Python
    def _flash_attention(self, inputs: _Inputs, seq: int, choice: Implementation) -> Tensor:
        """Runs one of `_FLASH`. Returns [queries, batch, heads, head_dim]. The keys are the first tokens of a
        sequence of `seq` tokens, and the queries are the last of these tokens."""
        query, key, value, document_ids = inputs
        window = self.masks.window_of(seq)
        if choice == Implementation.FLASH_WINDOW:
            # A window longer than the sequence is plain causal attention.
            return windowed_attention(query, key, value, self.scale, window or seq + 1, self._sinks(query))
        _, batch, heads, _ = query.shape
        first_keys, end_queries = self.masks.ranges(seq, batch, query.device, document_ids)
        rate = self._rate
        mask = AttentionMask(
            self.masks.slopes_on(query.device),
            first_keys,
            end_queries,
            device_sample_keys(query, self.dropout_rng, self.dropout_salt, batch_dim=1) if rate else None,
            rate,
            first_head=self.tp_group.rank * heads,
            seq=seq,
            window=window,
            softcapping=self.softcapping,
        )
        return flash_attention(query, key, value, self.scale, mask, self._sinks(query))

    def _sinks(self, query: Tensor) -> Tensor | None:
        """Returns the sinks of this rank's heads, [heads]; None without sinks."""
        if self.has_sink and self.softmax_offset is None:
            return query.new_zeros(self.num_heads)
        return self.softmax_offset

    @not_compiled  # keeps the collective as it is written
    def _attend_chunks(self, inputs: _Inputs, choice: Implementation) -> Tensor:
        """Computes this rank's chunks of queries with context parallelism. The queries of a chunk attend only
        to the keys up to the chunk's end, so all ranks compute about equally many scores."""
        query, key, value, document_ids = inputs
        seq = len(query) * self.cp_group.size
        if len(key) < seq:  # latent attention computes keys and values of all tokens itself
            key, value = gather_keys_and_values(key, value, self.cp_group)
        self._record_logits(_Inputs(query, key, value, document_ids))
        key, value = _for_each_head(query, key, value, choice)
        shares = key.shape[2] < query.shape[2]
        outputs = []
        for rows, own in zip(sequence_chunks(self.cp_group, seq), query.chunk(2), strict=True):
            chunk = _Inputs(own, key[: rows.stop], value[: rows.stop], document_ids)
            if choice in _FLASH:
                outputs.append(self._flash_attention(chunk, seq, choice))
                continue
            chunk = _transposed(chunk)
            if choice == Implementation.SDPA:
                # The import is here because it loads torch's compiler, which takes a second.
                from torch.nn.attention import bias as attention_bias

                bias = attention_bias.causal_lower_right(len(rows), rows.stop)
                output = F.scaled_dot_product_attention(*chunk[:3], bias, scale=self.scale, enable_gqa=shares)
            else:
                output = self._attend_by_blocks(chunk, rows, seq)
            outputs.append(output.permute(2, 0, 1, 3))
        return torch.cat(outputs).flatten(2)

    @not_compiled  # dropout's masks are hashed in Python
    def _attend_by_blocks(self, inputs: _Inputs, queries: range, seq: int) -> Tensor:
        """Computes a block of queries at a time, with a bias for only the block's scores. The backward pass
        recomputes the scores. queries: positions of the queries in the sequence of `seq` tokens."""
        query, key, value, document_ids = inputs
        samples = self.dropout_rng.samples

        def attend(query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
            rows = range(first, first + query.shape[2])
            bias = self.masks.bias_of_rows(rows, query.dtype, query.device, document_ids)
            with self.dropout_rng.use_samples(samples):
                return self._attend_with_bias(_Inputs(query, key, value, document_ids), bias, (first, seq))

        outputs = []
        for first in range(queries.start, queries.stop, QUERIES_PER_BLOCK):
            end = min(first + QUERIES_PER_BLOCK, queries.stop)
            own = query[:, :, first - queries.start : end - queries.start]
            parts = (own, key[:, :, :end], value[:, :, :end])
            outputs.append(checkpoint(attend, *parts, first, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(outputs, dim=2)

    @not_compiled  # dropout's masks are hashed in Python
    def _unfused_attention(self, inputs: _Inputs, bias: Tensor | None) -> Tensor:
        """Runs `_attend_with_dropout`. With `recompute`, no [seq, seq] tensor is stored for the backward pass
        (selective activation recomputation, arXiv 2205.05198, section 5)."""
        if not self.recompute:
            return self._attend_with_dropout(inputs, bias)
        samples = self.dropout_rng.samples

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with self.dropout_rng.use_samples(samples):
                return self._attend_with_dropout(_Inputs(query, key, value, inputs.document_ids), bias)

        return checkpoint(attend, *inputs[:3], use_reentrant=False, preserve_rng_state=False)

    def _attend_with_bias(self, inputs: _Inputs, bias: Tensor, rows: tuple[int, int] | None = None) -> Tensor:
        """Computes attention with a bias by PyTorch's kernel. If the kernel lacks a feature, runs
        `_attend_with_dropout`."""
        if self.has_sink or self.softcapping or self._rate:
            return self._attend_with_dropout(inputs, bias, rows)
        return _biased_attention(*inputs[:3], bias, self.scale)

    def _attend_with_dropout(
        self, inputs: _Inputs, bias: Tensor | None, rows: tuple[int, int] | None = None
    ) -> Tensor:
        """Computes unfused attention with this repository's dropout, which depends on sample, head and
        position. A library's dropout depends on rank and kernel, so the loss would depend on the layout.

        rows: (first row, number of all rows) if the queries are a block of rows.
        """
        query, key, value, _ = inputs
        seq = query.shape[2]
        scores = soft_capped(torch.matmul(query, key.transpose(2, 3)) * self.scale, self.softcapping)
        if bias is None:
            future = torch.ones(seq, seq, dtype=torch.bool, device=query.device).triu_(1)
            scores = scores.masked_fill(future, -math.inf)
        else:
            scores = scores + bias
        if (sinks := self._sinks(query)) is not None:
            sink = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sink.to(scores.dtype)), dim=-1)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)[..., : key.shape[2]]
        weights = dropout(
            weights,
            self._rate,
            self.dropout_rng,
            self.dropout_salt,
            batch_dim=0,
            shard_dim=1,
            part=None if rows is None else Part(2, (range(rows[0], rows[0] + seq),), rows[1]),
            tp_group=self.tp_group,
        )
        return torch.matmul(weights, value)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Returns plain causal attention, in the shape of query [seq, batch, heads, head_dim], computed by the
    kernel that PyTorch chooses."""
    output = F.scaled_dot_product_attention(**causal_arguments(query, key, value), scale=scale)
    return output.permute(2, 0, 1, 3)


def causal_arguments(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """Returns the arguments of scaled_dot_product_attention that decide which kernel PyTorch chooses."""
    key, value = _for_each_head(query, key, value, Implementation.SDPA)
    shares = key.shape[2] < query.shape[2]
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    return {"query": query, "key": key, "value": value, "is_causal": True, "enable_gqa": shares}


def _biased_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Returns attention with a bias. All tensors are [batch, heads, seq, head_dim]. On CUDA it does not use
    cuDNN, whose gradients may be NaN if there is a bias (pytorch issue 196678)."""
    kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kernels) if query.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(query, key, value, bias, scale=scale)


def _heads_first(inputs: _Inputs, choice: Implementation) -> _Inputs:
    """Returns the inputs as [batch, heads, seq, head_dim], with `_for_each_head`'s keys and values."""
    query, key, value, document_ids = inputs
    return _transposed(_Inputs(query, *_for_each_head(query, key, value, choice), document_ids))


def _transposed(inputs: _Inputs) -> _Inputs:
    """Returns views [batch, heads, seq, head_dim] of the inputs, which are [seq, batch, heads, head_dim]."""
    query, key, value, document_ids = inputs
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    return _Inputs(query, key, value, document_ids)


def _of_equal_size(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the tensors with heads of equal size. Smaller heads are padded with zeros (see `choice`)."""
    missing = query.shape[-1] - value.shape[-1]
    if missing > 0:
        return query, key, F.pad(value, (0, missing))
    return (F.pad(query, (0, -missing)), F.pad(key, (0, -missing)), value) if missing else (query, key, value)


def _for_each_head(
    query: Tensor, key: Tensor, value: Tensor, choice: Implementation
) -> tuple[Tensor, Tensor]:
    """Returns key and value, [seq, batch, heads, head_dim], with one copy per query head of a group. For the
    flash kernels, which share them among the heads of a group, they are returned unchanged."""
    copies = query.shape[2] // key.shape[2]
    if copies == 1 or choice in _FLASH:
        return key, value
    if choice == Implementation.SDPA and _flash_kernel_accepts(query, key, value):
        return key, value
    return key.repeat_interleave(copies, dim=2), value.repeat_interleave(copies, dim=2)


def _flash_kernel_accepts(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Returns whether PyTorch computes causal attention of these tensors, [seq, batch, heads, head_dim], with
    its flash kernel. Other kernels would store all scores if heads share keys."""
    if query.device.type == "cpu":
        return True
    if query.dtype == torch.float32:
        return False
    return query.device.type != "cuda" or _flash_kernel_of_cuda_accepts(query, key, value)


@not_compiled  # dynamo cannot trace SDPAParams: it would break the graph twice, with a warning
def _flash_kernel_of_cuda_accepts(query: Tensor, key: Tensor, value: Tensor) -> bool:
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, True))
