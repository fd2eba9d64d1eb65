"""The predicted peak memory of a published program, as PyTorch's allocator counts it."""

from __future__ import annotations

from benchmarks.published_programs.layer_passes import EVERY_SECOND_PRODUCT
from benchmarks.published_programs.shapes import BYTES, Shape
from benchmarks.published_programs.steps import Run

_GATHERED_LAYERS = 2
"""Layers whose sharded weights exist at a time."""


def layer_bytes(shape: Shape) -> float:
    """Returns the bytes that a layer keeps for its backward pass without recomputation: inputs and results of
    the norms, queries, keys, values, the result of attention, inputs and result of the activation, and
    dropout masks."""
    model = shape.model
    outside = shape.own_tokens * model.hidden * (4 * BYTES + 2 * model.dropout)
    inside = (
        BYTES * (model.qkv + model.queries + model.wide + model.ffn)
        + shape.program.memory.inner * model.hidden
    )
    if model.gated and not shape.program.fused:
        inside += BYTES * model.ffn
    return outside + shape.tokens * inside / shape.layout.tensor


def kept_bytes(shape: Shape) -> float:
    """Returns the bytes that a layer keeps for its backward pass."""
    model, recompute = shape.model, shape.layout.recompute
    if recompute == "full":
        return BYTES * shape.own_tokens * model.hidden
    if recompute == "selective" and EVERY_SECOND_PRODUCT in shape.program.selective:
        # Inputs, every second product, and attention.
        products = 2 * model.queries + model.keys + model.ffn
        return BYTES * (2 * shape.own_tokens * model.hidden + shape.tokens * products / shape.layout.tensor)
    if recompute == "selective" and shape.program.shards_weights:
        # The results of products and attention, and the input.
        products = model.qkv + model.queries + model.wide + model.hidden
        return BYTES * (shape.own_tokens * model.hidden + shape.tokens * products / shape.layout.tensor)
    return layer_bytes(shape)


def rank_bytes(run: Run, rank: int) -> float:
    """Returns the peak bytes of a pipeline rank."""
    shape, layout, model, program = run.shape, run.layout, run.model, run.program
    memory, parameters = program.memory, run.rank_parameters[rank]
    layers = sum(run.stage_layers[rank :: layout.pipeline])
    partitions = layout.replicas if layout.zero else 1
    sharded = memory.optimizer + (program.gradient if program.shards_weights else 0)
    whole = 0 if program.shards_weights else memory.weight + program.gradient
    static = parameters * (whole + sharded / partitions)
    if program.shards_weights:
        layer = model.layer_parameters / layout.tensor
        gathered = _GATHERED_LAYERS * layer + model.embedding_parameters / layout.tensor
        static += 2 * BYTES * gathered
    in_flight = min(_warmup_chunks(run, rank), layout.micro_batches * layout.chunks) / layout.chunks
    is_last = rank == layout.pipeline - 1
    logits = shape.tokens * model.vocab / layout.tensor * memory.logit if is_last else 0.0
    again = layer_bytes(shape) if layout.recompute == "full" else 0.0
    return static + in_flight * layers * kept_bytes(shape) + max(logits, again)


def _warmup_chunks(run: Run, rank: int) -> int:
    """Returns the number of forward passes that a rank runs before its first backward pass."""
    ranks, chunks = run.layout.pipeline, run.layout.chunks
    return ranks - rank if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1


def peak_bytes(run: Run) -> float:
    """Returns the peak bytes of the most loaded rank; of rank 0 for nanotron, whose rows state rank 0's
    memory."""
    ranks = {0} if run.program.name == "nanotron" else {0, run.layout.pipeline - 1}
    return max(rank_bytes(run, rank) for rank in ranks)
