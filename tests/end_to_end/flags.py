"""Flags of tiny runs."""

from __future__ import annotations

MODEL = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32".split()
ABSOLUTE = "--max-position-embeddings 32".split()
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()

# Five steps, counted in iterations.
SHORT = (
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 5 --eval-iters 1 --log-interval 1"
).split()

# 20 steps counted in samples. Batch size and learning rate change during the run, and dropout is on.
RAMPED = (
    "--micro-batch-size 1 --global-batch-size 8 --rampup-batch-size 2 2 24 --train-samples 125 "
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-samples 100 --lr-warmup-samples 10 "
    "--eval-iters 1 --eval-interval 6 --log-interval 1"
).split()
RAMPED_STEPS = 20
