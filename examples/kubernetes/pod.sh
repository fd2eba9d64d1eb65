#!/usr/bin/env bash
# Process 1 of each pod of job.yaml: pod.sh FLAGS runs pretrain_gpt.py with these flags on NNODES pods x GPUS_PER_NODE
# processes. Exit codes: 0 finished, 75 stopped and saved (the next pod resumes), 2 a restart would fail again, 1 failed.
#
# Environment variables: NNODES, GPUS_PER_NODE, MASTER_ADDR (host name of the first pod), MASTER_PORT,
# JOB_COMPLETION_INDEX (Kubernetes sets it), REPO (this repository), PYTHON (its interpreter).
set -u
REPO=${REPO:-$(cd "$(dirname "$0")/../.." && pwd)}
PYTHON=${PYTHON:-$REPO/.venv/bin/python}
[ -x "$PYTHON" ] || PYTHON=python3
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH}
LOGS=$(mktemp -d)
export TORCHELASTIC_ERROR_FILE=$LOGS/error.json # torchrun copies the first error into it, with its exit code

# Kubernetes sends SIGTERM before it ends a pod. The processes get the signal, finish their step and save. torchrun does not
# get it, because torchrun would kill the processes after 30 s.
on_sigterm() {
    local processes
    processes=$(cat "/proc/$launcher/task/$launcher/children" 2>/dev/null)
    # shellcheck disable=SC2086
    kill -TERM ${processes:-$launcher} 2>/dev/null
}
launcher=
trap '[ -n "$launcher" ] || exit 75; on_sigterm' TERM

# A pod that starts before the first pod must wait until the first pod's host name can be resolved.
for ((seconds = 0; seconds < 600; seconds++)); do
    getent hosts "$MASTER_ADDR" >/dev/null && break
    sleep 1
done

"$PYTHON" -u -m torch.distributed.run --nnodes "$NNODES" --node-rank "$JOB_COMPLETION_INDEX" --log-dir "$LOGS" \
    --nproc-per-node "$GPUS_PER_NODE" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
    "$REPO/pretrain_gpt.py" "$@" &
launcher=$!
while wait "$launcher"; kill -0 "$launcher" 2>/dev/null; do :; done # a signal interrupts the wait
wait "$launcher"
code=$?
# torchrun exits with 1 after any failure, and with 0 after a stop. The processes write into their error files which it was.
if ((code != 0)); then
    ! grep -qs '"errorCode": 2\b' "$TORCHELASTIC_ERROR_FILE" || exit 2
    exit 1
fi
! compgen -G "$LOGS/*/attempt_*/*/error.json" >/dev/null || exit 75
