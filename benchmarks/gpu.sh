#!/usr/bin/env bash
# Every measurement that needs a GPU, for one H100 or H200: meant to take less than 40 minutes, the limits of its parts
# add up to 65. Needs no network and no data.
#
#   benchmarks/gpu.sh                            writes runs/gpu/table.md, and a log of each part beside it
#   PARTS="kernels nccl" benchmarks/gpu.sh       only these parts
#   DRY_RUN=1 benchmarks/gpu.sh                  prints the commands
#
# A part that fails or exceeds its limit does not stop the others; the exit code is then 1.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-runs/gpu}
PYTHON=${PYTHON:-.venv/bin/python}
known="data machine-code host-time kernels loss nccl resumed cpu bf16 adam-8bit 125M 1.3B 1.3B-dropout 1.3B-compiled"
known+=" 6.7B-slice 6.7B 13B-slice last-stage"
PARTS=${PARTS:-$known}
for name in $PARTS; do
    case " $known " in *" $name "*) ;; *)
        echo "error: PARTS has $name, expected some of: $known" >&2
        exit 2
        ;;
    esac
done
export TOKENIZERS_PARALLELISM=false

text=$OUT/text.jsonl
tokenizer=$OUT/tokenizer
tokens=$OUT/tokens_text_document
checkpoints=$OUT/checkpoints-$(date +%Y%m%d-%H%M%S)
# One process through the launcher: a world of 1 with NCCL on a GPU, in fp32. `nccl` and `resumed` are the first and the
# last 10 steps; `cpu` has the same losses to rounding, `bf16` and `adam-8bit` to that of 16-bit products and 8-bit moments.
train=("$PYTHON" -u -m torch.distributed.launch --standalone --nproc_per_node 1 pretrain_gpt.py
    --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --position-embedding-type alibi
    --reset-attention-mask --micro-batch-size 4 --global-batch-size 8 --train-iters 20 --lr 1e-3 --lr-decay-style constant
    --data-path "$tokens" --vocab-file "$tokenizer/vocab.json" --merge-file "$tokenizer/merges.txt"
    --split 969,30,1 --eval-iters 2 --log-interval 1 --log-level info)

failed=0
rows=()

# part NAME SECONDS COMMAND...: runs the command with a limit, and keeps its output. A run takes SIGTERM as a request to
# save: SIGKILL follows.
part() {
    local name=$1 limit=$2 started=$SECONDS code=0
    shift 2
    case " $PARTS " in *" $name "*) ;; *) return 0 ;; esac
    if [ -n "${DRY_RUN:-}" ]; then
        printf '%s: timeout %s %s\n' "$name" "$limit" "$*"
        return 0
    fi
    printf '== %s\n' "$name"
    timeout -k 30 "$limit" "$@" >"$OUT/$name.log" 2>&1 || code=$?
    [ "$code" = 0 ] || failed=1
    rows+=("| $name | $((SECONDS - started)) | $code |")
}

prepare_data() {
    "$PYTHON" examples/stdlib_text.py "$text" 400
    "$PYTHON" tools/train_tokenizer.py --input "$text" --vocab-size 4096 --output-dir "$tokenizer"
    "$PYTHON" tools/preprocess_data.py --input "$text" --output-prefix "$OUT/tokens" --append-eod --workers 2 \
        --vocab-file "$tokenizer/vocab.json" --merge-file "$tokenizer/merges.txt"
}
export -f prepare_data
export PYTHON OUT text tokenizer

[ -n "${DRY_RUN:-}" ] || mkdir -p "$OUT"
part data 300 bash -c prepare_data
part machine-code 180 "$PYTHON" benchmarks/kernels.py --compile-only
part host-time 120 env CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu "$PYTHON" benchmarks/host_time.py
part kernels 360 "$PYTHON" benchmarks/kernel_speed.py
part loss 240 "$PYTHON" benchmarks/memory.py loss
part nccl 180 "${train[@]}" --save "$checkpoints" --exit-interval 10
part resumed 180 "${train[@]}" --load "$checkpoints"
part cpu 420 env CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu "${train[@]}"
part bf16 180 "${train[@]}" --bf16
part adam-8bit 180 "${train[@]}" --use-bnb-optimizer
part 125M 120 "$PYTHON" benchmarks/throughput.py --preset 125M
part 1.3B 180 "$PYTHON" benchmarks/throughput.py --preset 1.3B
part 1.3B-dropout 180 "$PYTHON" benchmarks/throughput.py --preset 1.3B --dropout 0.1
part 1.3B-compiled 300 "$PYTHON" benchmarks/throughput.py --preset 1.3B --compile
part 6.7B-slice 180 "$PYTHON" benchmarks/throughput.py --preset 6.7B-slice
# Its weights, gradients and optimizer states take 76 GiB: for an H200.
memory_mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1) || true
if [ -n "${DRY_RUN:-}" ] || [ "${memory_mib:-0}" -gt 120000 ]; then
    part 6.7B 240 "$PYTHON" benchmarks/throughput.py --preset 6.7B
elif [[ " $PARTS " == *" 6.7B "* ]]; then
    echo "6.7B left out: it needs more than 120,000 MiB of GPU memory, this device has ${memory_mib:-0}"
fi
part 13B-slice 180 "$PYTHON" benchmarks/throughput.py --preset 13B-slice
part last-stage 180 "$PYTHON" benchmarks/throughput.py --preset 250k-last-stage
[ -z "${DRY_RUN:-}" ] || exit 0

{
    printf '| part | seconds | exit code |\n|---|---|---|\n'
    printf '%s\n' "${rows[@]}"
    "$PYTHON" benchmarks/gpu_table.py "$OUT"
    printf '\n# Logs\n'
    for row in "${rows[@]}"; do
        name=$(cut -d' ' -f2 <<<"$row")
        printf '\n## %s\n\n```\n' "$name"
        tail -n 60 "$OUT/$name.log"
        printf '```\n'
    done
} >"$OUT/table.md"
sed '/^# Logs$/,$d' "$OUT/table.md"
echo "results: $OUT/table.md"
exit "$failed"
