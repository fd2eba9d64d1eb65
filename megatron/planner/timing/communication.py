"""Communication of a training step on one rank, by formula: each collective with its bytes and its group.

Notation: b samples of s tokens per micro-batch, hidden size h, e bytes per parameter, tensor-parallel degree
t, data-parallel degree d, padded vocabulary V. H = e b s h is the size of a hidden state. Bytes are those of
the full tensor: the output of an all-gather, the input of a reduce-scatter, the tensor of an all-reduce.

Tensor-parallel group, per micro-batch (arXiv 1909.08053; with --sequence-parallel arXiv 2205.05198):

    embedding              forward all-reduce H
      sequence parallel    forward reduce-scatter H, backward all-gather H
    transformer layer      forward 2 all-reduces of H, backward 2, recomputation 2 (or 1, see below)
      sequence parallel    forward 2 all-gathers and 2 reduce-scatters of H; backward 4 and 2
      --tp-comm-overlap    the same in chunks, but 2 of each in the backward pass
      fewer query groups   forward and recomputation all-gather, backward reduce-scatter of the projections,
      than TP              e b s (n + 2 g) d
      qk-layernorm over    forward and recomputation 2 all-reduces of 4 b s, backward 2
      the projection
    LM head, fused loss    forward all-reduce H and all-gather 12 t b s, in chunks of tokens
    LM head, plain loss    forward all-reduces of 4 b s and 8 b s, backward all-reduce H
    input of a stage       forward all-gather H, and of its output's gradient: DeepSpeed sends 1 / t of them

PyTorch's recomputation stops after the last tensor that is saved. Without hidden dropout this is the input of
the last matrix product of the recomputed layers, so its all-reduce is not repeated.

Data-parallel group, per step, for P parameters of a rank (arXiv 1910.02054): all-reduce 4 P of the gradients,
which are fp32; with ZeRO-1 reduce-scatter 4 P, and all-gather e P. With ZeRO-2 a transformer layer's
gradients are reduce-scattered in each micro-batch instead, with ZeRO-3 its weights also gathered twice in
each micro-batch. Flat buffers are padded to equal partitions.

Between stages: the hidden state forward and its gradient backward, 1 / t of them on each tensor-parallel rank
if a rank has one stage. The two stages of the tied embedding all-reduce its gradient, 4 V h / t, with ZeRO
1 / d of it.

`tests/simulated/test_communication.py` compares calls and bytes with the simulated step, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron.config import Config
from megatron.config.vocab import padded_vocab_size
from megatron.model.gpt_model import FIRST_TRANSFORMER_LAYER, PARAMETER_DTYPES
from megatron.mpu.layout import ParallelLayout
from megatron.mpu.logit_chunks import CHUNK_TOKENS, LOGITS_BYTES
from megatron.mpu.tp_overlap import number_of_chunks
from megatron.pipeline.methods import TRANSFORMER_LAYER, embedding_and_head
from megatron.planner.memory.flat_buffers import (
    embedding_ranks,
    flat_buffers,
    has_partial_gradient,
    is_replicated,
    is_sequence_parallel,
    is_tied_across_ranks,
    layer_parameters,
    rank_buffers,
)
from megatron.planner.stages import StagePlan
from megatron.planner.timing.flops import skips_last_product

ALL_REDUCE, BROADCAST = "allreduce_", "broadcast_"
ALL_GATHER, ALL_GATHER_LIST, REDUCE_SCATTER = "_allgather_base_", "allgather_", "_reduce_scatter_base_"
SEND, RECEIVE = "send", "recv_"

TENSOR, DATA, PIPELINE, MODEL, TIED, WORLD = "tensor", "data", "pipeline", "model", "embedding", "world"
STAGES = "stages"
"""The group of a message: this rank and one of the next or previous stage."""

INPUT_GRADIENT = "input gradient"
"""Purpose of the collectives that run while the weight's gradient is computed."""

CHUNKS = "chunks of layers"
"""Purpose of the collectives that overlap with the product beside them (`megatron.mpu.tp_overlap`)."""

WEIGHTS = "weights"
"""Purpose of the all-gathers after the update of the optimizer."""
UNIT_GRADIENTS, UNIT_WEIGHTS = "gradients of layers", "weights of layers"
"""Purposes of the collectives of `megatron.optimizer.sharded_units`."""
BUCKET_GRADIENTS, BUCKET_WEIGHTS = "gradients of buckets", "weights of buckets"
"""Purposes of collectives that run during backward and forward passes (`megatron.optimizer.buckets`)."""

