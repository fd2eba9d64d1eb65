"""Reads the files that name a checkpoint of their folder, and which people edit: `latest`,
`latest_universal`, and Megatron-LM's `latest_checkpointed_iteration.txt`.

A path into the folder, a number, another framework's spelling, a comment and a link are understood. Any other
content is an error that quotes it: the newest checkpoint is not the one that its author wants.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint.files import read_with_retries
from megatron.checkpoint.names import is_plain, shown
from megatron.errors import UserError, is_access_error
from megatron.files import HostileFileError, read_small

# Size limit of a file that holds one name.
_MAX_BYTES = 4096
_STEP = re.compile(r"(?:(?:(?:global_?)?step|iter(?:ation)?|checkpoint)[ _-]?)?([0-9]{1,12})", re.IGNORECASE)
_COMMENT = re.compile(r"(^|\s)#.*")
# Invisible, and not removed by `str.strip`.
_ZERO_WIDTH = str.maketrans("", "", "\u200b\u200c\u200d\u2060\ufeff")


class MissingCheckpointError(UserError):
    """A user wrote something into `latest` that names no checkpoint. No other checkpoint is used instead."""


def read_latest_file(path: Path, step_names: Sequence[str], other_names: re.Pattern[str]) -> str | None:
    """Returns the name of the folder beside `path` that the file or link `path` names; None if it is missing,
    empty or not readable as text, as after a power failure.

    step_names: how a folder is named after its step, such as "global_step{}". other_names: names that are
    used unchanged. The first name that exists is returned; if none does, the first. Raises
    MissingCheckpointError for content that is not understood, and OSError if the file cannot be read now.
    """
    text = _content(path)
    if not text:
        return None
    name = _name_inside(path.parent, text)
    if name is not None and (path.parent / name).is_symlink() and not other_names.fullmatch(name):
        name = _name_inside(path.parent, os.path.realpath(path.parent / name)) or name
    step = _STEP.fullmatch(name or "")
    names = [step_name.format(int(step[1])) for step_name in step_names] if step else []
    if name in names[:1]:
        return name
    names += [name] if name is not None and other_names.fullmatch(name) else []
    existing = (name for name in names if (path.parent / name).is_dir())
    if found := next(existing, names[0] if names else None):
        return found
    raise MissingCheckpointError(
        f"{path} holds {shown(text)}, expected the name of a checkpoint in {path.parent}, such as "
        f"{step_names[0].format(3)}: correct it, or remove {path.name} to use the newest checkpoint"
    )


def _content(path: Path) -> str:
    """Returns what a person wrote: the target of a link, or a file's lines without comments and quotes. ""
    for a file that is missing, empty, or no text."""
    if path.is_symlink() and not path.is_file():
        return os.readlink(path)
    try:
        content = read_with_retries(path, lambda: read_small(path, _MAX_BYTES))
    except (OSError, HostileFileError) as error:
        if is_access_error(error):
            raise
        if path.is_dir():
            raise MissingCheckpointError(
                f"{path} is a folder, expected a file or a link that names a checkpoint"
            ) from error
        return ""
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = content.decode("utf-16" if is_utf16 else "utf-8", errors="replace").translate(_ZERO_WIDTH)
    lines = [_COMMENT.sub("", line).strip() for line in text.splitlines()]
    written = "\n".join(filter(None, lines)) or text.strip()  # only a comment is no name either
    if any(character < " " and character not in "\t\n" or character == "\ufffd" for character in written):
        return ""
    return written[1:-1] if written[0:1] in ("'", '"') and written[0] == written[-1] else written


def _name_inside(folder: Path, text: str) -> str | None:
    """Returns the last component of a path whose parent is `folder`: an absolute path, one relative to the
    folder, to the working folder, or to a parent of `folder`, or a URL. None for any other text."""
    is_url = "://" in text
    parent, name = os.path.split(text.rstrip("/") if is_url else os.path.normpath(os.path.expanduser(text)))
    if not (is_plain(name) or _STEP.fullmatch(name)):
        return None
    own, absolute = os.path.realpath(folder), os.path.abspath(folder)
    if not parent or is_url:
        return name if not parent or parent == str(folder) else None
    if own in (os.path.realpath(parent), os.path.realpath(folder / parent)):
        return name
    end = os.sep + parent
    return name if not os.path.isabs(parent) and (own.endswith(end) or absolute.endswith(end)) else None
