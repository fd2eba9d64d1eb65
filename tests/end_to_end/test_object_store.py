"""Commands save to and load from an object store, which is a local server with S3's protocol."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.object_store.store import ObjectStore
from megatron.training.log_lines import parse_log_line
from tests.end_to_end.clone import commands_in, make_clone
from tests.end_to_end.clone import run as run_command
from tests.end_to_end.command import Run, pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL, SHORT
from tests.end_to_end.test_starts import start
from tests.support import HANG_TIMEOUT_S
from tests.support.object_store import Bucket, answer, kill_sender, lose_answer, refuse
from tests.support.ports import free_ports

FLAGS = [*MODEL, *ABSOLUTE, *SHORT, "--zero-stage", "1"]


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of the caches of this test's runs."""
    folder = tmp_path / "caches"
    folder.mkdir()
    monkeypatch.setenv("SLURM_TMPDIR", str(folder))
    return folder


@pytest.fixture(scope="module")
def uninterrupted(data: list[str]) -> Run:
    return pretrain([*FLAGS, *data], processes=2).ok()


def flags_of(bucket: Bucket, data: list[str]) -> list[str]:
    return [*FLAGS, *data, "--save", bucket.url, "--load", bucket.url]


def checkpoints_in(bucket: Bucket) -> dict[int, str]:
    """Returns iteration -> folder of each checkpoint that has a `run.json`. Fails if a checkpoint lacks a
    byte."""
    store = ObjectStore(bucket.url)
    listed, found = store.list(), {}
    for key in listed:
        folder, _, name = key.partition("/")
        if name == "run.json":
            run = json.loads(store.read(key))
            for file, facts in run["files"].items():
                assert listed[f"{folder}/{file}"].size == facts["bytes"]
            found[run["state"]["iteration"]] = folder
    return found


def assert_nothing_is_left(bucket: Bucket, caches: Path) -> None:
    """Fails if the bucket contains more than complete checkpoints and `latest`, or if a cache is on the
    disk."""
    complete = {*checkpoints_in(bucket).values(), "latest", "latest.json"}
    assert {key.partition("/")[0] for key in ObjectStore(bucket.url).list()} == complete
    assert list(caches.iterdir()) == []


def assert_same_losses(run: Run, uninterrupted: Run) -> None:
    expected = {step["iteration"]: step["lm_loss"] for step in uninterrupted.steps}
    for step in run.steps:
        assert step["lm_loss"] == pytest.approx(expected[step["iteration"]], rel=1e-5)


def test_a_run_resumes_from_a_bucket_on_another_layout_with_the_losses_of_an_uninterrupted_run(
    bucket: Bucket, data: list[str], caches: Path, uninterrupted: Run
) -> None:
    """While the run saves, requests fail in each of the ways that are retried."""
    bucket.fault("PUT", answer(503, "SlowDown"), key="optim_states")
    bucket.fault("PUT", refuse, key="layer_05")
    bucket.fault("PUT", lose_answer, key="run.json")
    stopped = pretrain([*flags_of(bucket, data), "--exit-interval", "3"], processes=2).ok()
    assert f"saved {bucket.url}/global_step3 in " in stopped.stdout
    assert [*checkpoints_in(bucket)] == [3]
    bucket.heal()
    resumed = pretrain([*flags_of(bucket, data), "--pipeline-model-parallel-size", "2"], processes=2).ok()
    requests = [request for request in bucket.requests if "/owner/" not in request.key]
    assert f"starting from {bucket.url}/global_step3, iteration 3\n" in resumed.stdout
    assert len(stopped.steps) == 3 and len(resumed.steps) == 2
    assert_same_losses(stopped, uninterrupted)
    assert_same_losses(resumed, uninterrupted)
    assert resumed.evaluations[0]["lm_loss"] == pytest.approx(
        uninterrupted.evaluations[0]["lm_loss"], rel=1e-5
    )
    assert_nothing_is_left(bucket, caches)
    # The start lists the bucket once, and reads each object once.
    assert [request.key for request in requests if request.kind == "LIST"].count("run/") == 1
    read = [request.key for request in requests if request.kind == "GET"]
    files = json.loads(ObjectStore(bucket.url).read(f"{checkpoints_in(bucket)[3]}/run.json"))["files"]
    expected = [*files, "run.json", "latest", "latest.json"]
    assert sorted(key.rpartition("/")[2] for key in read) == sorted(expected)