FP32 = 4
Spec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Exchange:
    """Equal calls of one collective, or equal messages to or from another stage."""

    group: str
    operation: str
    """Name of the c10d operation, as in `megatron.simulation.record`."""
    purpose: str
    bytes: int
    """Of one call."""
    calls: int = 1
    peer: int | None = None
    """Of a message: the pipeline rank at its other end."""

    def ranks(self, layout: ParallelLayout) -> tuple[int, ...]:
        """Global ranks of the group that `layout.rank` is in; of a message only the other rank."""
        per_stage = layout.tp_size * layout.dp_size
        inside = layout.rank % per_stage
        stages = range(layout.pp_size)
        if self.group == WORLD:
            return tuple(range(layout.world_size))
        if self.group == TENSOR:
            first = layout.rank - layout.tp_rank
            return tuple(range(first, first + layout.tp_size))
        if self.group == DATA:
            first = layout.pipeline_stage * per_stage + layout.tp_rank
            return tuple(first + layout.tp_size * data for data in range(layout.dp_size))
        if self.group == MODEL:
            first = inside - layout.tp_rank
            return tuple(
                stage * per_stage + first + tensor for stage in stages for tensor in range(layout.tp_size)
            )
        if self.group == PIPELINE:
            return tuple(stage * per_stage + inside for stage in stages)
        assert self.peer is not None
        other = self.peer * per_stage + inside
        return (other,) if self.group == STAGES else tuple(sorted((layout.rank, other)))


@dataclass(frozen=True)
class StageCommunication:
    """What a pass of one micro-batch through a stage exchanges."""

    stage: int
    forward: tuple[Exchange, ...]
    backward: tuple[Exchange, ...]
    weight: tuple[Exchange, ...] = ()
    """In the weight pass of --pipeline-schedule zero-bubble."""


@dataclass(frozen=True)
class RankCommunication:
    """What a rank exchanges in a step: per micro-batch, in each of its stages, and once per step."""

    pipeline_rank: int
    stages: tuple[StageCommunication, ...]
    step: tuple[Exchange, ...]

    def exchanges(self, micro_batches: int) -> list[Exchange]:
        """All exchanges of a step, equal ones together."""
        passes = [e for stage in self.stages for e in (*stage.forward, *stage.backward, *stage.weight)]
        counts: dict[Exchange, int] = {}
        for times, part in ((micro_batches, passes), (1, self.step)):
            for e in part:
                one = Exchange(e.group, e.operation, e.purpose, e.bytes, 1, e.peer)
                counts[one] = counts.get(one, 0) + times * e.calls
        return [
            Exchange(e.group, e.operation, e.purpose, e.bytes, calls, e.peer) for e, calls in counts.items()
        ]


def rank_communication(config: Config, plan: StagePlan, vocab_size: int, rank: int) -> RankCommunication:
    """The communication of the first tensor and data rank of pipeline rank `rank`."""
    stages = [stage for stage in range(config.parallel.num_stages) if plan.rank_of(stage) == rank]
    return RankCommunication(
        rank,
        tuple(stage_communication(config, plan, vocab_size, stage) for stage in stages),
        tuple(_step_exchanges(config, plan, vocab_size, rank, stages)),
    )


# --- per micro-batch ---


def stage_communication(config: Config, plan: StagePlan, vocab_size: int, stage: int) -> StageCommunication:
    """What a pass of one micro-batch through a stage exchanges."""
    layers = range(plan.bounds[stage], plan.bounds[stage + 1])
    first, head = embedding_and_head(plan.names)
    count = sum(plan.names[layer] == TRANSFORMER_LAYER for layer in layers)
    forward, backward = _boundary_exchanges(config, plan, stage)
    weight: list[Exchange] = []
    if config.parallel.tensor_model_parallel_size > 1:
        hidden = _hidden_bytes(config)
        if first in layers:
            if config.parallel.sequence_parallel:
                forward.append(Exchange(TENSOR, REDUCE_SCATTER, "embedding", hidden))
                backward.append(Exchange(TENSOR, ALL_GATHER, "embedding", hidden))
            else:
                forward.append(Exchange(TENSOR, ALL_REDUCE, "embedding", hidden))
        layer_forward, layer_backward, weight = _layer_exchanges(config, count)
        forward += layer_forward
        backward += layer_backward
        if config.parallel.sequence_parallel:
            last = FIRST_TRANSFORMER_LAYER + config.model.num_layers
            if last in layers:  # to_batch_first
                wide = tensors_at(config, last, config.model.seq_length)[0][1].itemsize
                size = hidden * wide // _parameter_bytes(config)
                forward.append(Exchange(TENSOR, ALL_GATHER_LIST, "final norm", size))
        if head in layers:
            loss_forward, loss_backward = _loss_exchanges(config, vocab_size)
            forward += loss_forward
            backward += loss_backward
    if config.parallel.shards_gradients:
        unit_forward, unit_backward = _unit_exchanges(config, vocab_size, count)
        forward += unit_forward
        backward += unit_backward
    return StageCommunication(stage, tuple(forward), tuple(backward), tuple(weight))


