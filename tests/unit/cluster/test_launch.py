"""Rank and world size come from the variables of launchers and of Slurm. Launches that cannot work
are rejected."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from megatron.cluster import launch
from megatron.cluster.launch import (
    first_host,
    init_from_slurm_env,
    local_world_size_of,
    port_of_job,
    rank_of,
    torch_variables,
    world_size_of,
)
from megatron.cluster.rank_reports import RankReport
from megatron.errors import UserError
from tests.end_to_end.command import ROOT

# The environment of the last of 4 tasks of srun on 2 nodes, in job 31234.
TASK = {
    "SLURM_JOB_ID": "31234",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
# The environment of the last of 4 processes of torchrun on 2 nodes.
LAUNCHED = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "6000",
}
# The variables that torch needs for TASK, beside the address.
TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
# The environment of srun with one launcher per node.
LAUNCHERS_TASK = {**TASK, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}


def variables(env: dict[str, str]) -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "node_address", "address of {}".format)
        return torch_variables(env)


@pytest.mark.parametrize(
    ("more", "master"),
    [
        ({}, {"MASTER_ADDR": "address of n1", "MASTER_PORT": "21234"}),
        # srun sets MPI's variables, too.
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, {"MASTER_ADDR": "address of n1", "MASTER_PORT": "21234"}),
        ({"SLURM_STEP_NODELIST": "n2"}, {"MASTER_ADDR": "address of n2", "MASTER_PORT": "21234"}),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, {}),
    ],
)
def test_task_of_plain_srun_gets_torch_variables(more: dict[str, str], master: dict[str, str]) -> None:
    assert variables({**TASK, **more}) == {**TORCH, **master}


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"LOCAL_RANK": "0"},
        LAUNCHED,
        {**LAUNCHERS_TASK, **LAUNCHED},
        {**TASK, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {**LAUNCHED, "OMPI_COMM_WORLD_SIZE": "2"},
        # In a batch script there are variables of a task, but no step.
        {k: v for k, v in TASK.items() if k != "SLURM_STEP_ID"},
        # torchrun for one node in an interactive shell of Slurm.
        {**TASK, **LAUNCHED, "SLURM_NTASKS": "1", "GROUP_WORLD_SIZE": "1"},
        # srun with torch's variables set by hand.
        {**TASK, "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "6000"},
    ],
)
def test_single_or_launched_process_needs_no_variables(env: dict[str, str]) -> None:
    assert variables(env) == {}


@pytest.mark.parametrize(
    ("env", "parts"),
    [
        ({"WORLD_SIZE": "4"}, ["RANK is missing", "WORLD_SIZE=4"]),
        ({"RANK": "1"}, ["WORLD_SIZE is missing", "RANK=1"]),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["RANK 4", "WORLD_SIZE 4", "expected 0 to 3"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE is 0", "from 1 to 100,000"]),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1000000"},
            ["WORLD_SIZE is 1000000", "from 1 to 100,000"],
            id="hostile",
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "9" * 5000}, ["WORLD_SIZE is '999", "..."], id="hostile digits"
        ),
        pytest.param({"RANK": "²", "WORLD_SIZE": "4"}, ["RANK is '²'", "integer"], id="hostile superscript"),
        ({"RANK": "", "WORLD_SIZE": "2"}, ["RANK is missing in an environment with WORLD_SIZE=2:"]),
        ({**BY_HAND, "MASTER_PORT": "299999"}, ["MASTER_PORT is 299999", "1 to 65535"]),
        ({**BY_HAND, "MASTER_PORT": "0"}, ["MASTER_PORT is 0", "1 to 65535"]),
        ({**TASK, "MASTER_ADDR": "n1", "MASTER_PORT": "-1"}, ["MASTER_PORT is -1"]),
        ({"RANK": "x", "WORLD_SIZE": "4"}, ["RANK is 'x'", "integer"]),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, ["MASTER_ADDR is missing"]),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1"}, ["MASTER_PORT is missing"]),
        ({**LAUNCHED, "LOCAL_RANK": "2"}, ["LOCAL_RANK 2", "LOCAL_WORLD_SIZE 2", "contradict"]),
        (
            {**TASK, **LAUNCHED},
            ["4 launchers on 2 node(s)", "one launcher per node", "--ntasks-per-node=1"],
        ),
        (
            {**LAUNCHERS_TASK, **LAUNCHED, "GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "2", "RANK": "1"},
            ["2 launchers on 2 node(s)", "node 0 of a separate run", "--node_rank $SLURM_PROCID"],
        ),
        ({**LAUNCHERS_TASK, **LAUNCHED, "GROUP_WORLD_SIZE": "3"}, ["expects 3", "--ntasks equal"]),
        ({**TASK, "RANK": "0", "WORLD_SIZE": "1"}, ["WORLD_SIZE is 1", "4 task(s)", "unset RANK"]),
        (
            {**TASK, "RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "6000"},
            ["RANK is 0 in srun's task 3", "unset RANK"],
        ),
        ({**TASK, "SLURM_PROCID": "4"}, ["SLURM_PROCID 4", "SLURM_NTASKS 4", "contradict"]),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, ["OMPI_COMM_WORLD_SIZE is 4", "RANK and WORLD_SIZE are not set"]),
        ({"PMI_SIZE": "2"}, ["PMI_SIZE is 2", "$PMI_RANK"]),
        # mpirun in a job of Slurm starts its daemons with srun, one per node.
        ({**TASK, "SLURM_NTASKS": "1", "OMPI_COMM_WORLD_SIZE": "8"}, ["OMPI_COMM_WORLD_SIZE is 8"]),
        ({k: v for k, v in TASK.items() if k != "SLURM_LOCALID"}, ["SLURM_LOCALID is missing"]),
        ({k: v for k, v in TASK.items() if k != "SLURM_NTASKS"}, ["SLURM_NTASKS is missing"]),
        ({k: v for k, v in TASK.items() if k != "SLURM_JOB_ID"}, ["SLURM_JOB_ID is missing"]),
    ],
)
def test_start_that_cannot_work_is_one_sentence(env: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        variables(env)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for part in parts:
        assert part in sentence


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2]", "n1"),
        ("jean-zay-a[003-005,9],m1", "jean-zay-a003"),
        ("n[7,9-12]-ib", "n7-ib"),
        ("r[1-2]n[03-04]", "r1n03"),
        ("login,n[1-2]", "login"),
    ],
)
def test_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_ports_lie_below_the_ephemeral_range() -> None:
    assert {port_of_job(job) for job in range(40_000)} == set(range(10_000, 30_000))
    restarts = {port_of_job(job, start) for job in range(3_000) for start in range(1, 9)}
    assert restarts == set(range(30_000, 32_766))


def test_ports_of_the_restarts_and_steps_of_jobs_on_a_node_differ() -> None:
    """The jobs have similar ids, as the tasks of an array have, with three restarts each."""
    ports = [port_of_job(job, start) for job in range(19_800, 20_700) for start in range(4)]
    assert len(ports) == len(set(ports))
    assert all(port_of_job(7, start) != port_of_job(7, start + 1) for start in range(20))


def test_slurm_scripts_use_these_ports_and_skip_one_in_use() -> None:
    def ports(job_id: int, **env: str) -> list[int]:
        script = 'source "$0"; for restart in 0 1 2 3 4 5; do find_port $restart; echo $PORT; done'
        own = {**os.environ, "SLURM_JOB_ID": str(job_id), "REPO": str(ROOT), "PYTHON": sys.executable, **env}
        common = str(ROOT / "examples" / "slurm" / "common.sh")
        run = subprocess.run(
            ["bash", "-c", script, common], env=own, text=True, capture_output=True, check=True
        )
        return [int(line) for line in run.stdout.split()]

    with socket.create_server(("", 0)) as listener:
        assert ports(7, MASTER_PORT=str(listener.getsockname()[1]))[0] > listener.getsockname()[1]
    for job_id in (7, 123_456):
        for restart, port in enumerate(ports(job_id)):
            own = [port_of_job(job_id, start) for start in range(restart, restart + 4)]
            assert port in own and all(map(listens, own[: own.index(port)]))


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        (LAUNCHED, 2),
        ({**TASK, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1"}, 2),
        ({**TASK, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "1"}, 1),
        ({**TASK, "SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "2"}, 1),
        (TASK, None),
    ],
)
def test_local_world_size(env: dict[str, str], expected: int | None) -> None:
    assert local_world_size_of(env) == expected


def test_world_size_before_the_variables_are_set() -> None:
    assert [world_size_of(env) for env in ({}, TASK, LAUNCHED, {"WORLD_SIZE": "x"})] == [1, 4, 4, 1]


@pytest.mark.parametrize("text", ["²", "9" * 5000, "-1", "1_0", " 1", ""], ids=range(6))
def test_hostile_numbers_count_as_missing(text: str) -> None:
    assert world_size_of({"WORLD_SIZE": text}) == 1
    assert local_world_size_of({"LOCAL_WORLD_SIZE": text}) is None
    assert not RankReport(None, text).is_enabled
    assert (
        local_world_size_of({**TASK, "SLURM_STEP_TASKS_PER_NODE": f"{text}(x2)", "SLURM_NODEID": text})
        is None
    )


def test_rank_of() -> None:
    assert rank_of({}) == "0"
    assert rank_of(TASK) == "3"
    assert rank_of({**LAUNCHERS_TASK, **LAUNCHED, "RANK": "2"}) == "2"
    assert rank_of({"SLURM_PROCID": "1"}) == "0"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RANK": "", "WORLD_SIZE": "", "MASTER_PORT": ""}, {}),
        (
            {**TASK, "RANK": "", "MASTER_ADDR": "n1"},
            {**TASK, **TORCH, "MASTER_ADDR": "n1", "MASTER_PORT": "21234"},
        ),
    ],
    ids=["single process", "task of srun"],
)
def test_empty_variables_count_as_unset_and_are_set(env: dict[str, str], expected: dict[str, str]) -> None:
    env = dict(env)
    init_from_slurm_env(env)
    assert env == expected
