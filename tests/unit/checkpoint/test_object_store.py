"""Tests `ObjectStore` with a server that has S3's protocol, and that fails, resets connections and hangs."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.object_store.store import ObjectStore, Retries, check_url, is_url
from tests.end_to_end.command import ROOT
from tests.support import HANG_TIMEOUT_S
from tests.support.object_store import (
    Action,
    Bucket,
    answer,
    cut_after,
    first_upload_only,
    hang,
    kill_sender,
    lose_answer,
    refuse,
    small_pages,
)

# The smallest part that S3 accepts.
PART = 5 * 2**20
ALL = "PUT|GET|HEAD|LIST|CREATE|PART|COMPLETE|DELETE"
QUICK = Retries(attempts=4, first_delay_s=0.001, max_delay_s=0.002)


@pytest.fixture
def store(bucket: Bucket) -> ObjectStore:
    """Returns a store with short waits and small parts."""
    return ObjectStore(bucket.url, QUICK, PART)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Returns a file of three parts. The last part is smaller."""
    path = tmp_path / "large"
    path.write_bytes(os.urandom(2 * PART + 12_345))
    return path


def download(store: ObjectStore, key: str, path: Path, size: int) -> bytes:
    """Downloads an object. Returns the bytes that the download writes."""
    store.download(key, path, size)
    return path.read_bytes()


def test_objects_are_written_listed_read_and_deleted(bucket: Bucket, store: ObjectStore) -> None:
    assert store.list() == {}
    for key in ("step1/a", "step1/deep/b", "step10/a", "step1", "empty"):
        store.put(key, key.encode() if key != "empty" else b"")
    # The name of a folder is not a prefix: objects of a run whose name is longer do not belong to this run.
    ObjectStore(f"{bucket.url}-2").put("other", b"")
    bucket.heal()
    assert sorted(store.list()) == ["empty", "step1", "step1/a", "step1/deep/b", "step10/a"]
    assert {key: info.size for key, info in store.list("step1").items()} == {"step1/a": 7, "step1/deep/b": 12}
    assert bucket.counts() == {"LIST": 2}
    assert store.list("step1/") == store.list("step1") and store.list("step") == {}
    bucket.heal()
    assert [store.read("step1/deep/b"), store.read("empty")] == [b"step1/deep/b", b""]
    assert [store.read("step1/a", 2), store.read("step1/a", 0, 4), store.read("step1/a", 4, 6)] == [
        b"ep1/a",
        b"step",
        b"1/",
    ]
    assert bucket.counts() == {"GET": 5}
    store.delete(["step1/a", "missing", "step1"])
    assert bucket.counts() == {"GET": 5, "DELETE": 1}
    assert sorted(store.list()) == ["empty", "step1/deep/b", "step10/a"]


def test_keys_that_are_no_names_of_files_are_not_listed(bucket: Bucket, store: ObjectStore) -> None:
    for key in ("a b+c%2F/ü", "folder/", "../x", "a/../../x", "a//x", "./x"):
        store.put(key, b"x")
    assert store.list().keys() == {"a b+c%2F/ü"}
    assert store.read("a b+c%2F/ü") == b"x"


def test_more_objects_than_one_answer_or_deletion_holds(bucket: Bucket, store: ObjectStore) -> None:
    keys = {f"{index}" for index in range(7)}
    for key in keys:
        store.put(key, b"x")
    bucket.fault("LIST", small_pages(3), times=10)
    assert store.list().keys() == keys
    assert bucket.count("LIST") == 3
    more = keys | {f"missing/{index}" for index in range(2000)}
    store.delete(more)
    batches = [request.key.split("\n") for request in bucket.requests if request.kind == "DELETE"]
    assert [len(batch) for batch in batches] == [1000, 1000, 7]
    assert {key for batch in batches for key in batch} == {f"run/{key}" for key in more}
    assert store.list() == {}


def test_large_files_travel_in_parts(bucket: Bucket, store: ObjectStore, large: Path, tmp_path: Path) -> None:
    store.put_file("large", large)
    assert bucket.counts() == {"CREATE": 1, "PART": 3, "COMPLETE": 1}
    assert download(store, "large", tmp_path / "copy", large.stat().st_size) == large.read_bytes()
    assert bucket.count("GET") == 3
    small = tmp_path / "small"
    small.write_bytes(b"small")
    store.put_file("small", small)
    assert bucket.count("PUT") == 1 and store.read("small") == b"small"


