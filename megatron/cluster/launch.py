"""Who this process is among those that were started: by torch's variables, by srun's, or alone.

A launcher (torchrun, torch.distributed.launch) sets torch's variables. Under plain `srun python
pretrain_gpt.py`, one task per process, they are derived from Slurm's. What contradicts itself is a
ConfigError, before anything waits for processes that never come. All functions are of an environment; needs
no torch.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, MutableMapping

from megatron.config.errors import ConfigError

# From the job's number, so that two jobs that share a node do not meet; below the ports that systems hand
# out by themselves. examples/slurm/common.sh has the same.
FIRST_PORT, NUM_PORTS = 10_000, 20_000


class RankError(ConfigError):
    """The variables of this very process are wrong, of which no other process knows."""


def rank_of(env: Mapping[str, str]) -> str:
    """This process's global rank as far as the environment tells, "0" if alone."""
    return env.get("RANK") or (env.get("SLURM_PROCID", "0") if _in_step(env) else "0")


def node_name(env: Mapping[str, str]) -> str:
    """This node as Slurm calls it, else as it calls itself."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def has_torch_launcher(env: Mapping[str, str]) -> bool:
    """Whether torchrun or torch.distributed.launch started this process."""
    return "TORCHELASTIC_RUN_ID" in env


def init_from_slurm_env(env: MutableMapping[str, str] = os.environ) -> None:
    """Makes srun's task a process that torch knows, see `torch_variables`."""
    env.update(torch_variables(env))


def torch_variables(env: Mapping[str, str], address_of: Callable[[str], str] | None = None) -> dict[str, str]:
    """The variables to add to `env` so that torch finds the other processes; none if a launcher has set them,
    or there are no others.

    address_of: the address of a node by its name in Slurm (default: `node_address`).

    Raises ConfigError for a start that cannot work.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        _check_torch_variables(env)
        _check_against_slurm(env)
        return {}
    if not _in_step(env) or _number(env, "SLURM_NTASKS") == 1:
        return {}
    return _from_slurm(env, address_of or node_address)


def _in_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process. A batch script has variables of tasks too, and no step."""
    return "SLURM_STEP_ID" in env


def _check_torch_variables(env: Mapping[str, str]) -> None:
    world_size = _number(env, "WORLD_SIZE")
    rank = _number(env, "RANK")
    if not 0 <= rank < world_size:
        raise RankError(
            f"RANK {rank} with WORLD_SIZE {world_size}: expected 0 to {world_size - 1}; unset both, or "
            "correct what sets them"
        )
    if world_size > 1:
        _text(env, "MASTER_ADDR")
        _number(env, "MASTER_PORT")
    if "LOCAL_WORLD_SIZE" in env and "LOCAL_RANK" in env:
        local_rank, local_size = _number(env, "LOCAL_RANK"), _number(env, "LOCAL_WORLD_SIZE")
        if local_rank >= local_size or local_size > world_size:
            raise ConfigError(
                f"LOCAL_RANK {local_rank}, LOCAL_WORLD_SIZE {local_size} and WORLD_SIZE {world_size} "
                "contradict each other: unset what your script exports, the launcher sets all three"
            )


def _check_against_slurm(env: Mapping[str, str]) -> None:
    """Torch's variables inside a step: is the number of tasks that of the launchers, or of the processes?"""
    if not _in_step(env) or "SLURM_NTASKS" not in env:
        return
    tasks = _number(env, "SLURM_NTASKS")
    if "GROUP_WORLD_SIZE" not in env:
        _check_processes(env, tasks)
        return
    launchers = _number(env, "GROUP_WORLD_SIZE")
    if tasks in (launchers, 1):  # one step for all launchers, or one for each
        return
    nodes = _number(env, "SLURM_NNODES") if "SLURM_NNODES" in env else launchers
    started = f"srun started {tasks} launchers on {nodes} node(s), and each expects {launchers} (--nnodes)"
    if tasks > nodes:
        raise ConfigError(
            f"{started}: start one launcher per node (srun --ntasks-per-node=1), which starts "
            "a process per GPU"
        )
    if launchers == 1:
        raise ConfigError(
            f"{started}, so that each is node 0 of a run of its own: give --nnodes {tasks} --node_rank "
            "$SLURM_PROCID to the launcher, expanded inside srun's task"
        )
    raise ConfigError(f"{started}: make --nnodes and srun's --ntasks the same")


