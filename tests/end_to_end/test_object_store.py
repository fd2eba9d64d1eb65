"""Checkpoints in an object store through the command line, against a local server with S3's protocol."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.checkpoint.object_store.store import ObjectStore
from tests.end_to_end.command import Run, pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL, SHORT
from tests.support.object_store import Bucket, answer, kill_sender, lose_answer, refuse

FLAGS = [*MODEL, *ABSOLUTE, *SHORT, "--zero-stage", "1"]


@pytest.fixture
def mirrors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the mirrors of this test's runs."""
    folder = tmp_path / "mirrors"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture(scope="module")
def uninterrupted(data: list[str]) -> Run:
    return pretrain([*FLAGS, *data], processes=2).ok()


def flags_of(bucket: Bucket, data: list[str]) -> list[str]:
    return [*FLAGS, *data, "--save", bucket.url, "--load", bucket.url]


def checkpoints_in(bucket: Bucket) -> dict[int, str]:
    """Iteration -> folder of each checkpoint that has a `run.json`. Fails if such a checkpoint lacks a byte."""
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


def assert_nothing_is_left(bucket: Bucket, mirrors: Path) -> None:
    """Fails if anything but the complete checkpoints and `latest` is in the bucket, or a mirror on the disk."""
    complete = {*checkpoints_in(bucket).values(), "latest", "latest.json"}
    assert {key.partition("/")[0] for key in ObjectStore(bucket.url).list()} == complete
    assert list(mirrors.iterdir()) == []


def assert_same_losses(run: Run, uninterrupted: Run) -> None:
    expected = {step["iteration"]: step["lm_loss"] for step in uninterrupted.steps}
    for step in run.steps:
        assert step["lm_loss"] == pytest.approx(expected[step["iteration"]], rel=1e-5)


def test_a_run_resumes_from_a_bucket_on_another_layout_with_the_losses_of_an_uninterrupted_run(
    bucket: Bucket, data: list[str], mirrors: Path, uninterrupted: Run
) -> None:
    """While it saves, requests fail in each of the ways that are retried."""
    bucket.fault("PUT", answer(503, "SlowDown"), key="optim_states")
    bucket.fault("PUT", refuse, key="layer_05")
    bucket.fault("PUT", lose_answer, key="run.json")
    stopped = pretrain([*flags_of(bucket, data), "--exit-interval", "3"], processes=2).ok()
    assert f"saved {bucket.url}/global_step3 in " in stopped.stdout
    assert [*checkpoints_in(bucket)] == [3]
    bucket.heal()
    resumed = pretrain([*flags_of(bucket, data), "--pipeline-model-parallel-size", "2"], processes=2).ok()
    assert f"starting from {bucket.url}/global_step3, iteration 3\n" in resumed.stdout
    assert len(stopped.steps) == 3 and len(resumed.steps) == 2
    assert_same_losses(stopped, uninterrupted)
    assert_same_losses(resumed, uninterrupted)
    assert resumed.evaluations[0]["lm_loss"] == pytest.approx(
        uninterrupted.evaluations[0]["lm_loss"], rel=1e-5
    )
    assert_nothing_is_left(bucket, mirrors)
    # One listing, and each object once.
    listings = [request for request in bucket.requests if request.kind == "LIST"]
    assert [request.key for request in listings].count("run/") == 1
    read = [
        request.key for request in bucket.requests if request.kind == "GET" and "/owner/" not in request.key
    ]
    files = json.loads(ObjectStore(bucket.url).read(f"{checkpoints_in(bucket)[3]}/run.json"))["files"]
    expected = [*files, "run.json", "latest", "latest.json"]
    assert sorted(key.rpartition("/")[2] for key in read) == sorted(expected)


# (kind, key, number of the request, whether the request is done) of the request after which a rank is killed
KILLS = {
    "announcement": ("PUT", "saving-global_step3", 1, True),
    "first file": ("PUT", "global_step3.*optim_states", 1, False),
    "last file": ("PUT", "global_step3.*_states", 10, True),
    "latest.json before the commit": ("PUT", "latest.json", 5, True),
    "commit not done": ("PUT", "global_step3.*run.json", 1, False),
    "commit done": ("PUT", "global_step3.*run.json", 1, True),
    "latest": ("PUT", "latest$", 3, False),
    "end of the announcement": ("DELETE", "saving-global_step3", 1, False),
    "deletion announced": ("PUT", "saving-global_step1", 2, True),
    "run.json deleted": ("DELETE", "global_step1.*run.json", 1, True),
    "files deleted": ("DELETE", "global_step1.*optim_states", 1, True),
}
GATE_KILLS = ["last file", "run.json deleted"]


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        pytest.param(name, extra, id=f"{name}{' '.join(['', *extra])}", marks=marks)
        for name in KILLS
        for extra in ([], ["--async-save"], ["--save-format", "dcp"])
        for marks in [[] if name in GATE_KILLS and not extra else [pytest.mark.full]]
    ],
)
def test_a_start_after_a_kill_resumes_from_the_last_complete_checkpoint(
    name: str, extra: list[str], bucket: Bucket, data: list[str], mirrors: Path, uninterrupted: Run
) -> None:
    kind, key, number, is_done = KILLS[name]
    if extra == ["--save-format", "dcp"]:
        key, number = key.replace("optim_states", "distcp").replace("_states", "distcp"), min(number, 2)
        number = 5 if name == "latest.json before the commit" else number
    bucket.fault(kind, kill_sender(is_done=is_done), key=key, first=number)
    flags = [*flags_of(bucket, data), *extra, "--save-interval", "1", "--keep-last", "2"]
    killed = pretrain(flags, processes=2)
    assert killed.exit_code == -9
    last = max(checkpoints_in(bucket))
    assert last in (2, 3)
    bucket.heal()
    again = pretrain(flags, processes=2).ok()
    assert f"starting from {bucket.url}/global_step{last}, iteration {last}" in again.stdout
    assert_same_losses(killed, uninterrupted)
    assert_same_losses(again, uninterrupted)
    assert [*checkpoints_in(bucket)] == [4, 5]
    assert_nothing_is_left(bucket, mirrors)
