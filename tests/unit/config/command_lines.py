"""Command lines like those of published sbatch scripts, for the tests of the config."""

from __future__ import annotations

import re

# A run that passes all checks with --dry-run, on one process.
SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-samples 800 --dry-run"
).split()

RUN = [word for word in SMALL if word != "--dry-run"]
WITHOUT_LENGTH = [word for word in SMALL if word not in ("--train-samples", "800")]

# 176 B parameters on 384 GPUs, from Slurm: the quotes of the partition method arrive as part of its value.
BLOOM = [
    *"--tensor-model-parallel-size 4 --pipeline-model-parallel-size 12".split(),
    *["--pp-partition-method", "'type:transformer|embedding'"],
    *"--num-layers 70 --hidden-size 14336 --num-attention-heads 112".split(),
    *"--seq-length 2048 --max-position-embeddings 2048".split(),
    *"--micro-batch-size 2 --rampup-batch-size 192 16 9_765_625 --global-batch-size 2048".split(),
    *"--train-samples 220_000_000 --tokenizer-type PretrainedFromHF".split(),
    *"--tokenizer-name-or-path some/tokenizer".split(),
    *"--init-method-std 0.0048 --embed-layernorm --bf16 --seed 42 --position-embedding-type alibi".split(),
    *"--checkpoint-activations --abort-on-unmet-fused-kernel-constraints".split(),
    *"--kill-switch-path /tmp/kill-switch --pad-vocab-size-to 250880".split(),
    *"--optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 6e-5 --min-lr 6e-6".split(),
    *"--lr-decay-style cosine --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105".split(),
    *"--clip-grad 1.0 --weight-decay 1e-1 --exit-duration-in-mins 5990".split(),
    *"--log-interval 1 --save-interval 100 --eval-interval 1000 --eval-iters 1".split(),
    *"--tensorboard-dir /nowhere/tensorboard --tensorboard-queue-size 5 --log-timers-to-tensorboard".split(),
    *"--log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard".split(),
    *"--save /nowhere/checkpoints --load /nowhere/checkpoints --data-path /nowhere/text_document".split(),
    *"--num-workers 2 --valid-num-workers 0 --data-impl mmap --distributed-backend nccl".split(),
    *"--deepspeed --deepspeed_config ./no_such_config.json --zero-stage 0".split(),
    "--deepspeed-activation-checkpointing",
]

# 104 B parameters in fp16, with GPT-2's tokenizer and no --tokenizer-type; --clip-grad comes twice.
GPT_104B = [
    *"--tensor-model-parallel-size 4 --pipeline-model-parallel-size 32".split(),
    *"--num-layers 64 --hidden-size 11600 --num-attention-heads 80 --ffn-hidden-size 46400".split(),
    *"--seq-length 2048 --max-position-embeddings 2048".split(),
    *"--micro-batch-size 1 --rampup-batch-size 16 16 6_000_000 --global-batch-size 2048".split(),
    *"--train-samples 600_000_000 --train-tokens 300_000_000_000".split(),
    *"--vocab-file /nowhere/gpt2-vocab.json --merge-file /nowhere/gpt2-merges.txt".split(),
    *"--loss-scale 12 --clip-grad 1.0 --fp16 --checkpoint-activations --seed 43".split(),
    *"--optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 6e-5 --min-lr 6e-6".split(),
    *"--lr-decay-style cosine --lr-decay-tokens 260_000_000_000 --lr-warmup-samples 216_320".split(),
    *"--clip-grad 1.0 --weight-decay 1e-1 --exit-duration-in-mins 1190".split(),
    *"--log-interval 10 --save-interval 1500 --eval-interval 1000 --eval-iters 5".split(),
    *"--codecarbon-dir /nowhere/codecarbon --tensorboard-dir /nowhere/tensorboard".split(),
    *"--save /nowhere/checkpoints --load /nowhere/checkpoints --data-path /nowhere/text_document".split(),
    *"--data-impl mmap --split 949,50,1 --distributed-backend nccl --local-rank=3".split(),
    *"--deepspeed --deepspeed_config ./no_such_config.json --zero-stage 1".split(),
    "--deepspeed-activation-checkpointing",
]


def rows(text: str) -> list[tuple[str, list[str]]]:
    """Returns (flags, parts of the answer) of each row 'FLAGS => PART; PART', which indented lines
    continue."""
    joined = re.sub(r"\n +", " ", text.strip()).splitlines()
    pairs = [(words.strip(), parts.strip()) for words, _, parts in (row.partition("=>") for row in joined)]
    return [(words, re.split(" *; *", parts) if parts else []) for words, parts in pairs]
