"""Patches PyTorch for the simulated device, during a block.

Each patch replaces code that depends on the device type before a dispatch mode sees the operation. For each
patch there is a test in tests/simulated/test_torch_patches.py that fails without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from megatron.planner.simulation.device import NAME, SimulatedDevice

aten = torch.ops.aten
# Type of the handles that collectives of PyTorch's fake process group return.
_WORK = torch._C._distributed_c10d.FakeWork


class _BackendModule(_DummyBackendModule):
    """The module `torch.sim`. torch.amp and torch.utils.checkpoint use it."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def register_device() -> None:
    """Registers the device type 'sim' in this process. This cannot be undone, so simulations run in separate
    processes. (A fake 'cuda' device would abort the process if PyTorch was built without CUDA.)"""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_BackendModule())


@contextmanager
def patched_torch(simulated: SimulatedDevice) -> Iterator[None]:
    """Applies all patches during the block."""
    # The import is late: it loads torch's compiler for a second, even in a process that only reads results.
    from torch.nn.attention import bias as attention_bias

    patches: list[tuple[Any, str, Callable]] = [
        (torch, "tensor", _tensor(torch.tensor)),
        (nn.Module, "_apply", _apply),
        (FakeTensor, "tolist", _tolist),
        (torch.UntypedStorage, "resize_", _resize_(torch.UntypedStorage.resize_, simulated)),
        (F, "scaled_dot_product_attention", _attention(F.scaled_dot_product_attention)),
        (attention_bias, "causal_lower_right", _CausalLowerRight),
        (F, "rms_norm", _rms_norm(F.rms_norm)),
        (F, "silu", _silu(F.silu)),
        (_WORK, "wait", _wait(_WORK.wait, simulated)),
        (dist, "all_gather_object", _all_gather_object),
        (dist, "broadcast_object_list", _broadcast_object_list),
    ]
    with ExitStack() as undo:
        for owner, name, patch in patches:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, patch)
        yield


