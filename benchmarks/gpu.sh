#!/usr/bin/env bash
# Measures and checks this program on one GPU, in phases in the order of their value. Needs no network and no data.
#
#   benchmarks/gpu.sh                                  about 8 minutes; writes to runs/gpu
#   benchmarks/gpu.sh --budget 300 --out FOLDER        ends after 300 seconds
#   benchmarks/gpu.sh --phases "versions smoke gpt"    only these phases
#   benchmarks/gpu.sh --device cpu --budget 300        all phases with tiny models: a test of this script
#   benchmarks/gpu.sh --dry-run                        prints the commands of the phases
#
# Each phase has a limit, and a phase that fails or exceeds it does not stop the others; the exit code is then 1. If
# versions or smoke fails, the program does not start on this machine, and the script stops. FOLDER has at most four
# files, which are complete after each phase, so a run that is killed leaves them. A later run replaces only the results
# of its own phases.
#
#   table.md       all results as tables
#   rows.jsonl     all results, one a line
#   logs.tar.gz    PHASE/NAME.log, loss curves, profiles by kernel
#   trace.json.gz  a step of GPT 1.3B, for chrome://tracing, if it has less than 15 MB
#
# The Python is $PYTHON, by default the Python of .venv if it exists, else python3. $COMMIT names the commit of a copy
# without its history.
#
# A machine with only Python 3.12, PyTorch, Triton and no network needs two commands. The first runs where a network is,
# the second on the machine; it installs the packages that the machine lacks into a folder of its own. Only their wheels
# need to be copied to the machine:
#
#   make wheelhouse PYTHON_VERSION=3.12
#   benchmarks/gpu.sh --wheelhouse wheelhouse
#
# phase      what it answers
# versions   versions, drivers, back ends of attention, settings that change results
# smoke      does a run start with the Triton kernels, if not, with PyTorch's operations
# kernels    errors of all kernels, compared with fp64
# curves     losses of 16 variants, compared with curves of a CPU
# gpt        GPT 1.3B: speed, MFU, memory, a profile; plain PyTorch loop, eager and compiled; the plan beside them
# llama      Llama 1B, and an 8-layer slice of Llama 8B
# ranks      losses of several ranks that share the GPU: tensor, pipeline, context and data parallelism
# resume     losses after a resume, equal to the digit
# sanitizer  compute-sanitizer (memcheck, racecheck) on small kernels
# tiles      times of the attention kernels with other tiles
# rest       more models and settings
# times      each kernel, compared with PyTorch and with libraries
# experts    expert layers of OLMoE's and Qwen3-30B-A3B's size: share of the peak, and a dense MLP's time
# loss       memory and time of head and loss
# host       time of the host for a layer, compared with plain PyTorch modules
#
# With --device cpu, kernels run in Triton's interpreter; the interpreter of Triton 3.6 needs numpy < 2.4.
set -uo pipefail
cd "$(dirname "$0")/.."
known="versions smoke kernels curves gpt llama ranks resume sanitizer tiles rest times experts loss host"
budget=480 device=cuda out=runs/gpu phases=$known wheelhouse="" dry_run=""
usage_error() {
    echo "error: $1" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry_run=1 && shift && continue ;;
        --budget | --device | --out | --phases | --wheelhouse) [ $# -gt 1 ] || usage_error "$1 has no value" ;;
        *) usage_error "$1 is unknown: see the first lines of benchmarks/gpu.sh" ;;
    esac
    case $1 in
        --budget) budget=$2 ;;
        --device) device=$2 ;;
        --out) out=$2 ;;
        --phases) phases=$2 ;;
        --wheelhouse) wheelhouse=$2 ;;
    esac
    shift 2
done
[[ $budget =~ ^[0-9]+$ ]] || usage_error "--budget $budget: expected seconds"
[[ $device =~ ^(cuda|cpu)$ ]] || usage_error "--device $device: expected cuda or cpu"
[ -z "$wheelhouse" ] || [ -d "$wheelhouse" ] || usage_error "--wheelhouse $wheelhouse: there is no such folder"
for name in $phases; do
    [[ " $known " == *" $name "* ]] || usage_error "--phases has $name, expected some of: $known"