def _check_processes(env: Mapping[str, str], tasks: int) -> None:
    """No launcher, but torch's variables: srun's tasks are the processes."""
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if world_size != tasks:
        raise ConfigError(
            f"WORLD_SIZE is {world_size} and srun started {tasks} task(s) without a launcher: unset RANK and "
            "WORLD_SIZE, which then follow Slurm's, or start a launcher per node"
        )
    if tasks > 1 and rank == 0 and _number(env, "SLURM_PROCID") != 0:
        raise ConfigError(
            f"RANK is 0 in srun's task {env['SLURM_PROCID']}: it was set once for all tasks; unset RANK and "
            "WORLD_SIZE, which then follow Slurm's"
        )


def _from_slurm(env: Mapping[str, str], address_of: Callable[[str], str]) -> dict[str, str]:
    tasks, rank = _number(env, "SLURM_NTASKS"), _number(env, "SLURM_PROCID")
    local_rank = _number(env, "SLURM_LOCALID")
    if not (0 <= rank < tasks and 0 <= local_rank <= rank):
        raise ConfigError(
            f"SLURM_PROCID {rank}, SLURM_LOCALID {local_rank} and SLURM_NTASKS {tasks} contradict each "
            "other: unset what your script exports, srun sets all three"
        )
    found = {"RANK": str(rank), "WORLD_SIZE": str(tasks), "LOCAL_RANK": str(local_rank)}
    if "MASTER_ADDR" not in env:
        hosts = env.get("SLURM_STEP_NODELIST") or _text(env, "SLURM_JOB_NODELIST")
        found["MASTER_ADDR"] = address_of(first_host(hosts))
    if "MASTER_PORT" not in env:
        found["MASTER_PORT"] = str(port_of_job(_number(env, "SLURM_JOB_ID")))
    return found


def port_of_job(job_id: int) -> int:
    """Where the processes of a Slurm job meet."""
    return FIRST_PORT + job_id % NUM_PORTS


def first_host(hosts: str) -> str:
    """The first of Slurm's compressed list of hosts: "n[003-005,9],m1" -> "n003"."""
    # A comma in brackets separates numbers, outside it separates hosts.
    first = re.split(r",(?![^\[]*\])", hosts)[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def node_address(node: str) -> str:
    """The node's name if the network knows it, else its address as Slurm knows it."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    try:
        shown = subprocess.run(
            ["scontrol", "show", "node", "--oneliner", node], capture_output=True, text=True, timeout=30
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        shown = ""
    match = re.search(r"\bNodeAddr=(\S+)", shown)
    if match is None:
        raise ConfigError(
            f"the first node of the job, {node}, has no address that is known here: export MASTER_ADDR"
        )
    return match[1]


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise ConfigError(
            f"the environment variable {name} is missing beside {_beside(env)}: a launcher or srun sets all "
            "of them; start this with one of the two, or unset what your script exports"
        )
    return env[name]


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(_text(env, name))
    except ValueError:
        raise ConfigError(
            f"the environment variable {name} is '{env[name]}': expected the whole number that a launcher "
            "or srun sets"
        ) from None


def _beside(env: Mapping[str, str]) -> str:
    names = ("RANK", "WORLD_SIZE") if "RANK" in env or "WORLD_SIZE" in env else ("SLURM_STEP_ID",)
    return " and ".join(f"{name}={env[name]}" for name in names if name in env)