@pytest.mark.full
def test_two_nodes_have_caches_of_their_own(
    bucket: Bucket, data: list[str], caches: Path, uninterrupted: Run
) -> None:
    """Each rank uses the cache of its node."""
    flags = flags_of(bucket, data)
    for extra, line in (
        [["--exit-interval", "3"], ""],
        [[], f"from {bucket.url}/global_step3, iteration 3\n"],
    ):
        (port,) = free_ports(1)
        ranks = [start(rank, port, [*flags, *extra], SLURMD_NODENAME=f"n{rank}") for rank in range(2)]
        (stdout, stderr), _ = [rank.communicate(timeout=HANG_TIMEOUT_S) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], stderr
        assert line in stdout
        assert_same_losses(Run(0, stdout, stderr, set()), uninterrupted)
    assert [*checkpoints_in(bucket)] == [3, 5]
    assert_nothing_is_left(bucket, caches)


# (kind, key, number of the request, whether the request is done) of the request after which a rank is killed.
KILLS = {
    "announcement": ("PUT", "saving-global_step3", 1, True),
    "first file": ("PUT", "global_step3.*optim_states", 1, False),
    "last file": ("PUT", "global_step3.*_states", 9, True),
    "latest.json before the commit": ("PUT", "latest.json", 5, True),
    "commit not done": ("PUT", "global_step3.*run.json", 1, False),
    "commit done": ("PUT", "global_step3.*run.json", 1, True),
    "latest": ("PUT", "latest$", 3, False),
    "end of the announcement": ("DELETE", "saving-global_step3", 1, False),
    "deletion announced": ("PUT", "saving-global_step1", 2, True),
    "run.json deleted": ("DELETE", "global_step1.*run.json", 1, True),
    "files deleted": ("DELETE", "global_step1.*optim_states", 1, True),
}


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        pytest.param(name, extra, id=f"{name}{' '.join(['', *extra])}", marks=marks)
        for name in KILLS
        for extra in ([], ["--async-save"], ["--save-format", "dcp"])
        for marks in [[] if name == "last file" and not extra else [pytest.mark.full]]
    ],
)
def test_a_start_after_a_kill_resumes_from_the_last_complete_checkpoint(
    name: str, extra: list[str], bucket: Bucket, data: list[str], caches: Path, uninterrupted: Run
) -> None:
    kind, key, number, is_done = KILLS[name]
    if extra == ["--save-format", "dcp"]:
        key, number = key.replace("optim_states", "distcp").replace("_states", "distcp"), min(number, 2)
        number = 5 if name == "latest.json before the commit" else number
    bucket.fault(kind, kill_sender(is_done=is_done), key=key, first=number)
    flags = [*flags_of(bucket, data), *extra, "--save-interval", "1", "--keep-last", "2"]
    killed = pretrain(flags, processes=2)
    assert -9 in killed.rank_exit_codes
    last = max(checkpoints_in(bucket))
    assert last in (2, 3)
    bucket.heal()
    again = pretrain(flags, processes=2).ok()
    assert f"starting from {bucket.url}/global_step{last}, iteration {last}" in again.stdout
    assert_same_losses(killed, uninterrupted)
    assert_same_losses(again, uninterrupted)
    assert [*checkpoints_in(bucket)] == [4, 5]
    assert_nothing_is_left(bucket, caches)


@pytest.mark.full
@pytest.mark.parametrize("extra", [[], ["--async-save"]], ids=["direct", "background"])
def test_a_save_that_fails_leaves_the_checkpoint_before(
    extra: list[str], bucket: Bucket, data: list[str], caches: Path, uninterrupted: Run
) -> None:
    """A lost permission is not retried. After the failure training continues only if the save was in the
    background."""
    bucket.fault("PUT", answer(403, "AccessDenied"), key="global_step3.*layer_05")
    flags = [*flags_of(bucket, data), *extra, "--save-interval", "1"]
    run = pretrain(flags, processes=2)
    if extra:
        assert f"warning: checkpoint {bucket.url}/global_step3 was not saved (rank " in run.ok().stdout
        assert sorted(checkpoints_in(bucket)) == [1, 2, 4, 5]
    else:
        (error,) = run.errors
        assert run.exit_code == 2 and f"checkpoint {bucket.url}/global_step3 cannot be written (" in error
        assert error.endswith(": fix this, then the run resumes from iteration 2")
        assert sorted(checkpoints_in(bucket)) == [1, 2]
        bucket.heal()
        assert "/global_step2, iteration 2" in pretrain(flags, processes=2).ok().stdout
    assert_nothing_is_left(bucket, caches)


