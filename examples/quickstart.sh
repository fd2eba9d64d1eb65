#!/usr/bin/env bash
# Trains a GPT from text on this machine, in 5 to 8 minutes on 2 CPU cores. `make train` runs this script.
#
# Text (the sources of Python's standard library) -> tokenizer -> token files -> training with 2 processes (2 pipeline
# stages), stopped half-way and resumed -> validation loss, a sample, a plot. Existing files are reused.
set -euo pipefail
cd "$(dirname "$0")/.."

# Settings: override them in the environment, as in `TRAIN_ITERS=2000 make train`.
RUN_DIR=${RUN_DIR:-runs/quickstart}        # everything is written here
TRAIN_ITERS=${TRAIN_ITERS:-800}            # optimizer steps; a larger number continues a finished run
MAX_FILES=${MAX_FILES:-100000}             # source files to train on
VOCAB_SIZE=${VOCAB_SIZE:-1024}
NUM_LAYERS=${NUM_LAYERS:-4}
HIDDEN_SIZE=${HIDDEN_SIZE:-448}
NUM_HEADS=${NUM_HEADS:-8}
SEQ_LENGTH=${SEQ_LENGTH:-128}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-4}
LEARNING_RATE=${LEARNING_RATE:-1.2e-3}
EVAL_ITERS=${EVAL_ITERS:-40}
LOG_INTERVAL=${LOG_INTERVAL:-20}
NEW_TOKENS=${NEW_TOKENS:-120}
PROMPT=${PROMPT:-"def read(self, size=-1):"}

# The two processes share the cores. More threads than cores would be slower.
cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 2 ? cores / 2 : 1))}

say() { printf '\n== %s\n' "$*"; }

text=$RUN_DIR/text.jsonl
tokenizer=$RUN_DIR/tokenizer
tokens=$RUN_DIR/tokens_text_document # preprocess_data.py appends _text_document
checkpoints=$RUN_DIR/checkpoints
log=$RUN_DIR/train.log
mkdir -p "$RUN_DIR"
started=$SECONDS

say "1/6 text: the sources of Python's standard library"
if [ ! -e "$text" ]; then
    python examples/stdlib_text.py "$text" "$MAX_FILES"
fi

say "2/6 tokenizer: a byte-level BPE of $VOCAB_SIZE tokens"
if [ ! -e "$tokenizer/merges.txt" ]; then
    python tools/train_tokenizer.py --input "$text" --vocab-size "$VOCAB_SIZE" --output-dir "$tokenizer"
fi
tokenizer_flags=(--vocab-file "$tokenizer/vocab.json" --merge-file "$tokenizer/merges.txt")

say "3/6 token files: the .bin/.idx pair that training reads"
if [ ! -e "$tokens.idx" ]; then
    python tools/preprocess_data.py --input "$text" --output-prefix "$RUN_DIR/tokens" "${tokenizer_flags[@]}" \
        --append-eod --workers 2
fi

# --load and --save name the same folder: the run resumes from its newest checkpoint, or starts if there is none.
# --override-lr-scheduler is needed if TRAIN_ITERS is larger than before: it changes the learning-rate schedule.
train() {
    python -u -m torch.distributed.run --nproc_per_node 2 --standalone pretrain_gpt.py \
        --pipeline-model-parallel-size 2 \
        --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE" --num-attention-heads "$NUM_HEADS" \
        --seq-length "$SEQ_LENGTH" --position-embedding-type rotary \
        --hidden-dropout 0 --attention-dropout 0 \
        --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE" \
        --train-iters "$TRAIN_ITERS" \
        --override-lr-scheduler \
        --lr "$LEARNING_RATE" --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
        --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
        --data-path "$tokens" --split 969,30,1 "${tokenizer_flags[@]}" \
        --save "$checkpoints" --load "$checkpoints" --save-interval "$TRAIN_ITERS" \
        --eval-interval "$half" --eval-iters "$EVAL_ITERS" --log-interval "$LOG_INTERVAL" \
        --tensorboard-dir "$RUN_DIR/tensorboard" "$@" 2>&1 | tee -a "$log"
}
half=$((TRAIN_ITERS > 1 ? TRAIN_ITERS / 2 : 1))

if [ ! -e "$checkpoints/latest" ]; then
    say "4/6 training with 2 processes, to step $half"
    train --exit-interval "$half"
fi
say "5/6 training resumes from the checkpoint, to step $TRAIN_ITERS"
train

say "6/6 results"
python tools/job_report.py "$log" --output "$RUN_DIR/loss.png" --title "quickstart"
printf '\nThe model continues "%s":\n\n' "$PROMPT"
python tools/generate.py --load "$checkpoints" --prompt "$PROMPT" --max-new-tokens "$NEW_TOKENS" \
    --temperature 0.7 --top-k 40

cat <<END

Done in $((SECONDS - started)) s. $(grep 'validation loss at' "$log" | tail -1 | sed 's/^ *//; s/ *| *$//')

  $RUN_DIR/loss.png       plot of the loss
  $RUN_DIR/train.log      console output of the training
  $RUN_DIR/tensorboard/   TensorBoard logs
  $checkpoints/    checkpoints, the newest is $(cat "$checkpoints/latest"); tokenizer: $tokenizer/

Three commands to try next:

  TRAIN_ITERS=$((2 * TRAIN_ITERS)) make train
        continues the training to step $((2 * TRAIN_ITERS))
  .venv/bin/python tools/generate.py --load $checkpoints --prompt "class Queue:" --top-k 40
        continues a prompt of your own
  .venv/bin/python tools/evaluate.py --load $checkpoints --data-path $tokens --tensor-model-parallel-size 2
        evaluates the checkpoint with tensor parallelism instead of pipeline parallelism

Delete this run:  rm -r $RUN_DIR
END
