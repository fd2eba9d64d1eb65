"""The folder that a conversion writes: complete or absent."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from megatron.checkpoint.convert.to_universal import check_space
from megatron.checkpoint.integrity.names import one_line
from megatron.config import ConfigError


@contextmanager
def temporary_folder(output: Path, suffix: str, needed_bytes: int) -> Iterator[Path]:
    """A new folder beside `output`, which the body fills and renames to `output`; removed if the body raises.

    suffix: of its name. Raises ConfigError if `output` or this folder exists, if it cannot be made or
    written, and if its disk has fewer than needed_bytes free.
    """
    temporary = output.with_name(output.name + suffix)
    for path in (output, temporary):
        if path.exists():
            raise ConfigError(f"{path} exists already: remove it, or give another folder")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{output} cannot be made ({error.strerror}): give another folder") from error
    try:
        check_space(temporary, needed_bytes, str(output))
        yield temporary
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if _is_write_error(error, temporary):
            raise ConfigError(
                f"{output} cannot be written ({one_line(error)}): free space, or give another folder"
            ) from error
        raise


def _is_write_error(error: BaseException, folder: Path) -> bool:
    """Whether it may be that of a write in the folder, as on a full disk; an error of another file is not."""
    if isinstance(error, OSError):
        return not isinstance(error.filename, str) or Path(error.filename).is_relative_to(folder)
    return isinstance(error, SafetensorError)
