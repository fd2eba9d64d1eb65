"""Digests of the files of an exported folder, in the format of sha256sum: `sha256sum -c megatron.sha256`
compares them. Other programs write SHA256SUMS, which may list other files; this program does not read it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from megatron.checkpoint.integrity.access import read_with_retries
from megatron.checkpoint.integrity.manifest import describe_file
from megatron.checkpoint.integrity.names import check_file
from megatron.config import ConfigError
from megatron.config.errors import is_access_error
from megatron.files import read_small
from megatron.text_table import first_few

DIGEST_FILE = "megatron.sha256"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def digest_of(path: Path) -> str:
    """Reads a file and returns its SHA-256."""
    return str(describe_file(path)["sha256"])


def write_digests(folder: Path, known: Mapping[str, str]) -> None:
    """Writes the digests of all files in a folder and its sub-folders. known: digests by file name;
    these files are not read again."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    lines = [f"{known.get(name) or digest_of(folder / name)}  {name}\n" for name in names]
    (folder / DIGEST_FILE).write_text("".join(lines))


def read_digests(folder: Path) -> dict[str, str]:
    """Name of each file that has a digest -> its SHA-256; {} for a folder without digests.

    Raises ConfigError if they are malformed, OSError if they cannot be read now.
    """
    path = folder / DIGEST_FILE
    if not path.exists():
        return {}
    text = read_with_retries(path, lambda: read_small(path)).decode(errors="replace")
    found = [_LINE.fullmatch(line) for line in text.splitlines()]
    if not all(found):
        raise ConfigError(f"{path} is damaged: expected a digest and a file's name in each line")
    return {check_file(match[2], path): match[1] for match in found if match}


def digest_problem(folder: Path, name: str, digest: str) -> str | None:
    """Reads a file. Returns what is wrong with it, in words; None if it has the digest. OSError if it cannot
    be read now."""
    path = folder / name
    try:
        found = read_with_retries(path, lambda: digest_of(path))
    except OSError as error:
        if is_access_error(error):
            raise
        return f"{name} cannot be read ({error.strerror})"
    return None if found == digest else f"{name} differs from its digest in {DIGEST_FILE}"


def check_digests(folder: Path) -> None:
    """Raises ConfigError, with their names, for files that differ from their digests."""
    problems = [digest_problem(folder, *entry) for entry in read_digests(folder).items()]
    if damaged := [problem for problem in problems if problem]:
        raise ConfigError(
            f"{folder} is damaged: {first_few(damaged)}: copy it again, or delete {DIGEST_FILE} if you have "
            "changed the folder yourself"
        )
