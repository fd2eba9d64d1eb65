"""Flags of published scripts that have nothing left to do here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OldFlag:
    """A flag that scripts pass. nargs and choices as in argparse, nargs 0 for no value. reason: what became
    of it."""

    names: tuple[str, ...]
    reason: str
    nargs: int | str | None = 0
    metavar: str | None = None
    choices: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """The spelling under which it is reported."""
        return self.names[0]


# Accepted and reported once.
OLD_FLAGS: tuple[OldFlag, ...] = (
    OldFlag(("--deepspeed",), "DeepSpeed is always the engine"),
    OldFlag(
        ("--deepspeed-activation-checkpointing",), "--checkpoint-activations alone decides on recomputation"
    ),
    OldFlag(
        ("--abort-on-unmet-fused-kernel-constraints",),
        "no fused kernel is compiled, so none has constraints to meet",
    ),
    OldFlag(("--no-bias-gelu-fusion",), "bias and GELU are not fused by hand"),
    OldFlag(("--no-bias-dropout-fusion",), "bias and dropout are not fused by hand"),
    OldFlag(("--no-masked-softmax-fusion",), "attention runs through PyTorch's scaled-dot-product kernels"),
    OldFlag(("--no-query-key-layer-scaling",), "attention scores are never scaled by the layer number"),
    OldFlag(
        ("--data-impl",), "the format of token files is always mmap", nargs=None, choices=("mmap", "infer")
    ),
    OldFlag(("--codecarbon-dir",), "emissions are not tracked", nargs=None, metavar="FOLDER"),
)
