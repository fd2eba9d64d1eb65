"""The passes of published programs as lists of kernels and collectives.

The bytes of every tensor that a kernel reads or writes are counted. Fused causal attention computes half of
the full GEMMs; its backward pass computes 2.5 times as much as its forward pass.
"""

from __future__ import annotations

import math

from benchmarks.published_programs.shapes import BYTES, Shape
from megatron.planner.rates import NO_TENSOR_CORES
from megatron.planner.simulation.passes import Action, Collective, Kernel, Wait

TENSOR, SHARDS = "tensor", "shards"
"""Groups of ranks: tensor-parallel, and those that reduce gradients together."""
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "allgather", "reduce_scatter", "allreduce"

PRODUCTS, WIDE_PRODUCT, EVERY_SECOND_PRODUCT, ATTENTION, OTHERS = (
    "products",
    "wide product",
    "every second product",
    "attention",
    "others",
)
"""Parts of a layer that a recomputation repeats; the MLP's first product, the widest, is not one of
PRODUCTS."""


def product(rows: float, columns: float, inner: float, batch: float = 1, more_bytes: float = 0.0) -> Kernel:
    """Returns a GEMM, or a batch of equal GEMMs. The batched GEMMs of 2021, with heads of 108 and 150
    elements, were as slow as without tensor cores."""
    moved = BYTES * (rows * inner + inner * columns + rows * columns) * batch + more_bytes
    alignment = math.gcd(8, *(int(length) for length in (columns, inner) if length == int(length)))
    alignment = NO_TENSOR_CORES if batch > 1 and alignment < 8 else alignment
    return Kernel("mm", 2 * rows * columns * inner * batch, moved, (rows, columns, inner), alignment)


