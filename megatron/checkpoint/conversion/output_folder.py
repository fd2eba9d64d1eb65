"""The folder that a conversion writes: complete or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron.errors import UserError, one_line
from megatron.files import create_locked, locked_leftover


def check_space(folder: Path, needed: int, flag: str) -> None:
    """Raises UserError, which names the flag, if the folder's disk has fewer bytes free than needed."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{flag}: {folder.parent} has {free / 1e9:,.1f} GB free and {needed / 1e9:,.1f} GB are needed: "
            "free space, or pass another folder"
        )


@contextmanager
def temporary_folder(output: Path, suffix: str, needed_bytes: int) -> Iterator[Path]:
    """Creates a folder beside `output`, which the block fills and renames to `output`; removes it if the
    block raises. Replaces the temporary folder of a conversion that was killed.

    suffix: appended to the name of `output`. Raises UserError if `output` exists, if the temporary folder is
    not from a killed conversion or cannot be written, or if its disk has fewer than needed_bytes free.
    """
    temporary = output.with_name(output.name + suffix)
    with _locked(output, temporary) as is_leftover:
        if output.exists():
            raise UserError(_exists(output))
        try:
            if is_leftover and temporary.is_dir() and not temporary.is_symlink():
                shutil.rmtree(temporary)
            temporary.mkdir()
        except FileExistsError as error:
            raise UserError(_exists(temporary)) from error
        except OSError as error:
            raise _cannot_be_created(output, error) from error
        try:
            check_space(temporary, needed_bytes, str(output))
            yield temporary
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if _is_write_error(error, temporary):
                raise UserError(
                    f"{output} cannot be written ({one_line(error)}): free space, or give another folder"
                ) from error
            raise


def _cannot_be_created(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be created ({error.strerror}): give another folder")


def _exists(path: Path) -> str:
    return f"{path} exists already: remove it, or give another folder"


@contextmanager
def _locked(output: Path, temporary: Path) -> Iterator[bool]:
    """Locks a file beside the temporary folder; the kernel unlocks it however this process ends. Yields
    whether a killed conversion left the file.

    The file is not in the temporary folder: NFS renames an open file instead of deleting it, so a folder with
    an open file in it cannot be deleted. Raises UserError if another process has the lock. On a file system
    without locks the file itself is the lock, and the user has to remove it after a killed conversion.
    """
    path = temporary.with_name(temporary.name + ".lock")
    is_leftover = os.path.lexists(path)
    with ExitStack() as stack:
        try:
            temporary.parent.mkdir(parents=True, exist_ok=True)
            if is_leftover:
                stack.enter_context(locked_leftover(str(path)))
            else:
                stack.enter_context(create_locked(str(path)))
        except (BlockingIOError, FileNotFoundError) as error:
            raise UserError(
                f"{temporary} is being written by another process: wait, or give another folder"
            ) from error
        except OSError as error:
            if not is_leftover:
                raise _cannot_be_created(output, error) from error
            raise UserError(
                f"{path} exists already: its conversion runs or was killed. Give another folder, or "
                f"remove {path.name} and {temporary.name} if it was killed"
            ) from error
        try:
            yield is_leftover
        finally:
            path.unlink(missing_ok=True)


def _is_write_error(error: BaseException, folder: Path) -> bool:
    """Returns whether an error may come from a write in the folder, as on a full disk."""
    if isinstance(error, OSError):
        return not isinstance(error.filename, str) or Path(error.filename).is_relative_to(folder)
    return type(error).__name__ == "SafetensorError"  # its import would take time in every conversion
