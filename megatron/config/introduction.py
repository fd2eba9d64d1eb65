"""What `pretrain_gpt.py` prints without flags."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.errors import ConfigError

INTRODUCTION = r"""no flags are given; pretrain_gpt.py trains a GPT with tensor, pipeline and data parallelism
Train a small GPT on this machine's CPU (5 to 8 minutes on 2 cores):
  make train
Plan a run of 354 M parameters on 8 GPUs, on a machine without GPUs:
  python pretrain_gpt.py --dry-run --gpu a100-80gb --world-size 8 --bf16 --num-layers 24 --hidden-size 1024 \
    --num-attention-heads 16 --seq-length 2048 --position-embedding-type rotary --vocab-size 50257 \
    --micro-batch-size 4 --global-batch-size 256 --train-iters 1000 --lr 3e-4
All flags: python pretrain_gpt.py --help. Documentation: README.md and docs/README.md."""


def require_flags(argv: Sequence[str]) -> None:
    """Raises ConfigError with the introduction if argv has no flag, or only the launcher's --local-rank."""
    if all(word.replace("_", "-").startswith("--local-rank=") for word in argv):
        raise ConfigError(INTRODUCTION)
