"""Every script of examples/slurm runs with real sbatch on 2 nodes x 2 CPUs, with a small model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from tests.end_to_end.command import ROOT
from tests.end_to_end.flags import ABSOLUTE, MODEL, SHORT
from tests.slurm.conftest import EXAMPLES
from tests.support import HANG_TIMEOUT_S
from tests.support.slurm import CLUSTER, Job

TINY = {
    **{"NNODES": 2, "GPUS_PER_NODE": 2, "TP_SIZE": 2, "PP_SIZE": 2},
    **{"NUM_LAYERS": 2, "HIDDEN_SIZE": 32, "NUM_HEADS": 4, "SEQ_LENGTH": 32},
    **{"MICRO_BATCH_SIZE": 1, "GLOBAL_BATCH_SIZE": 4, "RAMPUP_BATCH_SIZE": "2 2 4"},
    **{"TRAIN_SAMPLES": 12, "LR_WARMUP_SAMPLES": 2, "LR_DECAY_SAMPLES": 12, "EVAL_ITERS": 0},
}
STEPS = 4  # of 2, 2, 4 and 4 samples
ON_BOTH_NODES = ("--nodes=2",)

Submit = Callable[..., Job]


def steps(log: str) -> list[int]:
    return [int(step) for step in re.findall(r"^ iteration +(\d+)/", log, re.MULTILINE)]


@pytest.fixture(scope="module")
def places(corpus: Path) -> dict[str, object]:
    """Returns the variables that name data and tokenizers."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=_tokenizer_file(corpus), eos_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.save_pretrained(corpus / "tokenizer")
    for name, part in (("train", "0:0.95"), ("valid", "0.95:1")):
        blend = f'"{name}: 1 {part} {corpus / "text_text_document"}"\n'
        (corpus / f"{name}-splits.txt").write_text(blend)
    return {
        "TRAIN_SPLITS": corpus / "train-splits.txt",
        "VALID_SPLITS": corpus / "valid-splits.txt",
        "DATA_PATH": corpus / "text_text_document",
        "VOCAB_FILE": corpus / "vocab.json",
        "MERGE_FILE": corpus / "merges.txt",
        "TOKENIZER": corpus / "tokenizer",
        "PAD_VOCAB_SIZE_TO": 640,
    }


def _tokenizer_file(corpus: Path) -> str:
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer(str(corpus / "vocab.json"), str(corpus / "merges.txt"))
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(corpus / "tokenizer.json"))
    return str(corpus / "tokenizer.json")


def train_exit_and_resume(
    submit: Submit, script: str, options: tuple[str, ...] = ON_BOTH_NODES, **variables: object
) -> Job:
    """Runs two jobs, one after the other. The first job exits after 2 steps. Returns the first job."""
    first = submit(script, "--exit-interval", "2", options=options, **variables)
    assert first.end() == 0, first.log()
    assert steps(first.log()) == [1, 2]
    assert "2 node(s) x 2 processes" in first.log()
    second = submit(script, options=options, **variables)
    assert second.end() == 0, second.log()
    assert re.search(r"starting from \S*global_step2, iteration 2", second.log())
    assert steps(second.log()) == [3, 4]
    return first


def test_a_second_start_finds_the_cluster_of_the_first(slurm: dict[str, str]) -> None:
    def daemons() -> dict[str, str]:
        return {file.name: file.read_text() for file in Path(slurm["SLURM_TEST_FOLDER"], "pid").iterdir()}

    before = daemons()
    subprocess.run([CLUSTER, "start"], env=slurm, check=True, timeout=HANG_TIMEOUT_S)
    assert len(before) == 4 and daemons() == before


def test_the_smoke_job_trains_and_resumes(submit: Submit) -> None:
    job = submit("smoke.slurm", GPUS_PER_NODE=1)  # the first start of each process takes most of the time
    assert job.end() == 0, job.log()
    assert steps(job.log()) == [1, 2, 3, 4, 5, 6]
    assert (
        job.log()
        .splitlines()[-1]
        .startswith("smoke: 2 node(s) x 1 processes trained 6 steps, saved and resumed")
    )


