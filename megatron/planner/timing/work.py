"""Work of a pass of one micro-batch through a pipeline stage: FLOPs, bytes through memory, launches.

FLOPs are those of the matrix products (`megatron.planner.timing.flops`). Bytes: a pass reads each weight; a
backward pass also writes the weight's gradient and adds it to the accumulated one, which reads and writes it.
The kernels read and write activations. How often depends on the program: `Traffic` has the bytes per element
of a transformer layer:

    hidden     of the b s h elements of the hidden state: norms, residual connections, dropout, in and out of
               the tensor-parallel matrices. With --sequence-parallel each rank has 1 / t of them
    attention  of the b s w / t elements of a rank's heads (queries, keys, values and the output)
    mlp        of the b s f / t elements of a rank's intermediate activation
    score      of the a b s^2 / t attention scores; 0 with a fused kernel, which stores none

The numbers of this program were counted on the simulated step, operation by operation
(`tests/simulated/test_work.py` compares). `MEGATRON_2021` describes the program of published measurements:
Megatron-DeepSpeed of BigScience, counted by hand, with fused kernels for bias and GELU, masked softmax and
layer norm (arXiv 1909.08053, 2104.04473); bias, dropout and residual are counted as three kernels, with which
the fitted rows agree better than with one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.config import Config
from megatron.config.registries import LAYER_ARRANGEMENTS
from megatron.config.vocab import padded_vocab_size
from megatron.model.attention_choice import Implementation
from megatron.mpu.logit_chunks import chunk_sizes
from megatron.pipeline.methods import TRANSFORMER_LAYER, embedding_and_head
from megatron.planner.implementations import (
    adds_column_gradients,
    adds_head_gradient,
    adds_row_gradients,
    attention_of,
    counts_kernels,
    skips_bias_add,
)
from megatron.planner.memory.layer_memory import FP32
from megatron.planner.stages import StagePlan
from megatron.planner.timing.communication import overlap_chunks
from megatron.planner.timing.flops import head_flops, recomputes_scores, transformer_layer_flops


@dataclass(frozen=True)
class Traffic:
    """Bytes read and written per element (see the module's docstring), and operations, in a layer's pass."""

    hidden: float
    attention: float
    mlp: float
    score: float
    launches: float


@dataclass(frozen=True)
class Program:
    """How a program computes a layer, the head and the loss."""

    forward: Traffic
    backward: Traffic
    """Without recomputation."""
    logit: float
    """Bytes per logit of both passes."""
    gradient_bytes: int
    """Bytes of an accumulated gradient."""
    fused_loss: bool
    """Whether the forward pass computes the gradients of LM head and loss, and the backward pass none."""
    overlaps_input_gradient: bool
    """Whether a column-parallel layer computes its weight's gradient during the all-reduce of its input's."""
    all_reduces_gradients: bool = False
    """Whether ZeRO-1 all-reduces the gradients instead of reduce-scattering them."""
    adds_column_gradients: bool = False
    """Whether the product of a column-parallel weight's gradient adds to the sum of the micro-batches."""
    adds_row_gradients: bool = False
    """The same of row-parallel weights."""
    adds_head_gradient: bool = False
    """Whether that of the LM head's weight adds to the sum of the fused loss."""


@dataclass(frozen=True)
class Work:
    """What a pass computes. misaligned_flops: of attention with heads that tensor cores do not support."""

    flops: float = 0.0
    misaligned_flops: float = 0.0
    bytes: float = 0.0
    launches: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.misaligned_flops + other.misaligned_flops,
            self.bytes + other.bytes,
            self.launches + other.launches,
        )

    def times(self, factor: float) -> Work:
        """`factor` equal summands."""
        return Work(
            factor * self.flops, factor * self.misaligned_flops, factor * self.bytes, factor * self.launches
        )


@dataclass(frozen=True)
class StageWork:
    """The work of a pass of one micro-batch through a stage.

    overlap_flops: matrix products of the backward pass (and of the loss) during which an all-reduce runs, if
    the backward pass is not divided.
    product_flops: matrix products of the forward pass beside which layers communicate.
    weight: the part of `backward` that --pipeline-schedule zero-bubble does in a pass of its own.
    """

    forward: Work
    backward: Work
    overlap_flops: float
    product_flops: float
    weight: Work = Work()


MEGATRON_2021 = Program(
    forward=Traffic(hidden=46, attention=20, mlp=8, score=13, launches=36),
    backward=Traffic(hidden=74, attention=40, mlp=16, score=19, launches=66),
    logit=30,
    gradient_bytes=2,
    fused_loss=False,
    overlaps_input_gradient=False,
    all_reduces_gradients=True,
)


