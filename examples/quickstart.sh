#!/usr/bin/env bash
# Text -> tokenizer -> token files -> a GPT trained on 2 processes, interrupted once and resumed -> a sample and a plot.
# Takes about 4 minutes on 2 CPU cores. Called by `make train`; what is done already is not done again.
set -euo pipefail
cd "$(dirname "$0")/.."

# Knobs: set any of them in the environment.
RUN_DIR=${RUN_DIR:-runs/quickstart}             # everything is written here
TRAIN_ITERS=${TRAIN_ITERS:-300}                 # optimizer steps; a larger number later continues the run
VOCAB_SIZE=${VOCAB_SIZE:-4096}
NUM_LAYERS=${NUM_LAYERS:-5}
HIDDEN_SIZE=${HIDDEN_SIZE:-384}
NUM_HEADS=${NUM_HEADS:-6}
SEQ_LENGTH=${SEQ_LENGTH:-256}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-4}
LEARNING_RATE=${LEARNING_RATE:-1e-3}
EVAL_ITERS=${EVAL_ITERS:-8}
NEW_TOKENS=${NEW_TOKENS:-120}
PROMPT=${PROMPT:-"def read(self, size=-1):"}
MAX_FILES=${MAX_FILES:-0}                       # of the standard library; 0: all
