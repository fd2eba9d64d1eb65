"""Finds out how this process was started: its rank and world size, its launcher and its limits.

A launcher (torchrun, torch.distributed.launch) sets torch's variables (RANK, WORLD_SIZE, ...). Under plain
`srun python pretrain_gpt.py`, with one task per process, this module derives torch's variables from Slurm's
variables. If variables contradict each other, it raises UserError before any process waits for others. The
functions take the environment as an argument. The module does not import torch.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from megatron.child_processes import process_fields, start_of
from megatron.errors import UserError, one_line

# MASTER_PORT is computed from the job id, so that two jobs on one node use different ports. A job has one
# port for its first start, and three ports in a second range for its restarts or further steps. Both ranges
# lie below the ephemeral ports of Linux. examples/slurm/common.sh contains the formula, too.
FIRST_PORT, NUM_PORTS = 10_000, 20_000
FIRST_RESTART_PORT, NUM_RESTART_PORTS = 30_000, 2_766
_LAST_PORT = 65_535
# A larger number of processes is a typo. Without this limit, lists of all ranks would take much time and
# memory.
MAX_PROCESSES = 100_000
# The variables that torch's launcher sets. Empty variables count as unset.
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# A process of a run opens about 60 files and sockets, or some hundreds if its node has many ranks.
LEAST_OPEN_FILES = 256
# Importing torch and DeepSpeed takes 0.8 GiB; a small model trains on a CPU with 2.5 GB.
LEAST_ADDRESS_SPACE_BYTES = 2 << 30
# Variable with the number of processes that mpirun has started -> variables with the rank of a process.
_MPI_VARIABLES = {
    "OMPI_COMM_WORLD_SIZE": "$OMPI_COMM_WORLD_RANK and $OMPI_COMM_WORLD_LOCAL_RANK",
    "PMI_SIZE": "$PMI_RANK and $MPI_LOCALRANKID",
}


def rank_of(env: Mapping[str, str]) -> str:
    """Returns the global rank according to the environment; "0" for a single process."""
    return env.get("RANK") or _of_task(env, "SLURM_PROCID") or "0"


def world_size_of(env: Mapping[str, str]) -> int:
    """Returns the number of processes according to the environment; 1 if the variable is missing or not a
    number."""
    return decimal_number(env.get("WORLD_SIZE") or _of_task(env, "SLURM_NTASKS")) or 1


def decimal_number(text: str) -> int | None:
    """Returns the number that a text contains; None if the text is not 1 to 18 ASCII digits, as launchers
    write numbers."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def local_world_size_of(env: Mapping[str, str]) -> int | None:
    """Returns the number of this run's processes on this node; None if it is not in the environment."""
    if (size := decimal_number(env.get("LOCAL_WORLD_SIZE", ""))) is not None:
        return size
    # Slurm's notation, for example "4(x2),1": 4 tasks on each of two nodes, and 1 task on a third node.
    counts: list[int] = []
    tasks = _of_task(env, "SLURM_STEP_TASKS_PER_NODE")
    for count, repeats in re.findall(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", tasks):
        counts += [int(count)] * int(repeats or 1)
    node = decimal_number(_of_task(env, "SLURM_NODEID"))
    return counts[node] if node is not None and node < len(counts) else None


def node_rank_of(env: Mapping[str, str]) -> int | None:
    """Returns the index of this node in the run; None if it is not in the environment."""
    is_launched = has_torch_launcher(env)
    return decimal_number(env.get("GROUP_RANK", "") if is_launched else _of_task(env, "SLURM_NODEID"))


def node_name(env: Mapping[str, str]) -> str:
    """Returns the name of this node in Slurm, otherwise its host name."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def has_torch_launcher(env: Mapping[str, str]) -> bool:
    """Returns whether torchrun or torch.distributed.launch started this process."""
    return "TORCHELASTIC_RUN_ID" in env


def check_limits() -> None:
    """Raises UserError if ulimit allows this process too few open files, or too little memory, for a run. A
    soft limit of open files that is too low is set to the hard limit. Must be called first: libraries report
    an exhausted limit as an unrelated error, or wait forever."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < LEAST_OPEN_FILES:
        raise UserError(
            f"ulimit -Hn {hard}: a process may open {hard} files. Expected at least {LEAST_OPEN_FILES}: "
            "start the run in a shell with a higher limit"
        )
    if 0 <= limit < LEAST_OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= space < LEAST_ADDRESS_SPACE_BYTES:
        raise UserError(
            f"ulimit -v {space // 1024}: a process may use {space / 2**30:.1f} GiB of virtual memory. "
            f"Expected at least {LEAST_ADDRESS_SPACE_BYTES / 2**30:.0f} GiB: raise the limit with ulimit -v "
            "unlimited"
        )


def find_launcher(env: Mapping[str, str]) -> tuple[int, str] | None:
    """Returns process id and start time of the torch launcher that started this process. Returns None without
    a launcher, or if the launcher is in a different process-id namespace. A wrapper (numactl, a shell) may be
    between the launcher and this process."""
    if not has_torch_launcher(env):
        return None
    # TORCHELASTIC_ERROR_FILE comes first because it is unique per process, unlike the run id.
    names = ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID")
    variable = next((name for name in names if env.get(name)), None)
    if variable is None:
        return None
    given, pid = f"{variable}={env[variable]}".encode(), os.getppid()
    while given in _environment_of(pid):
        pid = int(process_fields(pid)[1])
    start = start_of(pid)
    return None if start is None else (pid, start)


def _environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # the process belongs to another user, or has ended
        return []


def launch_id(env: Mapping[str, str]) -> str:
    """Returns a name that is equal for all processes of one launch on this node, and different for other
    launches. The name begins with the process id and the start time of the launcher or the shell, unless srun
    has started the processes."""
    if _in_step(env) and not has_torch_launcher(env):
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return "-".join(["slurm", *(env.get(name, "0") for name in names)])
    # The name contains the launcher, or the session of the shell, and not the parent, because each process
    # may have its own parent (timeout, numactl). Process ids are reused, so the start time is a part of the
    # name.
    starter, start = find_launcher(env) or (os.getsid(0), start_of(os.getsid(0)) or "0")
    port, restart = env.get("MASTER_PORT", "0"), env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{starter}-{start}-{port}-{restart}"


def private_temporary_folder() -> Path | None:
    """Returns this user's folder among the temporary files of this node, which other users cannot write to;
    None if it cannot be created."""
    base = Path(tempfile.gettempdir()) / f"megatron-{os.getuid()}"
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        status = base.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        return None
    return base


def wait_until(condition: Callable[[], bool], max_s: float, interval_s: float = 0.01) -> bool:
    """Polls until the condition is met; returns whether it was met within `max_s` seconds."""
    deadline = time.monotonic() + max_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval_s)
    return True


