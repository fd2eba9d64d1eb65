"""Converts native checkpoints into universal checkpoints, in DeepSpeed's layout (`formats.universal`).

    global_step5_universal/
        zero/                           one folder per parameter
        zero/optimizer_state.pt         optimizer state that is not per parameter
        mp_rank_XX_model_states.pt      copied from the source
        run.json                        copied, if the source has one
        source.json                     which checkpoint was converted
    latest_universal                    the name of the folder

The vocabulary is stored without padding. This format is for exchange with other Megatron programs; `--load`
opens native checkpoints on any layout without a conversion. A conversion copies one block at a time, in
several threads: reading, checksums and writing release the GIL.

Processes on several nodes convert one checkpoint together (`shared_work`). Every file and folder is complete
when it gets its name, by a rename, and all processes write equal bytes.
"""

from __future__ import annotations

import errno
import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial as partial_function
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from megatron.checkpoint.conversion.output_folder import check_space
from megatron.checkpoint.conversion.shared_work import SharedWork
from megatron.checkpoint.conversion.source import identity_of
from megatron.checkpoint.files import add_checksum
from megatron.checkpoint.formats.archive_writer import write_archive
from megatron.checkpoint.formats.deepspeed_files import model_files
from megatron.checkpoint.formats.native import BLOCK_BYTES, NativeReader
from megatron.checkpoint.formats.registry import LATEST_UNIVERSAL_FILE, PARAMETER_FOLDER
from megatron.checkpoint.formats.state import StateReader
from megatron.checkpoint.formats.torch_archive import Stub, read_file
from megatron.checkpoint.formats.universal import LOSS_SCALE_KEY, OPTIMIZER_STATE_FILE
from megatron.checkpoint.formats.universal_writer import UNFINISHED_FOLDER, UniversalWriter
from megatron.checkpoint.formats.writing import (
    PARTIAL,
    copy_parameter,
    has_all_digests,
    largest_first,
    state_bytes,
)
from megatron.checkpoint.names import shown
from megatron.checkpoint.record import RUN_FILE
from megatron.errors import UserError
from megatron.files import open_regular, read_small, rename_synced, sync_file, write_atomically, write_json

# The identity of the source, in a conversion. A task that starts late finds by it that the others are done.
SOURCE_FILE = "source.json"
# Holds a file per parameter whose replicas differed and were averaged: the largest difference.
AVERAGED_FOLDER = "averaged"
# Holds an empty file per parameter that an earlier, interrupted conversion wrote.
KEPT_FOLDER = "kept"
# Entries that optimizer_state.pt lacks, because the parameters' files hold them.
_PER_PARAMETER = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")


class UniversalConversion(UniversalWriter):
    """Writes universal checkpoints. A conversion of a native one may be interrupted and shared by several
    processes, see `convert`."""

    def __init__(self, folder: Path, reader: StateReader, allow_replica_mismatch: bool = False) -> None:
        super().__init__(folder, reader)
        self._allow_replica_mismatch = allow_replica_mismatch

    @classmethod
    def write_checkpoint(
        cls, reader: StateReader, target: Path, workers: int = 4, verify: bool = True
    ) -> Iterator[str]:
        """See `CheckpointWriter`."""
        if isinstance(reader, NativeReader):
            return convert(reader, target, workers, verify=verify)
        return super().write_checkpoint(reader, target, workers, verify)

    def finish_parameter(self, name: str, mismatch: float = 0.0) -> None:
        """See `CheckpointWriter`. Accepts the mean of the replicas if it is allowed."""
        if mismatch and self._allow_replica_mismatch:
            # Before the parameter is finished: a resumed conversion does not compare its replicas again.
            _mark(self.folder / AVERAGED_FOLDER, name, str(mismatch))
            mismatch = 0.0
        super().finish_parameter(name, mismatch)

    def convert(self, name: str, verify: bool) -> str | None:
        """Copies a parameter. Returns None if an earlier conversion has finished it."""
        if self.has_parameter(name):
            _mark(self.folder / KEPT_FOLDER, name)
            return None
        return copy_parameter(self, name, verify)


