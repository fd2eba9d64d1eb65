"""Torch's launcher runs in a container (a process-id namespace that ends with its first process, a shell
script), and ranks end after their launcher was killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.training.log_lines import parse_log_line
from tests.end_to_end.command import ROOT, environment, pretrain_typed
from tests.end_to_end.flags import ABSOLUTE, MODEL, NO_DROPOUT, SHORT
from tests.end_to_end.test_ends import at_step, children
from tests.support import HANG_TIMEOUT_S
from tests.support.ports import free_ports
from tests.unit.cluster.test_local_diagnosis import RANK

CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
CONTAINER += ["--user", "--map-root-user"] if os.getuid() else []
KUBERNETES = ROOT / "examples" / "kubernetes"
JOB = f"""
set -e
{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 2 "$@"
echo done
"""
# A rank ends as its argument says, after both ranks have a report. Otherwise the launcher could end a rank
# during its start, and that rank could not name the cause.
BOTH_READY = """
import time
from pathlib import Path
folder = Path(os.environ["TMPDIR"])
(folder / os.environ["RANK"]).touch()
while len(list(folder.glob("[01]"))) < 2:
    time.sleep(0.01)
with exit_on_error(report):"""
RANK_BY_ARGUMENT = RANK.replace("\nwith exit_on_error(report):", BOTH_READY).replace(
    "sys.stdin.readline().strip()", "sys.argv[1 + int(os.environ['RANK'])]"
)


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        (("mistake", "mistake"), r"error: --lr is 0"),
        (("lost", "broken"), r"error: rank 1 on \S+ \(pid \d+\), after iteration 7: ValueError: broken"),
        (("lost", "kill"), r"error: rank 1 on \S+ \(pid \d+\), after iteration 7: killed \(SIGKILL\), .*"),
    ],
    ids=["mistake", "crash", "killed"],
)
def test_cause_is_in_the_log_of_a_container_that_ends_with_its_script(
    ends, cause: str, tmp_path: Path
) -> None:
    program = written(tmp_path / "rank.py", RANK_BY_ARGUMENT)
    script = written(tmp_path / "job.sh", JOB)
    env = environment() | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [*CONTAINER, "bash", script, program, *ends]
    run = subprocess.run(command, env=env, text=True, capture_output=True, timeout=HANG_TIMEOUT_S)
    assert run.returncode == 1
    assert len(re.findall(f"^{cause}$", run.stderr, re.MULTILINE)) == 1
    assert re.search(rf"Root Cause.*traceback : {cause}\n=", run.stderr, re.DOTALL)


WAITING_RANK = """
import time
from megatron.cluster.exit_codes import exit_on_error
from megatron.cluster.rank_reports import RankReport
from megatron.cluster.watchdog import Watchdog

report = RankReport.from_environment()
watchdog = Watchdog(report)
print("ready", flush=True)
time.sleep(10_000)  # longer than any test waits
"""


@pytest.mark.parametrize("wrapper", [[], ["--no-python", "bash", "-c"]], ids=["python", "wrapped"])
def test_ranks_end_after_their_launcher_was_killed(wrapper: list[str], tmp_path: Path) -> None:
    program = [written(tmp_path / "rank.py", WAITING_RANK)]
    if wrapper:
        program = [*wrapper, f"{sys.executable} {program[0]}; exit"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    env = environment() | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    launcher = subprocess.Popen([sys.executable, *launch, *program], env=env, text=True, **pipes)
    assert launcher.stdout is not None
    assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n", "ready\n"]
    launcher.kill()
    _, stderr = launcher.communicate(timeout=HANG_TIMEOUT_S)  # returns after the ranks have closed stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert f"torch's launcher (process {launcher.pid}) was killed" in line
    assert not list(tmp_path.glob("megatron-*/*"))


@pytest.mark.full
@pytest.mark.parametrize("flags", [[], ["--async-save"]], ids=["saves at once", "saves in the background"])
def test_a_run_whose_launcher_was_killed_ends_and_its_folder_is_free(
    flags: list[str], data: list[str], tmp_path: Path
) -> None:
    """The launcher hosts the store, which a save in the background needs. Fails if the ranks continue to
    train after the launcher was killed."""
    save = ["--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "1", *flags]
    command = [*MODEL, *ABSOLUTE, *SHORT, *data, "--pipeline-model-parallel-size", "2", *save]
    command[command.index("--train-iters") + 1] = "100000"  # the ranks train until they notice the kill
    run = pretrain_typed(command, processes=2, on_line=at_step(3, lambda process: process.kill()))
    assert run.exit_code == -signal.SIGKILL and len(run.errors) == 1
    assert re.search("torch's launcher .* was killed|the store of the processes .* is lost", run.errors[0])
    again = pretrain_typed([*command, "--exit-interval", "1"], processes=2).ok()
    (step,) = again.steps
    assert step["iteration"] >= 2


# --- examples/kubernetes ---


def start_pod(index: int, port: int, flags: list[str], folder: Path, count: int = 2) -> subprocess.Popen[str]:
    env = environment() | {
        **{"NNODES": str(count), "GPUS_PER_NODE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
        **{"JOB_COMPLETION_INDEX": str(index), "PYTHON": sys.executable, "TMPDIR": str(folder)},
    }
    log = open(folder / f"{index}.log", "w")
    command = [*CONTAINER, str(KUBERNETES / "pod.sh"), *flags]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=log)


def test_a_pod_of_the_kubernetes_example_exits_with_2_after_a_mistake(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    pod = start_pod(0, port, ["--num-layer", "4"], tmp_path, count=1)
    assert pod.communicate(timeout=HANG_TIMEOUT_S)[0] == "" and pod.returncode == 2
    log = (tmp_path / "0.log").read_text()
    assert log.startswith("error: unknown flag --num-layer") and log.count("unknown flag") == 2


@pytest.mark.full
def test_pods_of_the_kubernetes_example_save_after_sigterm_and_resume(
    data: list[str], tmp_path: Path
) -> None:
    save = ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    flags = [*MODEL, *ABSOLUTE, *NO_DROPOUT, *SHORT, *data, *save, "--pipeline-model-parallel-size", "2"]
    flags[flags.index("--train-iters") + 1] = "400"
    (port,) = free_ports(1)
    pods = [start_pod(index, port, flags, tmp_path) for index in range(2)]
    for line in pods[0].stdout or ():
        if (parse_log_line(line.rstrip("\n")) or {}).get("iteration", 0) >= 2:
            # Only one pod gets the signal, and all pods save.
            os.kill(children(pods[1].pid)[0], signal.SIGTERM)
            break
    pods[0].stdout.read()
    assert [pod.wait(HANG_TIMEOUT_S) for pod in pods] == [75, 75]
    saved = int((tmp_path / "run" / "latest").read_text().removeprefix("global_step"))
    assert 2 <= saved < 400
    flags += ["--exit-interval", str(saved + 1)]
    (port,) = free_ports(1)
    pods = [start_pod(index, port, flags, tmp_path) for index in range(2)]
    printed = [pod.communicate(timeout=HANG_TIMEOUT_S)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0]
    lines = [parse_log_line(line) or {} for line in printed[0].splitlines()]
    assert [line["iteration"] for line in lines if line.get("kind") == "training"] == [saved + 1]


def test_the_kubernetes_example_has_the_fields_that_its_pods_rely_on() -> None:
    service, job = yaml.safe_load_all((KUBERNETES / "job.yaml").read_text())
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    # The pods find the first pod under <job>-0.<subdomain>, and the Service selects the pods.
    name = job["metadata"]["name"]
    assert (
        env["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
        and pod["subdomain"] == service["metadata"]["name"]
    )
    assert service["spec"]["selector"] == {"job-name": name} and service["spec"]["publishNotReadyAddresses"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(env["NNODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(env["GPUS_PER_NODE"])
    actions = {
        tuple(rule["onExitCodes"]["values"]): rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule and rule["onExitCodes"]["containerName"] == container["name"]
    }
    assert actions == {(2,): "FailJob", (75,): "Ignore"} and pod["restartPolicy"] == "Never"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert pod["terminationGracePeriodSeconds"] > 30 and (ROOT / container["command"][0]).is_file()
    words = " ".join(container["args"])
    assert "--save=" in words and "--load=" in words
