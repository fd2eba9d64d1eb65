"""The flags that BigScience's published sbatch scripts (bigscience-workshop/bigscience, folder train/) pass
to pretrain_gpt.py. A line per script lists its differences from the most common script.

The facts were read from the scripts and are written in our own words. Not included: scripts that start
another program, scripts that only copy logs, and tr8-104B-cl.slurm, which ends in its own shell arithmetic on
126_953_125.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# 1.3 B parameters on 16 nodes of 4 GPUs, fp16, GPT-2's tokenizer. A word that begins with -- starts a flag.
COMMONEST = (
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --num-layers 24 --hidden-size 2048 "
    "--num-attention-heads 16 --ffn-hidden-size 8192 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 8 --global-batch-size 512 --rampup-batch-size 32 32 2_000_000 "
    "--train-samples 73_242_187 --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt "
    "--loss-scale 12 --fp16 "
    "--checkpoint-activations --optimizer adam --adam-beta1 0.9 --adam-beta2 0.999 --adam-eps 1e-8 "
    "--lr 2e-4 "
    "--min-lr 1e-5 --lr-decay-style cosine --lr-decay-samples 73_242_187 --lr-warmup-samples 183_105 "
    "--clip-grad 1.0 --weight-decay 1e-1 --exit-duration-in-mins 1190 --log-interval 200 "
    "--save-interval 1500 "
    "--eval-interval 1000 --eval-iters 100 --tensorboard-dir tensorboard --tensorboard-queue-size 5 "
    "--log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard "
    "--save checkpoints --load checkpoints --data-path text_document --data-impl mmap --split 949,50,1 "
    "--distributed-backend nccl --deepspeed --zero-stage 1 --deepspeed-activation-checkpointing"
)

# Short names for flags, and for changes that many scripts share. '~flag' removes a flag.
SHORT = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "layers": "--num-layers",
    "hidden": "--hidden-size",
    "heads": "--num-attention-heads",
    "ffn": "--ffn-hidden-size",
    "seq": "--seq-length",
    "positions": "--max-position-embeddings",
    "micro": "--micro-batch-size",
    "batch": "--global-batch-size",
    "ramp": "--rampup-batch-size",
    "samples": "--train-samples",
    "decay": "--lr-decay-samples",
    "warmup": "--lr-warmup-samples",
    "beta2": "--adam-beta2",
    "with-alibi": "--position-embedding-type alibi",
    "with-rotary": "--position-embedding-type rotary",
    "hf": "~--vocab-file ~--merge-file --tokenizer-type PretrainedFromHF --tokenizer-name-or-path t5-small",
    "350M": "tp 4 pp 2 hidden 1024 ffn 4096 --lr 3e-4",
    "125M": "tp 4 pp 2 layers 12 hidden 768 ffn 3072 --lr 6e-4",
    "tp1": "tp 1 pp 2 micro 1",
    "first": "micro 16 batch 1024 ~ramp samples 146_484_375 decay 126_953_125 --lr 1e-4",
    "early": "micro 4 batch 256 ~ramp samples 146_484_375 decay 126_953_125 ~--checkpoint-activations "
    "~--deepspeed-activation-checkpointing",
    "groups": "~--data-path ~--split --train-weighted-split-paths @TRAIN --valid-weighted-split-paths "
    "@VALID @BOTH --test-weighted-split-paths @TEST",
    "files": "~--data-path ~--split --train-weighted-split-paths-path train-splits.txt "
    "--valid-weighted-split-paths-path valid-splits.txt",
    "104B": "pp 32 layers 64 hidden 11600 heads 80 ~ffn micro 1 batch 2048 ramp 16 16 6_000_000 samples "
    "300_000_000 decay 126_953_125 warmup 216_320 beta2 0.95 --lr 6e-5 --min-lr 6e-6 --init-method-std "
    "0.006 --seed 43 --log-interval 1 --save-interval 300 --eval-iters 5",
    "by-tokens": "~ramp ~decay samples 600_000_000 --train-tokens 300_000_000_000 --lr-decay-tokens "
    "260000000000",
    "bloom": "hf files ~ffn ~--loss-scale tp 1 pp 2 micro 1 ramp 192 16 9_765_625 samples 220_000_000 decay "
    "200_000_000 beta2 0.95 --pp-partition-method 'type:transformer|embedding' --init-method-std 0.0048 "
    "--embed-layernorm --seed 42 with-alibi --abort-on-unmet-fused-kernel-constraints --pad-vocab-size-to "
    "250880 --exit-duration-in-mins 5990 --log-interval 1 --save-interval 250 --eval-iters 1 --zero-stage "
    "0",
    "mup": "hf ~--split ~ffn ~--loss-scale ~ramp tp 2 pp 1 layers 32 hidden 2560 heads 32 micro 16 samples "
    "1_953_125 decay 1_953_125 beta2 0.95 --pp-partition-method 'type:transformer' --embed-layernorm "
    "--seed 42 with-alibi --abort-on-unmet-fused-kernel-constraints --pad-vocab-size-to 51200 "
    "--log-interval 1 --save-interval 250 --eval-iters 1 --lr 0.01 --min-lr .001 --init-method-std 0.1 "
    "--mup --mup-input-mult 10 --mup-output-mult 10 --mup-attn-mult 10",
}

VALUES = {
    "@TRAIN": "TRAIN: 0.3 0:0.949 oscar/ar, 0.7 0:0.949 oscar/en",
    "@VALID": "VALID_AR: 1 0.949:0.999 oscar/ar",
    "@BOTH": "VALID_ALL: 0.3 0.949:0.999 oscar/ar, 0.7 0.949:0.999 oscar/en",
    "@TEST": "TEST_AR: 1 0.999:1 oscar/ar",
}

CURRICULUM: dict[str, object] = {
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 64,
        "max_difficulty": 2048,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 36000, "difficulty_step": 8},
    },
    "elastic_checkpoint": True,
}


@dataclass(frozen=True)
class Script:
    """A published script. processes: nodes x GPUs. fault: part of the error of a start from initial
    weights."""

    name: str
    processes: int
    changes: str
    fault: str | None = None

    def flags(self) -> dict[str, list[str]]:
        """The script's flags with their values, without --deepspeed_config."""
        found: dict[str, list[str]] = {}
        _change(found, COMMONEST)
        _change(found, self.changes)
        return found

    @property
    def first_supported_sample(self) -> int | None:
        """Consumed samples from which the run can resume, if the fault is a batch of the ramp-up.

        The layout of such a script supports only the full batch, which the ramp-up reaches after its SAMPLES.
        """
        is_in_ramp_up = self.fault is not None and self.fault.startswith("a batch of ")
        return int(self.flags()["--rampup-batch-size"][2]) if is_in_ramp_up else None

    def words(self) -> list[str]:
        return [word for flag, values in self.flags().items() for word in (flag, *values)]

    def deepspeed_json(self) -> dict[str, object]:
        """The DeepSpeed file of the script. It repeats the flags, except for the loss scale."""
        flags = self.flags()
        fp16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2}
        fp16 |= {"min_loss_scale": 1, "initial_scale_power": 12}
        return {
            "train_micro_batch_size_per_gpu": int(flags["--micro-batch-size"][0]),
            "train_batch_size": int(flags["--global-batch-size"][0]),
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": int(flags["--zero-stage"][0])},
            **({"fp16": fp16} if "--fp16" in flags else {"bf16": {"enabled": True}}),
            **(CURRICULUM if "--train-tokens" in flags else {}),
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        }