def convert(
    source: NativeReader,
    target: Path,
    workers: int = 1,
    allow_replica_mismatch: bool = False,
    shared: SharedWork | None = None,
    print_fn: Callable[[str], object] = lambda _: None,
    verify: bool = False,
) -> Iterator[str]:
    """Writes the universal checkpoint `target`; yields the name of each parameter that this process
    writes, large ones first. Returns when the checkpoint is published, by this process or by another.

    It resumes an interrupted conversion of the same source: parameters that are complete and match their
    checksums are kept. allow_replica_mismatch: average replicas of a parameter that differ. print_fn:
    receives the lines of the result in the process that publishes. verify: compare all states with the
    digests of the source, or its files if the states have none.

    Raises UserError for a damaged source, too little disk space or memory, and replicas that differ.
    """
    shared = shared or SharedWork()
    partial = target.with_name(target.name + PARTIAL)
    try:
        if not is_published(source, target):
            if verify:
                _verify_files(source, workers, shared)
            is_new = _begin(source, partial)
            # Looked for again: another process may have published before this one created its folder.
            if not is_published(source, target):
                writer = UniversalConversion(partial, source, allow_replica_mismatch)
                sizes = state_bytes(source)
                _check_resources(partial, sizes, workers)
                copy = partial_function(writer.convert, verify=verify)
                yield from filter(None, shared.share("parameter", largest_first(sizes), copy, workers))
            elif is_new:
                shutil.rmtree(partial)
    except (OSError, UserError):
        # Once another process has published, the folder is gone, and an error does not matter.
        if not is_published(source, target):
            raise
    publish = partial_function(_publish, source, partial, target, verify)
    for lines in shared.share("publication", [target.name], lambda _: publish()):
        for line in lines:
            print_fn(line)


def _verify_files(source: NativeReader, workers: int, shared: SharedWork) -> None:
    """Compares the files of a checkpoint with their digests, unless all states have digests, with which their
    blocks are compared. Raises UserError that names the damaged files."""
    files = {} if has_all_digests(source) else source.checkpoint.run.get("files", {})
    names = largest_first({name: files[name]["bytes"] for name in files})
    problems = shared.share("source file", names, source.file_problem, workers, lambda found: not found)
    if damages := [damage for damage in problems if damage]:
        raise _damaged(source, damages)


def _damaged(source: NativeReader, damages: Sequence[str]) -> UserError:
    return UserError(f"checkpoint {source.folder}: {'; '.join(damages)}: convert an older checkpoint")


def _check_resources(partial: Path, sizes: Mapping[str, int], workers: int) -> None:
    """Raises UserError if the parameters that are not written yet need more space than the disk has, or if
    the workers need more memory than is available. sizes: parameter -> bytes. A worker holds one block of a
    parameter and as many bytes of its shards, however large the parameter is."""
    missing = sum(size for name, size in sizes.items() if not (partial / PARAMETER_FOLDER / name).exists())
    # What other processes are writing is on the disk already.
    check_space(partial, missing - _bytes_in(partial / UNFINISHED_FOLDER), "--output_folder")
    needed, available = workers * 2 * BLOCK_BYTES, _available_memory()
    if available is not None and available < needed:
        raise UserError(
            f"{workers} workers need {needed / 1e6:,.0f} MB of memory and {available / 1e6:,.0f} MB are "
            "available: lower --num_extract_workers and --num_merge_workers"
        )


def _available_memory() -> int | None:
    """Returns available memory in bytes; None if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None


def _bytes_in(folder: Path) -> int:
    """Returns the size of a folder in which other processes create and remove files."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(parent, name).stat().st_size
    return total


def _publish(source: NativeReader, partial: Path, target: Path, verify: bool) -> list[str]:
    """Writes the common files, publishes, and returns the lines of the result; none if that was done."""
    lines: list[str] = []
    if not is_published(source, target):
        for path in sorted((partial / AVERAGED_FOLDER).glob("*")):
            difference = float(path.read_text() or "nan")  # an earlier version wrote empty files
            lines.append(
                f"{path.name}: replicas on TP ranks differed by up to {difference:.2e}; their mean is used"
            )
        kept = len(list((partial / KEPT_FOLDER).glob("*")))
        before = f", {kept} of them by an earlier, interrupted conversion" if kept else ""
        lines.append(f"{target}: {len(source.specs)} parameters{before}")
        _write_common_files(source, partial, verify)
        shutil.rmtree(partial / UNFINISHED_FOLDER, ignore_errors=True)
        sync_file(partial)
        rename_synced(partial, target)
    _announce(target)
    return lines


def _announce(target: Path) -> None:
    """Ends a conversion: names the checkpoint in `latest_universal`, then removes what only it needed."""
    latest = target.parent / LATEST_UNIVERSAL_FILE
    if not latest.is_file() or read_small(latest) != target.name.encode():
        write_atomically(latest, target.name)
    for name in (AVERAGED_FOLDER, KEPT_FOLDER):
        shutil.rmtree(target / name, ignore_errors=True)
    sync_file(target)


def is_published(source: NativeReader, target: Path) -> bool:
    """Returns whether `target` is a complete conversion of this source, which may lack only `_announce`.
    Raises UserError if `target` is something else."""
    # Listed, because a network file system may remember for a while that a name does not exist.
    if not target.parent.is_dir() or target.name not in os.listdir(target.parent):
        return False
    mark = target / SOURCE_FILE
    if not mark.is_file() or _source_identity(mark) != identity_of(source):
        raise UserError(f"--output_folder {target} exists: remove it, or give another")
    return True


