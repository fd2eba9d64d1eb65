# shellcheck shell=bash
# What the scripts of this folder share: sourced by them, never run. They hold the sizes; here is how a job finds its
# nodes, starts one launcher on each, and ends. After sourcing, a script sets its sizes and calls, in this order,
#
#     hold_nodes        NNODES nodes, or the job asks for them and waits again
#     launch FLAGS      pretrain_gpt.py with these flags on NNODES nodes x GPUS_PER_NODE processes. After a failure the
#                       run starts again from its newest complete checkpoint, up to MAX_RESTARTS times. Cut short by
#                       time or a signal, the job goes back into the queue. Returns 0: finished, 1: failed, 2: a
#                       person has to act; or ends the job with 75: to be continued.
#
# Read from the environment: REPO (this repository), PYTHON (its interpreter), MAX_RESTARTS, REQUEUE (yes or no), and
# what each script lists at its top.

mistake() { # mistake SENTENCE: what the user can put right
    echo "error: $1" >&2
    exit 2
}

[ -n "${SLURM_JOB_ID:-}" ] || mistake "there is no Slurm job: start it as sbatch $0"
REPO=$(cd "$REPO" && pwd)
# In an array, SLURM_JOB_ID of the last job is also the name of all of them.
THIS_JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
THIS_JOB=${THIS_JOB:-$SLURM_JOB_ID}
PYTHON=${PYTHON:-$REPO/.venv/bin/python}
[ -x "$PYTHON" ] || PYTHON=$(command -v python3) || mistake "there is no $REPO/.venv: type make setup, or set PYTHON"

MAX_RESTARTS=${MAX_RESTARTS:-3}
REQUEUE=${REQUEUE:-yes}
TO_BE_CONTINUED=75

# Threads of each process on CPUs; more threads than cores wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# torch.distributed.launch says at every start that torchrun is its new name.
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore::FutureWarning}

hold_nodes() {
    # sbatch reads the number of nodes from its command line and from #SBATCH lines, never from a variable. A job
    # that began on another number than NNODES therefore changes its own request, and waits for that: the job id, the
    # log and `sbatch --wait` stay.
    ((SLURM_JOB_NUM_NODES == NNODES)) && return
    local have=$SLURM_JOB_NUM_NODES again="sbatch --nodes=$NNODES"
    if ((${SLURM_RESTART_COUNT:-0} > 0)); then
        mistake "Slurm gave $have node(s) to a job that needs NNODES=$NNODES: submit it with $again"
    fi
    echo "the job began on $have node(s) and needs NNODES=$NNODES: it asks for them and waits ($again saves this)"
    # Slurm ends the script as soon as it is requeued; this and what it starts go on for the moment that they need.
    trap '' TERM
    scontrol requeue "$THIS_JOB" ||
        mistake "this cluster does not let a job ask again: submit it with $again"
    # Both ends of the range: a single number would only be the least.
    scontrol update JobId="$THIS_JOB" NumNodes="$NNODES-$NNODES" 2>&1 | grep -v 'pending execution' || true
    exit 0
}

