"""Flags of published scripts that are no settings here: with nothing left to do, or still to come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OldFlag:
    """A flag that scripts pass. nargs and choices as in argparse, nargs 0 for no value. reason: see the two
    tables."""

    names: tuple[str, ...]
    reason: str
    nargs: int | str | None = 0
    metavar: str | None = None
    choices: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """The spelling under which it is reported."""
        return self.names[0]


# Accepted and reported once. The reason says what became of the flag.
NOTHING_LEFT_TO_DO: tuple[OldFlag, ...] = (
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

# Refused. The reason says what to do until the flag is there.
STILL_TO_COME: tuple[OldFlag, ...] = (
    OldFlag(("--mup",), "muP is not supported yet: drop all --mup flags for the standard parametrisation"),
    *(
        OldFlag(
            (name,),
            "muP is not supported yet: drop all --mup flags for the standard parametrisation",
            nargs=None,
            metavar="NUMBER",
        )
        for name in ("--mup-input-mult", "--mup-output-mult", "--mup-attn-mult")
    ),
    *(
        OldFlag(
            (f"--{part}-weighted-split-paths{ending}",),
            "weighted splits are not supported yet: give one prefix with --data-path, and --split",
            nargs=nargs,
            metavar=metavar,
        )
        for part in ("train", "valid", "test")
        for ending, nargs, metavar in (("", "+", "GROUP"), ("-path", None, "FILE"))
    ),
    OldFlag(
        ("--skip-train-iteration-range",),
        "skipping ranges of steps is not supported yet: drop the flag",
        nargs="+",
        metavar="FIRST-LAST",
    ),
    OldFlag(
        ("--sync-tp-duplicated-parameters",),
        "averaging of duplicated parameters is not supported yet: drop the flag, their gradients are equal "
        "here",
    ),
)

OLD_FLAGS = NOTHING_LEFT_TO_DO + STILL_TO_COME
