#!/usr/bin/env bash
# A real Slurm of two nodes, n1 and n2, on this machine: for the tests, and to try the examples.
#
#     tests/slurm/cluster.sh start                  munge, slurmctld, two slurmd; returns when both nodes are up
#     eval "$(tests/slurm/cluster.sh env)"          lets sbatch, squeue and scancel of this shell talk to it
#     tests/slurm/cluster.sh stop                   ends all jobs and daemons, and leaves no file behind
#
# Needs Debian's slurmctld, slurmd, slurm-client and munge; no systemd, no accounting database, and root only if other
# users are to submit. Configuration, state and logs are in one folder under TMPDIR. The nodes claim CPUs and GPUs that
# do not exist, so that what the examples request fits. A second start finds the cluster of the first. A node that does
# not answer for SLURM_TEST_SLURMD_TIMEOUT seconds (default: 300) is down.
set -euo pipefail

folder=${SLURM_TEST_FOLDER:-${TMPDIR:-/tmp}/slurm-two-nodes-$(id -u)}
nodes=(n1 n2)
cpus_per_node=8
gpus_per_node=8
longest_wait_s=60

export SLURM_CONF=$folder/slurm.conf
export PATH=$PATH:/usr/sbin:/sbin # where the daemons are, and a user's PATH often does not reach

fail() { # fail SENTENCE [LOG]
    echo "error: $1" >&2
    if [ -s "${2:-}" ]; then
        echo "the last lines of $2:" >&2
        tail -n 15 "$2" >&2
    fi
    exit 1
}

start() {
    local program node
    for program in munged slurmctld slurmd sbatch; do
        command -v "$program" >/dev/null ||
            fail "$program is not installed: apt-get install munge slurmctld slurmd slurm-client"
    done
    mkdir -p "$folder"
    # Two starts at once would make two clusters. Descriptor 9 is closed in the daemons, who would keep the lock.
    exec 9<"$folder"
    flock --wait $((2 * longest_wait_s)) 9 || fail "another start of the cluster does not end: see $folder"
    mkdir -p "$folder"/{log,munge,pid,run,state,spool-n1,spool-n2}
    [ -e "$SLURM_CONF" ] || write_configuration
    start_daemon munged munged --force --key-file="$folder/munge/key" --seed-file="$folder/munge/seed" \
        --socket="$folder/run/munge" --pid-file="$folder/pid/munged" --log-file="$folder/log/munged"
    start_daemon slurmctld slurmctld
    for node in "${nodes[@]}"; do
        start_daemon "slurmd-$node" slurmd -N "$node"
    done
    wait_for_nodes
}

write_configuration() {
    local ports host gpu
    mapfile -t ports < <(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && python3 -m tests.support.ports 3)
    host=$(hostname -s)
    (
        umask 077
        head -c 256 /dev/urandom >"$folder/munge/key"
    )
    # Empty files instead of devices: Slurm counts them and sets CUDA_VISIBLE_DEVICES, and PyTorch finds no GPU.
    mkdir -p "$folder/gpu"
    for ((gpu = 0; gpu < gpus_per_node; gpu++)); do : >"$folder/gpu/$gpu"; done
    echo "NodeName=n[1-2] Name=gpu File=$folder/gpu/[0-$((gpus_per_node - 1))]" >"$folder/gres.conf"
    # cred_expire is also how long a requeued job waits, which would be two minutes.
    cat >"$SLURM_CONF.tmp" <<END
ClusterName=two-nodes
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge,cred_expire=6
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/pid/slurmctld
SlurmdPidFile=$folder/pid/slurmd-%n
SlurmctldLogFile=$folder/log/slurmctld
SlurmdLogFile=$folder/log/slurmd-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
SlurmdTimeout=${SLURM_TEST_SLURMD_TIMEOUT:-300}
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=$cpus_per_node Gres=gpu:$gpus_per_node
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=$cpus_per_node Gres=gpu:$gpus_per_node
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
END
    mv "$SLURM_CONF.tmp" "$SLURM_CONF"
}

start_daemon() { # start_daemon NAME COMMAND...: the daemon puts itself into the background and writes pid/NAME
    local name=$1 log=$folder/log/$1
    shift
    if alive "$folder/pid/$name"; then return; fi
    rm -f "$folder/pid/$name"
    "$@" >>"$log.start" 2>&1 9<&- || fail "$name does not start" "$log.start"
}

alive() { # alive PIDFILE: whether that process runs; its name guards against a reused number
    local pid
    pid=$(cat "$1" 2>/dev/null) && grep -qE '^(munged|slurmctld|slurmd)' "/proc/$pid/comm" 2>/dev/null
}

wait_for_nodes() {
    local deadline=$((SECONDS + longest_wait_s)) up=0 name
    while ((SECONDS < deadline)); do
        # A node that works is up as well: start may be called while jobs run.
        up=$(sinfo --noheader --Node --format=%t 2>/dev/null | grep -cE '^(idle|mix|alloc|comp)$' || true)
        if ((up == ${#nodes[@]})); then return; fi
        for name in munged slurmctld slurmd-n1 slurmd-n2; do
            # slurmctld writes its pid some time after it has gone to the background.
            [ ! -e "$folder/pid/$name" ] || alive "$folder/pid/$name" ||
                fail "$name has ended by itself" "$folder/log/$name"
        done
        sleep 0.5
    done
    fail "only $up of ${#nodes[@]} nodes are up after $longest_wait_s s" "$folder/log/slurmctld"
}

stop() {
    local name deadline
    [ -d "$folder" ] || return 0
    if alive "$folder/pid/slurmctld"; then
        # slurmctld may run and not answer.
        timeout 10 scancel --signal=KILL --full --user="$(id -un)" 2>/dev/null || true
        timeout 10 scancel --user="$(id -un)" 2>/dev/null || true
        deadline=$((SECONDS + 20))
        while ((SECONDS < deadline)) && [ -n "$(timeout 10 squeue --noheader 2>/dev/null)" ]; do sleep 0.5; done
    fi
    for name in slurmd-n1 slurmd-n2 slurmctld; do # at once: each takes seconds to end
        if alive "$folder/pid/$name"; then kill "$(cat "$folder/pid/$name")" || true; fi
    done
    for name in slurmd-n1 slurmd-n2 slurmctld munged; do
        end_daemon "$folder/pid/$name"
    done
    kill_leftovers
    rm -rf "$folder"
}

end_daemon() { # end_daemon PIDFILE
    local deadline=$((SECONDS + 10)) pid
    alive "$1" || return 0
    pid=$(cat "$1")
    kill "$pid" 2>/dev/null || true
    while [ -d "/proc/$pid" ] && ((SECONDS < deadline)); do sleep 0.1; done
    if [ -d "/proc/$pid" ]; then kill -KILL "$pid" || true; fi
}

kill_leftovers() { # kills processes of jobs whose daemon died, found by the environment that Slurm gave them
    local process
    for process in /proc/[0-9]*; do
        tr '\0' '\n' 2>/dev/null <"$process/environ" | grep -qxF "SLURM_CONF=$SLURM_CONF" || continue
        if grep -q '^slurmstepd' "$process/comm" 2>/dev/null ||
            tr '\0' '\n' 2>/dev/null <"$process/environ" | grep -q '^SLURM_JOB_ID='; then
            kill -KILL "${process#/proc/}" 2>/dev/null || true
        fi
    done
}

case ${1:-} in
start) start ;;
stop) stop ;;
env) echo "export SLURM_CONF=$(printf %q "$SLURM_CONF")" ;;
*)
    echo "usage: $0 start | stop | env" >&2
    exit 2
    ;;
esac