@pytest.mark.full
def test_the_documented_command(
    bucket: Bucket, corpus: Path, data: list[str], caches: Path, tmp_path: Path
) -> None:
    (command,) = commands_in("docs/object_store.md")
    command = command.replace("s3://bucket/run", bucket.url).replace("--nproc", "--standalone --nproc")
    clone, flags = make_clone(tmp_path, corpus), " ".join([*FLAGS, *data])
    first, again = (run_command(command, clone, FLAGS=flags) for _ in range(2))
    assert f"saved {bucket.url}/global_step5 in " in first
    assert f"starting from {bucket.url}/global_step5, iteration 5\n" in again
    assert [*checkpoints_in(bucket)] == [5]
    assert_nothing_is_left(bucket, caches)


@pytest.mark.full
@pytest.mark.parametrize("save_format", ["native", "dcp"])
def test_saves_in_the_background_with_deletions(
    save_format: str, bucket: Bucket, data: list[str], caches: Path, uninterrupted: Run
) -> None:
    flags = [*flags_of(bucket, data), "--save-interval", "1", "--async-save", "--save-format", save_format]
    first = pretrain([*flags, "--exit-interval", "3"], processes=2).ok()
    assert sorted(checkpoints_in(bucket)) == [1, 2, 3]
    again = pretrain([*flags, "--keep-last", "2", "--tensor-model-parallel-size", "2"], processes=2).ok()
    assert f"starting from {bucket.url}/global_step3, iteration 3\n" in again.stdout
    for finished in (first, again):
        assert_same_losses(finished, uninterrupted)
    assert sorted(checkpoints_in(bucket)) == [4, 5]
    assert_nothing_is_left(bucket, caches)


def no_credentials(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)