done

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=$PWD/.venv/bin/python
fi
work=$(mktemp -d)
results=$work/results # PHASE -> its rows.jsonl and logs
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$work/inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$work/triton}
tiny=() small=() interpreter=() loss=(loss) host=() patience=1
if [ "$device" = cpu ]; then
    export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES="" STAGE_HOST_TENSORS=1
    tiny=(--tiny) small=(--small) interpreter=(env TRITON_INTERPRET=1 MEGATRON_KERNELS=interpreter)
    patience=4 # of the limits: a CPU may be busy with other work
    loss=(loss --tokens 64 --vocab 1024 --hidden 64 --rounds 1) host=(--rounds 1 --calls 1)
fi
failed=0

# end GROUP: kills all processes of a phase or helper, also those that outlived `timeout`.
end() { kill -KILL -- "-$1" "$1" 2>/dev/null; }
at_exit() {
    local group
    for group in $(jobs -pr); do end "$group"; done
    if [ -z "$dry_run" ]; then
        write_table
        cat "$out/table.md"
        echo "results: $out/table.md, after $SECONDS s"
    fi
    rm -rf "$work"
}
trap at_exit EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

left() { echo $((budget - SECONDS)); }
wanted() { [[ " $phases " == *" $1 "* ]]; }
log_of() { echo "$results/${1%%-*}/$1.log"; }
add_phase() {
    mkdir -p "$results/${1%%-*}"
    printf '{"table": "phases", "phase": "%s", "seconds": %s, "verdict": "%s"}\n' "$@" >>"$results/${1%%-*}/rows.jsonl"
}

# write_table: replaces the files of $out.
write_table() {
    local name
    for name in $known plan; do cat "$results/$name/rows.jsonl" 2>/dev/null; done >"$work/rows.jsonl"
    "$PYTHON" benchmarks/gpu_table.py "$work" >"$work/table.md"
    tar -czf "$work/logs.tar.gz" -C "$results" --exclude=trace.json.gz .
    find "$results/gpt" -name trace.json.gz -size -15000k -exec cp {} "$work" \; 2>/dev/null
    for name in rows.jsonl table.md logs.tar.gz trace.json.gz; do
        [ ! -s "$work/$name" ] || { cp "$work/$name" "$out/.new" && mv "$out/.new" "$out/$name"; }
    done
}

# start NAME SECONDS COMMAND...: starts the command with a limit, its output in PHASE/NAME.log. The command and all that
# it starts are one process group, which `timeout` ends: with SIGTERM, which a run takes as a request to save, then with
# SIGKILL.
start() {
    mkdir -p "$results/${1%%-*}"
    timeout -k 5 "$2" "${@:3}" >"$(log_of "$1")" 2>&1 &
    started=$!
}

# phase NAME SECONDS COMMAND...: runs the command, if the phase is wanted and time is left, and returns its exit code.
# The word @seconds of the command becomes the seconds after which the command should end.
phase() {
    local name=$1 limit=$(($2 * patience)) begin=$SECONDS code=0 verdict=ok
    wanted "${name%%-*}" || return 0
    shift 2
    [ "$(left)" -ge "$limit" ] || limit=$(left)
    if [ -n "$dry_run" ]; then
        printf '%s: timeout %s %s\n' "$name" "$limit" "${*/@seconds/$((limit - 10))}"
        return 0
    fi
    if [ "$limit" -lt 15 ]; then
        add_phase "$name" 0 "no time was left"
        return 0
    fi
    start "$name" "$limit" "${@/@seconds/$((limit - 10))}"
    wait "$started" || code=$?
    end "$started"
    case $code in
        0) ;;
        124 | 137) verdict="FAILED: ended after its limit of $limit s" ;;
        *) verdict="FAILED: exit code $code, see $name.log" ;;
    esac
    if [ "$code" != 0 ] && [ "$(left)" -lt 12 ]; then
        verdict="not complete when the budget ended, see $name.log"
    elif [ "$code" != 0 ]; then
        failed=1
    fi
    add_phase "$name" $((SECONDS - begin)) "$verdict"
    echo "== $name: $verdict, $((SECONDS - begin)) s of $SECONDS s"
    write_table
    return "$code"
}

# helper NAME SECONDS COMMAND...: a command that runs beside the phases.
helper() {
    [ -z "$dry_run" ] || { printf '%s: timeout %s %s\n' "$1" "$2" "${*:3}" && return; }
    start "$1" $(($2 * patience < $(left) ? $2 * patience : $(left))) "${@:3}"
}

# give_up NAME CODE: ends the script, unless the phase only needed more than its time.
give_up() {
    [[ $2 =~ ^(124|137)$ ]] && return
    tail -n 15 "$(log_of "$1")"
    echo "stopped: $1 failed, so the program does not start on this machine; the other phases did not run"
    exit 1
}