@pytest.fixture
def killed_conversion(tmp_path: Path) -> Path:
    """Returns a repository whose tools/ds_to_universal.py kills itself while it writes its third block."""
    repo = tmp_path / "killed_conversion"
    (repo / "tools").mkdir(parents=True)
    (repo / "examples").symlink_to(ROOT / "examples")
    (repo / "tools" / "ds_to_universal.py").write_text(f"""\
import itertools, os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from megatron.checkpoint.formats.native import NativeReader
from megatron.commands.ds_to_universal import main

blocks, numbers = NativeReader.read_blocks, itertools.count(1)

def then_kill(*args):
    for block in blocks(*args):
        if next(numbers) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield block

NativeReader.read_blocks = then_kill
main()
""")
    return repo


@pytest.mark.full
def test_104b_resumes_after_failures(
    submit: Submit, places: dict[str, object], killed_conversion: Path, tmp_path: Path
) -> None:
    variables = {**TINY, **places, "TRAIN_SAMPLES": 60, "SAVE_INTERVAL": 5}
    # Without --nodes, as typed, the job begins on one node.
    job = submit("tr8-104B.slurm", **variables)
    job.wait_for("/checkpoints/global_step5 in ")
    os.kill(job.rank(2), signal.SIGKILL)
    job.wait_for("checkpoint verification")
    job.control("scancel", "--batch", "--signal=USR2")  # as #SBATCH --signal=B:USR2@1800 does
    assert job.end() == 0, job.log()
    log = job.log()
    assert "started on 1 node(s) and needs NNODES=2" in log
    assert re.search(r"^error: rank 2 on n2, stage 1 .*: killed \(SIGKILL\)", log, re.MULTILINE)
    assert "restart 1 of 3, from the newest complete checkpoint" in log
    assert "the job's script requested a stop" in log and "is requeued and will resume" in log
    assert log.count("starting from runs/tr8-104B/checkpoints/global_step") == 2

    uninterrupted = submit("tr8-104B.slurm", options=ON_BOTH_NODES, RUN_DIR="other", **variables)
    assert uninterrupted.end() == 0, uninterrupted.log()
    assert losses(log) == losses(uninterrupted.log()) and len(losses(log)) == 16

    variables |= {"TP_SIZE": 1, "TRAIN_SAMPLES": 64}
    job = submit("resume-universal.slurm", options=ON_BOTH_NODES, **variables)
    assert job.end() == 2 and "global_step16_universal is not converted yet" in job.log()
    killed = submit("convert-universal.slurm", options=ON_BOTH_NODES, REPO=killed_conversion, WORKERS=1)
    assert killed.end() != 0, killed.log()
    checkpoints = tmp_path / "runs" / "tr8-104B" / "checkpoints"
    assert (checkpoints / "global_step16_universal.partial" / "unfinished").is_dir()
    convert = submit("convert-universal.slurm", options=ON_BOTH_NODES, WORKERS=1)
    after = (*ON_BOTH_NODES, f"--dependency=afterok:{convert.number}")
    job = submit("resume-universal.slurm", options=after, **variables)
    assert job.end() == 0, job.log()
    # A task that starts late finds that the other tasks are done.
    published = re.findall(r"global_step16_universal: \d+ parameters", convert.log())
    assert convert.end() == 0 and len(published) == 1, convert.log()
    assert "iteration 16" in re.search("starting from .*global_step16_universal.*", job.log())[0]
    assert "TP 1 x PP 2 x DP 2" in job.log()
    assert steps(job.log()) == [17]
    assert (tmp_path / "runs" / "tr8-104B-tp1-pp2" / "checkpoints" / "latest").read_text() == "global_step17"


def lose_node(slurm: dict[str, str], job: Job, node: str, disks: Path) -> None:
    """Ends the daemon and the tasks of a node, and wipes its disk. Slurm marks the node as down, and it comes
    back empty."""
    pid_file = Path(slurm["SLURM_TEST_FOLDER"], "pid", f"slurmd-{node}")
    daemon = psutil.Process(int(pid_file.read_text()))
    daemon.kill()
    while daemon.is_running() and daemon.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.1)
    pid_file.unlink()
    for process in job.processes(f"SLURMD_NODENAME={node}"):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(disks / node)
    down = ["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost"]
    subprocess.run(down, env=slurm, check=True)
    subprocess.run([CLUSTER, "start"], env=slurm, check=True, timeout=HANG_TIMEOUT_S)


