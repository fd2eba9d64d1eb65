"""Tests which checkpoints of an object store a start finds, and which objects it removes."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.files import add_checksum
from megatron.checkpoint.folders.objects import _COMMIT, ObjectFolder
from megatron.checkpoint.folders.of_run import Folders
from megatron.checkpoint.lineage.identity import LineageEntry, RunIdentity
from megatron.checkpoint.lineage.owner import Timing
from megatron.checkpoint.ranks import FolderTakenError
from megatron.errors import UserError
from megatron.files import open_regular, write_json
from megatron.object_store.cache import hold_cache
from megatron.object_store.store import ObjectStore, Retries
from tests.support.object_store import Bucket, Exchange, answer

FILE = "weights.pt"


class Run:
    """A run that saves checkpoints of one file."""

    def __init__(self, bucket: Bucket, disk: Path) -> None:
        self.folder, self.identity = ObjectFolder(bucket.url, disk), RunIdentity()
        self.folder.read()

    def upload(self, step: int, suffix: str) -> tuple[Path, LineageEntry]:
        name = f"saving-global_step{step}.{suffix}"
        self.folder.begin(name)
        saving = self.folder.staging(name)
        saving.mkdir(parents=True)
        (saving / FILE).write_text(suffix)
        self.folder.upload(saving, [FILE], lambda count: None)
        files = {FILE: {"bytes": 8}}
        assert [*saving.iterdir()] == [] and self.folder.size_mismatch(saving, files) is None
        run = {"state": {"iteration": step}, "files": files, **self.identity.record()}
        run = add_checksum(run)
        write_json(saving / "run.json", run)
        return saving, LineageEntry(f"global_step{step}", step, self.identity.run_id, run["sha256"])

    def save(self, step: int, suffix: str) -> None:
        self.identity = self.folder.publish(*self.upload(step, suffix), self.identity)


def folders_in(bucket: Bucket) -> set[str]:
    return {key.partition("/")[0] for key in ObjectStore(bucket.url).list()} - {"latest", "latest.json"}


def test_a_start_sees_the_complete_checkpoints_and_its_first_save_removes_the_rest(
    bucket: Bucket, tmp_path: Path
) -> None:
    run, store = Run(bucket, tmp_path / "first"), ObjectStore(bucket.url)
    run.save(1, "0000000a")
    run.save(2, "0000000b")
    run.upload(3, "0000000c")  # then the job is killed
    store._s3("PUT", "create_multipart_upload", "global_step3.0000000c/large")
    # The run did not announce these objects, so it does not own them.
    store.put("global_step7.0000000d/weights.pt", b"of a user")
    store._s3("PUT", "create_multipart_upload", "global_step7.0000000d/large")
    bucket.heal()
    again = Run(bucket, tmp_path / "second")
    assert bucket.counts() == {"LIST": 1, "GET": 4}
    assert sorted(path.name for path in again.folder.path.glob("global_*")) == [
        "global_step1",
        "global_step2",
    ]
    file = again.folder.path / "global_step2" / FILE
    assert str(file) == f"{bucket.url}/global_step2/{FILE}"
    assert file.stat().st_size == 8 and not os.path.exists(file)
    again.folder.fetch("global_step2", FILE, lambda: None)
    assert Path(os.fspath(file)).read_text() == "0000000b"
    named = pickle.loads(pickle.dumps(file))  # a rank that has not listed the folder
    assert named == file and not named.exists() and not os.path.exists(named)
    again.folder.remove_fetched()
    assert not os.path.exists(file) and os.path.exists(file.parent / "run.json")
    again.save(3, "0000000e")
    expected = {"global_step1.0000000a", "global_step2.0000000b", "global_step3.0000000e"}
    assert folders_in(bucket) == {*expected, "global_step7.0000000d"}
    uploads = store._s3("LIST", "list_multipart_uploads", "")["Uploads"]
    assert [upload["Key"] for upload in uploads] == ["run/global_step7.0000000d/large"]


@pytest.mark.parametrize("newest", [True, False])
def test_of_two_complete_folders_of_a_checkpoint_the_one_in_latest_json_counts(
    newest: bool, bucket: Bucket, tmp_path: Path
) -> None:
    """The job is killed after it has made the second folder visible, and before it deletes the first
    folder."""
    run, store = Run(bucket, tmp_path / "first"), ObjectStore(bucket.url)
    run.save(1, "0000000a")
    first = {key: store.read(key) for key in store.list() if "0000000a" in key}
    run.save(1, "0000000b")
    assert folders_in(bucket) == {"global_step1.0000000b"}
    time.sleep(1.1)  # objects' times have no fractions of a second
    for key, content in first.items():
        store.put(key, content)  # so it is the newer one
    if newest:
        store.delete(["latest.json"])
    again = Run(bucket, tmp_path / "second")
    assert again.folder.keys == {"global_step1": f"global_step1.0000000{'a' if newest else 'b'}"}
    again.save(2, "0000000c")
    assert folders_in(bucket) == {f"global_step1.0000000{'a' if newest else 'b'}", "global_step2.0000000c"}


@pytest.mark.parametrize("inner", ["save", "load"])
def test_one_of_two_folders_may_be_inside_the_other(inner: str, bucket: Bucket, tmp_path: Path) -> None:
    urls = {"save": bucket.url, "load": bucket.url} | {inner: f"{bucket.url}/inner"}
    for url in urls.values():
        ObjectStore(url).put("latest", url.encode())
    folders = Folders(tmp_path, **urls)
    for _ in range(2):  # the second start finds the files of the first
        folders.read()
        assert [(folders.at(url) / "latest").read_text() for url in urls.values()] == [*urls.values()]


def test_an_object_that_grows_after_the_listing_is_whole(bucket: Bucket, tmp_path: Path) -> None:
    store = ObjectStore(bucket.url)
    store.put("latest", b"global_step100")

    def grow(exchange: Exchange) -> None:
        store.put("latest", b"global_step1000")
        exchange.send(*exchange.forward())

    bucket.fault("GET", grow, key="latest")
    ObjectFolder(bucket.url, tmp_path).read()
    assert (tmp_path / "latest").read_bytes() == b"global_step1000"


def test_a_job_that_loses_the_folder_during_its_commit_does_not_complete_the_checkpoint(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = Run(bucket, tmp_path / "disk"), []
    uploaded = run.upload(1, "0000000a")
    quick = Retries(attempts=2, first_delay_s=0.001)
    assert _COMMIT.total_s + _COMMIT.request_s < Timing().stale_after_s
    monkeypatch.setattr("megatron.checkpoint.folders.objects._COMMIT", quick)
    bucket.fault("PUT", answer(503, "SlowDown"), key="run.json", times=2)

    def check_owner() -> None:
        calls.append(bucket.requests[-1].key)
        if len(calls) == 2:
            raise FolderTakenError("taken over")

    with pytest.raises(FolderTakenError):
        run.folder.publish(*uploaded, run.identity, check_owner)
    assert calls == ["run/latest.json", "run/global_step1.0000000a/run.json"]
    assert "global_step1.0000000a/run.json" not in ObjectStore(bucket.url).list()
    run.folder.publish(*uploaded, run.identity, lambda: None)
    assert "global_step1.0000000a/run.json" in ObjectStore(bucket.url).list()


def test_a_deletion_that_fails_halfway_is_ended_by_the_next(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(bucket, tmp_path / "disk")
    path = run.folder.path / "global_step1"
    run.save(1, "0000000a")
    bucket.fault("DELETE", answer(403, "AccessDenied"), key=FILE)
    with pytest.raises(PermissionError):
        run.folder.remove(path)
    run.save(2, "0000000b")
    run.folder.remove(path)
    assert folders_in(bucket) == {"global_step2.0000000b"}
    assert not path.exists() and [*run.folder.keys] == ["global_step2"]


def test_a_folder_with_other_files_is_not_deleted(bucket: Bucket, tmp_path: Path) -> None:
    run, store = Run(bucket, tmp_path / "disk"), ObjectStore(bucket.url)
    run.save(1, "0000000a")
    store.put("global_step1.0000000a/notes.txt", b"of a user")
    before = store.list()
    with pytest.raises(OSError, match=r"global_step1.0000000a/notes.txt, which run.json beside it does not"):
        run.folder.remove(run.folder.path / "global_step1")
    assert store.list() == before
    store.delete(["global_step1.0000000a/notes.txt"])
    run.folder.remove(run.folder.path / "global_step1")
    assert folders_in(bucket) == set() and not (run.folder.path / "global_step1").exists()
    assert not (tmp_path / "disk" / "global_step1").exists()


def test_a_name_that_leaves_the_folder_is_not_used(bucket: Bucket, tmp_path: Path) -> None:
    run, store = Run(bucket, tmp_path / "a" / "b" / "disk"), ObjectStore(bucket.url)
    run.save(1, "0000000a")
    for name in ("x/../../../../outside", "a b", "\\x"):
        store._s3("PUT", "put_object", f"global_step1.0000000a/{name}", Body=b"hostile")
    again = Run(bucket, tmp_path / "a" / "b" / "other")
    files = again.folder.tree.folders["global_step1"]
    assert sorted(files) == ["run.json", FILE] and not list(tmp_path.rglob("outside"))


def test_a_cache_is_shared_by_the_ranks_of_a_job_and_removed_by_the_last_or_by_a_later_start(
    tmp_path: Path,
) -> None:
    env = {"SLURM_TMPDIR": str(tmp_path), "WORLD_SIZE": "2", "MASTER_PORT": "1"}
    with hold_cache("n1", env) as first, hold_cache("n1", env) as second:
        assert first == second and first.is_dir()
        with hold_cache("n2", env) as other:  # a second node, simulated on this machine
            assert other != first
        assert [*tmp_path.iterdir()] == [first]
        program = (
            "import os, sys\nfrom megatron.object_store.cache import hold_cache\n"
            "with hold_cache('n1', {'SLURM_TMPDIR': sys.argv[1]}) as root:\n"
            "    (root / 's3').mkdir()\n    os._exit(0)"
        )
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
        (dead,) = set(tmp_path.iterdir()) - {first}
        with hold_cache("n3", env):
            assert not dead.exists() and first.exists()
    assert [*tmp_path.iterdir()] == []


def test_ranks_that_start_and_end_at_any_time_share_or_remove_caches(tmp_path: Path) -> None:
    env = {"SLURM_TMPDIR": str(tmp_path), "WORLD_SIZE": "2"}

    def start_and_end(rank: int) -> None:
        for start in range(300):
            with hold_cache(f"n{(rank + start) % 3}", env) as root:
                (root / f"rank{rank}").write_bytes(b"")
                (root / f"rank{rank}").unlink()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(start_and_end, range(6)))
    assert [*tmp_path.iterdir()] == []


def test_a_full_disk_of_the_cache_is_named(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold_cache("n1", {"SLURM_TMPDIR": str(tmp_path)}) as root:
        run = Run(bucket, root / "s3" / "run")
        run.save(1, "0000000a")

        def fail(*arguments: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match=f"in {root}: set SLURM_TMPDIR or TMPDIR to a folder on a larger"):
            run.folder.fetch("global_step1", FILE, lambda: None)
        assert [path.name for path in (run.folder.tree.cache / "global_step1").iterdir()] == ["run.json"]


def test_a_cache_that_is_not_a_folder_is_not_used(tmp_path: Path) -> None:
    env = {"SLURM_TMPDIR": str(tmp_path), "WORLD_SIZE": "2"}
    with hold_cache("n1", env) as root:
        pass
    root.symlink_to(tmp_path / "missing")
    with pytest.raises(UserError, match="it is not a folder"), hold_cache("n1", env):
        pass


def test_a_cache_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"SLURM_TMPDIR": str(tmp_path), "WORLD_SIZE": "2"}
    with hold_cache("n1", env) as root:
        pass
    root.mkdir()
    owner, getuid = os.getuid(), os.getuid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    wanted = root.with_name(root.name.replace(f"-{owner}-", f"-{owner + 1}-"))
    root.rename(wanted)
    with pytest.raises(Exception, match="it belongs to another user"), hold_cache("n1", env):
        pass
    monkeypatch.setattr(os, "getuid", getuid)
    assert json.dumps([path.name for path in tmp_path.iterdir()]) == json.dumps([wanted.name])


def test_a_folder_that_is_read_again_replaces_nothing(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(bucket, tmp_path / "disk")
    run.save(1, "0000000a")
    run.folder.read()
    run.save(2, "0000000b")
    assert folders_in(bucket) == {"global_step1.0000000a", "global_step2.0000000b"}


def test_a_checkpoint_is_complete_whatever_the_nodes_disk_does_after_the_commit(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(bucket, tmp_path / "disk")
    uploaded = run.upload(1, "0000000a")
    commit = run.folder._commit

    def fill_disk(*arguments: Any) -> None:
        commit(*arguments)
        monkeypatch.setattr(
            Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
        )

    monkeypatch.setattr(run.folder, "_commit", fill_disk)
    run.identity = run.folder.publish(*uploaded, run.identity)
    monkeypatch.undo()
    assert [entry.name for entry in run.identity.lineage] == ["global_step1"]
    assert json.loads((run.folder.path / "global_step1" / "run.json").read_bytes())["state"]["iteration"] == 1


def test_the_free_space_is_that_of_the_nodes_disk_before_anything_is_kept(tmp_path: Path) -> None:
    folder = ObjectFolder("s3://bucket/run", tmp_path / "not" / "yet")
    assert "MB are free there" in folder.note_on_space("")


def test_a_path_of_an_object_refuses_what_would_change_or_list_the_cache(tmp_path: Path) -> None:
    folder = ObjectFolder("s3://bucket/run", tmp_path)
    folder.tree.keep("global_step1/run.json", b"{}")
    path = folder.path / "global_step1"
    for name in ("mkdir", "unlink", "rename", "replace", "touch", "rmdir", "rglob", "walk", "write_text"):
        with pytest.raises(TypeError, match="s3://bucket/run/global_step1: objects are written"):
            getattr(path, name)("x")
    assert (path / "run.json").is_file() and path > folder.path
    with pytest.raises(FileNotFoundError, match="s3://bucket/run/global_step1/weights.pt"):
        open_regular(path / "weights.pt")
