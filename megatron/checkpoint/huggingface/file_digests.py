"""The digests of a folder that an export has written: `megatron.sha256`.

They have the format of sha256sum: `sha256sum -c megatron.sha256` compares them. This program does not read
SHA256SUMS, in which other programs may list other files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from megatron.checkpoint.files import describe_file, file_problem, file_sizes, read_with_retries
from megatron.checkpoint.names import check_file
from megatron.errors import UserError
from megatron.files import read_small
from megatron.text_table import first_few

DIGEST_FILE = "megatron.sha256"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def digest_of(path: Path) -> str:
    """Reads a file and returns its SHA-256."""
    return str(describe_file(path)["sha256"])


def write_digests(folder: Path, known: Mapping[str, str]) -> None:
    """Writes the digests of all files below a folder. known: file name -> digest that is known already."""
    lines = [f"{known.get(name) or digest_of(folder / name)}  {name}\n" for name in file_sizes(folder)]
    (folder / DIGEST_FILE).write_text("".join(lines))


def read_digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file that has one, by name; {} for a folder without digests.

    Raises UserError if the digests are malformed, and OSError if they cannot be read now.
    """
    path = folder / DIGEST_FILE
    if not path.exists():
        return {}
    text = read_with_retries(path, lambda: read_small(path)).decode(errors="replace")
    found = [_LINE.fullmatch(line) for line in text.splitlines()]
    if not all(found):
        raise UserError(f"{path} is damaged: expected a digest and a file's name in each line")
    return {check_file(match[2], path): match[1] for match in found if match}


def check_digests(folder: Path) -> None:
    """Raises UserError if files differ from their digests. The message names the files."""
    problems = [file_problem(folder, *entry, DIGEST_FILE) for entry in read_digests(folder).items()]
    if damaged := [problem for problem in problems if problem]:
        raise UserError(
            f"{folder}: {first_few(damaged)}: copy the folder again, or remove {DIGEST_FILE} if you have "
            "changed the folder yourself"
        )