@pytest.mark.full
def test_a_requeued_job_resumes_from_the_local_checkpoint_that_a_lost_node_leaves(
    submit: Submit, places: dict[str, object], slurm: dict[str, str], tmp_path: Path
) -> None:
    variables = {**TINY, **places, "RAMPUP_BATCH_SIZE": "", "TRAIN_SAMPLES": 1_000_000}
    local = {"SAVE_LOCAL": tmp_path / "disks" / "{node}", "SAVE_LOCAL_INTERVAL": 2}
    job = submit("tr8-104B.slurm", options=ON_BOTH_NODES, **variables, **local)
    job.wait_for(" on the nodes' disks, ", times=2)
    lose_node(slurm, job, "n2", tmp_path / "disks")
    job.wait_for("checkpoint verification")
    job.wait_for(" on the nodes' disks, ", times=3)
    job.control("scancel")
    job.end()
    first, line, second = re.split("^(starting from .*)", job.log(), flags=re.MULTILINE)
    saved = [int(step) for step in re.findall(r"^saved \S*global_step(\d+) on the nodes' disks", first, re.M)]
    words = (
        r"starting from \S*/disks/n1/\S*global_step(\d+), iteration \1 \(local checkpoint, no checkpoint in"
    )
    found = re.match(rf"{words} --save\)\. \d+ of its files were copied from other nodes to n2$", line)
    assert found and int(found[1]) >= saved[-1], line
    assert "initializing from scratch" in first and min(losses(second)) == int(found[1]) + 1
    common = losses(first).keys() & losses(second).keys()
    assert all(losses(first)[step] == losses(second)[step] for step in common)


def losses(log: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"^ iteration +(\d+)/.*lm loss: (\S+)", log, re.M)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "layers", "partition"),
    [
        # Embedding and head weigh as much as the layers between them.
        ("tr8-104B-mt5-32.slurm", 2, "type:embed:2|transformer:1"),
        ("tr11-176B-ml.slurm", 2, "type:transformer|embedding"),
    ],
)
def test_a_large_vocabulary(
    script: str, layers: int, partition: str, submit: Submit, places: dict[str, object]
) -> None:
    first = train_exit_and_resume(submit, script, **{**TINY, **places, "NUM_LAYERS": layers})
    assert f"--partition-method {partition}" in first.log()


@pytest.mark.full
def test_experts(submit: Submit, places: dict[str, object]) -> None:
    few = {"PP_SIZE": 1, "EP_SIZE": 4, "NUM_EXPERTS": 4, "EXPERTS_PER_TOKEN": 2, "TRAIN_SAMPLES": 16}
    first = train_exit_and_resume(submit, "olmoe-1B-7B.slurm", **{**TINY, **places, **few})
    assert "TP 2 x PP 1 x DP 2, EP 4, ZeRO stage 1" in first.log()


@pytest.mark.full
def test_8_bit_adam(submit: Submit, places: dict[str, object]) -> None:
    train_exit_and_resume(submit, "tr8b-104B-bnb.slurm", **TINY, **places)


@pytest.mark.full
def test_a_curriculum(submit: Submit, places: dict[str, object]) -> None:
    variables = {**TINY, **places, "CURRICULUM_START": 8, "CURRICULUM_STEPS": 4}
    tokens = {"TRAIN_TOKENS": 10_000, "LR_DECAY_TOKENS": 10_000, "TRAIN_SAMPLES": 4 * STEPS}
    train_exit_and_resume(submit, "tr8b-104B-cl.slurm", **{**variables, **tokens})


