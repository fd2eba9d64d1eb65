"""Flags of other programs: those that are accepted and ignored, and what replaces unknown ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeprecatedFlag:
    """An accepted flag without effect. nargs and choices as in argparse, nargs 0: no value."""

    names: tuple[str, ...]
    reason: str
    """Why it has no effect."""
    nargs: int | str | None = 0
    metavar: str | None = None
    choices: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """The spelling used in messages."""
        return self.names[0]

    @property
    def note(self) -> str:
        """The message of a run that was given this flag."""
        return f"{self.name} is deprecated and ignored: {self.reason}"


# Flags of Megatron-LM, DeepSpeed and transformers that are not flags here -> what to do instead.
REPLACED_FLAGS: dict[str, str] = {
    "--gradient-accumulation-steps": "set --global-batch-size, which is --micro-batch-size x accumulation "
    "steps x data-parallel size",
    "--use-distributed-optimizer": "set --zero-stage 1, which shards the optimizer state over the "
    "data-parallel ranks",
    "--swiglu": "set --glu-activation swiglu",
    "--use-rope-scaling": "set --rope-scaling-type llama3",
    "--rotary-seq-len-interpolation-factor": "set --rope-scaling-type linear and --rope-scaling-factor",
    "--num-key-value-heads": "set --group-query-attention and --num-query-groups",
    "--use-rotary-position-embeddings": "set --position-embedding-type rotary",
}

DEPRECATED_FLAGS: tuple[DeprecatedFlag, ...] = (
    DeprecatedFlag(("--deepspeed",), "DeepSpeed is always used"),
    DeprecatedFlag(
        ("--deepspeed-activation-checkpointing",), "--checkpoint-activations enables activation checkpointing"
    ),
    DeprecatedFlag(
        ("--overlap-grad-reduce",), "with --zero-stage 1 it is the default, see --no-overlap-grad-reduce"
    ),
    DeprecatedFlag(
        ("--overlap-param-gather",), "with --zero-stage 1 it is the default, see --no-overlap-param-gather"
    ),
    DeprecatedFlag(("--abort-on-unmet-fused-kernel-constraints",), "there are no compiled fused kernels"),
    DeprecatedFlag(("--no-bias-gelu-fusion",), "there is no fused bias-GELU kernel"),
    DeprecatedFlag(("--no-bias-dropout-fusion",), "there is no fused bias-dropout kernel"),
    DeprecatedFlag(("--no-masked-softmax-fusion",), "attention uses scaled_dot_product_attention of PyTorch"),
    DeprecatedFlag(
        ("--no-query-key-layer-scaling",), "attention scores are never scaled by the layer number"
    ),
    DeprecatedFlag(
        ("--data-impl",), "the format of token files is always mmap", nargs=None, choices=("mmap", "infer")
    ),
    DeprecatedFlag(("--no-load-rng",), "checkpoints hold no random state"),
    DeprecatedFlag(("--codecarbon-dir",), "emissions are not tracked", nargs=None, metavar="FOLDER"),
)
