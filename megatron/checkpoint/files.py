"""The files of a checkpoint: those that a layout needs, their sizes and digests, and errors of access.

An error of access, such as an I/O error of a network file system, says nothing about a checkpoint's content:
a read is repeated and then stops the program. Only a file that was read counts as damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from megatron.errors import is_access_error
from megatron.files import open_regular

# Delays between attempts: a network file system may recover, or show a new file to other nodes, only after
# some seconds.
RETRY_DELAYS_S = (0.1, 0.4, 1.0, 3.0, 6.0)
# The end of the sentence for an error of access.
MAY_BE_INTACT = ": the checkpoint may be intact, so no older one is used; repair the access, then start again"

T = TypeVar("T")


def read_with_retries(
    path: Path, read: Callable[[], T], retry_delays_s: Sequence[float] = RETRY_DELAYS_S
) -> T:
    """Returns read(), which reads `path`. After an error of access it is called again for about ten seconds;
    then the OSError is raised with the path. Any other error is raised at once."""
    for delay_s in (*retry_delays_s, None):
        try:
            return read()
        except OSError as error:
            if not is_access_error(error):
                raise
            if delay_s is None:
                raise OSError(error.errno, error.strerror, str(path)) from error
        time.sleep(delay_s)
    raise AssertionError("the last attempt returns or raises")


# File name -> {"bytes": size, "sha256": digest in hex}.
Files = dict[str, dict[str, Any]]
READ_THREADS = 4


def no_heartbeat() -> None:
    """The default for functions that call a heartbeat after each file."""


def describe_files(folder: Path, heartbeat: Callable[[], None] = no_heartbeat) -> Files:
    """Size and digest of every file in the folder, and syncs each to the disk. Collective: the ranks share
    the work, and all get the result. heartbeat: called after each file."""
    import torch.distributed as dist

    # One rank lists: on a shared file system another's listing may be older.
    names: list[Any] = [sorted(path.name for path in folder.iterdir()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    (names,) = names
    return _shared(names, lambda name: describe_file(folder / name, to_disk=True), heartbeat)


def first_size_mismatch(folder: Path, files: Files, unneeded: Collection[str] = ()) -> str | None:
    """The first file that is missing or has another size, in words; None if there is none. Reads no file.

    unneeded: files that may be missing. OSError if the folder cannot be read now.
    """
    for name, expected in sorted(files.items()):
        try:
            status = read_with_retries(folder / name, (folder / name).stat)
        except OSError as error:
            if is_access_error(error):
                raise
            if name in unneeded:
                continue
            return f"{name} is missing"
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a regular file"
        size = status.st_size
        if size != expected["bytes"]:
            return f"{name} has {size:,} bytes and was written with {expected['bytes']:,}"
    return None


def file_problem(folder: Path, name: str, expected: dict[str, Any]) -> str | None:
    """Reads a file. Returns what is wrong with it, in words; None if it has the expected digest. OSError if
    it cannot be read now."""
    path = folder / name
    try:
        is_intact = read_with_retries(path, lambda: describe_file(path)) == expected
    except OSError as error:
        if is_access_error(error):
            raise
        return f"{name} cannot be read ({error.strerror or error})"
    return None if is_intact else f"{name} is damaged: its digest differs from that in run.json"


def file_problems(folder: Path, files: Files, workers: int = READ_THREADS) -> Iterator[str | None]:
    """`file_problem` of every file, in order, read by several threads."""
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(lambda name: file_problem(folder, name, files[name]), files)


def first_problem(
    names: list[str], find_problem: Callable[[str], str | None], heartbeat: Callable[[], None] = no_heartbeat
) -> str | None:
    """The first problem that `find_problem` returns for one of rank 0's files. Collective: the ranks share
    the files, so that each is read once. heartbeat: called after each file."""
    import torch.distributed as dist

    shared = [names]
    dist.broadcast_object_list(shared)  # another rank's listing of a folder may be older
    (names,) = shared
    problems = _shared(names, find_problem, heartbeat)
    return next((problem for _, problem in sorted(problems.items()) if problem), None)


def add_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """The record with a SHA-256 of its content."""
    return {**record, "sha256": _digest_of(record)}


def has_valid_checksum(record: dict[str, Any]) -> bool:
    """Whether the record has the checksum that `add_checksum` adds."""
    content = {key: value for key, value in record.items() if key != "sha256"}
    return record.get("sha256") == _digest_of(content)


def _digest_of(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _shared(
    names: list[str], describe: Callable[[str], Any], heartbeat: Callable[[], None]
) -> dict[str, Any]:
    """describe(name) of every name, each computed by one rank. An OSError on one rank is raised on all."""
    # Imported only here: tools that inspect checkpoints do not need torch, which takes seconds.
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    own: dict[str, Any] | OSError
    try:
        own = {}
        for name in names[rank::size]:
            own[name] = describe(name)
            heartbeat()
    except OSError as error:
        own = error
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, own)
    for part in parts:
        if isinstance(part, OSError):
            raise part
    return {name: entry for part in parts for name, entry in sorted(part.items())}


def describe_file(path: Path, to_disk: bool = False) -> dict[str, Any]:
    """Size and digest of one file. to_disk: sync it to the disk."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else _digest(file)
        if to_disk:
            os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _digest(file: Any) -> Any:
    """`hashlib.file_digest` of Python 3.10."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest


# Tied parameters are saved with the first layer that holds them.
_TIED_LAYER = 1
# DeepSpeed's names of optimizer files begin with this for some settings.
_OPTIONAL_PREFIX = "bf16_"


def missing_files(files: Collection[str], run: Mapping[str, Any]) -> list[str]:
    """The files that the layout and parameters in `run` require and that are not among `files`, in order.

    run: the content of `run.json`. Returns [] if it has no layout. Raises ValueError, KeyError, TypeError or
    AttributeError if it is malformed.
    """
    if "layout" not in run:
        return []
    plain = {name.removeprefix(_OPTIONAL_PREFIX) for name in files}
    layout = run["layout"]
    tensor, pipeline, data = (
        int(layout[f"{kind}_parallel_size"]) for kind in ("tensor_model", "pipeline_model", "data")
    )
    replicas = data if int(layout["zero_stage"]) > 0 else 0
    # A malformed layout of a billion ranks is refused before its names are listed.
    if tensor * pipeline * max(replicas, 1) > len(plain):
        return [f"files for TP x PP x DP = {tensor} x {pipeline} x {data}"]
    expected = _expected(tensor, pipeline, replicas, run.get("parameters", {}))
    return [name for name in expected if name not in plain]


def unneeded_files(run: Mapping[str, Any]) -> frozenset[str]:
    """The names of `run`'s files that a resume does not read, so that it may start without them.

    With ZeRO these are the mp_rank files, the states of DeepSpeed's engine: weights and optimizer state are
    in the zero_pp_rank files, all else is in `run.json`. Without ZeRO the mp_rank files hold the optimizer.
    """
    if int(run.get("layout", {}).get("zero_stage", 0)) < 1:
        return frozenset()
    return frozenset(name for name in run["files"] if re.fullmatch(r"mp_rank_[0-9]+_model_states\.pt", name))


def _expected(tensor: int, pipeline: int, replicas: int, parameters: Collection[str]) -> Iterator[str]:
    """replicas: data-parallel ranks that write their own files, as with ZeRO."""
    for layer, rank in product(sorted({_layer_of(name) for name in parameters}), range(tensor)):
        yield f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"
    for rank in range(tensor * pipeline):
        yield f"mp_rank_{rank:02d}_model_states.pt"
        for replica in range(replicas):
            yield f"zero_pp_rank_{replica}_mp_rank_{rank:02d}_optim_states.pt"


def _layer_of(parameter: str) -> int:
    match = re.match(r"([0-9]{1,6})\.", parameter)
    return int(match[1]) if match else _TIED_LAYER