def _tensor(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a replacement of torch.tensor that creates the tensor on the host and copies it to the device,
    as with CUDA. `torch.tensor(data, device=...)` itself fills the tensor outside of any dispatch mode."""

    def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != NAME:
            return original(data, *args, device=device, **kwargs)
        return original(data, *args, device="cpu", **kwargs).to(device)

    return tensor


def _apply(self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Changes parameters in place, as `Module._apply` does on real devices. For fake tensors the original
    creates new parameters without the attributes of the old ones."""
    for child in self.children() if recurse else ():
        child._apply(function)
    for parameter in self._parameters.values():
        if parameter is not None:
            _convert(parameter, function)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = function(buffer)
    return self


@torch.no_grad()
def _convert(parameter: nn.Parameter, function: Callable[[Tensor], Tensor]) -> None:
    converted = function(parameter)
    if not isinstance(converted, FakeTensor):
        parameter.data = converted
    elif converted is not parameter:
        converted.requires_grad_(parameter.requires_grad)._is_param = True
        for name, value in vars(parameter).items():
            vars(converted).setdefault(name, value)
        _swap(parameter, converted)


def _swap(one: Tensor, other: Tensor) -> None:
    """Swaps two tensors, even if they have weak references, which torch.utils.swap_tensors rejects."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def _tolist(self: FakeTensor) -> Any:
    """Copies the tensor to the host once, as from a real device. The original would read each element
    separately."""
    return self.to("cpu").tolist()


def _resize_(original: Callable, simulated: SimulatedDevice) -> Callable:
    """Returns a replacement that also reports the new size of a storage to the device. ZeRO-2 and 3 resize
    storages to free and allocate buffers, which no dispatch mode sees."""

    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        original(storage, size)
        simulated.resized(storage)

    return resize_


_MAX_CUDNN_HEAD = 128


@dataclass(frozen=True)
class _CausalLowerRight:
    """Replaces `torch.nn.attention.bias.CausalBias`, whose tensors cannot be fake tensors."""

    queries: int
    keys: int


def _attention(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a replacement that runs the kernel which PyTorch chooses on CUDA: the memory-efficient kernel
    with a bias or for fp32; FlashAttention for a mask aligned to the lower right, for wide heads and for
    deterministic algorithms; otherwise cuDNN's kernel, which PyTorch 2.11 and newer prefer on Hopper and
    Blackwell. On other GPUs this kernel has the rate of the one that PyTorch chooses there
    (`megatron.planner.rates`)."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | _CausalLowerRight | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **options: Any,
    ) -> Tensor:
        if query.device.type != NAME:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)
        lower_right = False
        if isinstance(attn_mask, _CausalLowerRight):
            attn_mask, is_causal, lower_right = None, True, True
        if attn_mask is None and query.dtype != torch.float32:
            wide = query.shape[-1] > _MAX_CUDNN_HEAD or query.shape[-1] % 8
            if lower_right or wide or torch.are_deterministic_algorithms_enabled():
                flash = aten._scaled_dot_product_flash_attention
                return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
            cudnn = aten._scaled_dot_product_cudnn_attention
            return cudnn(query, key, value, None, True, dropout_p, is_causal, scale=scale)[0]
        bias = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
        efficient = aten._scaled_dot_product_efficient_attention
        needs_backward = torch.is_grad_enabled() and query.requires_grad
        return efficient(query, key, value, bias, needs_backward, dropout_p, is_causal, scale=scale)[0]

    return attention


def _rms_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a replacement that runs the fused kernel, as on CUDA, which keeps the reciprocal deviation of
    each row. For other devices PyTorch uses elementary operations, which keep several tensors of the input's
    size."""

    def rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        if x.device.type != NAME:
            return original(x, shape, weight, eps)
        return _FusedRMSNorm.apply(x, weight, eps)

    return rms_norm


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        result, deviation = _fused_rms_norm(x, weight)
        ctx.save_for_backward(x, deviation, weight)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, deviation, weight = ctx.saved_tensors
        backward = aten._fused_rms_norm_backward
        return (*backward(grad, x, list(weight.shape), deviation, weight, [True, True]), None)


def _without_values(function: Callable) -> Any:
    """Registers a function that returns tensors without values as an operation, under the function's name."""
    name = f"megatron_simulation::{function.__name__.strip('_')}"
    operation = torch.library.custom_op(name, function, mutates_args=())
    operation.register_fake(function)
    return operation


@_without_values
def _fused_rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the outputs of `aten::_fused_rms_norm` on CUDA: the norm, and the reciprocal deviation of each
    row."""
    return torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


def _silu(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a replacement whose backward pass is one kernel, as on CUDA. For unknown devices PyTorch runs
    seven kernels."""

    def silu(x: Tensor, inplace: bool = False) -> Tensor:
        return original(x, inplace) if x.device.type != NAME else _FusedSiLU.apply(x)

    return silu


class _FusedSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return aten.silu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _silu_backward(grad, *ctx.saved_tensors)


@_without_values
def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Returns a tensor like the output of `aten::silu_backward`."""
    return torch.empty_like(x)


def _wait(original: Callable, simulated: SimulatedDevice) -> Callable:
    """Returns a replacement that also reports the wait for a collective. A dispatch mode does not see such a
    wait."""

    def wait(work: dist.Work, *args: Any) -> Any:
        simulated.trace.add_wait(work)
        return original(work, *args)

    return wait


def _all_gather_object(objects: list[Any], mine: Any, group: Any = None) -> None:
    """Fills the objects of all ranks with this rank's object. The original sends objects as bytes of tensors,
    but tensors on the simulated device have no values."""
    objects[:] = [mine] * len(objects)


def _broadcast_object_list(objects: list[Any], *_: Any, **__: Any) -> None:
    """Does not change the objects: the other ranks are assumed to have this rank's objects."""