# install: unpacks the wheels of packages that this Python does not have.
install() {
    local found wheels
    found=$("$PYTHON" - "$wheelhouse" <<'END'
import importlib.metadata, pathlib, re, sys
have = {re.sub("[-_.]+", "-", d.metadata["Name"] or "").lower() for d in importlib.metadata.distributions()}
for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    if re.sub("[-_.]+", "-", wheel.name.split("-")[0]).lower() not in have:
        print(wheel)
END
    ) || return
    mapfile -t wheels <<<"$found"
    [ -z "$found" ] || "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/site" "${wheels[@]}"
}

# continued NAME SECONDS COMMAND...: a phase that is started again after a crash, and then continues.
continued() {
    local until=$((SECONDS + $2 * patience)) attempt
    for attempt in "" -again -again2; do
        phase "$1$attempt" $(((until - SECONDS) / patience)) "${@:3}"
        case $? in 0 | 1 | 124) return 0 ;; esac # 1: rows failed, but the process reached its end
    done
}

measure() {
    continued "$1" "$2" "$PYTHON" benchmarks/device_throughput.py "$1" --out "$results/$1" --seconds @seconds "${tiny[@]}"
}

kernels() {
    continued "$1" "$2" "${interpreter[@]}" "$PYTHON" benchmarks/kernel_speed.py "${@:3}" --out "$results/$1" "${small[@]}"
}

curves() {
    phase "$1" "$2" "$PYTHON" benchmarks/device_curves.py "$1" --out "$results/${1%%-*}" --work "$work" \
        --seconds @seconds "${tiny[@]}"
}

# sanitizer TOOL: small cases of each kernel. Without PyTorch's cache of memory each tensor is an allocation of its own.
sanitizer() {
    local program=${COMPUTE_SANITIZER:-}
    wanted sanitizer || return 0
    [ -n "$program" ] || program=$(command -v compute-sanitizer || ls -d /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
    if [ -z "$program" ] && [ -z "$dry_run" ]; then
        add_phase "sanitizer-$1" 0 "compute-sanitizer was not found"
        return
    fi
    phase "sanitizer-$1" 90 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${interpreter[@]}" "${program:-compute-sanitizer}" \
        --tool "$1" --error-exitcode 9 "$PYTHON" benchmarks/kernel_speed.py check --small --dtype fp16 --out "$work/$1"
}

if [ -z "$dry_run" ]; then
    mkdir -p "$out" "$results/install"
    [ ! -f "$out/logs.tar.gz" ] || tar -xzf "$out/logs.tar.gz" -C "$results"
    for name in $phases; do rm -rf "${results:?}/$name"; done
    if [ -n "$wheelhouse" ]; then
        install >"$(log_of install)" 2>&1 || give_up install 1
        export PYTHONPATH=$PYTHONPATH:$work/site
        echo "== install: $SECONDS s"
    fi
fi
card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1) || true

if wanted gpt || wanted llama || wanted rest; then
    rm -rf "$results/plan"
    helper plan 200 env CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu "$PYTHON" benchmarks/device_throughput.py plan \
        --card "${card:-}" --out "$results/plan" "${tiny[@]}"
    plan=${started:-}
fi
phase versions 150 "$PYTHON" benchmarks/gpu_environment.py --out "$results/versions" || give_up versions $?
curves smoke 150 || curves smoke-pytorch 60 || give_up smoke-pytorch $?
kernels kernels 50 check
if wanted curves && wanted gpt && [ "$device" = cuda ]; then # the compiler fills its caches while the curves use little of the GPU
    helper prewarm 150 "$PYTHON" benchmarks/device_throughput.py prewarm --out "$out"
    prewarm=${started:-}
fi
curves curves 85
[ -z "${prewarm:-}" ] || end "$prewarm"
measure gpt 120
measure llama 90
curves ranks 60
curves resume 40
sanitizer memcheck
sanitizer racecheck
kernels tiles 120 tiles
measure rest 300
kernels times 180 time
phase experts 90 "$PYTHON" benchmarks/expert_speed.py --out "$results/experts" "${tiny[@]}"
phase loss 90 "$PYTHON" benchmarks/memory.py "${loss[@]}"
phase host 90 env CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu "$PYTHON" benchmarks/host_time.py "${host[@]}"
[ -z "$dry_run" ] || exit 0
if [ -n "${plan:-}" ] && ! wait "$plan"; then
    add_phase plan 0 "FAILED: see plan.log"
    failed=1
fi
exit "$failed"
