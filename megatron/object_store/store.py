"""The objects below one URL: list, read, write and delete, with all retries in one place."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.errors import ConfigError, printable

if TYPE_CHECKING:
    from megatron.object_store.s3 import Failure

# scheme of a URL -> (package that fsspec needs for it, extra of this package that installs it)
SCHEMES = {"s3": ("s3fs", "objectstore")}
PART_BYTES = 32 * 2**20
_MAX_PARTS = 10_000
_MAX_DELETED_AT_ONCE = 1000
# Number of connections of an upload. One connection to S3 carries 50 to 100 MB/s.
_UPLOAD_THREADS = 4
_DOWNLOAD_THREADS = 8
# Retries are logged only after this time: with many ranks a store normally refuses some requests.
_SILENT_S = 5.0
_LOG = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Retries:
    """When a failed request is sent again: at most `attempts` times in all, and not later than `total_s`
    seconds after the first attempt.

    request_s: a request that has not ended after so many seconds is given up and sent again. A server may
    accept a connection and never read from it; no timeout of a socket ends such a request.
    """

    attempts: int = 12
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    total_s: float = 300.0
    request_s: float = 180.0

    def delay_s(self, failures: int) -> float:
        """Returns how many seconds to wait after so many failures: a random number between 0 and a limit that
        doubles with each failure. It comes from the system's generator, because the ranks of a run seed
        `random` with one number."""
        limit_s = min(self.max_delay_s, self.first_delay_s * 2 ** min(failures - 1, 30))
        return random.SystemRandom().uniform(0.0, limit_s)


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing says about an object. modified: seconds since 1970 by the store's clock."""

    size: int
    modified: float


def _object_info(answer: dict[str, Any]) -> ObjectInfo:
    return ObjectInfo(answer["size"], answer["LastModified"].timestamp())


def _is_file_name(key: str) -> bool:
    """Returns whether a key can be the name of a file in a folder. Programs that show a bucket as folders
    create keys that end with /. A key that contains .. would be a file outside of the folder."""
    return not {"", ".", ".."} & {*key.split("/")}


