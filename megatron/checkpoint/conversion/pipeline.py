"""Converts a checkpoint: a reader of any format yields pieces, and a writer of any format takes them.

Several threads copy the parameters in blocks: reading, checksums and writing release the GIL, and the memory
does not grow with the model. The target folder is written under a temporary name, and renamed once it is
complete and synced.

Some writers keep finished parameters (`CheckpointWriter.keeps_parameters`): each file and folder is complete
when a rename gives it its name. With them an interrupted conversion continues, and processes on several nodes
can convert one checkpoint together (`shared_work`), since all of them write equal bytes. `source.json` in the
folder identifies the checkpoint that is converted. It stays in the published folder, so that a task that
starts late sees that the work is done. A conversion that fails keeps the folder only if it contains a
parameter, so that the next conversion continues. Every other format is written by one process, which leaves
nothing behind if it fails.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.checkpoint.conversion.shared_work import SharedWork
from megatron.checkpoint.conversion.source import identity_of
from megatron.checkpoint.formats.state import StateReader, UnusableSourceError
from megatron.checkpoint.formats.writing import CheckpointWriter, check_space, has_all_digests
from megatron.checkpoint.names import shown
from megatron.errors import UserError, one_line
from megatron.files import read_small, rename_synced, sync_file, sync_tree, write_atomically

# Suffix of the folder's name while it is written.
PARTIAL = ".partial"
# File with the identity of the source.
SOURCE_FILE = "source.json"


def convert(
    reader: StateReader,
    writer_class: type[CheckpointWriter],
    target: Path,
    workers: int = 4,
    verify: bool = True,
    task: tuple[int, int] = (0, 1),
    print_fn: Callable[[str], object] = lambda _: None,
    **options: Any,
) -> Iterator[str]:
    """Writes the folder `target`. Yields the name of each parameter that this process writes. Returns when
    this or another process has published the folder.

    workers: number of threads. verify: compare all states with the digests of the source; if the states have
    none, compare its files. task: (rank, number) of the processes that call this function at the same time,
    which only a writer that keeps parameters allows. print_fn: receives the lines of the result, in the
    process that publishes. options: options of the writer.

    Raises UserError for a damaged source, a source that lacks what the format needs, too little disk space,
    replicas that differ, and a `target` that is not a conversion of this source.
    """
    keeps = writer_class.keeps_parameters
    identity = identity_of(reader) if keeps else None
    is_published(target, identity)  # raises an error before anything is created
    partial = target.with_name(target.name + PARTIAL)
    writer: CheckpointWriter | None = None
    is_begun = False
    try:
        work = SharedWork(partial, *task, is_exclusive=not keeps)
    except OSError as error:
        raise UserError(f"{target} cannot be created ({error.strerror}): give another folder") from error
    with work as shared:
        try:
            try:
                if not is_published(target, identity):
                    if verify and not writer_class.weights_only:
                        _verify_files(reader, writer_class, workers, shared)
                    is_new = _begin(partial, identity, shared.is_leftover)
                    is_begun = True
                    # This is checked again, because another process may have published before this one
                    # created its folder.
                    if not is_published(target, identity):
                        writer = writer_class(partial, reader, **options)
                        yield from _copy(writer, target, workers, verify, shared)
                    elif is_new:
                        shutil.rmtree(partial)
            except (OSError, UserError):
                # If another process has published, the folder has been renamed, and this error does not
                # matter.
                if not (keeps and is_published(target, identity)):
                    raise

            def publish(_: str) -> list[str]:
                is_done = writer is None or is_published(target, identity)
                lines = [] if writer is None or is_done else _publish(writer, target)
                writer_class.announce(target)
                return lines

            for lines in shared.share("publication", [target.name], publish):
                for line in lines:
                    print_fn(line)
        except BaseException as error:
            if writer is not None:
                writer.abandon()
            continues = writer_class.has_parameters(partial) and not isinstance(error, UnusableSourceError)
            if is_begun and not continues and shared.is_last():
                shutil.rmtree(partial, ignore_errors=True)
            if sentence := _failure(error, partial, target, keeps):
                raise UserError(sentence) from error
            raise


def _verify_files(
    reader: StateReader, writer_class: type[CheckpointWriter], workers: int, shared: SharedWork
) -> None:
    """Compares the files of a checkpoint with their digests. If all states have digests, `StateReader.pieces`
    compares the states, and only files that are copied are compared. Raises UserError that names the damaged
    files."""
    files = reader.checkpoint.run.get("files", {})
    compared = writer_class.copied_files(reader) if has_all_digests(reader) else reader.compared_files()
    names = largest_first({name: files.get(name, {}).get("bytes", 0) for name in compared})
    found = shared.share("source files", names, reader.file_problem, workers, lambda problem: not problem)
    if problems := list(filter(None, found)):
        raise UserError(f"checkpoint {reader.folder}: {'; '.join(problems[:3])}: convert an older checkpoint")


def _copy(
    writer: CheckpointWriter, target: Path, workers: int, verify: bool, shared: SharedWork
) -> Iterator[str]:
    """Copies the parameters that no other process copies and that no earlier process has finished."""
    sizes = writer.parameter_bytes()
    check_space(writer.folder, sum(sizes.values()) - writer.unfinished_bytes(), str(target))

    def copy(name: str) -> str | None:
        if writer.has_parameter(name):
            return None
        writer.write_parameter(name, writer.pieces(name, verify))
        return name

    names, threads = (list(sizes), 1) if writer.weights_only else (largest_first(sizes), workers)
    yield from filter(None, shared.share("parameter", names, copy, threads))


def largest_first(sizes: Mapping[str, int]) -> list[str]:
    """Returns the names, large parameters first, so that the threads that take them end together."""
    return sorted(sizes, key=lambda name: sizes[name], reverse=True)


# --- before and after the parameters ---


def is_published(target: Path, identity: str | None) -> bool:
    """Returns whether `target` is a complete conversion of the source with this identity. Work that follows
    the publication may still be missing. Raises UserError if `target` exists and is not such a conversion."""
    # The folder is listed, because a network file system may remember for some seconds that a name
    # is missing.
    if not target.parent.is_dir() or target.name not in os.listdir(target.parent):
        return False
    mark = target / SOURCE_FILE
    if identity is None or not mark.is_file() or _identity_in(mark) != identity:
        raise _exists(target)
    return True


def _begin(partial: Path, identity: str | None, is_leftover: bool) -> bool:
    """Creates the folder. Returns whether it did not exist before.

    identity: identity of the source, if an interrupted conversion of it can continue and other processes may
    convert it at the same time; None to replace what a killed conversion left. is_leftover: whether a killed
    conversion left its lock.
    """
    mark = partial / SOURCE_FILE
    if identity is None:
        if is_leftover and partial.is_dir() and not partial.is_symlink() and not mark.exists():
            shutil.rmtree(partial)
        try:
            partial.mkdir()
        except FileExistsError as error:
            raise _exists(partial) from error
        return True
    created = False
    if not partial.is_symlink() and not mark.is_file():
        with TemporaryDirectory(prefix=f"{partial.name}.", dir=partial.parent) as temporary:
            new = Path(temporary, "new")  # without the temporary folder's mode, which excludes other users
            new.mkdir()
            write_atomically(new / SOURCE_FILE, identity)
            try:
                rename_synced(new, partial)
                created = True
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
    if links := [path for path in (partial, *partial.iterdir()) if path.is_symlink()]:
        raise UserError(f"{links[0]} is a link, which no conversion creates: remove it")
    if not mark.is_file():
        raise UserError(
            f"{partial} is not an interrupted conversion that can continue: it has no {SOURCE_FILE}: remove "
            "it, or give another folder"
        )
    if (found := _identity_in(mark)) != identity:
        raise UserError(
            f"{partial} is an interrupted conversion of another checkpoint ({shown(found)}): finish that "
            "conversion, or remove the folder"
        )
    return created


def _publish(writer: CheckpointWriter, target: Path) -> list[str]:
    """Completes the folder and gives it its name. Returns the lines of the result."""
    lines = writer.result(target)
    writer.complete()
    if writer.keeps_parameters:  # the files in the folder are already synced
        sync_file(writer.folder)
    else:
        sync_tree(writer.folder)
    rename_synced(writer.folder, target)
    return lines


def _failure(error: BaseException, partial: Path, target: Path, keeps: bool) -> str:
    """Returns the sentence for an error of the file system; "" for every other error."""
    if keeps and isinstance(error, OSError):
        return f"the conversion stopped ({error}): fix the cause, then the same command continues it"
    # Importing the class would slow down every conversion.
    is_write = type(error).__name__ == "SafetensorError"
    if isinstance(error, OSError):
        # The error of a failed write, such as on a full disk, does not name the file.
        is_write = not isinstance(error.filename, str) or Path(error.filename).is_relative_to(partial)
    return f"{target} cannot be written ({one_line(error)}): free space, or give another folder" * is_write


def _identity_in(mark: Path) -> str:
    return read_small(mark).decode(errors="replace")


def _exists(path: Path) -> UserError:
    return UserError(f"{path} exists already: remove it, or give another folder")