@pytest.mark.full
def test_a_sweep_runs_as_an_array_and_submits_only_what_is_missing(
    slurm: dict[str, str], places: dict[str, object], tmp_path: Path
) -> None:
    variables = {**TINY, **places, "METHODS": "type:transformer stages:9,9 memory", "STEPS": 2, "REPEAT": 2}
    env = {**slurm, **{name: str(value) for name, value in variables.items()}, "SBATCH_OPTIONS": "--time=10"}

    def sweep() -> str:
        words = ["bash", str(EXAMPLES / "sweep-partition.slurm")]
        run = subprocess.run(
            words, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=HANG_TIMEOUT_S
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    folder = tmp_path / "runs" / "sweep-partition"
    first = sweep()
    number = re.search(r"submitted job (\d+): an array of 4 runs", first)[1]
    assert (
        "nothing to submit: all other runs are done; 4 are in the queue" in sweep()
        or len(list(folder.glob("runs/*.json"))) > 0
    )
    job = Job(number, folder / "runs", slurm)
    assert job.end() == 0, job.log()
    assert re.findall(r"global batch size: +(\d+)", job.log()) == ["4"] * 8

    (folder / "runs" / "002-1.json").unlink()
    again = Job(re.search(r"submitted job (\d+): an array of 1 runs", sweep())[1], folder / "runs", slurm)
    assert again.end() == 0, again.log()
    assert "nothing to submit: all runs are done" in sweep()
    report = json.loads((folder / "report.json").read_text())
    assert [row["status"] for row in report["rows"]] == ["ok", "refused", "ok"]
    assert [row["processes"] for row in report["rows"] if row["measured"]] == [4, 4]
    assert all(row["measured"]["repeats"] == 2 for row in report["rows"] if row["measured"])
    assert report["losses"][0]["agrees"] and report["losses"][0]["runs"] == 4
    assert not list(tmp_path.glob("runs/**/global_step*"))


@pytest.mark.full
def test_srun_without_a_launcher_starts_a_run(slurm: dict[str, str], data: list[str], tmp_path: Path) -> None:
    flags = [*MODEL, *ABSOLUTE, *SHORT, *data, "--pipeline-model-parallel-size", "2", "--train-iters", "2"]
    run = subprocess.run(
        ["srun", "--nodes=2", "--ntasks=4", sys.executable, "-u", str(ROOT / "pretrain_gpt.py"), *flags],
        cwd=tmp_path,
        env=slurm,
        text=True,
        capture_output=True,
        timeout=HANG_TIMEOUT_S,
    )
    assert run.returncode == 0, run.stderr
    assert "4 processes = TP 1 x PP 2 x DP 2" in run.stdout
    assert steps(run.stdout) == [1, 2]


def kill_rank_2(env: dict[str, str], reports: Path) -> None:
    (path,) = reports.glob("megatron-*/*/rank-2.json")
    os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)


