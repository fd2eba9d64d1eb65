"""Chooses the implementation that computes attention, and returns the reason for the choice."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
)

from megatron.config import Config
from megatron.config.registries import POSITION_EMBEDDINGS
from megatron.errors import UserError, one_line
from megatron.kernels import windowed_attention
from megatron.kernels.attention import MAX_HEAD_DIM
from megatron.kernels.selection import reason_against_kernels, uses_kernels
from megatron.model.position import AttentionMasks
from megatron.mpu.world import gather_from_all_ranks

_LOG = logging.getLogger(__name__)
MAX_UNFUSED_SEQ_LENGTH = 2048
"""Longest sequence, in tokens, for which a [seq, seq] tensor is allocated on a GPU."""
_PLAIN = "flash, plain causal by scaled_dot_product_attention"


class Implementation(Enum):
    """The implementations of `CoreAttention`."""

    SDPA = "torch.nn.functional.scaled_dot_product_attention, without a bias"
    TRITON = "megatron.kernels.attention: no [seq, seq] tensor is stored"
    FLASH_WINDOW = "megatron.kernels.windowed_attention: PyTorch's flash kernel with a window"
    BIASED_SDPA = "scaled_dot_product_attention with a bias [seq, seq]"
    UNFUSED = "PyTorch operations on all scores"
    BLOCKS = (
        "PyTorch operations on the scores of a block of queries at a time, recomputed in the backward pass"
    )


@dataclass(frozen=True)
class AttentionRequirements:
    """The properties that select the implementation.

    dropout: the dropout rate, 0 outside of training. window: number of tokens that a token attends to, itself
    included; None: no limit. kernels_unsupported_reason: why the Triton kernels cannot be used; None if they
    can. flash: whether PyTorch's flash kernels support the dtype and the device. sink, softcapping: see
    --softmax-type and --attn-logit-softcapping.
    """

    dropout: float
    alibi: bool
    documents: bool
    seq_length: int
    head_dim: int
    on_cpu: bool
    kernels_unsupported_reason: str | None
    window: int | None = None
    context_parallel: bool = False
    flash: bool = False
    sink: bool = False
    softcapping: float | None = None

    @property
    def features(self) -> list[str]:
        """The names of all requirements beyond plain causal attention."""
        found = [f"dropout {self.dropout:g}"] if self.dropout else []
        found += ["ALiBi"] if self.alibi else []
        found += ["document boundaries"] if self.documents else []
        found += [f"scores capped at {self.softcapping:g}"] if self.softcapping else []
        found += ["a sink"] if self.sink else []
        return found + ([f"a window of {self.window} tokens"] if self.window else [])

    @property
    def fits_flash(self) -> bool:
        """Whether PyTorch's flash kernels can compute this attention: they support the size of its heads, and
        it has no features except a window and a sink."""
        fits = self.head_dim % 8 == 0 and self.head_dim <= windowed_attention.MAX_HEAD_DIM
        return fits and len(self.features) == bool(self.window) + self.sink


def choose_attention(required: AttentionRequirements) -> tuple[Implementation, str]:
    """Returns the implementation and the reason for it.

    PyTorch's fused kernel computes plain causal attention, because it is faster than the Triton kernel.
    PyTorch's flash kernel computes windows and sinks in 16 bits if no other feature is needed. The Triton
    kernels compute dropout, ALiBi, document boundaries, capped scores, and windows and sinks in fp32.
    PyTorch's kernels do not suit these features: they draw a different dropout mask, take biases only as
    [seq, seq] tensors, and take documents only as lengths whose number the host must know. Without Triton
    kernels, CPUs and short sequences use [seq, seq] tensors. Context parallelism never uses such tensors,
    since its queries are chunks of the sequence.

    Only unfused attention and some of PyTorch's kernels support values whose size differs from the keys'
    (latent attention, --v-channels). For all implementations the smaller tensors are padded with zeros, which
    change no score and no sum.
    """
    features = ", ".join(required.features)
    if not features:
        return Implementation.SDPA, _PLAIN
    against = required.kernels_unsupported_reason
    if against is None and required.flash and required.fits_flash:
        return Implementation.FLASH_WINDOW, f"flash, {features} by PyTorch's flash kernel"
    if against is None and required.head_dim > MAX_HEAD_DIM:
        against = f"heads of {required.head_dim} are larger than {MAX_HEAD_DIM}"
    if against is None:
        return Implementation.TRITON, f"flash, {features} by the triton kernel"
    by_blocks = "context parallelism" if required.context_parallel else None
    if not required.on_cpu and required.seq_length > MAX_UNFUSED_SEQ_LENGTH:
        by_blocks = f"{required.seq_length} tokens are more than {MAX_UNFUSED_SEQ_LENGTH}"
    if by_blocks is not None:
        return (
            Implementation.BLOCKS,
            f"PyTorch by blocks of queries, since {against}; {features}; {by_blocks}",
        )
    if required.dropout or required.sink or required.softcapping:
        return Implementation.UNFUSED, f"PyTorch, all scores are stored, since {against}; {features}"
    return (
        Implementation.BIASED_SDPA,
        f"scaled_dot_product_attention with a bias per score, since {against}; {features}",
    )


def run_uses_kernels(config: Config) -> bool:
    """Returns whether a run on GPUs (of the kind --gpu, if given) uses the Triton kernels.
    MEGATRON_KERNELS=pytorch turns them off, and they do not support a V100 (compute capability 7.0)."""
    is_old = (config.training.gpu or "").startswith("v100")
    return not is_old and os.environ.get("MEGATRON_KERNELS") != "pytorch"


def training_attention(config: Config, window: int | None = None, on_cpu: bool = False) -> Implementation:
    """Returns the implementation that training uses in layers with this window, on GPUs or (`on_cpu`) on
    CPUs."""
    model = config.model.of_kind(has_window=window is not None)
    required = AttentionRequirements(
        dropout=model.attention_dropout,
        alibi=POSITION_EMBEDDINGS.load(model.position_embedding_type).slopes is not None,
        documents=config.data.reset_attention_mask,
        seq_length=model.seq_length,
        head_dim=model.attention_head_dim,
        on_cpu=on_cpu,
        kernels_unsupported_reason=None if run_uses_kernels(config) and not on_cpu else "no kernels",
        window=window if window and window < model.seq_length else None,
        context_parallel=config.parallel.context_parallel_size > 1,
        flash=config.precision.name != "fp32" and not on_cpu,
        sink=model.softmax_type != "vanilla",
        softcapping=model.attn_logit_softcapping,
    )
    return choose_attention(required)[0]


def implementation_for(
    query: Tensor,
    seq: int,
    dropout: float,
    masks: AttentionMasks,
    sink: bool = False,
    softcapping: float | None = None,
) -> Implementation:
    """Returns the implementation for query [seq / CP, batch, heads, head_dim]. It logs each reason once."""
    local, _, _, head_dim = query.shape
    alibi, documents, window = masks.slopes is not None, masks.within_documents, masks.window_of(seq)
    if not (dropout or alibi or documents or window or sink or softcapping):
        if not torch.compiler.is_compiling():
            _log_once(_PLAIN)
        return Implementation.SDPA
    on_cpu, against = query.device.type == "cpu", None
    if not uses_kernels(query):
        against = reason_against_kernels(query.device.type) or f"kernels do not support {query.dtype}"
    flash = query.dtype != torch.float32 and _has_flash_kernels(query.device.type)
    split = local < seq
    required = AttentionRequirements(
        dropout, alibi, documents, seq, head_dim, on_cpu, against, window, split, flash, sink, softcapping
    )
    return choose_attention(required)[0] if torch.compiler.is_compiling() else _logged_choice(required)


def use_flash_attention_3() -> list[str]:
    """Replaces PyTorch's flash kernels (FlashAttention 2) by FlashAttention 3 if each rank has a Hopper GPU
    and the package flash_attn_interface. It returns a sentence for the log. The flash kernels compute windows
    in 16 bits, and with context parallelism also causal attention. The function is collective."""
    if not all(gather_from_all_ranks(_has_flash_attention_3())):
        return []
    activate_flash_attention_impl("FA3")
    return [
        "PyTorch's flash attention is FlashAttention 3, of the package flash_attn_interface "
        "(MEGATRON_FLASH_ATTENTION=2 keeps FlashAttention 2)"
    ]


def flash_attention_remedy() -> str:
    """Returns advice for the user if PyTorch's flash kernels give wrong results."""
    if current_flash_attention_impl() == "FA3":
        return "set MEGATRON_FLASH_ATTENTION=2 to keep FlashAttention 2"
    return "install another version of torch"