def _boundary_exchanges(config: Config, plan: StagePlan, stage: int) -> tuple[list[Exchange], list[Exchange]]:
    """The messages of a stage and the all-gathers of what arrives in parts."""
    forward: list[Exchange] = []
    backward: list[Exchange] = []
    tp_size = config.parallel.tensor_model_parallel_size
    partitioned = config.parallel.sends_parts
    for other, bound in ((stage - 1, plan.bounds[stage]), (stage + 1, plan.bounds[stage + 1])):
        if not 0 <= other < config.parallel.num_stages:
            continue
        peer = plan.rank_of(other)
        if peer == plan.rank_of(stage):
            continue  # the turn of DualPipeV
        specs = tensors_at(config, bound, config.model.seq_length)
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
        full = sizes[0]
        tables = []
        if partitioned:
            # The shape, the numbers of parts and of this part, and the bounds of all parts.
            tables = [8 * (1 + len(specs[0][0]) + 2 + tp_size + 1)]
            sizes[0] //= tp_size
        gradients = [size for size, (_, dtype) in zip(sizes, specs, strict=True) if dtype.is_floating_point]
        before = other < stage
        activation, gradient = (RECEIVE, SEND) if before else (SEND, RECEIVE)
        for size in [*tables, *sizes]:
            forward.append(Exchange(STAGES, activation, "activations", size, peer=peer))
        for size in [*tables, *gradients]:
            backward.append(Exchange(STAGES, gradient, "gradients", size, peer=peer))
        if partitioned:
            gathered = Exchange(TENSOR, ALL_GATHER, "parts of messages", full)
            (forward if before else backward).append(gathered)
    return forward, backward