def cancel(env: dict[str, str], reports: Path) -> None:
    (path, _) = reports.glob("megatron-*/slurm-*")
    subprocess.run(["scancel", path.name.split("-")[1]], env=env, check=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (kill_rank_2, r"^error: rank 2 on n2, stage 1 \(pid \d+\), after iteration \d+: killed \(SIGKILL\)"),
        (cancel, r"^stopped by SIGTERM, after iteration (\d+): the same command resumes from iteration \1$"),
    ],
)
def test_srun_without_a_launcher_names_the_cause(
    action: Callable[..., None], expected: str, slurm: dict[str, str], data: list[str], tmp_path: Path
) -> None:
    flags = [
        *MODEL,
        *ABSOLUTE,
        *SHORT,
        *data,
        "--pipeline-model-parallel-size",
        "2",
        "--train-iters",
        "100000",
    ]
    flags += ["--save", str(tmp_path / "checkpoints"), "--load", str(tmp_path / "checkpoints")]
    with subprocess.Popen(
        ["srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", sys.executable, "-u"]
        + [str(ROOT / "pretrain_gpt.py"), *flags],
        env={**slurm, "TMPDIR": str(tmp_path)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        for line in process.stdout:
            if re.search("^ iteration +3/", line):
                action(slurm, tmp_path)
                break
        _, stderr = process.communicate(timeout=HANG_TIMEOUT_S)
    assert process.returncode != 0
    assert re.search(expected, stderr, re.MULTILINE), stderr
    assert "Traceback" not in stderr
    assert not list(tmp_path.glob("megatron-*/*"))


PROBE = """\
import os, sys, time
from megatron.cluster.exit_codes import exit_code, exit_on_error
from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.rank_reports import RankReport

report = RankReport.from_environment()
print(f"rank {report.rank}: restart {os.environ.get('SLURM_RESTART_COUNT', 0)}", flush=True)
with exit_on_error(report):
    if "--fail" in sys.argv:
        raise ValueError("broken")
    report.set_iteration(1)
while not report.stop_requested():
    time.sleep(0.1)
sys.exit(exit_code(report, ExitStatus.REQUEUE))
"""


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    """Returns a repository whose pretrain_gpt.py prints how the scripts treat its processes."""
    for folder in ("examples", "megatron"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "pretrain_gpt.py").write_text(PROBE)
    return tmp_path


@pytest.mark.full
def test_a_job_that_may_not_requeue_exits_with_75(submit: Submit, probe: Path) -> None:
    job = submit("tr8-104B.slurm", options=ON_BOTH_NODES, REPO=probe, REQUEUE="no", **TINY)
    job.wait_for(": restart 0", times=4)
    job.control("scancel", "--batch", "--signal=USR2")
    assert job.end() == 75, job.log()
    assert not list(probe.glob("runs/*/reports/*"))


@pytest.mark.full
def test_a_requeued_job_starts_again(submit: Submit, probe: Path) -> None:
    job = submit("tr8-104B.slurm", options=ON_BOTH_NODES, REPO=probe, **TINY)
    job.wait_for(": restart 0", times=4)
    job.control("scontrol", "requeue")
    job.wait_for(": restart 1", times=4)
    job.control("scancel")
    assert job.end() != 0


@pytest.mark.full
def test_a_failure_that_comes_again_ends_the_job_with_its_cause_last(submit: Submit, probe: Path) -> None:
    job = submit("tr8-104B.slurm", "--fail", options=ON_BOTH_NODES, REPO=probe, MAX_RESTARTS=1, **TINY)
    assert job.end() == 1
    lines = job.log().splitlines()
    assert lines.count("restart 1 of 1, from the newest complete checkpoint") == 1
    assert re.search(r"^error: rank \d on n[12] \(pid \d+\), .*: ValueError: broken$", lines[-1])
    assert job.log().count("ValueError: broken") == 4  # a traceback and a sentence in each run


TR8_LAYOUT = "512 processes = TP 4 x PP 32 x DP 4"
# srun writes down the flags with which it would start pretrain_gpt.py.
STUBS = {
    "scontrol": '[ "$2" = hostnames ] && echo localhost || true',
    "sinfo": "true",
    "srun": 'while [[ $1 != */pretrain_gpt.py ]]; do shift; done; printf "%s\\n" "${@:2}" >"$FLAGS"',
}


# The smoke job runs these commands, and test_slurm_examples.py parses the flags of every script.
@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "nodes", "words", "layout"),
    [
        ("tr8-104B.slurm", 128, 50_257, TR8_LAYOUT),
        ("tr8-104B-mt5-32.slurm", 32, 250_100, "128 processes = TP 4 x PP 32 x DP 1"),
        ("tr11-176B-ml.slurm", 48, 250_680, "384 processes = TP 4 x PP 12 x DP 8"),
        ("tr8b-104B-bnb.slurm", 128, 50_257, TR8_LAYOUT),
        ("tr8b-104B-cl.slurm", 128, 50_257, TR8_LAYOUT),
    ],
)
def test_the_real_size_passes_a_dry_run(
    script: str, nodes: int, words: int, layout: str, tmp_path: Path
) -> None:
    """Runs the unchanged script with stubs instead of Slurm."""
    for name, commands in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{commands}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": "localhost"}
    job["MAX_RESTARTS"] = "0"  # without processes there are no reports of their success
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FLAGS": str(tmp_path / "flags")}
    subprocess.run(
        ["bash", str(EXAMPLES / script)],
        cwd=ROOT,
        env={**os.environ, **job, **path, "PYTHON": sys.executable, "RUN_DIR": str(tmp_path)},
        timeout=HANG_TIMEOUT_S,
    )
    flags = (tmp_path / "flags").read_text().splitlines()
    flags += ["--dry-run", "--world-size", layout.split()[0], "--vocab-size", str(words)]
    run = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_TIMEOUT_S,
    )
    assert run.returncode == 0, run.stderr
    assert layout in run.stdout


