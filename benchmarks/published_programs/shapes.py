"""The description of a published run: the model, the layout and the program."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = 2
"""Bytes of an element of activations and weights, in 16 bits."""


@dataclass(frozen=True)
class Model:
    """The shape of a published model. head: elements of a head. vocab: padded."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocab: int
    seq: int
    gated: bool = False
    tied: bool = False
    rotary: bool = False
    biases: bool = False
    dropout: bool = False

    @property
    def queries(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head

    @property
    def keys(self) -> int:
        """Width of the keys of all groups."""
        return self.groups * self.head

    @property
    def qkv(self) -> int:
        """Width of queries, keys and values."""
        return self.queries + 2 * self.keys

    @property
    def wide(self) -> int:
        """Width of the result of the MLP's first matrix."""
        return (2 if self.gated else 1) * self.ffn

    @property
    def layer_parameters(self) -> int:
        """Parameters of the matrices of a layer."""
        return self.hidden * (self.qkv + self.queries + self.wide + self.ffn)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, as many as the LM head's."""
        return self.vocab * self.hidden


@dataclass(frozen=True)
class Layout:
    """The parallel layout of a run.

    tensor, pipeline, context: sizes of the groups. chunks: virtual stages per pipeline rank. zero: stage of
    ZeRO. recompute: 'none', 'selective' or 'full'. tensor_overlap: whether a product and its collective run
    in chunks, beside each other.
    """

    gpus: int
    node_size: int
    tensor: int
    pipeline: int
    chunks: int
    context: int
    zero: int
    sequence_parallel: bool
    micro_batch: int
    global_batch: int
    recompute: str
    tensor_overlap: bool = False

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def replicas(self) -> int:
        """Ranks that reduce the gradients of a parameter together."""
        return self.data * self.context

    @property
    def micro_batches(self) -> int:
        """Micro-batches per pipeline and step."""
        return self.global_batch // (self.micro_batch * self.data)


@dataclass(frozen=True)
class HostTime:
    """Host time in addition to launches, which limits the steps of one program (fitted, cause unknown).

    layer_s: for both passes of a layer. tensor_s: additional time for these, times the square of the
    tensor-parallel size; if a tensor-parallel run has a pipeline over several nodes, pipeline_s times the
    size instead. update_s: per layer, for an update that ZeRO-1 shards. stall_s: on `stall_gpus` or more, per
    micro-batch of a pipeline, and per step without a pipeline.
    """

    layer_s: float = 0.0
    tensor_s: float = 0.0
    pipeline_s: float = 0.0
    update_s: float = 0.0
    stall_s: float = 0.0
    stall_gpus: int = 512


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a program allocates.

    weight: per parameter, without gradients. optimizer: per parameter of a rank's partition. logit: per
    logit. inner: per token and element of the hidden state in the tensor-parallel part of a layer, in
    addition to the tensors that the passes of `layer_passes` keep.
    """

    weight: float
    optimizer: float
    logit: float
    inner: float = 0.0


@dataclass(frozen=True)
class Program:
    """A class of programs.

    Kernels. attention: the implementations (`megatron.planner.rates`) on GPUs before Hopper and on later
    ones; None for unfused attention. attention_rate: for both, the part of its rate that the program's
    version reaches. deterministic: whether attention's backward pass adds in a fixed order, in twice the
    time. fused: whether consecutive elementwise operations are one kernel. eager_norm: whether norms and
    rotations consist of fp32 operations. traffic: factor of the bytes of all kernels except products and
    attention, for kernels that the lists leave out. logit: bytes per logit in the loss, both passes.
    launch_s: host time per kernel of the lists. selective: parts of a layer that selective recomputation
    repeats.

    Gradients. gradient: bytes of an accumulated gradient. reduced: bytes in its reduction. adds_gradients:
    whether the products of the weight gradients add to the sum of the micro-batches. shards_weights: whether
    the weights are sharded over the data-parallel ranks and gathered layer by layer. overlaps_reduction:
    whether the last backward pass hides the reduction and the first forward pass the gathering of the
    weights. all_reduces: whether ZeRO-1 all-reduces. data_rate: the part of the network's rate that
    these collectives reach.

    Tensor parallelism. hides_input_gradient: whether the products of the weight gradients hide the
    collectives of the input gradients. tensor_latency_s: time that a collective takes in addition to the
    network's time.
    """

    name: str
    attention: tuple[str, str] | None
    memory: MemoryUse
    traffic: float = 1.0
    attention_rate: tuple[float, float] = (1.0, 1.0)
    deterministic: bool = False
    fused: bool = False
    eager_norm: bool = False
    logit: float = 30
    launch_s: float = 8e-6
    selective: frozenset[str] = frozenset()
    gradient: int = 4
    reduced: int = 4
    adds_gradients: bool = False
    shards_weights: bool = False
    overlaps_reduction: bool = False
    all_reduces: bool = False
    data_rate: float = 1.0
    tensor_latency_s: float = 0.0
    hides_input_gradient: bool = False
    host: HostTime = HostTime()


@dataclass(frozen=True)
class Shape:
    """The sizes of a rank's work. attention: the implementation, None for unfused attention."""

    model: Model
    layout: Layout
    program: Program
    attention: str | None

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch in the products."""
        return self.layout.micro_batch * self.model.seq / self.layout.context

    @property
    def own_tokens(self) -> float:
        """Tokens of a micro-batch in norms and residual connections."""
        return self.tokens / (self.layout.tensor if self.layout.sequence_parallel else 1)