def _change(flags: dict[str, list[str]], text: str) -> None:
    current: list[str] = []
    for word in text.split():
        name = word.removeprefix("~")
        expanded = SHORT.get(name, name)
        if word.startswith("~"):
            flags.pop(expanded)
        elif expanded != name and " " in expanded:
            _change(flags, expanded)
        elif expanded.startswith("--"):
            current = flags[expanded] = []
        else:
            current.append(VALUES.get(word, word))


# 'NAME PROCESSES: CHANGES ! FAULT', continued in indented lines.
_SCRIPTS = """
arch-and-scaling-template 64: tp1 ~decay
# TRAIN_SAMPLES is never set in this script, and a flag is misspelled.
tr1-13B-round1 64: pp 8 --train-samples --ffn_hidden_size 20480 ! --train-samples: expected
tr1-13B-short 8: tp 2 pp 2 layers 8 hidden 512 heads 8 ffn 2048 seq 512 positions 512 micro 1 batch 64 ramp
    16 16 5_000_000 samples 300_000_000 decay 126_953_125 warmup 216_320 --lr 1e-4 --seed 42 --log-interval
    10 --save-interval 2000 --eval-iters 5 --codecarbon-dir codecarbon
tr3-1B3-modeling-baseline 64: hf first pp 8 --log-interval 1 --save-interval 10 --eval-interval 10
tr3b-760M 64: hf early hidden 1536 ffn 6144 --lr 2.5e-4
tr3c-350M 16: hf 350M early
tr3d-1B3-more-warmup 64:
tr3d-1B3-oscar-training2 64: tp1 samples 146_484_375
tr3e-1B3-c4-training2 64: tp1 samples 146_484_375
tr3e-1B3-diagnostic1-warmup-c4 64: hf
tr3f-1B3-diagnostic2-low-warmup-oscar 64: first
tr3g-760M-v2 64: hidden 1536 ffn 6144 --lr 2.5e-4
tr3h-350M-v2 16: 350M
tr3i-125M-v2 16: 125M
tr3j-760M-pile 64: hidden 1536 ffn 6144 --lr 2.5e-4
tr3k-350M-pile 16: 350M
tr3l-125M-pile 16: 125M
tr3m-1B3-emb-norm-pile-optim-reset 64: tp1 samples 5_000_000 beta2 0.95 --embed-layernorm --seed 1234
    --log-interval 1 --log-level info --log-level-replica error
tr3m-1B3-emb-norm-pile 64: tp1 samples 161_132_812 --embed-layernorm --seed 1234 --log-interval 1 --log-level
    info --log-level-replica error
tr3m-1B3-pile 64: samples 146_484_375
tr3n-1B3-pile-fancy 256: samples 146_484_375 decay 146_484_375 ! a batch of 32 is not divisible by
    --micro-batch-size 8 x data-parallel size 16
tr3o-1B3-pile-no-dropout 256: samples 146_484_375 decay 146_484_375 --hidden-dropout 0.0 --attention-dropout
    0.0 ! a batch of 32 is not divisible by --micro-batch-size 8 x data-parallel size 16
tr4/tr3b-350M 16: hf 350M early ~positions with-rotary
tr4-1B3-modeling-rotary 64: hf first ~positions with-rotary
tr4b-350M-modeling-rotary 16: 350M ~positions with-rotary
tr4c-1B3-oscar-modeling-rotary 64: ~positions with-rotary
tr4c-1B3-extrapolation 64: with-rotary seq 6048 positions 6048 --eval-only 1
tr5-1B3-modeling-multilingual 64: hf micro 4 ramp 16 16 2_000_000 samples 146_484_375 decay 126_953_125
tr5a-1B3-multilingual-mt5tok 64: hf groups tp1 pp 8 samples 146_484_375 decay 146_484_375
tr5a-bnb-1B3-multilingual-mt5tok 64: hf --data-path 0.3 ar 0.7 en --use-bnb-optimizer --eval-interval 10000
tr5b-1B3-multilingual-alpha 64: hf groups tp1 pp 8 samples 146_484_375 decay 146_484_375
tr5b-1B3-multilingual-oscar 64: hf groups tp1 pp 8 --split 949,50,1 ! with --split 949,50,1
tr5b-bnb-1B3-multilingual-oscar 64: hf --data-path 0.3 ar 0.7 en --use-bnb-optimizer
tr5c-1B3-multilingual-alpha-alibi 256: hf groups tp1 pp 8 with-alibi samples 195_312_500 decay 195_312_500
    warmup 216_320 --eval-interval 10000
tr5d-1B3-multilingual-equal-alibi 256: hf groups tp1 pp 8 with-alibi samples 195_312_500 decay 195_312_500
    warmup 216_320 --eval-interval 10000
tr7a-1B3-modeling-alibi 64: with-alibi
tr7b-350M-modeling-alibi 16: 350M with-alibi
tr7b-check-with-train-script 16: 350M with-alibi
tr7b-extrapolation-law 16: 350M with-alibi seq 4048 positions 4048 --no-train 1
tr7c-1B3-modeling-alibi 64: with-alibi --no-query-key-layer-scaling
tr7d-1B3-modeling-alibi 64: tp1 with-alibi
tr7d-extrapolation-law 64: tp1 with-alibi seq 2148 positions 2148 --eval-only 1
tr7d-extrapolation-law-checkpoint-117k 64: tp1 with-alibi seq 6048 positions 6048 --eval-only 1
tr8-104B 512: 104B --embed-layernorm
tr8b-104B-pile 512: 104B pp 8 layers 32 hidden 16384 heads 32 ffn 20480 beta2 0.999 ~--init-method-std
    --save-interval 1500 --codecarbon-dir codecarbon
tr8b-104B-bnb 512: 104B --use-bnb-optimizer
tr8b-104B-cl 512: 104B by-tokens warmup 3_750_000 --embed-layernorm --eval-interval 150
tr8b-104B-cl-a100-16n 128: 104B by-tokens warmup 3_750_000 --embed-layernorm --exit-duration-in-mins 1185
    --save-interval 50 --eval-interval 150
tr8b-104B-emb-norm-64n 256: 104B --skip-train-iteration-range 13251-14000 16652-18500 --embed-layernorm
    --exit-duration-in-mins 1185
tr10-13B 16: hf tp 2 pp 4 layers 40 hidden 5120 heads 40 ~ffn micro 1 batch 2048 ramp 16 16 6_000_000 samples
    1464844 ~decay warmup 216_320 beta2 0.95 --lr 1e-4 --min-lr 6e-6 --hidden-dropout 0.0 --attention-dropout
    0.0 --init-method-std 0.00884 --seed 43 --log-interval 1 --save-interval 300 --eval-iters 5 --split
    900,100,0 --log-level info --log-level-replica error
tr11-176B-ml 384: bloom tp 4 pp 12 layers 70 hidden 14336 heads 112 micro 2 batch 2048 ~--fp16 --bf16 --lr
    6e-5 --min-lr 6e-6 --save-interval 100 --kill-switch-path kill-switch --num-workers 2 --valid-num-workers
    0 --sync-tp-duplicated-parameters
setup-test-n2 16: bloom tp 4 pp 2 layers 2 hidden 1024 heads 64 micro 2 batch 2048 ~--fp16 --bf16 --lr 6e-5
    --min-lr 6e-6 --kill-switch-path kill-switch
# This batch, and that of two others below, fits the time after the ramp-up, when they were resumed.
tr11b-1B3-ml 64: bloom micro 4 ! a batch of 192 is not divisible
tr11c-2B5-ml 128: bloom tp 4 pp 4 layers 30 hidden 2560 heads 32 ramp 192 32 9_765_625 --lr 1.6e-4
tr11c-2B5-ml-continuation 128: bloom layers 30 hidden 2560 heads 32 ramp 192 32 9_765_625 --lr 1.6e-4
    --zero-stage 1 ! a batch of 224 is not divisible
tr11d-760M-ml 32: bloom hidden 1536 batch 256 --lr 2.5e-4 ~--checkpoint-activations
tr11d-760M-ml-continuation 32: bloom hidden 1536 batch 256 --lr 2.5e-4 ~--checkpoint-activations --zero-stage
    1
tr11e-350M-ml 32: bloom pp 1 hidden 1024 batch 256 --lr 3.0e-4 ~--checkpoint-activations ! a batch of 208 is
    not divisible
tr11e-350M-ml-continuation 32: bloom pp 1 hidden 1024 batch 256 ramp 192 32 9_765_625 --lr 3.0e-4
    ~--checkpoint-activations --zero-stage 1
tr11f-6B3-ml 128: bloom tp 4 pp 4 layers 30 hidden 4096 heads 32 ramp 192 32 9_765_625 --lr 1.2e-4
tr11f-6B3-ml-continuation 128: bloom pp 1 layers 30 hidden 4096 heads 32 ramp 192 32 9_765_625 --lr 1.2e-4
    --save-interval 1 --zero-stage 1 ! a batch of 192 is not divisible
tr11-200B-ml 224: hf groups ~ffn ~ramp tp 8 pp 14 layers 80 hidden 14400 heads 96 micro 1 batch 2048 samples
    195_312_500 decay 195_312_500 warmup 216_320 --init-method-std 0.005 --embed-layernorm --seed 42
    with-alibi --log-interval 1 --save-interval 50 --eval-interval 10000
tr12a-1B3-oscar-en-filtered 64: tp1 samples 146_484_375 decay 146_484_375
tr12b-1B3-oscar-en-filtered-dedup 64: tp1 samples 146_484_375 decay 146_484_375
tr14-2B7-mup 64: mup
tr14-2B7-mup-cluster 64: mup
tr14-2B7-grid-search-mup 16: mup micro 1 ramp 192 32 9_765_625 samples 25_000_000 decay 25_000_000
tr14-39M-grid-search-mup 8: mup ~--load tp 1 hidden 256 heads 8 micro 32 --log-interval 10 --save-interval
    1000 --eval-iters 100
"""


def _read_scripts() -> Iterator[Script]:
    for line in re.sub(r"\n +", " ", _SCRIPTS.strip()).splitlines():
        if not line.startswith("#"):
            head, _, rest = line.partition(":")
            name, processes = head.split()
            changes, _, fault = rest.partition(" ! ")
            yield Script(name, int(processes), changes.strip(), fault or None)


SCRIPTS = tuple(_read_scripts())


def published(name: str) -> Script:
    """The script of this name."""
    return next(script for script in SCRIPTS if script.name == name)