class _UploadGoneError(FileNotFoundError):
    """The multipart upload does not exist: it is complete, or it was aborted."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL, such as s3://bucket/run."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(path)) is not None


def check_url(url: str) -> None:
    """Raises ConfigError if `url` does not name a store that this installation can open. Sends no request."""
    scheme, _, rest = url.partition("://")
    bucket, *folders = rest.rstrip("/").split("/")
    if not is_url(url) or scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"{printable(url)}: unknown scheme. Expected a folder, or a URL with {known}")
    if not re.fullmatch(r"[A-Za-z0-9._-]{3,255}", bucket):
        raise ConfigError(f"{printable(url)}: no valid bucket. Expected {scheme}://BUCKET/FOLDER")
    if (
        (folders and not _is_file_name("/".join(folders)))
        or re.search(r"[?#*\[\]\\]", rest)
        or rest != printable(rest)
    ):
        raise ConfigError(
            f"{printable(url)}: invalid folder. Expected {scheme}://BUCKET/FOLDER, with one / between names"
        )
    package, extra = SCHEMES[scheme]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{url} needs the package {package}, which is not installed: pip install {package}, or install "
            f"this package with [{extra}]"
        )


class ObjectStore:
    """The objects below one URL, such as s3://bucket/run. Keys are relative to the URL.

    Errors are OSErrors with errno, a sentence and the URL: FileNotFoundError for a missing object or bucket,
    PermissionError for credentials and permissions, EIO for all others and once the retries are exhausted. An
    object is complete or invisible: it appears with the end of its last request. Several threads, and a
    forked child, can use a store.

    The ranks of all nodes save at the same time, and a store answers 503 SlowDown if a prefix gets more
    requests than it can serve. Therefore requests are large and few. Ranks that were refused at the same time
    wait for random times, so that they do not return at the same time.
    """

    def __init__(self, url: str, retries: Retries = Retries(), part_bytes: int = PART_BYTES) -> None:
        """part_bytes: size in bytes of the parts of an upload, and of the blocks of a download."""
        self.url = url.rstrip("/")
        self._scheme, _, rest = self.url.partition("://")
        self._bucket, _, self._root = rest.partition("/")
        self._retries, self._part_bytes = retries, part_bytes
        # Process id -> file system. The thread of a file system does not exist in a forked child. The child
        # keeps the parent's object, because deleting it would close the parent's connections.
        self._file_systems: dict[int, Any] = {}

    def url_of(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    def list(self, prefix: str = "", depth: int | None = None) -> dict[str, ObjectInfo]:
        """Returns key -> information for all objects below a folder; {} if nothing exists. The result is
        never cached. depth: 1 for the objects directly in the folder; None for any depth.

        Keys that cannot be names of files in a folder are left out."""
        root = self._path(prefix.rstrip("/"))
        found = self._request(
            "LIST", prefix, lambda files, limit: files.find(root, maxdepth=depth, detail=True, **limit)
        )
        start = len(self._path("")) + 1
        return {
            name[start:]: _object_info(info)
            for name, info in found.items()
            if name.startswith(f"{root}/") and _is_file_name(name[start:])
        }

    def info(self, key: str) -> ObjectInfo:
        """Returns size and time of change of an object."""
        path = self._path(key)
        return _object_info(self._request("HEAD", key, lambda files, limit: files.info(path, **limit)))

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Returns an object's bytes from `start` up to, but not including, `end`, with one GET."""
        if end is not None and end <= start:
            return b""
        path = self._path(key)
        # A whole object is read without a range, because an empty object has no valid range.
        return self._request(
            "GET", key, lambda files, limit: files.cat_file(path, start=start or None, end=end, **limit)
        )

    def read_block(self, key: str, start: int, end: int) -> bytes:
        """Returns all bytes from `start` up to, but not including, `end`. Raises OSError if the object is
        shorter."""
        data = self.read(key, start, end)
        if len(data) != end - start:
            raise OSError(
                errno.EIO,
                f"GET: the object ends at byte {start + len(data):,}, not {end:,}",
                self.url_of(key),
            )
        return data

    def download(
        self,
        key: str,
        path: str | os.PathLike[str],
        size: int,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Writes an object of `size` bytes to a file, in blocks, a few at a time. progress: called after each
        block. Raises OSError if the object is smaller."""

        def copy(start: int) -> None:
            data = memoryview(self.read_block(key, start, min(start + self._part_bytes, size)))
            while data:
                written = os.pwrite(file.fileno(), data, start)
                data, start = data[written:], start + written

        with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(_DOWNLOAD_THREADS) as pool:
            file.truncate(size)
            for _ in pool.map(copy, range(0, size, self._part_bytes)):
                progress()

    def put(self, key: str, data: bytes, retries: Retries | None = None) -> None:
        """Writes an object with one PUT. An existing object of this key is replaced."""
        self._s3("PUT", "put_object", key, retries, Body=data)

    def put_file(self, key: str, path: str | os.PathLike[str]) -> None:
        """Writes a file's bytes as an object. A file larger than a part is sent in parts, a few at a time."""
        size = os.path.getsize(path)
        if size <= self._part_bytes:
            self.put(key, Path(path).read_bytes())
            return
        try:
            self._put_parts(key, path, size)
        except _UploadGoneError:
            # The answer to the last request was lost, or another process aborted the upload.
            self._put_parts(key, path, size)

    def delete(self, keys: Iterable[str], retries: Retries | None = None) -> None:
        """Deletes objects, up to 1,000 per request. A key without an object is not an error."""
        remaining = iter(sorted(keys))
        while batch := [*islice(remaining, _MAX_DELETED_AT_ONCE)]:
            self._delete_batch(batch, retries)

    def abort_uploads(self, prefix: str = "") -> None:
        """Removes all unfinished multipart uploads below a folder. Uploads of killed processes are invisible
        but cost money. Uploads of living processes are removed as well; these then fail."""
        folder = self._key(prefix.rstrip("/"))
        root = f"{folder}/" if folder else ""
        while True:
            page = self._s3("LIST", "list_multipart_uploads", prefix, Prefix=root)
            # Not every server with S3's protocol filters by the prefix.
            uploads = [upload for upload in page.get("Uploads") or () if upload["Key"].startswith(root)]
            for upload in uploads:
                with suppress(_UploadGoneError):
                    key = upload["Key"][len(self._key("")) :].lstrip("/")
                    self._s3("DELETE", "abort_multipart_upload", key, UploadId=upload["UploadId"])
            # The next page begins with the next uploads, because these are removed.
            if not uploads or not page.get("IsTruncated"):
                return

    def _delete_batch(self, keys: Sequence[str], retries: Retries | None) -> None:
        names, bucket = [self._key(key) for key in keys], self._bucket

        def call(files: Any, limit: dict[str, float]) -> Any:
            return files.delete_objects(bucket, names, **limit)

        self._request("DELETE", keys[0], call, retries)

    def _put_parts(self, key: str, path: str | os.PathLike[str], size: int) -> None:
        part_bytes = max(self._part_bytes, -(-size // _MAX_PARTS))
        upload_id = self._s3("PUT", "create_multipart_upload", key)["UploadId"]

        def upload_part(number: int) -> dict[str, Any]:
            data = os.pread(file.fileno(), part_bytes, (number - 1) * part_bytes)
            part = self._s3("PUT", "upload_part", key, UploadId=upload_id, PartNumber=number, Body=data)
            return {"PartNumber": number, "ETag": part["ETag"]}

        try:
            with open(path, "rb") as file, ThreadPoolExecutor(_UPLOAD_THREADS) as pool:
                parts = [*pool.map(upload_part, range(1, -(-size // part_bytes) + 1))]
            self._s3(
                "PUT", "complete_multipart_upload", key, UploadId=upload_id, MultipartUpload={"Parts": parts}
            )
        except BaseException:
            # The cause that ended the upload may prevent its removal, too, or this process may have little
            # time left.
            with suppress(OSError):
                once = Retries(attempts=1, request_s=10.0)
                self._s3("DELETE", "abort_multipart_upload", key, once, UploadId=upload_id)
            raise

    def _key(self, key: str) -> str:
        """Returns the object's key in its bucket."""
        return "/".join(filter(None, (self._root, key)))

    def _path(self, key: str) -> str:
        """Returns the object's name in fsspec's file system."""
        return "/".join(filter(None, (self._bucket, self._root, key)))

    def _s3(
        self, operation: str, method: str, key: str, retries: Retries | None = None, **options: Any
    ) -> Any:
        """Sends a request of S3's own protocol. Returns the answer."""
        target = {"Bucket": self._bucket, "Key": self._key(key)}

        def call(files: Any, limit: dict[str, float]) -> Any:
            return files.call_s3(method, target, **options, **limit)

        return self._request(operation, key, call, retries)

    def _request(
        self,
        operation: str,
        key: str,
        call: Callable[[Any, dict[str, float]], T],
        retries: Retries | None = None,
    ) -> T:
        """Returns call(file system, time limit). Sends the request again after transient errors. Raises
        OSError."""
        # The import is late, because s3fs is optional.
        from megatron.object_store.s3 import open_file_system, read_failure

        retries = retries or self._retries
        files = self._file_systems.get(os.getpid())
        if files is None:
            # If two threads create a file system, both get the first one.
            files = self._file_systems.setdefault(os.getpid(), open_file_system())
        began = time.monotonic()
        attempt, is_reported = 0, False
        while True:
            attempt += 1
            try:
                return call(files, {"timeout": retries.request_s})
            except Exception as error:
                failure = read_failure(error, retries.request_s)
                if failure is None:
                    raise
                delay_s = retries.delay_s(attempt)
                elapsed_s = time.monotonic() - began
                is_last = attempt >= retries.attempts or elapsed_s + delay_s > retries.total_s
                if not failure.is_transient or is_last:
                    raise self._os_error(operation, key, failure, attempt, elapsed_s) from error
                if elapsed_s >= _SILENT_S and not is_reported:
                    is_reported, url = True, self.url_of(key)
                    _LOG.warning("%s: %s has failed (%s) and is retried", url, operation, failure.cause)
            time.sleep(delay_s)

    def _os_error(
        self, operation: str, key: str, failure: Failure, attempts: int, elapsed_s: float
    ) -> OSError:
        url, cause = self.url_of(key), failure.cause
        if failure.code == "NoSuchUpload":
            return _UploadGoneError(failure.errno, f"{operation}: {cause}", url)
        if failure.code == "NoSuchBucket":
            url = f"{self._scheme}://{self._bucket}"
        if attempts > 1:
            cause = f"{attempts} attempts in {elapsed_s:.0f} s, the last: {cause}"
        return OSError(failure.errno, f"{operation}: {cause}", url)