def _source_identity(mark: Path) -> str:
    return read_small(mark).decode(errors="replace")


def _mark(folder: Path, name: str, text: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    for path in (folder / name, folder, folder.parent):
        sync_file(path)


# --- before and after the parameters ---


def _begin(source: NativeReader, partial: Path) -> bool:
    """Creates the folder, or accepts the folder of an interrupted conversion of the same source or of
    another process. Returns whether it was created."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    created = False
    if not partial.is_symlink() and not (partial / SOURCE_FILE).is_file():
        with TemporaryDirectory(prefix=f"{partial.name}.", dir=partial.parent) as temporary:
            new = Path(temporary, "new")  # the temporary folder is its owner's only; this one is not
            new.mkdir()
            write_atomically(new / SOURCE_FILE, identity_of(source))
            try:
                rename_synced(new, partial)
                created = True
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
    if links := [path for path in (partial, *partial.iterdir()) if path.is_symlink()]:
        raise UserError(f"{links[0]} is a link, which no conversion creates: remove it")
    mark = partial / SOURCE_FILE
    if not mark.is_file():
        raise UserError(
            f"{partial} is not an interrupted conversion of a native checkpoint: it has no {SOURCE_FILE}: "
            "remove it, or give another --output_folder"
        )
    if _source_identity(mark) != identity_of(source):
        raise UserError(
            f"{partial} is an interrupted conversion of another checkpoint "
            f"({shown(_source_identity(mark))}): finish that conversion, or remove the folder"
        )
    return created


def _write_common_files(source: NativeReader, partial: Path, verify: bool) -> None:
    """Writes what does not belong to a single parameter, as DeepSpeed's converter does, and `run.json`."""
    files = source.checkpoint.run.get("files", {}) if verify else {}
    common = {key: value for key, value in source.files.common.items() if key not in _PER_PARAMETER}
    common["param_groups"] = source.files.common["base_optimizer_state"].get("param_groups")
    common[LOSS_SCALE_KEY] = common.pop("loss_scaler", None)
    with _replacing(partial, f"{PARAMETER_FOLDER}/{OPTIMIZER_STATE_FILE}") as written:
        write_archive(written, _plain_types(common))
    for path in model_files(source.folder):
        if path.name in files and (damage := source.file_problem(path.name)):
            raise _damaged(source, [damage])
        with _replacing(partial, path.name) as written:
            if source.files.stage == 0:  # then this file also holds the optimizer state
                write_archive(written, _plain_types({**read_file(path), "optimizer": None}))
            else:
                with open_regular(path) as file, open(written, "wb") as copy:
                    shutil.copyfileobj(file, copy)
    if not source.checkpoint.is_external:
        sizes = {
            str(path.relative_to(partial)): {"bytes": path.stat().st_size}
            for path in sorted(partial.rglob("*.pt"))
            if UNFINISHED_FOLDER not in path.parts  # which other processes may remove
        }
        content = {**source.checkpoint.run, "files": sizes}
        folder = partial / AVERAGED_FOLDER
        averaged = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        if averaged and "certificate" in content:
            content["certificate"] = _integrity_record_without(averaged, content["certificate"])
        with _replacing(partial, RUN_FILE) as written:
            write_json(written, add_checksum(content))


@contextmanager
def _replacing(partial: Path, name: str) -> Iterator[Path]:
    """Writes a file under its own name in a folder of its own, and renames it into `partial`."""
    (partial / UNFINISHED_FOLDER).mkdir(exist_ok=True)
    with TemporaryDirectory(dir=partial / UNFINISHED_FOLDER) as folder:
        written = Path(folder, Path(name).name)
        yield written
        sync_file(written)
        rename_synced(written, partial / name)


def _integrity_record_without(averaged: set[str], record: dict[str, Any]) -> dict[str, Any]:
    """Returns an integrity record without what is invalid after these parameters were averaged."""
    digests = {
        state_name: {name: digest for name, digest in by_parameter.items() if name not in averaged}
        for state_name, by_parameter in record["digests"].items()
    }
    return {**record, "digests": digests, "probe": None}


def _plain_types(value: Any) -> Any:
    """Returns the value in types that any program can read. Tensors and objects of other frameworks' classes
    become None; the arguments stay an `argparse.Namespace`, which Megatron programs expect."""
    if isinstance(value, dict):
        return {key: _plain_types(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain_types(entry) for entry in value)
    if isinstance(value, Namespace):
        return Namespace(**{key: _plain_types(entry) for key, entry in vars(value).items()})
    return None if isinstance(value, Stub) or isinstance(value, Tensor) else value
