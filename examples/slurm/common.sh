# shellcheck shell=bash
# Functions for the scripts in this folder, which source this file. A script sets its sizes, then calls in this order
#
#     request_nodes     checks that the job has NNODES nodes; if not, changes the job's request and requeues the job
#     launch FLAGS      runs pretrain_gpt.py with these flags on NNODES nodes x GPUS_PER_NODE processes. After a failure
#                       it restarts from the newest complete checkpoint, up to MAX_RESTARTS times. If a time limit or a
#                       signal stops the run, the job is requeued. Returns 0: finished, 1: failed, 2: failed, and a
#                       restart would fail again; exits with 75 if the run must be submitted again.
#
# Environment variables: REPO (this repository), PYTHON (its interpreter), MAX_RESTARTS, REQUEUE (yes or no), DRY_RUN,
# SAVE_LOCAL (a folder on each node's own disk, for local checkpoints every SAVE_LOCAL_INTERVAL iterations, by default
# 25), and the variables at the top of each script. `DRY_RUN=1 bash SCRIPT` prints the commands and starts nothing. It also
# works without Slurm.

usage_error() { # usage_error SENTENCE: an error that the user must correct
    echo "error: $1" >&2
    exit 2
}

DRY_RUN=${DRY_RUN:-}
if [ -n "$DRY_RUN" ]; then
    : "${SLURM_JOB_ID:=0}" "${SLURM_JOB_NUM_NODES:=1}" "${MASTER_ADDR:=\$MASTER_ADDR}" "${MASTER_PORT:=\$MASTER_PORT}"
fi
[ -n "${SLURM_JOB_ID:-}" ] || usage_error "not inside a Slurm job: start the script with sbatch $0"
REPO=$(cd "$REPO" && pwd)
# SLURM_JOB_ID of the last job of an array is also the id of the whole array.
THIS_JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
THIS_JOB=${THIS_JOB:-$SLURM_JOB_ID}
PYTHON=${PYTHON:-$REPO/.venv/bin/python}
[ -x "$PYTHON" ] || PYTHON=$(command -v python3) || usage_error "$REPO/.venv does not exist: run make setup, or set PYTHON"

MAX_RESTARTS=${MAX_RESTARTS:-3}
REQUEUE=${REQUEUE:-yes}
REQUEUE_EXIT_CODE=75 # the run has stopped and saved, and can be resumed

# Number of threads per process on CPUs. More threads than cores would be slower.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# torch.distributed.launch warns at every start that it is deprecated.
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore::FutureWarning}

named_checkpoint() { # named_checkpoint FILE: prints the checkpoint that `latest` or `latest_universal` names; nothing without FILE
    [ -e "$1" ] || [ -L "$1" ] || return 0
    PYTHONPATH=$REPO "$PYTHON" - "$1" <<'EOF'
import sys
from pathlib import Path
from megatron.checkpoint.discovery import read_latest, read_latest_universal
from megatron.errors import exit_on_user_error

with exit_on_user_error():
    file = Path(sys.argv[1])
    print((read_latest if file.name == "latest" else read_latest_universal)(file.parent) or "")
EOF
}

request_nodes() {
    # sbatch reads the number of nodes from its command line and from #SBATCH lines, never from a variable. So a job
    # whose number of nodes differs from NNODES changes its own request and is requeued. The job id, the log file and
    # `sbatch --wait` stay valid.
    ((SLURM_JOB_NUM_NODES == NNODES)) || [ -n "$DRY_RUN" ] && return
    local have=$SLURM_JOB_NUM_NODES again="sbatch --nodes=$NNODES"
    if ((${SLURM_RESTART_COUNT:-0} > 0)); then
        usage_error "Slurm gave $have node(s) to a job that needs NNODES=$NNODES: submit it with $again"
    fi
    echo "the job started on $have node(s) and needs NNODES=$NNODES: requeued with NNODES nodes ($again avoids this)"
    # Slurm sends SIGTERM as soon as the job is requeued, but the commands below must still run.
    trap '' TERM
    scontrol requeue "$THIS_JOB" ||
        usage_error "this cluster does not let a job requeue itself: submit it with $again"
    # The range sets minimum and maximum. A single number would set only the minimum.
    scontrol update JobId="$THIS_JOB" NumNodes="$NNODES-$NNODES" 2>&1 | grep -v 'pending execution' || true
    exit 0
}