find_master() { # sets MASTER_ADDR and MASTER_PORT, where the processes meet, unless they are given
    local hosts
    if [ -z "${MASTER_ADDR:-}" ]; then
        mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
        MASTER_ADDR=${hosts[0]}
        # A node's name in Slurm need not be one that the network knows.
        getent hosts "$MASTER_ADDR" >/dev/null ||
            MASTER_ADDR=$(scontrol show node --oneliner "$MASTER_ADDR" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    fi
    # From the job's number, so that two jobs on one node do not meet; below the ports that systems hand out.
    MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
}

launch() {
    ((${SLURM_STEP_NUM_TASKS:-1} == 1)) ||
        mistake "the script runs inside srun, which would start everything once per task: start it by sbatch alone"
    find_master
    local restart code
    for ((restart = 0; ; restart++)); do
        code=0
        run_step $((MASTER_PORT + restart)) "$@" || code=$?
        ((code != TO_BE_CONTINUED)) || go_on_later
        # 1 may go well the next time; 2, a mistake or a full disk, will not.
        ((code == 1 && restart < MAX_RESTARTS)) && [ -z "$ENDED_BY_SLURM" ] || return "$code"
        echo "restart $((restart + 1)) of $MAX_RESTARTS, from the newest complete checkpoint"
    done
}

run_step() { # run_step PORT FLAGS: trains once; says what went wrong, and returns the verdict's code
    local port=$1 step waiting=yes code=0 launcher
    shift
    launched=$((launched + 1))
    REPORTS=${RUN_DIR:-.}/reports/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$launched
    mkdir -p "$REPORTS" || mistake "RUN_DIR=${RUN_DIR:-.} cannot be written"
    [ -z "$LEAVE" ] || : >"$REPORTS/leave"
    echo "job $THIS_JOB: $NNODES node(s) x $GPUS_PER_NODE processes meet at $MASTER_ADDR:$port"
    # One task per node: each starts a launcher, which starts the node's processes. Its name for the task's number is
    # known only inside the task. The launcher must outlive a USR2 that somebody sends to the step.
    # shellcheck disable=SC2016
    local task='echo $$ >"$RANK_REPORTS/launcher-$SLURM_NODEID"; trap "" USR2
        exec "$0" -u -m torch.distributed.launch --node_rank "$SLURM_PROCID" "$@"'
    # --cpu-bind=none: all of a node's cores for its one task. --kill-on-bad-exit, --wait: when one node has failed,
    # the others do not hold the allocation.
    RANK_REPORTS=$REPORTS srun --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 --cpu-bind=none \
        --kill-on-bad-exit=1 --wait=60 \
        bash -c "$task" "$PYTHON" --nnodes "$NNODES" --nproc_per_node "$GPUS_PER_NODE" \
        --master_addr "$MASTER_ADDR" --master_port "$port" "$REPO/pretrain_gpt.py" "$@" &
    step=$!
    while [ -n "$waiting" ]; do # a signal ends the wait, not the step
        wait "$step" || true
        kill -0 "$step" 2>/dev/null && [ -z "$ENDED_BY_SLURM" ] || waiting=''
    done
    if [ -n "$ENDED_BY_SLURM" ]; then wait_before_kill "$step"; fi
    # Without this node's daemon Slurm cannot end the launcher, which waits five minutes, in native code, for others.
    launcher=$(cat "$REPORTS/launcher-0" 2>/dev/null || true)
    if [ -z "$ENDED_BY_SLURM" ] && grep -qs torch.distributed.launch "/proc/$launcher/cmdline"; then
        pkill -KILL -P "$launcher" || true
        kill -KILL "$launcher" || true
    fi
    code=0
    PYTHONPATH=$REPO "$PYTHON" -m megatron.cluster.diagnosis "$REPORTS" --processes $((NNODES * GPUS_PER_NODE)) \
        --slurm "$SLURM_JOB_ID" "$SLURM_JOB_NODELIST" ${ENDED_BY_SLURM:+--ended-by-slurm} || code=$?
    if ((code == 0 || code == TO_BE_CONTINUED)); then rm -rf "$REPORTS"; fi
    REPORTS=''
    return "$code"
}

wait_before_kill() { # wait_before_kill PID: no longer than leaves time for a verdict, before Slurm kills the script too
    local kill_wait_s end
    kill_wait_s=$(scontrol show config 2>/dev/null | sed -n 's/^KillWait *= *\([0-9]*\).*/\1/p')
    end=$((SECONDS + ${kill_wait_s:-30} - 10))
    while ((SECONDS < end)) && kill -0 "$1" 2>/dev/null; do sleep 0.5; done
}

go_on_later() { # the run was cut short and has saved: the same job goes on where it was
    [ -z "$ENDED_BY_SLURM" ] && [ "$REQUEUE" = yes ] || exit "$TO_BE_CONTINUED"
    trap '' TERM
    echo "job $THIS_JOB goes back into the queue, to go on from its checkpoint"
    scontrol requeue "$THIS_JOB" 2>/dev/null && exit
    echo "it may not go back (sbatch --requeue): submit it again to go on"
    exit "$TO_BE_CONTINUED"
}

# Slurm signals the script, and the script alone: USR2 before the time is up (#SBATCH --signal=B:USR2@600), and TERM on
# scancel, a requeue or a preemption, then to the processes as well. What tells the processes is a file, which rank 0
# looks for after every step: a signal would be lost on a process that is still starting, end the launcher and
# helpers that do not know it, and take slurmctld to deliver.
leave() {
    LEAVE=yes
    if [ -n "$REPORTS" ]; then : >"$REPORTS/leave"; fi
}
end_by_slurm() {
    ENDED_BY_SLURM=yes
    echo "Slurm ends the job (scancel, requeue, preemption or node failure): its processes save if there is time"
    leave
}
LEAVE='' ENDED_BY_SLURM='' REPORTS='' launched=0
trap leave USR2
trap end_by_slurm TERM