def program_of(config: Config) -> Program:
    """This program with the run's flags."""
    layer = _layer_choices(config)
    shards = config.parallel.tensor_model_parallel_size > 1
    fused_loss = config.training.loss_implementation == "fused"
    return Program(
        forward=_forward_traffic(config, layer),
        backward=_backward_traffic(config, layer),
        logit=_logit_bytes(layer.size, shards, layer.kernels) if fused_loss else 36,
        gradient_bytes=FP32,
        fused_loss=fused_loss,
        overlaps_input_gradient=True,
        adds_column_gradients=adds_column_gradients(config),
        adds_row_gradients=adds_row_gradients(config),
        adds_head_gradient=adds_head_gradient(config),
    )


@dataclass(frozen=True)
class _LayerChoices:
    """What the traffic of both passes of a transformer layer depends on. `rotary`, `joins` and `copies` are
    numbers of elements moved, per element of the queries."""

    size: int
    """Bytes per element."""
    kernels: bool
    dropout: bool
    """Of hidden states."""
    attention: Implementation
    gated: bool
    biases: bool
    keys: float
    """Of keys, or of values, in units of the queries."""
    rotates: bool
    rotary_percent: float
    """The share of each head that is rotated."""
    shares: bool
    """Whether heads of queries share keys and values."""
    one_norm: bool
    chunks: int
    """Of --tp-comm-overlap."""

    @property
    def unfused(self) -> bool:
        """Whether attention stores all scores."""
        return self.attention == Implementation.UNFUSED

    @property
    def biased(self) -> bool:
        """Whether attention is PyTorch's fused kernel with a bias."""
        return self.attention == Implementation.BIASED_SDPA

    @property
    def in_kernel(self) -> bool:
        """Whether attention is the Triton kernel."""
        return self.attention == Implementation.TRITON

    @property
    def repeats(self) -> bool:
        """Whether keys and values are copied for each head of their group."""
        return self.shares and not self.in_kernel

    @property
    def hashed(self) -> bool:
        """Whether PyTorch operations hash the masks of dropout."""
        return self.dropout and not self.kernels

    @property
    def partial(self) -> bool:
        """Whether only a part of each head is rotated. The parts are joined then."""
        return self.rotary_percent < 1

    @property
    def rotary(self) -> float:
        """The rotation moves 10 bytes per rotated byte in either pass."""
        return (1 + self.keys) * self.rotates * (10 * self.rotary_percent)

    @property
    def joins(self) -> float:
        """One copy of queries and keys, read and written."""
        return (1 + self.keys) * self.rotates * (2 * self.partial)

    @property
    def copies(self) -> float:
        """Of keys and values for the heads of their group."""
        return 2 * (1 + self.keys) * self.repeats


def _layer_choices(config: Config) -> _LayerChoices:
    model = config.model
    return _LayerChoices(
        size=_element_bytes(config),
        kernels=counts_kernels(config),
        dropout=model.hidden_dropout > 0,
        attention=attention_of(config),
        gated=model.glu_activation is not None,
        biases=not model.disable_bias_linear,
        keys=model.key_width / model.query_width,
        rotates=model.position_embedding_type == "rotary",
        rotary_percent=model.rotary_percent,
        shares=model.query_groups < model.num_attention_heads,
        one_norm=len(LAYER_ARRANGEMENTS[model.layer_arrangement].norms) == 1,
        chunks=overlap_chunks(config),
    )


def _forward_traffic(config: Config, layer: _LayerChoices) -> Traffic:
    """Without kernels the masks of dropout are hashed by 44 operations that move 79 bytes per element. The
    kernel reads and writes what the residual addition does; the keys of the samples are copied before."""
    model, tp_size, size = config.model, config.parallel.tensor_model_parallel_size, layer.size
    # Copies of queries that share keys and values.
    splits = layer.shares and model.query_groups > tp_size
    # Over several ranks the biases of row-parallel layers are added alone, or by the kernel of the dropout.
    in_dropout = skips_bias_add(config) and layer.kernels and layer.dropout
    biases_alone = 2 * (tp_size > 1 and layer.biases and not in_dropout)
    units = 6 if layer.unfused else 14 if layer.biased else 8
    units_of_heads = units - 2 * (1 - layer.keys) + layer.rotary
    norms, _ = _qk_norm_traffic(config)
    return Traffic(
        hidden=size * (14 + 2 * biases_alone - 2 * layer.one_norm) + 2 * 79 * layer.hashed,
        attention=norms.attention + size * (units_of_heads + layer.joins + layer.copies + 2 * splits),
        mlp=size * (8 if layer.gated else 4),
        score=(12 * size + 2 + 79) * layer.unfused,
        launches=10
        + biases_alone
        + layer.gated
        + 2 * layer.biased
        + (44 if layer.hashed else 1) * 2 * layer.dropout
        + 50 * layer.unfused
        + (layer.in_kernel and model.attention_dropout > 0)
        + (10 + 2 * layer.partial) * layer.rotates
        + 2 * layer.repeats
        + splits
        - layer.one_norm
        + 4 * (layer.chunks - 1)
        + norms.launches,
    )


