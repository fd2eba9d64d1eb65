#!/usr/bin/env bash
# Trains a Llama-like model of 20 M parameters on this machine, in 5 to 7 minutes on 2 CPU cores.
#
# Text (the sources of Python's standard library) -> tokenizer -> token files -> training with tensor parallelism of 2
# -> a LlamaForCausalLM for Hugging Face -> a sample by transformers. Existing files are reused.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH

# Settings: override them in the environment, as in `TRAIN_ITERS=1000 examples/llama.sh`.
RUN_DIR=${RUN_DIR:-runs/llama}
TRAIN_ITERS=${TRAIN_ITERS:-250}
MAX_FILES=${MAX_FILES:-100000} # source files to train on
VOCAB_SIZE=${VOCAB_SIZE:-8192}
NUM_LAYERS=${NUM_LAYERS:-9}
HIDDEN_SIZE=${HIDDEN_SIZE:-384}
FFN_HIDDEN_SIZE=${FFN_HIDDEN_SIZE:-1024}
NUM_HEADS=${NUM_HEADS:-6}
NUM_QUERY_GROUPS=${NUM_QUERY_GROUPS:-2}
SEQ_LENGTH=${SEQ_LENGTH:-128}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-8}
NEW_TOKENS=${NEW_TOKENS:-60}
PROMPT=${PROMPT:-"def read(self, size=-1):"}

cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 2 ? cores / 2 : 1))}

say() { printf '\n== %s\n' "$*"; }

text=$RUN_DIR/text.jsonl
tokenizer=$RUN_DIR/tokenizer
tokens=$RUN_DIR/tokens_text_document # preprocess_data.py appends _text_document
checkpoints=$RUN_DIR/checkpoints
exported=$RUN_DIR/hugging_face
mkdir -p "$RUN_DIR"

say "1/5 text and a tokenizer of $VOCAB_SIZE tokens"
if [ ! -e "$text" ]; then
    python examples/stdlib_text.py "$text" "$MAX_FILES"
fi
if [ ! -e "$tokenizer/merges.txt" ]; then
    python tools/train_tokenizer.py --input "$text" --vocab-size "$VOCAB_SIZE" --output-dir "$tokenizer"
fi
tokenizer_flags=(--vocab-file "$tokenizer/vocab.json" --merge-file "$tokenizer/merges.txt")

say "2/5 token files"
if [ ! -e "$tokens.idx" ]; then
    python tools/preprocess_data.py --input "$text" --output-prefix "$RUN_DIR/tokens" "${tokenizer_flags[@]}" \
        --append-eod --workers 2
fi

say "3/5 training with 2 processes (tensor parallelism), to step $TRAIN_ITERS"
python -u -m torch.distributed.run --nproc_per_node 2 --standalone pretrain_gpt.py \
    --tensor-model-parallel-size 2 \
    --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE" --ffn-hidden-size "$FFN_HIDDEN_SIZE" \
    --num-attention-heads "$NUM_HEADS" --group-query-attention --num-query-groups "$NUM_QUERY_GROUPS" \
    --seq-length "$SEQ_LENGTH" --position-embedding-type rotary --rotary-base 500000 \
    --normalization RMSNorm --glu-activation swiglu --disable-bias-linear \
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 \
    --micro-batch-size "$GLOBAL_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE" \
    --train-iters "$TRAIN_ITERS" --override-lr-scheduler \
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 \
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
    --data-path "$tokens" --split 969,30,1 "${tokenizer_flags[@]}" --eval-iters 0 \
    --save "$checkpoints" --load "$checkpoints" --save-interval "$TRAIN_ITERS" --log-interval 10

say "4/5 the model as a LlamaForCausalLM"
rm -rf "$exported"
python tools/convert_huggingface.py --from "$checkpoints" --to "$exported"

say "5/5 transformers continues the prompt"
python - "$exported" "$PROMPT" "$NEW_TOKENS" <<'PYTHON'
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt, new_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
print(f"{type(model).__name__}, {model.num_parameters():,} parameters\n")
inputs = tokenizer(prompt, return_tensors="pt")
tokens = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, repetition_penalty=1.2)
print(tokenizer.decode(tokens[0]))
PYTHON