@pytest.mark.parametrize(
    "script", sorted({path.name for path in EXAMPLES.glob("*.slurm")} - {"sweep-partition.slurm"})
)
def test_outside_slurm_a_script_says_how_to_start_it(script: str) -> None:
    run = subprocess.run(
        ["bash", str(EXAMPLES / script)], capture_output=True, text=True, timeout=HANG_TIMEOUT_S
    )
    assert run.returncode == 2
    assert run.stderr == f"error: not inside a Slurm job: start the script with sbatch {EXAMPLES / script}\n"


def test_a_script_away_from_the_repository_says_how_to_find_it(tmp_path: Path) -> None:
    copy = tmp_path / "copy.slurm"
    copy.write_text((EXAMPLES / "tr8-104B.slurm").read_text())
    run = subprocess.run(
        ["bash", str(copy)], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_TIMEOUT_S
    )
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1] == "error: set REPO to the folder of the repository"


@pytest.mark.full
def test_an_array_prepares_the_indices_of_a_run(
    submit: Submit, places: dict[str, object], corpus: Path, tmp_path: Path
) -> None:
    sets = [tmp_path / f"set{number}" for number in range(3)]
    for path in sets:
        for ending in (".bin", ".idx"):
            shutil.copy((corpus / "text_text_document").with_suffix(ending), path.with_suffix(ending))
    blend = ", ".join(f"1 0:1 {path}" for path in sets)
    (tmp_path / "splits.txt").write_text(f'"all: {blend}"\n')
    splits = {f"{name}_SPLITS": tmp_path / "splits.txt" for name in ("TRAIN", "VALID")}
    options = ("--array=1-2", "--cpus-per-task=1")
    job = submit("prepare-indices.slurm", options=options, **{**TINY, **places, **splits})
    assert job.end() == 0, job.log()
    assert sorted(re.findall(r"^(\d+) data set\(s\), ", job.log(), re.MULTILINE)) == ["1", "2"]
    run = submit(
        "tr11-176B-ml.slurm",
        "--require-prepared-indices",
        "--exit-interval",
        "1",
        options=ON_BOTH_NODES,
        **{**TINY, **places, **splits},
    )
    assert run.end() == 0, run.log()
    assert steps(run.log()) == [1] and "rank 0 builds" not in run.log()


@pytest.mark.full
def test_an_array_tokenizes_the_files_and_a_job_that_waits_for_it_merges_them(
    submit: Submit, places: dict[str, object], corpus: Path, tmp_path: Path
) -> None:
    documents = (corpus / "text.jsonl").read_text().splitlines(keepends=True)
    for part in range(4):
        share = documents[part * len(documents) // 4 : (part + 1) * len(documents) // 4]
        (tmp_path / f"part{part}.jsonl").write_text("".join(share))
    variables = {"INPUT": tmp_path / "part*.jsonl", "TOKENIZER": corpus / "tokenizer", "WORKERS": 1}
    job = submit("preprocess.slurm", options=("--array=1-2", "--cpus-per-task=1"), **variables)
    assert job.end() == 0, job.log()
    # The log of the merge may already be there.
    assert len(re.findall(r"^tokens/part\d_text_document: ", job.log(), re.MULTILINE)) == 4
    merged = tmp_path / "tokens" / "all_text_document"
    deadline = time.monotonic() + HANG_TIMEOUT_S
    while not merged.with_suffix(".idx").exists():
        assert time.monotonic() < deadline, job.log()
        time.sleep(0.2)
    for ending in (".bin", ".idx"):
        expected = (corpus / "text_text_document").with_suffix(ending)
        assert merged.with_suffix(ending).read_bytes() == expected.read_bytes()