class Pass:
    """Records the kernels and collectives of a pass."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.actions: list[Action] = []

    def add(self, kernel: Kernel) -> None:
        self.actions.append(kernel)

    def move(self, name: str, elements: float, size: float) -> None:
        """Records a kernel that moves `size` bytes per element."""
        self.add(Kernel(name, 0.0, self.shape.program.traffic * elements * size))

    def start(self, operation: str, size: float) -> None:
        """Starts a collective of the tensor-parallel group."""
        self.actions.append(Collective(TENSOR, operation, size))

    def wait(self) -> None:
        """Waits for the collective that was started last."""
        self.actions.append(Wait(0))

    def communicate(self, operation: str, size: float) -> None:
        """Records an exposed collective of the tensor-parallel group."""
        if self.shape.layout.tensor > 1:
            self.start(operation, size)
            self.wait()

    # Linear layers: `columns` of the result and `inner` elements of the input on this rank.

    def column_parallel(self, columns: float, inner: float) -> None:
        """Records the forward pass. With sequence parallelism the input is all-gathered."""
        shape = self.shape
        operation = ALL_GATHER if shape.layout.sequence_parallel else None
        self._gather_and_multiply(operation, product(shape.tokens, columns, inner), inner)

    def row_parallel(self, columns: float, inner: float) -> None:
        """Records the forward pass. The results are summed over the tensor-parallel ranks."""
        shape = self.shape
        layout, size = shape.layout, BYTES * shape.tokens * columns
        operation = REDUCE_SCATTER if layout.sequence_parallel else ALL_REDUCE
        alone = size / layout.tensor if layout.tensor_overlap else size
        beside = layout.tensor > 1 and layout.tensor_overlap
        if beside:
            self.start(operation, size - alone)
        self.add(product(shape.tokens, columns, inner))
        if beside:
            self.wait()
        self.communicate(operation, alone)

    def _gather_and_multiply(self, operation: str | None, kernel: Kernel, width: float) -> None:
        """All-gathers and multiplies. With overlap, collective and GEMM run in as many chunks as there are
        ranks, and only the first chunk is exposed."""
        layout, size = self.shape.layout, BYTES * self.shape.tokens * width
        if operation is None or layout.tensor == 1:
            self.add(kernel)
            return
        alone = size / layout.tensor if layout.tensor_overlap else size
        self.communicate(operation, alone)
        if layout.tensor_overlap:
            self.start(operation, size - alone)
        self.add(kernel)
        if layout.tensor_overlap:
            self.wait()

    def column_parallel_backward(self, columns: float, inner: float) -> None:
        """Records the gradients of input and weight. With sequence parallelism the input is all-gathered
        again."""
        shape = self.shape
        size, by_input = BYTES * shape.tokens * inner, product(shape.tokens, inner, columns)
        if shape.layout.tensor == 1:
            self.add(by_input)
            self._weight_gradient(columns, inner)
            return
        sequence, hides = shape.layout.sequence_parallel, shape.program.hides_input_gradient
        if sequence:
            self.start(ALL_GATHER, size)
            if not hides:
                self.wait()
        self.add(by_input)
        if sequence and hides:
            self.wait()
        self.start(REDUCE_SCATTER if sequence else ALL_REDUCE, size)
        if not hides:
            self.wait()
        self._weight_gradient(columns, inner)
        if hides:
            self.wait()

    def row_parallel_backward(self, columns: float, inner: float) -> None:
        """Records the gradients of input and weight."""
        shape = self.shape
        operation = ALL_GATHER if shape.layout.sequence_parallel else None
        self._gather_and_multiply(operation, product(shape.tokens, inner, columns), columns)
        self._weight_gradient(columns, inner)

    def _weight_gradient(self, columns: float, inner: float) -> None:
        """Records the GEMM, and the accumulation over micro-batches, which sharded weights do not have."""
        program, weights = self.shape.program, columns * inner
        if program.adds_gradients:
            more = (2 * program.gradient - BYTES) * weights
            self.add(product(columns, inner, self.shape.tokens, more_bytes=more))
            return
        self.add(product(columns, inner, self.shape.tokens))
        if not program.shards_weights:
            self.move("accumulation", weights, BYTES + 2 * program.gradient)

    # The other parts of a layer.

    def attention(self, backward: bool = False) -> None:
        shape = self.shape
        model, heads = shape.model, shape.model.heads / shape.layout.tensor
        if shape.attention is None:
            unfused = self._unfused_attention_backward if backward else self._unfused_attention
            unfused(heads)
            return
        flops = (5 if backward else 2) * shape.tokens * model.seq * heads * model.head
        elements = 8 * model.queries + 4 * model.keys if backward else 2 * (model.queries + model.keys)
        moved = BYTES * shape.tokens * elements / shape.layout.tensor
        name = f"{shape.attention}_attention{'_backward' * backward}"
        self.add(Kernel(name, flops, moved, (model.seq, model.seq, model.head)))

    def _unfused_attention(self, heads: float) -> None:
        """Records the scores, masked softmax in one kernel, dropout, the product with the values, and
        transposed copies."""
        model, batch = self.shape.model, self.shape.layout.micro_batch * heads
        scores = batch * model.seq**2
        self.add(product(model.seq, model.seq, model.head, batch))
        self.move("softmax", scores, 4)
        self.move("dropout", scores, 5)
        self.add(product(model.seq, model.head, model.seq, batch))
        self.move("transpose", self.shape.tokens * 4 * heads * model.head, 4)

    def _unfused_attention_backward(self, heads: float) -> None:
        model, batch = self.shape.model, self.shape.layout.micro_batch * heads
        scores = batch * model.seq**2
        self.add(product(model.seq, model.seq, model.head, batch))
        self.add(product(model.seq, model.head, model.seq, batch))
        self.move("dropout", scores, 5)
        self.move("softmax", scores, 6)
        self.add(product(model.seq, model.head, model.seq, batch))
        self.add(product(model.seq, model.head, model.seq, batch))
        self.move("transpose", self.shape.tokens * 4 * heads * model.head, 4)

    def activation(self) -> None:
        shape = self.shape
        elements = shape.tokens * shape.model.ffn / shape.layout.tensor
        if shape.model.gated and not shape.program.fused:
            self.move("silu", elements, 4)
            self.move("gate", elements, 6)
        else:
            self.move("activation", elements, 6 if shape.model.gated else 4)

    def activation_backward(self) -> None:
        shape = self.shape
        elements = shape.tokens * shape.model.ffn / shape.layout.tensor
        if shape.model.gated and not shape.program.fused:
            self.move("gate", elements, 10)
            self.move("silu", elements, 6)
            self.move("concatenation", elements, 8)
        else:
            self.move("activation", elements, 10 if shape.model.gated else 6)

    def rotation(self, backward: bool = False) -> None:
        shape = self.shape
        if shape.model.rotary:
            size = 24 if shape.program.eager_norm else 4 if shape.program.fused else 12 if backward else 8
            elements = shape.tokens * (shape.model.queries + shape.model.keys) / shape.layout.tensor
            self.move("rotation", elements, size)

    def residual(self) -> None:
        """Records bias, dropout and the addition of the residual connection."""
        shape = self.shape
        elements = shape.own_tokens * shape.model.hidden
        if shape.program.fused:
            self.move("bias, dropout and residual", elements, 6 + shape.model.dropout)
            return
        if shape.model.biases and shape.layout.tensor > 1:
            self.move("bias", elements, 4)
        if shape.model.dropout:
            self.move("dropout", elements, 5)
        self.move("residual", elements, 6)

    def residual_backward(self) -> None:
        """Records the backward pass of dropout, and the sum of both gradients."""
        shape = self.shape
        elements = shape.own_tokens * shape.model.hidden
        if shape.model.dropout:
            self.move("dropout", elements, 5)
        self.move("residual", elements, 6)

    def bias_gradients(self) -> None:
        """Records the sums of the gradients over the tokens, which Transformer Engine's GEMMs compute."""
        shape = self.shape
        model = shape.model
        if model.biases and not shape.program.fused:
            columns = (model.qkv + model.wide) / shape.layout.tensor
            self.move("bias gradients", shape.tokens * columns + 2 * shape.own_tokens * model.hidden, 2)

    def norm(self, backward: bool = False) -> None:
        program = self.shape.program
        size = (48 if backward else 34) if program.eager_norm else 4
        if backward and not program.eager_norm:
            size = 6 if program.fused else 10
        self.move("norm", self.shape.own_tokens * self.shape.model.hidden, size)