def _layer_exchanges(config: Config, count: int) -> tuple[list[Exchange], list[Exchange], list[Exchange]]:
    """Exchanges of `count` transformer layers in the tensor-parallel group: of the forward, the backward and
    the weight pass."""
    training, hidden = config.training, _hidden_bytes(config)
    recomputes = training.recomputes_layers
    per_group = training.checkpoint_num_layers
    groups = -(-count // per_group)
    skipped = groups if recomputes and skips_last_product(config) else 0
    again = count if recomputes else 0

    def calls(operation: str, number: int, purpose: str = "layers") -> list[Exchange]:
        return [Exchange(TENSOR, operation, purpose, hidden, number)] if number else []

    weight: list[Exchange] = []
    if config.parallel.overlap_chunks > 1:
        forward = _chunked(config, ALL_GATHER, 2 * count) + _chunked(config, REDUCE_SCATTER, 2 * count)
        backward = calls(ALL_GATHER, 2 * count) + calls(REDUCE_SCATTER, 2 * count, INPUT_GRADIENT)
        backward += _chunked(config, ALL_GATHER, 2 * count + 2 * again)
        backward += _chunked(config, REDUCE_SCATTER, 2 * again)
    elif config.parallel.sequence_parallel:
        forward = calls(ALL_GATHER, 2 * count) + calls(REDUCE_SCATTER, 2 * count)
        # Two of gradients, and two of saved inputs, for the weight gradients.
        deferred = 2 * count if config.parallel.schedule.splits_backward else 0
        backward = calls(ALL_GATHER, 4 * count - deferred)
        backward += calls(REDUCE_SCATTER, 2 * count, INPUT_GRADIENT)
        weight = calls(ALL_GATHER, deferred)
        backward += calls(ALL_GATHER, 2 * again, "recomputation")
        backward += calls(REDUCE_SCATTER, 2 * again - skipped, "recomputation")
    else:
        forward = calls(ALL_REDUCE, 2 * count)
        backward = calls(ALL_REDUCE, 2 * count, INPUT_GRADIENT)
        backward += calls(ALL_REDUCE, 2 * again - skipped, "recomputation")
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    if model.query_groups < tp_size and count:
        projected = hidden * (model.query_width + 2 * model.key_width) // model.hidden_size
        forward.append(Exchange(TENSOR, ALL_GATHER, "query groups", projected, count))
        backward.append(Exchange(TENSOR, REDUCE_SCATTER, "query groups", projected, count))
        if again:
            backward.append(Exchange(TENSOR, ALL_GATHER, "recomputation", projected, again))
    if model.qk_layernorm and model.qk_layernorm_scope == "projection" and count:
        squares = FP32 * config.batch.micro_batch_size * model.seq_length  # of the queries, and of the keys
        forward.append(Exchange(TENSOR, ALL_REDUCE, "query and key norms", squares, 2 * count))
        backward.append(Exchange(TENSOR, ALL_REDUCE, "query and key norms", squares, 2 * (count + again)))
    if recomputes and training.partition_activations and groups:
        size = hidden * _residual_bytes(config) // _parameter_bytes(config)
        backward.append(Exchange(TENSOR, ALL_GATHER, "partitioned activations", size, groups))
    return forward, backward, weight


def _chunked(config: Config, operation: str, number: int) -> list[Exchange]:
    """`number` collectives of hidden states in chunks (`megatron.mpu.tp_overlap`)."""
    chunks = overlap_chunks(config)
    size = _hidden_bytes(config) // chunks
    return [Exchange(TENSOR, operation, CHUNKS, size, number * chunks)] if number else []


def overlap_chunks(config: Config) -> int:
    """Chunks of the products beside collectives (`megatron.mpu.tp_overlap`); 1 without them."""
    parallel = config.parallel
    length = config.model.seq_length // parallel.tensor_model_parallel_size
    return number_of_chunks(length, parallel.overlap_chunks) if parallel.tensor_model_parallel_size > 1 else 1


def _loss_exchanges(config: Config, vocab_size: int) -> tuple[list[Exchange], list[Exchange]]:
    """Forward and backward exchanges of LM head and loss in the tensor-parallel group."""
    tp_size, hidden = config.parallel.tensor_model_parallel_size, _hidden_bytes(config)
    tokens = config.batch.micro_batch_size * config.model.seq_length
    if config.training.loss_implementation != "fused":
        forward = [
            Exchange(TENSOR, ALL_REDUCE, "loss", FP32 * tokens),
            Exchange(TENSOR, ALL_REDUCE, "loss", 2 * FP32 * tokens),
        ]
        return forward, [Exchange(TENSOR, ALL_REDUCE, INPUT_GRADIENT, hidden)]
    size = _parameter_bytes(config)
    columns = padded_vocab_size(vocab_size, config.model, tp_size) // tp_size
    per_chunk = max(min(CHUNK_TOKENS[size], LOGITS_BYTES // (columns * size), tokens), 1)
    forward = []
    full, rest = divmod(tokens, per_chunk)
    for rows, number in ((per_chunk, full), (rest, 1)):
        if rows and number:
            width = size * config.model.hidden_size
            forward.append(Exchange(TENSOR, ALL_GATHER_LIST, "loss", 3 * FP32 * tp_size * rows, number))
            forward.append(Exchange(TENSOR, ALL_REDUCE, INPUT_GRADIENT, rows * width, number))
    return forward, []


def _unit_exchanges(config: Config, vocab_size: int, count: int) -> tuple[list[Exchange], list[Exchange]]:
    """Exchanges of `count` transformer layers in the data-parallel group, forward and backward, with ZeRO-2
    and ZeRO-3."""
    if not count:
        return [], []
    parameters = layer_parameters(config, vocab_size)[FIRST_TRANSFORMER_LAYER]
    lengths = [flat.length for flat in flat_buffers(config, parameters, True)]
    size, training = _parameter_bytes(config), config.training
    backward = [Exchange(DATA, REDUCE_SCATTER, UNIT_GRADIENTS, FP32 * n, count) for n in lengths]
    if config.parallel.zero_stage < 3:
        return [], backward
    # All layers of a recomputed group but the last run once more before their backward pass.
    again = count - -(-count // training.checkpoint_num_layers) if training.recomputes_layers else 0
    forward = [Exchange(DATA, ALL_GATHER, UNIT_WEIGHTS, size * n, count) for n in lengths]
    backward += [Exchange(DATA, ALL_GATHER, UNIT_WEIGHTS, size * n, count + again) for n in lengths]
    return forward, backward


# --- once per step ---


def _step_exchanges(
    config: Config, plan: StagePlan, vocab_size: int, rank: int, stages: Sequence[int]
) -> Iterable[Exchange]:
    parallel = config.parallel
    tp_size, dp_size = parallel.tensor_model_parallel_size, parallel.data_parallel_size
    ranks, flats = parallel.pipeline_model_parallel_size, rank_buffers(config, plan, vocab_size, stages)
    partial = is_sequence_parallel if parallel.sequence_parallel else has_partial_gradient
    summed = sum(flat.first_partition(partial) for flat in flats) if tp_size > 1 else 0
    if summed:
        yield Exchange(TENSOR, ALL_REDUCE, "partial gradients", FP32 * summed)
    if dp_size > 1:
        for flat in flats:
            if not flat.shards_gradients:
                operation = REDUCE_SCATTER if flat.partitions > 1 else ALL_REDUCE
                purpose = BUCKET_GRADIENTS if flat.in_bucket else "gradients"
                yield Exchange(DATA, operation, purpose, FP32 * flat.length)
    tied = sum(flat.first_partition(lambda parameter: parameter.is_word_embedding) for flat in flats)
    if tied and is_tied_across_ranks(plan):
        (other,) = embedding_ranks(plan) - {rank}
        yield Exchange(TIED, ALL_REDUCE, "tied embedding", FP32 * tied, peer=other)
    replicated = sum(flat.first_partition(is_replicated) for flat in flats) if tp_size > 1 else 0
    if replicated:
        yield Exchange(TENSOR, ALL_REDUCE, "replicated gradients", FP32 * replicated)
    partitioned = parallel.optimizer_partitions > 1
    if partitioned:
        yield Exchange(WORLD, ALL_REDUCE, "gradient norm", 8)
    if tp_size * ranks > 1 and not partitioned:
        yield Exchange(MODEL, ALL_REDUCE, "gradient norm", 8)
    if dp_size > 1 and not partitioned:
        yield Exchange(DATA, BROADCAST, "gradient norm", 8)
    if config.stability.spike_policy is not None and parallel.world_size > 1:
        yield Exchange(WORLD, ALL_REDUCE, "loss and gradient norm", 16)
    if config.stability.sync_tp_duplicated_parameters and tp_size > 1:
        copies = sum(flat.first_partition(is_replicated) for flat in flats)
        if copies:
            yield Exchange(TENSOR, ALL_REDUCE, "replicated parameters", 8 * copies)
    for flat in flats:
        if flat.partitions > 1 and not (parallel.zero_stage == 3 and flat.shards_gradients):
            purpose = BUCKET_WEIGHTS if flat.in_bucket else WEIGHTS
            yield Exchange(DATA, ALL_GATHER, purpose, _parameter_bytes(config) * flat.length)
    if dp_size > 1 and len(plan.bounds) - 2 in stages:
        yield Exchange(DATA, ALL_REDUCE, "loss", FP32)
    if ranks > 1:
        yield Exchange(PIPELINE, BROADCAST, "loss", 2 * FP32)
    if parallel.world_size > 1:
        yield Exchange(WORLD, ALL_REDUCE, "exit code", 8)


# --- sizes ---


def tensors_at(config: Config, bound: int, seq_length: int) -> list[Spec]:
    """Shapes and dtypes of the tensors that the layer before `bound` returns on one rank: the inputs of a
    stage that begins with layer `bound` (see the list of layers in `megatron.model.gpt_model`)."""
    model, batch = config.model, config.batch.micro_batch_size
    last_layer = FIRST_TRANSFORMER_LAYER + model.num_layers - 1
    if bound <= 1:
        return [((batch, seq_length), torch.int64)]
    wide = config.precision.fp32_residual_connection and bound <= last_layer + 2
    if model.apply_residual_connection_post_layernorm and bound > FIRST_TRANSFORMER_LAYER:
        wide = False  # the residual is the output of a norm
    dtype = torch.float32 if wide else PARAMETER_DTYPES[config.precision.name]
    parts = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    sequence_first = FIRST_TRANSFORMER_LAYER - (1 if parts > 1 else 0)
    if sequence_first <= bound <= last_layer + 1:
        shape = (seq_length // parts, batch, model.hidden_size)
    else:
        shape = (batch, seq_length, model.hidden_size)
    has_document_ids = config.data.reset_attention_mask or (
        config.data.reset_position_ids and model.position_embedding_type == "rotary"
    )
    documents = [((batch, seq_length), torch.int64)] if has_document_ids and bound <= last_layer + 1 else []
    return [(shape, dtype), *documents]


def _hidden_bytes(config: Config) -> int:
    tokens = config.batch.micro_batch_size * config.model.seq_length
    return tokens * config.model.hidden_size * _parameter_bytes(config)


def _parameter_bytes(config: Config) -> int:
    return PARAMETER_DTYPES[config.precision.name].itemsize


def _residual_bytes(config: Config) -> int:
    return FP32 if config.precision.fp32_residual_connection else _parameter_bytes(config)