set_master() { # sets MASTER_ADDR of the rendezvous, unless the environment has it
    local hosts
    if [ -z "${MASTER_ADDR:-}" ]; then
        mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
        MASTER_ADDR=${hosts[0]}
        # The Slurm name of a node may differ from a host name that can be resolved.
        getent hosts "$MASTER_ADDR" >/dev/null ||
            MASTER_ADDR=$(scontrol show node --oneliner "$MASTER_ADDR" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    fi
}

find_port() { # find_port RESTART: sets PORT of the rendezvous, on which no program of this node listens
    # If MASTER_PORT is not set, the port is derived from the job id, as in megatron/cluster/launch.py. First starts and restarts
    # of jobs have separate ranges of ports, so that two jobs on one node use different ports. Both ranges are below the
    # ephemeral ports.
    local start
    for ((start = $1; start < $1 + 4; start++)); do
        if [ -n "${MASTER_PORT:-}" ]; then
            PORT=$((MASTER_PORT + start))
        elif ((start == 0)); then
            PORT=$((10000 + SLURM_JOB_ID % 20000))
        else
            PORT=$((30000 + (SLURM_JOB_ID * 3 + (start - 1) % 3) % 2766))
        fi
        (: <>"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null || return 0
    done
}

print_command() { # print_command WORDS: prints the command of a dry run, one flag per line
    local word
    printf '%q' "$1"
    for word in "${@:2}"; do
        if [[ $word == --* ]]; then printf ' \\\n    '; else printf ' '; fi
        # Variables of the job are printed unquoted, every other word with the shell's quotes.
        if [[ $word == \$* ]]; then printf '%s' "$word"; else printf '%q' "$word"; fi
    done
    printf '\n'
}

launch() {
    if [ -n "${SWEEP:-}" ] && [ -z "$DRY_RUN" ]; then
        launch_sweep_task "$@"
        return
    fi
    if [ -n "${SAVE_LOCAL:-}" ]; then
        set -- "$@" --save-local "$SAVE_LOCAL" --save-local-interval "${SAVE_LOCAL_INTERVAL:-25}"
    fi
    if [ -n "$DRY_RUN" ]; then
        print_command "$PYTHON" -u -m torch.distributed.launch --nnodes "$NNODES" --node_rank "\$SLURM_PROCID" \
            --nproc_per_node "$GPUS_PER_NODE" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" \
            "$REPO/pretrain_gpt.py" "$@"
        return
    fi
    ((${SLURM_STEP_NUM_TASKS:-1} == 1)) ||
        usage_error "the script runs inside srun, which would start it once per task: start it with sbatch only"
    set_master
    local restart code
    for ((restart = 0; ; restart++)); do
        code=0
        find_port "$restart"
        run_step "$PORT" "$@" || code=$?
        ((code != REQUEUE_EXIT_CODE)) || requeue_job
        # A restart may help after exit code 1, but not after 2 (such as a usage error or a full disk).
        ((code == 1 && restart < MAX_RESTARTS)) && [ -z "$ENDED_BY_SLURM" ] || return "$code"
        echo "restart $((restart + 1)) of $MAX_RESTARTS, from the newest complete checkpoint"
    done
}

launch_sweep_task() { # runs an array task of tools/sweep.py --sbatch once, with the flags of its row
    local file=$SWEEP task=$SLURM_ARRAY_TASK_ID words flags code=0
    words=$(sweep_task flags "$file" "$task") || return 2
    mapfile -t flags <<<"$words"
    SWEEP='' MAX_RESTARTS=0 REQUEUE=no
    launch "$@" "${flags[@]}" || code=$?
    sweep_task record "$file" "$task" "$code" "$(dirname "$file")/../runs/slurm-${SLURM_ARRAY_JOB_ID}_$task.out"
    return "$code"
}

sweep_task() { PYTHONPATH=$REPO "$PYTHON" -m megatron.planner.sweep.slurm "$@"; }

run_step() { # run_step PORT FLAGS: runs one srun step; prints the diagnosis of a failure and returns its exit code
    local port=$1 step waiting=yes code=0 launcher
    shift
    launched=$((launched + 1))
    REPORTS=${RUN_DIR:-.}/reports/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$launched
    mkdir -p "$REPORTS" || usage_error "RUN_DIR=${RUN_DIR:-.} is not writable"
    [ -z "$STOP_REQUESTED" ] || : >"$REPORTS/stop_requested"
    echo "job $THIS_JOB: $NNODES node(s) x $GPUS_PER_NODE processes, rendezvous at $MASTER_ADDR:$port"
    # One task per node runs a launcher, which starts the node's processes. SLURM_PROCID is known only inside the task.
    # The launcher must survive a SIGUSR2 that Slurm sends to the whole step.
    # shellcheck disable=SC2016
    local task='echo $$ >"$RANK_REPORTS/launcher-$SLURM_NODEID"; trap "" USR2
        exec "$0" -u -m torch.distributed.launch --node_rank "$SLURM_PROCID" "$@"'
    # With --cpu-bind=none the task may use all cores of its node. --kill-on-bad-exit and --wait end the other tasks if a
    # node fails.
    RANK_REPORTS=$REPORTS srun --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 --cpu-bind=none \
        --kill-on-bad-exit=1 --wait=60 \
        bash -c "$task" "$PYTHON" --nnodes "$NNODES" --nproc_per_node "$GPUS_PER_NODE" \
        --master_addr "$MASTER_ADDR" --master_port "$port" --rdzv_id "$SLURM_JOB_ID.$launched" \
        "$REPO/pretrain_gpt.py" "$@" &
    step=$!
    while [ -n "$waiting" ]; do # a signal interrupts the wait, not the step
        wait "$step" || true
        kill -0 "$step" 2>/dev/null && [ -z "$ENDED_BY_SLURM" ] || waiting=''
    done
    if [ -n "$ENDED_BY_SLURM" ]; then wait_before_kill "$step"; fi
    # If this node's slurmd is dead, Slurm cannot end the launcher, which waits five minutes for other nodes.
    launcher=$(cat "$REPORTS/launcher-0" 2>/dev/null || true)
    if [ -z "$ENDED_BY_SLURM" ] && grep -qs torch.distributed.launch "/proc/$launcher/cmdline"; then
        pkill -KILL -P "$launcher" || true
        kill -KILL "$launcher" || true
    fi
    code=0
    PYTHONPATH=$REPO "$PYTHON" -m megatron.cluster.diagnosis "$REPORTS" --processes $((NNODES * GPUS_PER_NODE)) \
        --slurm "$SLURM_JOB_ID" "$SLURM_JOB_NODELIST" ${ENDED_BY_SLURM:+--ended-by-slurm} || code=$?
    if ((code == 0 || code == REQUEUE_EXIT_CODE)); then rm -rf "$REPORTS"; fi
    REPORTS=''
    return "$code"
}

wait_before_kill() { # wait_before_kill PID: waits for PID, and leaves 10 s for the diagnosis before Slurm kills the script
    local kill_wait_s end
    kill_wait_s=$(scontrol show config 2>/dev/null | sed -n 's/^KillWait *= *\([0-9]*\).*/\1/p')
    end=$((SECONDS + ${kill_wait_s:-30} - 10))
    while ((SECONDS < end)) && kill -0 "$1" 2>/dev/null; do sleep 0.5; done
}

requeue_job() { # requeues the job, whose run has stopped and saved: the job resumes it later
    [ -z "$ENDED_BY_SLURM" ] && [ "$REQUEUE" = yes ] || exit "$REQUEUE_EXIT_CODE"
    trap '' TERM
    echo "job $THIS_JOB is requeued and will resume from its newest checkpoint"
    scontrol requeue "$THIS_JOB" 2>/dev/null && exit
    echo "Slurm does not requeue the job (sbatch --requeue allows it): submit it again to resume"
    exit "$REQUEUE_EXIT_CODE"
}

# Slurm signals only the script: SIGUSR2 before the time limit (#SBATCH --signal=B:USR2@1800), and SIGTERM on scancel,
# requeue or preemption, which the processes also receive later. The script asks the processes to stop through a file,
# which rank 0 checks after every step. A signal would not be safe: a process that is starting loses it, it kills the
# launcher and helper processes, and slurmctld must deliver it.
request_stop() {
    STOP_REQUESTED=yes
    if [ -n "$REPORTS" ]; then : >"$REPORTS/stop_requested"; fi
}
on_sigterm() {
    ENDED_BY_SLURM=yes
    echo "Slurm ends the job (scancel, requeue, preemption or node failure): its processes save if there is time"
    request_stop
}
STOP_REQUESTED='' ENDED_BY_SLURM='' REPORTS='' launched=0
trap request_stop USR2
trap on_sigterm TERM