BODIES = "PUT|PART"


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        pytest.param(answer(503, "SlowDown"), ALL, id="slow-down"),
        pytest.param(answer(500, "InternalError"), ALL, id="internal-error", marks=pytest.mark.full),
        pytest.param(answer(502), ALL, id="gateway", marks=pytest.mark.full),
        pytest.param(answer(400, "RequestTimeout"), BODIES, id="slow-body"),
        pytest.param(answer(400, "BadDigest"), BODIES, id="damaged-body", marks=pytest.mark.full),
        pytest.param(refuse, ALL, id="reset"),
        pytest.param(lose_answer, ALL, id="lost-answer"),
        pytest.param(cut_after(3), "GET|LIST", id="cut-answer"),
    ],
)
def test_transient_errors_are_retried(
    bucket: Bucket, store: ObjectStore, large: Path, tmp_path: Path, fault: Action, kinds: str
) -> None:
    """The first requests of each kind fail, and every operation must still succeed."""
    for kind in kinds.split("|"):
        bucket.fault(kind, fault, times=2)
    store.put("small", b"small")
    store.put_file("large", large)
    sizes = {"small": 5, "large": large.stat().st_size}
    assert {key: info.size for key, info in store.list().items()} == sizes
    assert store.read("small") == b"small"
    assert download(store, "large", tmp_path / "copy", store.info("large").size) == large.read_bytes()
    store.delete(sizes)
    assert store.list() == {}
    needed = {"PUT": 1, "CREATE": 1, "PART": 3, "COMPLETE": 1, "LIST": 2, "GET": 4, "HEAD": 1, "DELETE": 1}

    for kind, count in needed.items():
        assert bucket.count(kind) >= count + 2 * (kind in kinds.split("|")), kind


def test_only_the_failed_part_or_block_is_repeated(
    bucket: Bucket, store: ObjectStore, large: Path, tmp_path: Path
) -> None:
    bucket.fault("PART", answer(503, "SlowDown"), first=2)
    bucket.fault("GET", cut_after(100_000), first=2)
    store.put_file("large", large)
    assert download(store, "large", tmp_path / "copy", large.stat().st_size) == large.read_bytes()
    assert bucket.counts() == {"CREATE": 1, "PART": 4, "COMPLETE": 1, "GET": 4}


def calls(store: ObjectStore, path: Path) -> dict[str, Callable[[], Any]]:
    """Returns a call of each method, by the kind of the method's first request."""
    return {
        "LIST": store.list,
        "GET": lambda: store.read("key"),
        "HEAD": lambda: store.info("key"),
        "PUT": lambda: store.put("key", b"x"),
        "CREATE": lambda: store.put_file("key", path),
        "DELETE": lambda: store.delete(["key"]),
        "UPLOADS": store.abort_uploads,
    }


def test_errors_that_stay_are_not_retried(bucket: Bucket, store: ObjectStore, large: Path) -> None:
    for kind, call in calls(store, large).items():
        bucket.heal()
        bucket.fault(kind, answer(403, "AccessDenied"))
        with pytest.raises(PermissionError, match=f"{kind_of(kind)}: 403.*: check the credentials") as denied:
            call()
        assert denied.value.filename.startswith(bucket.url) and bucket.count() == 1
        if kind == "HEAD":
            continue  # the answer to a HEAD has a status and no code
        bucket.fault(kind, answer(400, "ExpiredToken"))
        with pytest.raises(PermissionError, match="ExpiredToken.*AWS_ACCESS_KEY_ID"):
            call()
        bucket.fault(kind, answer(404, "NoSuchBucket"))
        with pytest.raises(FileNotFoundError, match="bucket does not exist") as missing:
            call()
        assert missing.value.filename == bucket.url.removesuffix("/run")
        bucket.fault(kind, answer(400, "InvalidRequest"))
        with pytest.raises(OSError, match="InvalidRequest: a fault of the test") as invalid:
            call()
        assert invalid.value.errno == errno.EIO and bucket.count() == 4


def kind_of(kind: str) -> str:
    """Returns the operation that an error names for a kind of request."""
    return {"CREATE": "PUT", "UPLOADS": "LIST"}.get(kind, kind)


def test_a_missing_object_is_named(bucket: Bucket, store: ObjectStore, tmp_path: Path) -> None:
    for call in (lambda: store.read("a/b"), lambda: download(store, "a/b", tmp_path / "copy", 1)):
        with pytest.raises(FileNotFoundError, match=f"no such object: '{bucket.url}/a/b'"):
            call()
    assert bucket.count("GET") == 2
    with pytest.raises(FileNotFoundError, match="bucket does not exist: 's3://another-bucket'"):
        ObjectStore("s3://another-bucket/run", QUICK).list()


def test_an_object_that_ends_early_is_an_error(bucket: Bucket, store: ObjectStore, tmp_path: Path) -> None:
    store.put("key", b"12345")
    with pytest.raises(OSError, match="ends at byte 5, not 6") as error:
        download(store, "key", tmp_path / "copy", 6)
    assert error.value.errno == errno.EIO and error.value.filename == f"{bucket.url}/key"


