"""Starts processes by hand: one prepares for longer than --start-timeout, one dies before the process group
exists, another program uses MASTER_PORT, and processes see one device each."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.cluster.rank_reports import read_reports
from tests.end_to_end.command import ROOT, environment, pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL, SHORT
from tests.support import HANG_TIMEOUT_S
from tests.support.ports import free_ports

TIMEOUT_S = 4.0


def start(
    rank: int, port: int, flags: list[str], script: str = "pretrain_gpt.py", **env: str
) -> subprocess.Popen:
    # As on two nodes, the first process of each prints that it waits.
    own = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    own |= {"MASTER_PORT": str(port), **env}
    return subprocess.Popen(
        [sys.executable, "-u", script, *MODEL, *ABSOLUTE, *SHORT, *flags],
        cwd=ROOT,
        env=environment() | own,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_rank_0_may_have_any_local_rank(data: list[str]) -> None:
    flags = [*MODEL, *ABSOLUTE, *SHORT, *data, "--exit-interval", "1"]
    assert len(pretrain([*flags, "--local-rank", "1"]).ok().steps) == 1


@pytest.mark.full
def test_a_rank_that_prepares_does_not_use_up_the_time_of_the_others(data: list[str], tmp_path: Path) -> None:
    finish, port = tmp_path / "finish", free_ports(1)[0]
    flags = [*data, "--start-timeout", str(TIMEOUT_S), "--train-iters", "2"]
    slow = {"script": "tests/end_to_end/slow_preparation.py", "FINISH_PREPARATION": str(finish)}
    first = start(0, port, flags, **slow)
    while first.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    second = start(1, port, flags, **slow)
    assert second.stderr is not None
    waited = 0
    for line in second.stderr:
        waited += line == f"rank 1 is waiting at 127.0.0.1:{port} for rank 0, which is preparing\n"
        if waited * 0.5 > 2 * TIMEOUT_S:
            break
    finish.touch()
    outputs = [process.communicate(timeout=HANG_TIMEOUT_S) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), outputs
    assert "iteration        2/       2" in outputs[0][0]


def test_a_rank_that_dies_after_it_connected_ends_the_others(data: list[str], tmp_path: Path) -> None:
    """There is no launcher that would end the other ranks. Each rank has its own folder of reports, as on two
    nodes."""
    port, flags = free_ports(1)[0], [*data, "--hang-timeout", "2"]
    first = start(0, port, flags, RANK_REPORTS=str(tmp_path / "0"))
    second = start(1, port, flags, script="tests/end_to_end/dies_after_connecting.py")
    assert second.wait(HANG_TIMEOUT_S) == -signal.SIGKILL
    _, stderr = first.communicate(timeout=HANG_TIMEOUT_S)
    (report,) = read_reports(tmp_path / "0")
    assert (first.returncode, report["end"]) == (124, "hang"), stderr
    assert re.fullmatch(r"no progress for \d+ s in the preflight", report["text"])


def test_one_visible_device_per_process_is_enough(data: list[str]) -> None:
    flags = [*MODEL, *ABSOLUTE, *SHORT, *data, "--pipeline-model-parallel-size", "2", "--train-iters", "1"]
    run = pretrain(flags, processes=2, script="tests/end_to_end/one_visible_device.py")
    assert run.exit_code == 0 and len(run.steps) == 1, run.stderr


@pytest.mark.full
def test_each_rank_names_another_program_at_its_port(data: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as program:
        port = program.getsockname()[1]
        rank = start(1, port, data)
        _, stderr = rank.communicate(timeout=HANG_TIMEOUT_S)
    assert rank.returncode == 2
    last = stderr.splitlines()[-1]
    assert last.startswith(f"error: rank 1: 127.0.0.1:{port} is open, but it is not the store of this run: ")


@pytest.mark.parametrize("launcher", ["run", pytest.param("launch", marks=pytest.mark.full)])
def test_the_launchers_own_error_for_a_port_in_use_is_in_the_docs(launcher: str) -> None:
    """The launcher binds the port before this program starts, so this program cannot improve the message."""
    with socket.create_server(("", 0)) as program:
        port = str(program.getsockname()[1])
        command = [sys.executable, "-m", f"torch.distributed.{launcher}", "--nproc_per_node", "2"]
        run = subprocess.run(
            [*command, "--master_port", port, "pretrain_gpt.py", "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=HANG_TIMEOUT_S,
        )
    assert run.returncode == 1 and run.stdout == ""
    last = run.stderr.strip().splitlines()[-1]
    assert f"    {last.replace(port, '29500')}\n" in (ROOT / "docs" / "troubleshooting.md").read_text()