@contextmanager
def temporary_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables of this process within the block; processes started in it inherit them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def init_from_slurm_env(env: MutableMapping[str, str] = os.environ) -> None:
    """Sets torch's variables in a task of srun, see `torch_variables`, and deletes those that are empty."""
    for name in TORCH_VARIABLES:
        if env.get(name) == "":
            del env[name]
    env.update(torch_variables(env))


def torch_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to add to `env` for torch: none if a launcher has set them, or for a single
    process. Raises UserError if the variables contradict each other."""
    if env.get("RANK") or env.get("WORLD_SIZE"):
        _check_torch_variables(env)
        _check_against_slurm(env)
        return {}
    _check_mpi(env)
    if not _in_step(env) or _number(env, "SLURM_NTASKS") == 1:
        return {}
    return _from_slurm(env)


def _in_step(env: Mapping[str, str]) -> bool:
    """Returns whether srun started this process. (The process of a batch script also has task variables, but
    no step id.)"""
    return "SLURM_STEP_ID" in env


def _of_task(env: Mapping[str, str], name: str) -> str:
    """Returns a variable that srun sets in its tasks; "" outside of a task."""
    return env.get(name, "") if _in_step(env) else ""


def _check_torch_variables(env: Mapping[str, str]) -> None:
    world_size, rank = _number(env, "WORLD_SIZE"), _number(env, "RANK")
    if not 1 <= world_size <= MAX_PROCESSES:
        raise UserError(
            f"WORLD_SIZE is {world_size}: expected a number of processes from 1 to {MAX_PROCESSES:,}; unset "
            "RANK and WORLD_SIZE, or correct the script that sets them"
        )
    if not 0 <= rank < world_size:
        raise UserError(
            f"RANK {rank} with WORLD_SIZE {world_size}: expected 0 to {world_size - 1}; unset both, or "
            "correct the script that sets them"
        )
    if world_size > 1:
        _text(env, "MASTER_ADDR")
        _check_port(env)
    if "LOCAL_WORLD_SIZE" in env and "LOCAL_RANK" in env:
        local_rank, local_size = _number(env, "LOCAL_RANK"), _number(env, "LOCAL_WORLD_SIZE")
        if local_rank >= local_size or local_size > world_size:
            raise UserError(
                f"LOCAL_RANK {local_rank}, LOCAL_WORLD_SIZE {local_size} and WORLD_SIZE {world_size} "
                "contradict each other: unset the ones that your script exports; the launcher sets all three"
            )


def _check_port(env: Mapping[str, str]) -> None:
    port = _number(env, "MASTER_PORT")
    if not 1 <= port <= _LAST_PORT:
        raise UserError(
            f"the environment variable MASTER_PORT is {port}: expected a port from 1 to {_LAST_PORT}, equal "
            "on all nodes"
        )


def _check_against_slurm(env: Mapping[str, str]) -> None:
    """Raises UserError if srun's tasks are neither the launchers nor the processes of torch's variables."""
    if not _of_task(env, "SLURM_NTASKS"):
        return
    tasks = _number(env, "SLURM_NTASKS")
    if "GROUP_WORLD_SIZE" not in env:
        _check_processes(env, tasks)
        return
    launchers = _number(env, "GROUP_WORLD_SIZE")
    if tasks in (launchers, 1):  # one step starts all launchers, or each launcher has a step
        return
    nodes = _number(env, "SLURM_NNODES") if "SLURM_NNODES" in env else launchers
    started = f"srun started {tasks} launchers on {nodes} node(s), and each expects {launchers} (--nnodes)"
    if tasks > nodes:
        raise UserError(
            f"{started}: start one launcher per node (srun --ntasks-per-node=1), which then starts one "
            "process per GPU"
        )
    if launchers == 1:
        raise UserError(
            f"{started}, so that each is node 0 of a separate run: give the launcher --nnodes {tasks} "
            "--node_rank $SLURM_PROCID, expanded inside srun's task"
        )
    raise UserError(f"{started}: make --nnodes and srun's --ntasks equal")


def _check_mpi(env: Mapping[str, str]) -> None:
    """Raises UserError if mpirun started this process without torch's variables: each process would be a
    separate run."""
    tasks = _of_task(env, "SLURM_NTASKS") or "1"
    for name, names_of_ranks in _MPI_VARIABLES.items():
        # If srun has set MPI's variables, too, Slurm's variables are used.
        if env.get(name, "1") not in ("1", tasks):
            raise UserError(
                f"{name} is {env[name]}, and RANK and WORLD_SIZE are not set: mpirun started processes "
                f"without torch's rendezvous variables; set RANK, LOCAL_RANK (to {names_of_ranks}), "
                f"WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each of them, or start the program with "
                "torchrun or srun"
            )


def _check_processes(env: Mapping[str, str], tasks: int) -> None:
    """Raises UserError if srun's tasks are not the processes of torch's variables, without a launcher."""
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if world_size != tasks:
        raise UserError(
            f"WORLD_SIZE is {world_size} and srun started {tasks} task(s) without a launcher: unset RANK and "
            "WORLD_SIZE to use Slurm's, or start a launcher per node"
        )
    if tasks > 1 and rank == 0 and _number(env, "SLURM_PROCID") != 0:
        raise UserError(
            f"RANK is 0 in srun's task {env['SLURM_PROCID']}: it was set once for all tasks; unset RANK and "
            "WORLD_SIZE to use Slurm's"
        )


def _from_slurm(env: Mapping[str, str]) -> dict[str, str]:
    tasks, rank = _number(env, "SLURM_NTASKS"), _number(env, "SLURM_PROCID")
    local_rank = _number(env, "SLURM_LOCALID")
    if not (0 <= rank < tasks and 0 <= local_rank <= rank):
        raise UserError(
            f"SLURM_PROCID {rank}, SLURM_LOCALID {local_rank} and SLURM_NTASKS {tasks} contradict each "
            "other: unset the ones that your script exports; srun sets all three"
        )
    found = {"RANK": str(rank), "WORLD_SIZE": str(tasks), "LOCAL_RANK": str(local_rank)}
    if "MASTER_ADDR" not in env:
        hosts = env.get("SLURM_STEP_NODELIST") or _text(env, "SLURM_JOB_NODELIST")
        found["MASTER_ADDR"] = node_address(first_host(hosts))
    if "MASTER_PORT" in env:
        _check_port(env)
    else:
        # Steps of a job may run at the same time, so each step has its own port.
        step = decimal_number(env["SLURM_STEP_ID"]) or 0
        found["MASTER_PORT"] = str(port_of_job(_number(env, "SLURM_JOB_ID"), step))
    return found


def port_of_job(job_id: int, start: int = 0) -> int:
    """Returns the MASTER_PORT of a Slurm job. start: index of the restart or of the step; 0 for the first
    start."""
    if start == 0:
        return FIRST_PORT + job_id % NUM_PORTS
    return FIRST_RESTART_PORT + (job_id * 3 + (start - 1) % 3) % NUM_RESTART_PORTS


def first_host(hosts: str) -> str:
    """Returns the first host of Slurm's compressed list: "n[003-005,9],m1" -> "n003"."""
    # A comma inside brackets separates numbers; outside of brackets it separates hosts.
    first = re.split(r",(?![^\[]*\])", hosts)[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def node_address(node: str) -> str:
    """Returns the node's name if it resolves, otherwise its address according to Slurm."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    shown = output_of("scontrol", "show", "node", "--oneliner", node, timeout_s=30)
    match = re.search(r"\bNodeAddr=(\S+)", shown)
    if match is None:
        raise UserError(
            f"the name of the job's first node, {node}, does not resolve and Slurm shows no address: export "
            "MASTER_ADDR"
        )
    return match[1]


def output_of(*command: str, timeout_s: float) -> str:
    """Returns what a command of Slurm prints; "" if it is not installed or does not answer in time."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        present = [other for other in ("RANK", "WORLD_SIZE") if env.get(other)] or ["SLURM_STEP_ID"]
        shown = " and ".join(f"{other}={one_line(env[other], 40)}" for other in present)
        raise UserError(
            f"the environment variable {name} is missing in an environment with {shown}: start the program "
            "with a launcher or srun, or unset the ones that your script exports"
        )
    return env[name]


def _number(env: Mapping[str, str], name: str) -> int:
    # A negative number is accepted at this point: the caller rejects it with an error that names the expected
    # range.
    number = decimal_number(_text(env, name).removeprefix("-"))
    if number is None:
        raise UserError(
            f"the environment variable {name} is '{one_line(env[name], 40)}': expected the integer that a "
            "launcher or srun sets"
        )
    return -number if env[name].startswith("-") else number