def _backward_traffic(config: Config, layer: _LayerChoices) -> Traffic:
    """Without recomputation."""
    model, size, gated, biases = config.model, layer.size, layer.gated, layer.biases
    units = 21 if layer.unfused else 27 if layer.biased else 29 if layer.in_kernel else 25
    units_of_heads = (
        units - (10 if model.qkv_bias else 8) * (1 - layer.keys) - (0 if model.qkv_bias else 3) + layer.rotary
    )
    _, norms = _qk_norm_traffic(config)
    return Traffic(
        hidden=size * ((26 if biases else 24) - 3 * layer.one_norm)
        + (15 if layer.hashed else 4 * size) * layer.dropout,
        attention=norms.attention + size * (units_of_heads + 3 * layer.joins + layer.copies),
        mlp=size * ((21 if gated else 8) - (0 if biases else 2 if gated else 1)),
        score=52 * layer.unfused,
        launches=(33 if biases else 23)
        + 3 * gated
        + (10 if layer.hashed else 2) * layer.dropout
        + 5 * layer.unfused
        + layer.in_kernel
        + (10 + 6 * layer.partial) * layer.rotates
        + 2 * layer.repeats
        - layer.one_norm
        + 2 * layer.chunks * (layer.chunks > 1)
        - 2 * (adds_column_gradients(config) + adds_row_gradients(config))
        + norms.launches,
    )


def _qk_norm_traffic(config: Config) -> tuple[Traffic, Traffic]:
    """What --qk-layernorm adds to the forward and the backward pass. Over several ranks a norm of the
    projection is made of fp32 operations (`model.qk_norm`), otherwise it is one kernel."""
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    if not model.qk_layernorm:
        return Traffic(0, 0, 0, 0, 0), Traffic(0, 0, 0, 0, 0)
    elements = _element_bytes(config) * (1 + model.key_width / model.query_width)
    if model.qk_layernorm_scope == "projection" and tp_size > 1:
        return Traffic(0, 19 * elements, 0, 0, 20), Traffic(0, 45 * elements, 0, 0, 32)
    return Traffic(0, 2 * elements, 0, 0, 2), Traffic(0, 3 * elements, 0, 0, 4)


def _logit_bytes(size: int, shards: bool, kernels: bool) -> int:
    """Of the fused loss. With kernels a logit is written by the product, read and overwritten by the kernel
    (with shards read once more), and read by the products of both gradients."""
    if kernels:
        return size * (6 if shards else 5)
    return 82 if shards else 58


def stage_work(config: Config, plan: StagePlan, vocab_size: int, stage: int, program: Program) -> StageWork:
    """The work of a pass of one micro-batch through a stage of the plan."""
    layers = plan.names[plan.bounds[stage] : plan.bounds[stage + 1]]
    count = layers.count(TRANSFORMER_LAYER)
    layer = layer_work(config, program)
    forward, backward = layer.forward.times(count), layer.backward.times(count)
    overlap = count * layer.overlap_flops
    first, head = embedding_and_head(plan.names)
    model, tokens = config.model, _tokens(config)
    size = _element_bytes(config)
    embedding = Work(bytes=3 * size * tokens * model.hidden_size, launches=5)
    if plan.bounds[stage] <= first < plan.bounds[stage + 1]:
        forward += embedding
        backward += embedding
    if plan.bounds[stage] <= head < plan.bounds[stage + 1]:
        tp_size = config.parallel.tensor_model_parallel_size
        rows = padded_vocab_size(vocab_size, model, tp_size) // tp_size
        flops = head_flops(config, rows * tp_size) / 3
        head_forward, head_backward = head_work(config, program, rows)
        forward += head_forward
        backward += head_backward
        overlap += flops
    return StageWork(forward, backward, overlap, count * layer.product_flops, layer.weight.times(count))