def test_exhausted_retries_name_url_operation_and_cause(bucket: Bucket, large: Path) -> None:
    store = ObjectStore(bucket.url, Retries(attempts=2, first_delay_s=0.001), PART)

    def upload() -> None:
        store.put_file("key", large)

    for kind, call in {**calls(store, large), "PART": upload, "COMPLETE": upload}.items():
        bucket.heal()
        bucket.fault(kind, answer(503, "" if kind == "HEAD" else "SlowDown"), times=100)
        operation = "PUT" if call == upload else kind_of(kind)
        with pytest.raises(OSError, match=rf"{operation}: 2 attempts in \d+ s, the last: 503") as error:
            call()
        assert error.value.errno == errno.EIO
        assert error.value.filename in (bucket.url, f"{bucket.url}/key")
        # Several parts are sent at a time.
        assert bucket.count(kind) == 2 or (kind == "PART" and 2 <= bucket.count(kind) <= 6)
        # Nothing remains of an upload that was given up.
        assert bucket.count("ABORT") == (call == upload)
    assert uploads(bucket) == []


@cache
def file_system() -> Any:
    """Returns a file system of s3fs, without the code of this program."""
    import s3fs

    return s3fs.S3FileSystem(skip_instance_cache=True)


def uploads(bucket: Bucket) -> list[str]:
    """Returns the keys of the multipart uploads in the bucket that have not ended."""
    return sorted(upload["Key"] for upload in file_system().list_multipart_uploads(bucket.name))


def test_retries_end_after_their_total_time(bucket: Bucket) -> None:
    bucket.fault("LIST", answer(503, "SlowDown"), times=100)
    with pytest.raises(OSError, match="LIST: 503 SlowDown"):
        ObjectStore(bucket.url, Retries(attempts=100, total_s=0.0)).list()
    assert bucket.count("LIST") == 1


@pytest.mark.parametrize("method", ["read", "put"])
def test_a_server_that_hangs_ends_in_an_error(bucket: Bucket, method: str) -> None:
    bucket.fault("GET|PUT", hang, times=100)
    store = ObjectStore(bucket.url, Retries(attempts=2, first_delay_s=0.001, request_s=0.5))
    with pytest.raises(OSError, match="2 attempts in .* no end after 0.5 s") as error:
        store.read("key") if method == "read" else store.put("key", b"x")
    assert error.value.errno == errno.EIO