def layer_forward(shape: Shape, parts: frozenset[str] | None = None) -> list[Action]:
    """Returns the forward pass of a layer. parts: the parts that a recomputation repeats; None: all."""
    model, tensor = shape.model, shape.layout.tensor
    of = Pass(shape)

    def has(*names: str) -> bool:
        return parts is None or not parts.isdisjoint(names)

    if has(OTHERS):
        of.norm()
    if has(PRODUCTS):
        of.column_parallel(model.qkv / tensor, model.hidden)
    if has(OTHERS):
        of.rotation()
    if has(ATTENTION):
        of.attention()
    if has(PRODUCTS, EVERY_SECOND_PRODUCT):
        of.row_parallel(model.hidden, model.queries / tensor)
    if has(OTHERS):
        of.residual()
        of.norm()
    if has(WIDE_PRODUCT):
        of.column_parallel(model.wide / tensor, model.hidden)
    elif has(EVERY_SECOND_PRODUCT):
        of.column_parallel(model.wide / 2 / tensor, model.hidden)
    if has(OTHERS):
        of.activation()
    if has(PRODUCTS):
        of.row_parallel(model.hidden, model.ffn / tensor)
        of.residual()
    return of.actions


def layer_backward(shape: Shape) -> list[Action]:
    """Returns the backward pass of a layer, with what it recomputes."""
    model, tensor = shape.model, shape.layout.tensor
    of = Pass(shape)
    if shape.layout.recompute == "full":
        of.actions += layer_forward(shape)
    elif shape.layout.recompute == "selective":
        of.actions += layer_forward(shape, shape.program.selective)
    of.residual_backward()
    of.row_parallel_backward(model.hidden, model.ffn / tensor)
    of.activation_backward()
    of.column_parallel_backward(model.wide / tensor, model.hidden)
    of.norm(backward=True)
    of.residual_backward()
    of.row_parallel_backward(model.hidden, model.queries / tensor)
    of.attention(backward=True)
    of.rotation(backward=True)
    of.column_parallel_backward(model.qkv / tensor, model.hidden)
    of.norm(backward=True)
    of.bias_gradients()
    return of.actions


def head_forward(shape: Shape) -> list[Action]:
    """Returns the forward pass of the last norm, the LM head and the loss."""
    rows = shape.model.vocab / shape.layout.tensor
    of = Pass(shape)
    of.norm()
    of.column_parallel(rows, shape.model.hidden)
    of.move("loss", shape.tokens * rows, shape.program.logit / 2)
    return of.actions


def head_backward(shape: Shape) -> list[Action]:
    """Returns the backward pass of `head_forward`."""
    rows = shape.model.vocab / shape.layout.tensor
    of = Pass(shape)
    of.move("loss", shape.tokens * rows, shape.program.logit / 2)
    of.column_parallel_backward(rows, shape.model.hidden)
    of.norm(backward=True)
    return of.actions


def embedding(shape: Shape) -> list[Action]:
    """Returns one pass of the embedding."""
    of = Pass(shape)
    of.move("embedding", shape.own_tokens * shape.model.hidden, 6)
    operation = REDUCE_SCATTER if shape.layout.sequence_parallel else ALL_REDUCE
    of.communicate(operation, BYTES * shape.tokens * shape.model.hidden)
    return of.actions