def head_work(config: Config, program: Program, rows: int) -> tuple[Work, Work]:
    """(forward, backward) of the LM head with `rows` rows on this rank, and of the loss.

    Each chunk of tokens of the fused loss (`mpu.logit_chunks`) reads the weight twice, and reads and writes
    the fp32 sum of its gradient. The backward pass adds the sum to that of the micro-batches.
    """
    size, tokens, width = _element_bytes(config), _tokens(config), config.model.hidden_size
    weight, traffic = rows * width, program.logit * tokens * rows
    flops = head_flops(config, rows * config.parallel.tensor_model_parallel_size) / 3
    if not program.fused_loss:
        once = Work(flops, 0.0, size * weight + traffic / 2, 40)
        return once, Work(2 * flops, 0.0, (3 * size + 2 * FP32) * weight + traffic / 2, 40)
    sizes = chunk_sizes(tokens, rows, width, size, on_cpu=False)
    chunks = math.ceil(tokens / sizes.tokens)
    # A product that is rounded to 16 bits is written, read and added in parts.
    apart = size != FP32 and not program.adds_head_gradient
    additions = 2 * math.ceil(rows / sizes.product_rows) if apart else 1
    of_weight = FP32 + chunks * (2 * size + 2 * FP32 + (2 * size if apart else 0))
    forward = Work(3 * flops, 0.0, of_weight * weight + traffic, 20 + chunks * (13 + additions))
    return forward, Work(bytes=3 * FP32 * weight, launches=7)


def layer_work(config: Config, program: Program) -> StageWork:
    """The work of a pass of one micro-batch through one transformer layer."""
    model, parallel = config.model, config.parallel
    tp_size, tokens = parallel.tensor_model_parallel_size, _tokens(config)
    width, key_width = model.query_width, model.key_width
    wide = (2 if model.glu_activation else 1) * model.ffn_hidden_size
    size = _element_bytes(config)
    columns = (width + 2 * key_width + wide) * model.hidden_size / tp_size
    rows = (width + model.ffn_hidden_size) * model.hidden_size / tp_size
    weights = columns + rows
    scores = tokens * model.seq_length * model.num_attention_heads / tp_size
    attention = 4 * tokens * model.seq_length * width / tp_size
    flops = 2 * tokens * weights + attention
    shards = tp_size if parallel.sequence_parallel else 1

    def activations(traffic: Traffic) -> float:
        moved = traffic.hidden * model.hidden_size / shards
        moved += (traffic.attention * width + traffic.mlp * model.ffn_hidden_size) / tp_size
        return tokens * moved + traffic.score * scores

    total = transformer_layer_flops(config)
    recomputed = total - 3 * flops
    # Tensor cores multiply 16-bit matrices whose rows are multiples of 16 bytes.
    misaligned = attention if size == 2 and model.kv_channels % 8 else 0.0
    forward = Work(
        flops - misaligned,
        misaligned,
        activations(program.forward) + size * weights,
        program.forward.launches,
    )
    # A gradient that is rounded is written by the product, then read.
    rounded = (not program.adds_column_gradients) * columns + (not program.adds_row_gradients) * rows
    gradients = 2 * size * rounded + 2 * program.gradient_bytes * weights
    if overlap_chunks(config) > 1:
        # Copies of the inputs of two products. That each chunk reads the weights again is a part of its
        # product.
        gradients += 2 * size * tokens * (width + model.ffn_hidden_size) / tp_size
    backward = Work(
        2 * (flops - misaligned),
        2 * misaligned,
        activations(program.backward) + size * weights + gradients,
        program.backward.launches,
    )
    if config.training.recomputes_layers:
        backward += Work(max(recomputed - misaligned, 0.0), misaligned, forward.bytes, forward.launches)
    else:
        again = program.forward.score * scores if recomputes_scores(config) else 0.0
        backward += Work(flops=max(recomputed, 0.0), bytes=again)
    overlap = 2 * tokens * (width + 2 * key_width + wide) * model.hidden_size / tp_size
    products = 2 * tokens * weights
    if not parallel.schedule.splits_backward:
        return StageWork(forward, backward, overlap, products)
    # Each of four matrices: a product, which reads input and gradient, and the addition to the main gradient,
    # which may be a part of the product.
    read = 4 * model.hidden_size + (2 * width + 2 * key_width + wide + model.ffn_hidden_size) / tp_size
    launches = 8 - 2 * (program.adds_column_gradients + program.adds_row_gradients)
    weight = Work(products, 0.0, gradients + size * tokens * read, launches)
    return StageWork(forward, backward, overlap, products, weight)


def _element_bytes(config: Config) -> int:
    return FP32 if config.precision.name == "fp32" else 2


def _tokens(config: Config) -> int:
    return config.batch.micro_batch_size * config.model.seq_length