def test_a_server_that_reads_nothing_ends_in_an_error(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's read timeout begins only after everything is sent. Fails if a request that cannot be sent
    has no time limit."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        store = ObjectStore(bucket.url, Retries(attempts=2, first_delay_s=0.001, request_s=0.5))
        with pytest.raises(OSError, match="PUT: 2 attempts in .* no end after 0.5 s") as error:
            store.put("key", bytes(2**25))
    assert error.value.errno == errno.EIO


def test_mistakes_in_the_environment(
    bucket: Bucket, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        changed.delenv("AWS_ACCESS_KEY_ID")
        with pytest.raises(PermissionError, match="LIST: Unable to locate credentials: .*AWS_ACCESS_KEY_ID"):
            store.list()
    with monkeypatch.context() as changed:
        changed.setenv("AWS_PROFILE", "nobody")
        with pytest.raises(PermissionError, match="LIST: .*nobody.*AWS_PROFILE"):
            ObjectStore(bucket.url, QUICK).list()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "minio:9000")
    with pytest.raises(OSError, match="LIST: .*Invalid endpoint: minio:9000"):
        ObjectStore(bucket.url, QUICK).list()
    assert bucket.count() == 0
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(OSError, match="LIST: 4 attempts in .*Could not connect.*127.0.0.1:1"):
        ObjectStore(bucket.url, QUICK).list()


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a program in its own process."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_TIMEOUT_S)


UPLOAD = """
import sys
from megatron.object_store.store import ObjectStore
url, part_bytes, key, path = sys.argv[1:]
ObjectStore(url, part_bytes=int(part_bytes)).put_file(key, path)
"""


@pytest.mark.parametrize(
    ("kind", "first"), [("PART", 2), pytest.param("COMPLETE", 1, marks=pytest.mark.full)]
)
def test_a_killed_upload_is_invisible_until_it_is_removed(
    bucket: Bucket, store: ObjectStore, large: Path, kind: str, first: int
) -> None:
    store.put("step2/key", b"the object before")
    bucket.fault(kind, kill_sender(is_done=False), first=first)
    assert run(UPLOAD, f"{bucket.url}/step2", PART, "key", large).returncode == -signal.SIGKILL
    assert store.list().keys() == {"step2/key"} and store.read("step2/key") == b"the object before"
    for key in ("run/step2/new", "run/step20/key", "run-2/key"):
        file_system().call_s3("create_multipart_upload", Bucket=bucket.name, Key=key)
    assert uploads(bucket) == ["run-2/key", "run/step2/key", "run/step2/new", "run/step20/key"]
    bucket.fault("UPLOADS", first_upload_only)
    store.abort_uploads("step2")
    assert uploads(bucket) == ["run-2/key", "run/step20/key"]
    store.abort_uploads()
    assert uploads(bucket) == ["run-2/key"] and store.list().keys() == {"step2/key"}


@pytest.mark.full
def test_an_upload_that_is_killed_after_its_last_request_is_complete(
    bucket: Bucket, store: ObjectStore, large: Path, tmp_path: Path
) -> None:
    """The answer to the last request never arrived."""
    bucket.fault("COMPLETE", kill_sender(is_done=True))
    assert run(UPLOAD, bucket.url, PART, "key", large).returncode == -signal.SIGKILL
    size = large.stat().st_size
    assert download(store, "key", tmp_path / "copy", size) == large.read_bytes() and uploads(bucket) == []


FORK = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from megatron.object_store.store import ObjectStore
store = ObjectStore(sys.argv[1])

def use(name):
    with ThreadPoolExecutor(8) as pool:
        keys = [f"{name}/{index}" for index in range(16)]
        list(pool.map(lambda key: store.put(key, key.encode()), keys))
        assert list(pool.map(lambda key: store.read(key).decode(), keys)) == keys

use("before")
child = os.fork()
if child == 0:
    use("child")
    assert len(store.list("before")) == 16
    os._exit(0)
use("parent")
assert os.waitpid(child, 0)[1] == 0
assert len(store.list()) == 48
"""


def test_threads_and_forked_children_share_a_store(bucket: Bucket) -> None:
    ended = run(FORK, bucket.url)
    assert ended.returncode == 0, ended.stderr


def test_ranks_with_one_seed_wait_for_different_times() -> None:
    retries, delays = Retries(first_delay_s=1.0, max_delay_s=60.0), []
    for _ in range(2):
        random.seed(1234)
        before = random.getstate()
        delays.append([retries.delay_s(failures) for failures in range(1, 9) for _ in range(50)])
        assert random.getstate() == before  # the data loader's state
    assert delays[0] != delays[1]
    for failures in range(1, 9):
        longest, limit = max(delays[0][50 * (failures - 1) : 50 * failures]), min(2 ** (failures - 1), 60)
        assert limit / 2 < longest <= limit


def test_a_request_that_is_retried_for_seconds_is_reported_once(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.fault("PUT", answer(503, "SlowDown"), times=3)
    bucket.fault("PUT", answer(503, "SlowDown"), key="late", times=3)
    ObjectStore(bucket.url, QUICK).put("early", b"x")
    assert not caplog.messages
    monkeypatch.setattr("megatron.object_store.store._SILENT_S", 0.0)
    ObjectStore(bucket.url, QUICK).put("late", b"x")
    (message,) = caplog.messages
    assert message.startswith(f"{bucket.url}/late: PUT has failed (503 SlowDown: ")


def test_a_url_is_checked_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_url("s3://bucket") and is_url("gs://bucket") and not is_url("/s3/x") and not is_url("s3:/x")
    for url in ("s3://bucket", "s3://bucket/run", "s3://bucket/run/", "s3://my.bucket/a/b_c-1"):
        check_url(url)
    for url, problem in {
        "gs://bucket/run": "gs://bucket/run: unknown scheme. Expected .* s3://",
        "S3://bucket/run": "unknown scheme",
        "run": "unknown scheme",
        "s3://": "no valid bucket. Expected s3://BUCKET/FOLDER",
        "s3:///run": "no valid bucket",
        "s3://user@bucket/run": "no valid bucket",
        "s3://bucket//run": "invalid folder",
        "s3://bucket/../run": "invalid folder",
        "s3://bucket/run?versionId=1": "invalid folder",
        "s3://bucket/\x1b[2J": r"^s3://bucket/\\x1b\[2J: invalid folder",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            check_url(url)
    program = "import sys; from megatron.object_store.store import check_url; check_url('s3://bucket/run')"
    assert (
        run(f"{program}; assert not {{'s3fs', 'botocore', 'fsspec', 'torch'}} & {{*sys.modules}}").returncode
        == 0
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"s3://bucket/run needs .* s3fs, .*: pip install s3fs.*\[objectstore\]"
    ):
        check_url("s3://bucket/run")