def _has_flash_attention_3() -> bool:
    if setting := os.environ.get("MEGATRON_FLASH_ATTENTION"):
        if setting != "2":
            raise UserError(f"MEGATRON_FLASH_ATTENTION is {setting!r} in the environment: set 2 or unset it")
        return False
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    if not is_hopper or "FA3" not in list_flash_attention_impls() or not find_spec("flash_attn_interface"):
        return False
    try:
        import_module("flash_attn_interface")
    except Exception as error:  # a package built for another torch version raises any kind of exception
        _LOG.warning(
            "FlashAttention 3 is not used: flash_attn_interface cannot be imported: %s "
            "(MEGATRON_FLASH_ATTENTION=2 keeps FlashAttention 2)",
            one_line(str(error)),
        )
        return False
    return all(hasattr(torch.ops.flash_attn_3, name) for name in ("fwd", "bwd"))


def _has_flash_kernels(device_type: str) -> bool:
    """Returns whether PyTorch was built with flash kernels for this device. The simulated device counts as
    one that has them."""
    if device_type == "cuda":
        return torch.backends.cuda.is_flash_attention_available()
    return device_type != "cpu"


@lru_cache(maxsize=1024)
def _logged_choice(required: AttentionRequirements) -> Implementation:
    """Returns the implementation that `choose_attention` chooses, and logs the reason."""
    choice, reason = choose_attention(required)
    _log_once(reason)
    return choice


@lru_cache
def _log_once(reason: str) -> None:
    _LOG.info("attention: %s", reason)
