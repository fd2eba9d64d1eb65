"""The simulated device 'sim'. Its tensors have shapes and dtypes, but no values.

`SimulatedDevice` is a dispatch mode, so it sees every PyTorch operation of the program, in forward and
backward passes. An operation on the device runs on fake tensors and is counted: FLOPs, bytes, collective
calls, host synchronizations, memory. (`FakeTensorMode` also raises an error for tensors of two devices.)

Operations on host tensors run for real, so that the program's own bookkeeping works. Only large host tensors
are fake, such as offloaded optimizer state, and weights before they are moved to the device.

Small integer tensors on the device also have true values, which are computed on the CPU. Tables of indices
are therefore real, and the code that reads them runs unchanged.
"""

from __future__ import annotations

import math
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from megatron.planner.simulation.memory_tracker import MemoryTracker
from megatron.planner.simulation.passes import Kernel

NAME = "sim"
# Integer tensors of at most this many elements have true values.
_MOST_VALUES = 1024
# Host tensors with more elements are fake.
_MOST_HOST_ELEMENTS = 2**18
# Operations that launch no kernel on a device.
_NO_KERNEL = frozenset(
    "empty empty_like new_empty empty_strided new_empty_strided detach _unsafe_view lift_fresh "
    "_reshape_alias set_ alias is_same_size resize_ record_stream".split()
)
# Operations whose output size depends on values, for which the host must wait.
_VALUE_SIZED = frozenset("nonzero masked_select _unique2 unique_dim unique_consecutive equal".split())
_PRODUCTS = frozenset("mm addmm bmm baddbmm".split())
# Operations that multiply the groups of rows of experts.
_GROUPED_PRODUCTS = frozenset("multiply_groups multiply_within_groups add_products_within_groups".split())
# In-place operations without an implementation for fake tensors.
_WITHOUT_META = frozenset(["_fused_sgd_"])
_FP8_PRODUCT = "multiply_fp8"
_ADD_PRODUCT = torch.ops.aten.addmm.dtype_out  # in torch 2.11 its implementation raises TypeError
POINT_TO_POINT = ("send", "recv_")
"""c10d's names of the operations that send and receive a message."""


@dataclass(frozen=True)
class CollectiveCall:
    """One call of a collective or of a point-to-point operation, as this rank issues it."""

    operation: str
    """Name of the c10d operation, such as 'allreduce_', 'send' or 'recv_'."""
    ranks: tuple[int, ...]
    """Global ranks of the process group, sorted. For 'send' and 'recv_' only the other rank."""
    dtype: str
    elements: int
    """Number of elements of the full tensor: the output of an all-gather, the input of a reduce-scatter."""
    bytes: int
    """Number of bytes of the full tensor."""


class Trace(Protocol):
    """Counts the work of the simulated device."""

    def add_operation(self, kernel: Kernel, bytes_written: int) -> None:
        """Counts an operation on the device. bytes_written: the part of the kernel's bytes that it writes."""

    def add_call(self, call: CollectiveCall, work: dist.Work | None = None) -> None:
        """Counts a collective call. work: the handle on which the caller can wait."""

    def add_wait(self, work: dist.Work) -> None:
        """Counts that the host makes the device wait for a collective."""

    def add_sync(self, cause: str) -> None:
        """Counts that the host waits until the device has finished all its work. cause: 'item', 'copy to
        host', 'copy to device', 'synchronize', or the name of the operation."""