def no_access(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.fault("LIST|GET|HEAD|PUT", answer(403, "AccessDenied"), times=1e9)


def only_reads(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.fault("PUT", answer(403, "AccessDenied"), times=1e9)


def no_bucket(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    object.__setattr__(bucket, "url", "s3://no-such-bucket/run")


# Name -> (flags beside --save and --load, what is done before the run, the beginning of the error).
MISTAKES: dict[str, tuple[list[str], Callable[..., None] | None, str]] = {
    "no bucket": ([], no_bucket, "--save s3://no-such-bucket/run cannot be read (LIST: "),
    "no access": ([], no_access, "--save {url} cannot be read (LIST: "),
    "only reads": ([], only_reads, "--save {url}: owner-000001-"),
    "no credentials": ([], no_credentials, "--save {url} cannot be read ("),
    "scheme": (["--save", "ftp://host/run"], None, "ftp://host/run: unknown scheme. Expected a folder, or "),
    "in a checkpoint": (["--save", "{url}/global_step4/x"], None, "--save {url}/global_step4/x is in a "),
    "credentials": (
        ["--load", "s3://KEY:a/SECRET@bucket/run"],
        None,
        "--load s3://...@bucket/run: expected a URL without credentials; set AWS_",
    ),
    "no such folder": (["--load", "{url}/typo"], None, "--load {url}/typo does not exist: pass an existing"),
    "local": (["--save-local", "x", "--save-local-interval", "1"], None, "--save-local with {url}: expected"),
    "local and --load": (
        ["--save", "{disk}", "--save-local", "x", "--save-local-interval", "1"],
        None,
        "--save-local with {url}: expected a folder of a file system",
    ),
    "Hugging Face": (["--save-hf-at-end"], None, "--save-hf-at-end with {url}: expected a folder of a file"),
    "universal": (["--universal_checkpoint"], None, "--universal_checkpoint with {url}: expected a folder"),
    "flags": (["--use-checkpoint-args"], None, "--use-checkpoint-args with --load {url}: expected a folder"),
}
GATE_MISTAKES = ["no bucket", "local and --load"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in GATE_MISTAKES else pytest.mark.full) for name in MISTAKES]
)
def test_a_mistake_is_one_sentence(
    name: str,
    bucket: Bucket,
    data: list[str],
    caches: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    extra, change, sentence = MISTAKES[name]
    if change is not None:
        change(bucket, monkeypatch)
    given = [flag.format(url=bucket.url, disk=tmp_path / "save") for flag in extra]
    run = pretrain([*flags_of(bucket, data), *given], processes=2)
    (error,) = run.errors
    assert run.exit_code == 2 and error.partition("error: ")[2].startswith(sentence.format(url=bucket.url))
    assert len(run.stderr.splitlines()) == 1 and list(caches.iterdir()) == []


@pytest.mark.full
def test_two_jobs_in_one_folder_of_a_bucket(bucket: Bucket, data: list[str], caches: Path) -> None:
    """The second job stops at its start, and the first continues."""
    second: list[Run] = []

    def start_another(line: str, pids: list[int]) -> None:
        if (parse_log_line(line) or {}).get("iteration") == 2:
            second.append(pretrain(flags_of(bucket, data), processes=2))

    first = pretrain([*flags_of(bucket, data), "--save-interval", "1"], processes=2, on_line=start_another)
    assert len(first.ok().steps) == 5
    (error,) = second[0].errors
    assert second[0].exit_code == 2 and f"--save {bucket.url} is in use by another run on" in error
    assert_nothing_is_left(bucket, caches)


@pytest.mark.full
def test_other_ways_to_use_a_bucket(bucket: Bucket, data: list[str], caches: Path, tmp_path: Path) -> None:
    """A run begins in a file system and continues in a bucket. A second run starts from one of its
    checkpoints. An evaluation reads the bucket."""
    local, flags = str(tmp_path / "local"), [*FLAGS, *data, "--save-interval", "1"]
    pretrain([*flags, "--exit-interval", "2", "--save", local, "--load", local], processes=2).ok()
    to_bucket = [*flags, "--load", local, "--save", bucket.url, "--save-interval", "1"]
    moved = pretrain(to_bucket, processes=2).ok()
    assert f"starting from {local}/global_step2, iteration 2\n" in moved.stdout
    assert sorted(checkpoints_in(bucket)) == [3, 4, 5]
    shutil.rmtree(local)  # the command can be repeated without this folder
    repeated = pretrain(to_bucket, processes=2).ok()
    assert f"starting from {bucket.url}/global_step5, iteration 5" in repeated.stdout, repeated.stdout
    for name in ("global_step4", checkpoints_in(bucket)[4]):
        back = str(tmp_path / name)
        started = pretrain([*flags, "--load", f"{bucket.url}/{name}", "--save", back], processes=2).ok()
        assert f"starting from {bucket.url}/global_step4, iteration 4\n" in started.stdout
        again = pretrain([*flags, "--load", f"{bucket.url}/{name}", "--save", back], processes=2).ok()
        assert f"starting from {back}/global_step5, iteration 5 (" in again.stdout
    evaluated = pretrain([*FLAGS, *data, "--load", bucket.url, "--eval-only"], processes=2).ok()
    assert evaluated.evaluations == moved.evaluations
    assert_nothing_is_left(bucket, caches)


@pytest.mark.full
def test_a_damaged_object_is_not_used_and_latest_can_be_set_by_hand(
    bucket: Bucket, data: list[str], caches: Path
) -> None:
    flags, store = [*flags_of(bucket, data), "--save-interval", "1"], ObjectStore(bucket.url)
    pretrain(flags, processes=2).ok()
    (damaged, *_) = (key for key in store.list(checkpoints_in(bucket)[5]) if "optim_states" in key)
    content = bytearray(store.read(damaged))
    content[len(content) // 2] ^= 1
    store.put(damaged, bytes(content))
    run = pretrain([*flags, "--train-iters", "5"], processes=2).ok()
    assert f"starting from {bucket.url}/global_step4, iteration 4 (" in run.stdout
    assert "is damaged: its digest differs" in run.stdout
    time.sleep(1.1)  # objects' times have no fractions of a second
    store.put("latest", b"global_step2\n")
    run = pretrain(flags, processes=2).ok()
    assert f"starting from {bucket.url}/global_step2, iteration 2 (latest was set by hand" in run.stdout
    assert sorted(checkpoints_in(bucket)) == [1, 2, 3, 4, 5]
    assert_nothing_is_left(bucket, caches)
