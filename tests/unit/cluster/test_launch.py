"""Who a process is, by the variables of launchers and of Slurm; and starts that cannot work."""

from __future__ import annotations

import pytest

from megatron.cluster.launch import first_host, init_from_slurm_env, port_of_job, rank_of, torch_variables
from megatron.config import ConfigError

# What srun gives to the last of 4 tasks on 2 nodes, of job 31234.
TASK = {
    "SLURM_JOB_ID": "31234",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
# What torchrun gives to the last of 4 processes on 2 nodes.
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
# One task per node, in which the launcher was started.
LAUNCHERS_TASK = {**TASK, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}


def variables(env: dict[str, str]) -> dict[str, str]:
    return torch_variables(env, address_of=lambda node: f"address of {node}")


def test_a_task_of_plain_srun_is_a_process() -> None:
    assert variables(TASK) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "address of n1",
        "MASTER_PORT": "21234",
    }


def test_a_meeting_place_that_is_given_is_kept() -> None:
    found = variables({**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert found == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


def test_a_step_on_part_of_a_job_meets_on_a_node_of_the_step() -> None:
    assert variables({**TASK, "SLURM_STEP_NODELIST": "n2"})["MASTER_ADDR"] == "address of n2"


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"LOCAL_RANK": "0"},
        LAUNCHED,
        {**LAUNCHERS_TASK, **LAUNCHED},
        {**TASK, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        # A batch script: variables of a task, and no step.
        {k: v for k, v in TASK.items() if k != "SLURM_STEP_ID"},
        # torchrun for one node in an interactive shell of Slurm.
        {**TASK, **LAUNCHED, "SLURM_NTASKS": "1", "GROUP_WORLD_SIZE": "1"},
        # srun with torch's variables set by hand.
        {**TASK, "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "6000"},
    ],
)
def test_who_is_alone_or_was_launched_needs_nothing_more(env: dict[str, str]) -> None:
    assert variables(env) == {}


@pytest.mark.parametrize(
    ("env", "parts"),
    [
        ({"WORLD_SIZE": "4"}, ["RANK is missing", "WORLD_SIZE=4"]),
        ({"RANK": "1"}, ["WORLD_SIZE is missing", "RANK=1"]),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["RANK 4", "WORLD_SIZE 4", "expected 0 to 3"]),
        ({"RANK": "x", "WORLD_SIZE": "4"}, ["RANK is 'x'", "whole number"]),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, ["MASTER_ADDR is missing"]),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1"}, ["MASTER_PORT is missing"]),
        ({**LAUNCHED, "LOCAL_RANK": "2"}, ["LOCAL_RANK 2", "LOCAL_WORLD_SIZE 2", "contradict"]),
        (
            {**TASK, **LAUNCHED},
            ["4 launchers on 2 node(s)", "one launcher per node", "--ntasks-per-node=1"],
        ),
        (
            {**LAUNCHERS_TASK, **LAUNCHED, "GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "2", "RANK": "1"},
            ["2 launchers on 2 node(s)", "node 0 of a run of its own", "--node_rank $SLURM_PROCID"],
        ),
        ({**LAUNCHERS_TASK, **LAUNCHED, "GROUP_WORLD_SIZE": "3"}, ["expects 3", "--ntasks the same"]),
        ({**TASK, "RANK": "0", "WORLD_SIZE": "1"}, ["WORLD_SIZE is 1", "4 task(s)", "unset RANK"]),
        (
            {**TASK, "RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "6000"},
            ["RANK is 0 in srun's task 3", "unset RANK"],
        ),
        ({**TASK, "SLURM_PROCID": "4"}, ["SLURM_PROCID 4", "SLURM_NTASKS 4", "contradict"]),
        ({k: v for k, v in TASK.items() if k != "SLURM_LOCALID"}, ["SLURM_LOCALID is missing"]),
        ({k: v for k, v in TASK.items() if k != "SLURM_NTASKS"}, ["SLURM_NTASKS is missing"]),
        ({k: v for k, v in TASK.items() if k != "SLURM_JOB_ID"}, ["SLURM_JOB_ID is missing"]),
    ],
)
def test_a_start_that_cannot_work_is_one_sentence(env: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
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
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_ports_of_jobs_stay_below_those_that_systems_hand_out() -> None:
    assert {port_of_job(job) for job in range(40_000)} == set(range(10_000, 30_000))


def test_the_rank_is_known_before_torch_is() -> None:
    assert rank_of({}) == "0"
    assert rank_of(TASK) == "3"
    assert rank_of({**LAUNCHERS_TASK, **LAUNCHED, "RANK": "2"}) == "2"
    assert rank_of({"SLURM_PROCID": "1"}) == "0"


def test_the_environment_is_filled_in() -> None:
    env = {**TASK, "MASTER_ADDR": "n1"}
    init_from_slurm_env(env)
    assert env["RANK"] == "3" and env["WORLD_SIZE"] == "4" and env["MASTER_PORT"] == "21234"
