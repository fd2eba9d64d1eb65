"""The forward and backward pass of a micro-batch as one CUDA graph (--cuda-graph-impl local).

A graph repeats the kernels that it has captured, with equal addresses and numbers, and runs no Python code.
The host needs one call per micro-batch instead of one per kernel, so the host no longer limits small models
and short micro-batches. Values that differ between micro-batches are copied to fixed addresses before each
replay: tokens, labels, their weights, and the keys of the dropout masks. The loss scale and the number of
micro-batches are constants in the graph. If one of them or a shape changes, the next micro-batch runs
eagerly, and the micro-batch after it is captured.

Python hooks do not run in a replay. Therefore gradients are always added to sums that `zero_gradients` has
reset, and the data-parallel ranks reduce them after the last micro-batch. The checks of the flags exclude all
features that need hooks or the host within a pass: ZeRO-2 and ZeRO-3, several pipeline stages, experts,
compiled layers, and activations in host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.model.pipeline_module import GPTModelPipe
from megatron.mpu.random import Samples

_LOG = logging.getLogger(__name__)


class MicroBatchGraph:
    """Trains on micro-batches with a model of one stage. If the accelerator has no graphs, as on a CPU, every
    pass runs eagerly."""

    def __init__(self, module: GPTModelPipe) -> None:
        self._module, self._rng = module, module.dropout_rng
        self._key: tuple[Any, ...] | None = None
        self._graph: Any = None
        self._inputs: list[Tensor] = []
        self._dropout_keys: Tensor | None = None
        self._loss: Tensor | None = None
        self._read: list[torch.UntypedStorage] = []
        """The storages outside of the graph that it reads or writes. They are kept alive, since a replay has
        only addresses."""

    def run(
        self, inputs: Sequence[Tensor], samples: Sequence[int], loss_scale: float, micro_batches: int
    ) -> Tensor:
        """Adds the gradients of the micro-batch's loss x loss_scale / micro_batches to the sums of the step.

        inputs: `MicroBatch.inputs`, labels and the labels' weights, each [batch, seq], on the device. Returns
        the loss, a scalar. No collective may be running on the parameters.
        """
        numbers = loss_scale, micro_batches
        key = ([(x.shape, x.dtype) for x in inputs], numbers)
        if key != self._key:
            # The first pass runs eagerly: it fills tables and chooses kernels, which a capture must not do.
            self._key, self._graph, self._loss, self._read = key, None, None, []
            return self._pass(inputs, Samples(samples), *numbers)
        if self._graph is None:
            self._graph = get_accelerator().create_graph()
            if self._graph is None:  # for example on a CPU
                _log_no_graphs(get_accelerator().device_name())
                return self._pass(inputs, Samples(samples), *numbers)
            self._capture(inputs, samples, *numbers)
        for fixed, x in zip(self._inputs, inputs, strict=True):
            fixed.copy_(x)
        if self._dropout_keys is not None:
            with self._rng.use_samples(samples):
                self._dropout_keys.copy_(self._rng.host_keys(), non_blocking=True)
        get_accelerator().replay_graph(self._graph)
        assert self._loss is not None
        return self._loss.clone()

    def _capture(
        self, inputs: Sequence[Tensor], samples: Sequence[int], loss_scale: float, micro_batches: int
    ) -> None:
        """Captures a pass. On a GPU a capture computes nothing."""
        self._inputs = [x.clone() for x in inputs]
        fixed = Samples(samples)
        with self._rng.use_samples(fixed):
            # The graph has its own keys, at addresses that other micro-batches do not use.
            self._dropout_keys = self._rng.copy_keys(self._inputs[0].device)
        capture = get_accelerator().capture_to_graph(self._graph)
        # In torch's default mode 'global', a CUDA call of any thread can abort the capture, for example when
        # the data loader's thread pins memory, or when the checkpoint writer's thread waits for a copy.
        capture.capture_error_mode = "thread_local"
        with _MemoryOutside() as outside, capture:
            self._loss = self._pass(self._inputs, fixed, loss_scale, micro_batches)
        self._read = list(outside.storages.values())
        _LOG.info("cuda graph: captured the forward and backward pass of a micro-batch")

    def _pass(
        self, inputs: Sequence[Tensor], samples: Samples, loss_scale: float, micro_batches: int
    ) -> Tensor:
        *tokens, labels, weights = inputs
        module = self._module
        samples.loss_gradient = loss_scale / micro_batches
        with self._rng.use_samples(samples), module.fused_head_loss(samples.loss_gradient):
            outputs = module(tokens[0] if len(tokens) == 1 else tuple(tokens))
            loss = module.loss(outputs, (labels, weights))
            (loss * loss_scale / micro_batches).backward()
        return loss.detach()


@lru_cache
def _log_no_graphs(device: str) -> None:
    _LOG.info("cuda graph: none, since a %s has no graphs; all passes run eagerly", device)


class _MemoryOutside(TorchDispatchMode):
    """Records the storages that operations read or write, except the outputs of these operations."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}
        """The storages by address."""
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            if storage.data_ptr() not in self._made:
                self.storages[storage.data_ptr()] = storage
        found = func(*args, **kwargs)
        self._made.update({x.data_ptr() for x in _storages(found)} - self.storages.keys())
        return found


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """Yields the storages of all tensors in nested sequences and mappings."""
    if isinstance(values, Tensor):
        yield values.untyped_storage()
    elif isinstance(values, Mapping):
        yield from _storages(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _storages(value)