class SimulatedDevice(TorchDispatchMode):
    """Runs operations within its context on the simulated device, and counts them in `trace` and `memory`."""

    def __init__(self, trace: Trace, memory: MemoryTracker) -> None:
        super().__init__()
        self.trace, self.memory, self.host_memory = trace, memory, MemoryTracker()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._values: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Returns a CPU tensor with the true values of a tensor on the device; None if they are not known."""
        return self._values.get(tensor)

    def pin(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a host tensor in pinned memory."""
        copy = tensor.clone()
        self._pinned.add(copy.untyped_storage())
        return copy

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Updates the size of a storage that was changed in place."""
        self.memory.resized(storage)
        self.host_memory.resized(storage)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # checked first, because it is the most frequent call
            return args[0].fake_device
        try:
            return self._run(func, args, kwargs or {})
        except Exception:
            # An exception inside of the autograd engine may end the process without a message.
            print(
                f"simulated operation {func} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True
            )
            raise

    def _run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        fakes = [x for x in _tensors(args, kwargs) if isinstance(x, FakeTensor)]
        device = kwargs.get("device")
        to_device = device is not None and torch.device(device).type == NAME
        if not fakes and not to_device:
            return self._run_on_host(func, args, kwargs)
        on_device = to_device or any(x.fake_device.type == NAME for x in fakes)
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            return self._run_collective(func, name, args, kwargs)
        special = self._SPECIAL.get(name)
        if special is not None and on_device:
            handled, result = special(self, args, kwargs)
            if handled:
                return result
        if on_device and (name in _VALUE_SIZED or _indexes_by_mask(name, args)):
            self.trace.add_sync(name)
        if func.is_view:
            result = self._view(func, args, kwargs)
        else:
            with self._fake:
                only_writes = name in _WITHOUT_META or func is _ADD_PRODUCT
                result = kwargs.get("out") if only_writes else func(*args, **kwargs)
        self._account(func, name, args, kwargs, result, on_device)
        return result

    def _view(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs a view. Views are half of all operations, so they bypass the full `FakeTensorMode`, which is
        four times as slow."""
        with in_kernel_invocation_manager(self._fake):
            result = func(*args, **kwargs)
        return tree_map_only(Tensor, lambda view: FakeTensor(self._fake, view, args[0].fake_device), result)

    def _run_on_host(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not _is_large_factory(args, kwargs):
            return func(*args, **kwargs)
        with self._fake:
            result = func(*args, **kwargs)
        self.host_memory.add(result.untyped_storage())
        return result

    def _account(
        self, func: Any, name: str, args: tuple, kwargs: dict[str, Any], result: Any, on_device: bool
    ) -> None:
        outputs = [x for x in _tensors((result,), {}) if isinstance(x, FakeTensor)]
        for output in outputs:
            self._count_storage(output)
        if not on_device:
            return
        self._keep_values(func, args, kwargs, outputs)
        if func.is_view or name in _NO_KERNEL:
            return
        inputs = {id(x): x for x in _tensors(args, kwargs)}
        # An in-place variant counts as the operation without the underscore.
        packet = getattr(torch.ops.aten, name.removesuffix("_"), func.overloadpacket)
        shaped = _with_all_heads(name, [x for x in args if not isinstance(x, torch.dtype)])
        flops = (
            int(flop_registry[packet](*shaped, **kwargs, out_val=result)) if packet in flop_registry else 0
        )
        written = {id(x): x for x in (*outputs, *_mutated(func, args, kwargs))}
        overwritten = {id(x) for x in _overwritten(func, name, args, kwargs)}
        inputs = {key: x for key, x in inputs.items() if key not in overwritten}
        bytes_read, bytes_written = (sum(map(_bytes_of, x.values())) for x in (inputs, written))
        kernel = Kernel(name, flops, bytes_read + bytes_written)
        if flops:
            kernel = replace(kernel, product=_product(func, args), alignment=_alignment(args))
        self.trace.add_operation(kernel, bytes_written)

    def _count_storage(self, tensor: Tensor) -> None:
        assert isinstance(tensor, FakeTensor)
        tracker = self.memory if tensor.fake_device.type == NAME else self.host_memory
        tracker.add(tensor.untyped_storage())

    # --- operations that connect host and device ---

    def _item(self, args: tuple, kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Returns the number that the host reads from the device. If its value is not known, returns 1 or
        True."""
        (tensor,) = args
        self.trace.add_sync("item")
        value = self.value_of(tensor)
        if value is not None:
            return True, value.item()
        return True, True if tensor.dtype == torch.bool else torch.ones((), dtype=tensor.dtype).item()

    def _to_copy(self, args: tuple, kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Copies a tensor to a different device. Returns (True, copy); (False, None) if the device stays the
        same."""
        (source,), device = args, kwargs.get("device")
        target = source.device.type if device is None else torch.device(device).type
        if target == source.device.type:
            return False, None
        dtype = kwargs.get("dtype") or source.dtype
        non_blocking = bool(kwargs.get("non_blocking")) and dtype == source.dtype
        if target == "cpu":
            if not non_blocking:
                self.trace.add_sync("copy to host")
            return True, self._host_copy(source, dtype)
        self._copy_to_device(source, non_blocking)
        with self._fake:
            result = torch.empty_strided(source.shape, source.stride(), dtype=dtype, device=self.device)
        self._count_storage(result)
        if not isinstance(source, FakeTensor) and _may_have_values(result):
            self._values[result] = source.detach().to(dtype=dtype, copy=True)
        return True, result

    def _host_copy(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        value = self.value_of(source)
        if value is not None:
            return value.to(dtype=dtype, copy=True)
        if source.numel() <= _MOST_HOST_ELEMENTS:
            return torch.zeros(source.shape, dtype=dtype)
        with self._fake:
            result = torch.empty(source.shape, dtype=dtype, device="cpu")
        self._count_storage(result)
        return result

    def _copy_(self, args: tuple, kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Copies a tensor in place between devices. Returns (True, target); (False, None) within one
        device."""
        target, source = args[0], args[1]
        if target.device.type == source.device.type:
            return False, None
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        non_blocking &= source.dtype == target.dtype  # PyTorch converts dtypes through pageable memory
        if target.device.type == "cpu":
            if not non_blocking or target.untyped_storage() not in self._pinned:
                self.trace.add_sync("copy to host")
            return True, target
        self._copy_to_device(source, non_blocking)
        value = self.value_of(target)
        if value is not None and not isinstance(source, FakeTensor):
            value.copy_(source)
        return True, target

    def _copy_to_device(self, source: Tensor, non_blocking: bool) -> None:
        size = _bytes_of(source)
        self.trace.add_operation(Kernel("copy to device", 0, 2 * size), size)
        if not non_blocking or source.untyped_storage() not in self._pinned:
            self.trace.add_sync("copy to device")

    _SPECIAL: dict[str, Callable[[SimulatedDevice, tuple, dict[str, Any]], tuple[bool, Any]]] = {
        "_local_scalar_dense": _item,
        "_to_copy": _to_copy,
        "copy_": _copy_,
    }

    # --- collectives ---

    def _run_collective(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        call = describe_call(name, args)
        with self._fake:
            result = func(*args, **kwargs)
        if call is not None:
            results = result if isinstance(result, (list, tuple)) else (result,)
            works = [x for x in results if isinstance(x, torch.ScriptObject)]
            self.trace.add_call(call, dist.Work.unbox(works[0]) if works else None)
        if any(x.device.type == "cpu" for x in _tensors(args, kwargs)):
            self.trace.add_sync(f"{name} of host tensors")
        return result

    # --- true values of small integer tensors ---

    def _keep_values(self, func: Any, args: tuple, kwargs: dict[str, Any], outputs: list[FakeTensor]) -> None:
        """Runs the operation also on the true values, if all are known and the outputs are small integer
        tensors."""
        if not outputs or not all(map(_may_have_values, outputs)):
            return
        inputs = _tensors(args, kwargs)
        if any(isinstance(x, FakeTensor) and x not in self._values for x in inputs):
            for tensor in _mutated(func, args, kwargs):
                self._values.pop(tensor, None)  # the operation has changed its value to an unknown one
            return

        def real(x: Any) -> Any:
            if isinstance(x, torch.device):
                return torch.device("cpu")
            return self._values[x] if isinstance(x, FakeTensor) else x

        result = func(*tree_map(real, args), **tree_map(real, kwargs))
        for output, value in zip(outputs, _tensors((result,), {}), strict=True):
            self._values[output] = value


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors among the arguments of an operation, in order."""
    return list(_iterate(args)) + list(_iterate(kwargs.values()))


def _iterate(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _iterate(value)


def describe_call(name: str, args: tuple) -> CollectiveCall | None:
    """Returns the call of the c10d operation `name`; None for operations that exchange no tensors."""
    lists = [_tensors((argument,), {}) for argument in args]
    # The longest list of tensors is the full tensor: the output of an all-gather, or the input of a
    # reduce-scatter.
    full = max(lists, key=lambda tensors: sum(x.numel() for x in tensors), default=[])
    if not full:
        return None
    elements = sum(x.numel() for x in full)
    ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(process_group_of(args)))
    ranks = (ranks[int(args[2])],) if name in POINT_TO_POINT else tuple(sorted(ranks))
    return CollectiveCall(
        name, ranks, str(full[0].dtype).removeprefix("torch."), elements, elements * full[0].element_size()
    )


def process_group_of(args: tuple) -> dist.ProcessGroup:
    """Returns the process group among the arguments."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            name = dist.ProcessGroup.unbox(argument).group_name
            return dist.distributed_c10d._resolve_process_group(name)
    raise ValueError("a collective call without a process group")


def _product(func: Any, args: tuple) -> tuple[float, float, float] | None:
    """Returns `Kernel.product`. For a matrix product, or for each product in a batch, it is (rows, columns,
    inner length); with experts it is each expert's product if all experts have equally many rows. For
    attention it is (queries, keys, elements of a head). Operands of attention are [batch, heads, seq,
    head_dim] in PyTorch, and [seq, batch, heads, head_dim] in `megatron.kernels`."""
    name = func.overloadpacket.__name__
    if "attention" in name:
        is_aten = func.namespace == "aten"
        operands = [x for x in args if isinstance(x, Tensor) and x.dim() == 4]
        # The first argument of PyTorch's backward passes is the gradient of the output.
        queries, keys = operands[1:3] if is_aten and "backward" in name else operands[:2]
        seq = 2 if is_aten else 0
        return queries.shape[seq], keys.shape[seq], queries.shape[-1]
    if name == _FP8_PRODUCT:
        x, _, matrices = (argument for argument in args[:3] if isinstance(argument, Tensor))
        groups = len(matrices) if matrices.dim() == 3 else 1
        return len(x) / groups, matrices.shape[-2], matrices.shape[-1]
    if name in _GROUPED_PRODUCTS:
        return _grouped_product([x for x in args if isinstance(x, Tensor)])
    if name not in _PRODUCTS:
        return None
    left, right = [x for x in args if isinstance(x, Tensor)][-2:]
    return left.shape[-2], right.shape[-1], left.shape[-1]


def _grouped_product(tensors: list[Tensor]) -> tuple[float, float, float]:
    """Returns `Kernel.product` of a group with the mean number of rows: of its rows with a matrix, or of its
    rows of two tensors. tensors: the last one has the ends of the groups."""
    groups = len(tensors[-1])
    matrices = next((x for x in tensors if x.dim() == 3 and x is not tensors[0]), None)
    if matrices is not None:
        rows, inner = tensors[0].shape
        return rows / groups, matrices.numel() / (groups * inner), inner
    left, right = tensors[-3:-1]
    return left.numel() / len(right), right.shape[1], len(right) / groups


def _alignment(args: tuple) -> int:
    """Returns `Kernel.alignment` of a matrix product, from its operands."""
    matrices = [x for x in args if isinstance(x, Tensor) and x.dim() >= 2][-2:]
    # The length of a row in memory is the larger stride. cuBLAS needs one contiguous dimension, so PyTorch
    # copies a matrix that has none.
    rows = [max(x.stride()[-2:]) if 1 in x.stride()[-2:] else x.shape[-1] for x in matrices]
    return math.gcd(8, *rows)


def _bytes_of(tensor: Tensor) -> int:
    """Returns the bytes that an operation reads for a tensor. Repeated elements of an expanded tensor are
    read once."""
    elements = tensor.numel()
    if elements and 0 in tensor.stride():
        elements = math.prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
    return min(elements * tensor.element_size(), tensor.untyped_storage().nbytes())


def _may_have_values(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point and tensor.numel() <= _MOST_VALUES


def _with_all_heads(name: str, args: list[Any]) -> list[Any]:
    """Returns the arguments of attention with as many heads of keys and values as of queries. torch's formula
    for FLOPs expects this before version 2.13. A shared head saves no FLOPs."""
    if not name.startswith("_scaled_dot_product"):
        return args
    first = int("backward" in name)  # in a backward pass the first argument is the gradient of the output
    heads = args[first].shape[1]
    for place in (first + 1, first + 2):
        batch, _, *rest = args[place].shape
        args[place] = torch.empty(batch, heads, *rest, device="meta")
    return args


def _mutated(func: Any, args: tuple, kwargs: dict[str, Any], only: str | None = None) -> list[Tensor]:
    """Returns the arguments that the operation writes to. only: the name of the argument to return; None for
    all."""
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if only not in (None, argument.name):
            continue
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += _tensors((value,), {})
    return found


def _overwritten(func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the arguments that the operation writes without reading them."""
    names = ("copy_", "fill_", "zero_", "copy_gradient", "quantize_fp8")
    if name in names or func._schema.overload_name == "out" or kwargs.get("beta") == 0.0:
        return _mutated(func, args, kwargs)
    return _mutated(func, args, kwargs, only="rounded") if name == "adamw" else []


def _indexes_by_mask(name: str, args: tuple) -> bool:
    return name in ("index", "index_put", "index_put_") and any(
        x.dtype == torch.bool for x in _iterate(args[1])
    )


def _is_large_factory(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Returns whether the operation creates a large host tensor without reading another tensor."""
    shape = args[0] if args else None
    if not isinstance(shape, (list, torch.Size)) or _tensors(args, kwargs):
        return False
    return all(isinstance(size, int) for size in shape) and math.prod(shape) > _MOST_HOST_ELEMENTS
