"""The stamp of prepared data: what was verified, and the size and modification time of each file at that
time.

A start that finds the stamp only compares these with the files' status, and opens no file. The stamp is a
JSON file, `prepared-DIGEST.json`, in --data-cache-path, otherwise in the folder of the first token files.
DIGEST identifies the prefixes: all runs that read the same prefixes share the stamp.

    {"version": 1,
     "data_sets": {
       "/data/a_text_document": {
         "facts": {"documents": 437, "tokens": 3127361, "ranges": {"0-423": 3011849, "423-437": 115512}},
         "files": {
           "a_text_document.idx": [[size, mtime_ns], [size, mtime_ns]],        of the .idx and the .bin file
           "a_text_document_documents0-423_..._doc_idx.npy": [[size, mtime_ns], ...]}}},
     "blends": {"/data/blend-0123456789ab_4096_dataset_index.npy": [[size, mtime_ns], ...]}}

`ranges` holds the number of tokens of ranges of documents; these ranges are part of the names of the index
files. An entry of `files` has the name of its first file. If token files change, all entries of their data
set become invalid. The entry of token files with a loss mask also has the mask's two files.

When a stamp is written again, it loses the entries of index files that were deleted.

Each shard of tools/prepare_indices.py writes a part, `prepared-DIGEST.0-of-4.json`. A shard that finds all
parts merges them into the stamp; the parts remain. Files are written under a temporary name and renamed. If
two runs write at the same time, one may lose the new entries of the other; the files of lost entries are then
verified once more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.config import DataConfig
from megatron.data.flags import token_file_prefixes
from megatron.data.index_files import replaced_file
from megatron.data.indexed_dataset import IndexedDataset, TokenCounts, file_paths, index_path
from megatron.errors import one_line
from megatron.files import HostileFileError, dict_of, fields_of, is_count, list_of, read_small
from megatron.shares import share_out

logger = logging.getLogger(__name__)

_VERSION = 1
# The key of a data set's `TokenCounts` in the file. It keeps the name of the first version of the stamp.
_COUNTS_KEY = "facts"
# Largest size of a stamp. 3,000 data sets with three splits take 3 MB.
_MAX_BYTES = 1 << 27
_WARNINGS = 3  # limit, because a blend may have thousands of changed files

Status = list[int]
"""Size in bytes and modification time in nanoseconds of a file; [] if the file cannot be accessed."""


def statuses(paths: Sequence[str]) -> list[Status]:
    """Returns the current status of each file."""
    found: list[Status] = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            found.append([])
        else:
            found.append([status.st_size, status.st_mtime_ns])
    return found


class IndexStamp:
    """The stamp for the prefixes of a run, or a part of it. Several threads may use it."""

    def __init__(self, data: DataConfig, shard: tuple[int, int] = (0, 1)) -> None:
        """Reads the stamp. shard: (index, number). This process then verifies and writes only its part."""
        given = list(dict.fromkeys(token_file_prefixes(data)))
        paths = [os.path.abspath(prefix) for _, prefix in given]
        folder = data.data_cache_path or (os.path.dirname(paths[0]) if paths else "")
        digest = hashlib.sha256("\n".join(sorted(set(paths))).encode()).hexdigest()[:12]
        stem, (index, number) = os.path.join(folder, f"prepared-{digest}"), shard
        self.path = f"{stem}.json"
        self._parts = [f"{stem}.{part}-of-{number}.json" for part in range(number)] if number > 1 else []
        self._content, self._text = _read(self.path)
        if self._parts:
            part, self._text = _read(self._parts[index])
            self._content = _merged(self._content, part)
        self.shard = shard
        self.prefixes = _of_shard(given, shard)
        """(flag, prefix) of the token files of this shard, each prefix once per flag."""
        self._intact: dict[str, bool] = {}
        self._opened: dict[str, IndexedDataset] = {}
        self._cache_folder = data.data_cache_path
        self._changed = 0

    def refresh(self) -> None:
        """Reads what other processes have added to the stamp since the last read. Does not read the status of
        token files again."""
        content, self._text = _read(self.path)
        self._content = _merged(self._content, content)

    def dataset(self, prefix: str, option: str) -> IndexedDataset:
        """Returns the dataset of a prefix. It is opened only once, and not verified. option: the flag that
        names the prefix. Files that are unchanged since the stamp recorded them are opened only when a
        document is read."""
        if prefix not in self._opened:
            self._opened[prefix] = IndexedDataset(prefix, option, verify=False, counts=self.counts(prefix))
        return self._opened[prefix]

    def counts(self, prefix: str) -> TokenCounts | None:
        """Returns the counts of a data set; None unless its token files are unchanged since they were
        verified."""
        if prefix not in self._intact:
            entry = self._content["data_sets"].get(os.path.abspath(prefix), {"files": {}})
            paths = file_paths(prefix)
            self._intact[prefix] = self._is_unchanged(entry["files"], os.path.basename(paths[0]), paths)
        if not self._intact[prefix]:
            return None
        counts = self._content["data_sets"][os.path.abspath(prefix)][_COUNTS_KEY]
        return TokenCounts(**{name: counts[name] for name in _COUNTS})

    def record_token_files(self, dataset: IndexedDataset, found: list[Status]) -> None:
        """Records verified token files, and removes the entry of the files that they replace. found: the
        files' status before the verification."""
        self._content["data_sets"][os.path.abspath(dataset.prefix)] = {
            _COUNTS_KEY: asdict(dataset.counts),
            "files": {os.path.basename(index_path(dataset.prefix)): found},
        }
        self._intact[dataset.prefix] = True

    def vouches(self, prefix: str | None, paths: Sequence[str]) -> bool:
        """Returns whether these files are the verified ones, and were made from the current token files.

        prefix: the data set of an index; None for a blend's table.
        """
        if prefix is not None and self.counts(prefix) is None:
            return False
        files, key = self._place(prefix, paths)
        return self._is_unchanged(files, key, paths)

    def record(self, prefix: str | None, paths: Sequence[str], found: list[Status]) -> None:
        """Records verified files of an index or a table. found: the files' status before the verification, or
        after they were written. Does nothing if the token files are not recorded."""
        if all(found) and (prefix is None or self.counts(prefix) is not None):
            files, key = self._place(prefix, paths)
            files[key] = found

    def _place(self, prefix: str | None, paths: Sequence[str]) -> tuple[dict[str, list[Status]], str]:
        """Returns the dict in which files are recorded, and their key in it."""
        if prefix is None:
            return self._content["blends"], os.path.abspath(paths[0])
        return self._content["data_sets"][os.path.abspath(prefix)]["files"], os.path.basename(paths[0])

    def _is_unchanged(self, files: dict[str, list[Status]], key: str, paths: Sequence[str]) -> bool:
        expected = files.get(key)
        if expected is None or len(expected) != len(paths):  # a loss mask was added or removed
            return False
        for path, was, now in zip(paths, expected, statuses(paths), strict=True):
            if was != now:
                self._warn(path, was, now)
                return False
        return True

    def _warn(self, path: str, was: Status, now: Status) -> None:
        self._changed += 1
        if self._changed > _WARNINGS:
            return
        if not now:
            problem = "it does not exist, or cannot be accessed"
        elif was[0] != now[0]:
            problem = f"it has {now[0]:,} bytes, expected {was[0]:,}"
        else:
            problem = "its time of change is different"
        more = "; further files are not named" if self._changed == _WARNINGS else ""
        logger.warning(
            "%s is verified or built again, since it has changed since %s was written: %s%s",
            path,
            self.path,
            problem,
            more,
        )

    def write(self) -> bool:
        """Writes the stamp, or this shard's part of it, if it has changed. Returns False, and logs a warning,
        if the folder is not writable."""
        content, path = self._content, self.path
        if self._parts:
            own = {os.path.abspath(prefix) for _, prefix in self.prefixes}
            content = {
                **content,
                "data_sets": {key: content["data_sets"][key] for key in content["data_sets"] if key in own},
                # Only the first shard builds tables. Old entries of other shards must not replace its
                # entries.
                "blends": content["blends"] if self.shard[0] == 0 else {},
            }
            path = self._parts[self.shard[0]]
            if not os.path.exists(path):
                self._text = ""  # so that a shard without data sets also writes its part
        try:
            self._text = self._replace(path, content, self._text)
            self._merge_parts()
        except OSError as error:
            logger.warning("%s cannot be written (%s): the next start verifies again", path, error.strerror)
            return False
        return True

    def _merge_parts(self) -> None:
        """Merges the parts into the stamp if all parts exist. Each shard merges when it ends, and once more
        if another shard has written in the meantime. The parts may be of an earlier command."""
        merged: dict[str, Any] | None = None
        while self._parts and all(map(os.path.exists, self._parts)):
            before, (merged, text) = merged, _read(self.path)
            for part in self._parts:
                merged = _merged(merged, _read(part)[0])
            if merged == before:
                return
            self._replace(self.path, merged, text)

    def _replace(self, path: str, content: dict[str, Any], present: str) -> str:
        """Writes a stamp unless its text equals `present`. Returns the text. Raises OSError."""
        if _text_of(content) != present and (text := _text_of(self._existing(content))) != present:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with replaced_file(path) as file:
                file.write(text.encode())
            return text
        return present

    def _existing(self, content: dict[str, Any]) -> dict[str, Any]:
        """Returns the entries except those whose index files or tables were deleted."""
        data_sets = {}
        for prefix, entry in content["data_sets"].items():
            token_files, folder = index_path(prefix), self._cache_folder or os.path.dirname(prefix)
            files = {
                name: found
                for name, found in entry["files"].items()
                if name == os.path.basename(token_files) or os.path.lexists(os.path.join(folder, name))
            }
            data_sets[prefix] = {**entry, "files": files}
        blends = {path: found for path, found in content["blends"].items() if os.path.lexists(path)}
        return {**content, "data_sets": data_sets, "blends": blends}


def _of_shard(given: list[tuple[str, str]], shard: tuple[int, int]) -> list[tuple[str, str]]:
    """Returns the pairs (flag, prefix) of a shard. Shards get about equally many bytes of .idx files."""
    index, number = shard
    if number == 1:
        return given
    found = statuses([index_path(prefix) for _, prefix in given])
    sizes = {prefix: status[0] if status else 0 for (_, prefix), status in zip(given, found, strict=True)}
    chosen = share_out(sizes, number)
    return [pair for pair in given if chosen[pair[1]] == index]


def _merged(content: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of both contents. An entry of `other` replaces an entry of `content`."""
    return {"version": _VERSION, **{key: content[key] | other[key] for key in ("data_sets", "blends")}}


def _text_of(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))


def _read(path: str) -> tuple[dict[str, Any], str]:
    """Returns the content and the text of a stamp. If it is missing or damaged, the content has no
    entries."""
    empty: dict[str, Any] = {"version": _VERSION, "data_sets": {}, "blends": {}}
    try:
        text = read_small(Path(path), _MAX_BYTES).decode()
        content = json.loads(text)
        if not _is_stamp(content):
            raise ValueError("it is not laid out as a stamp of this version")
    except FileNotFoundError:
        return empty, _text_of(empty)
    except (OSError, ValueError, RecursionError, HostileFileError) as error:
        logger.warning("%s is not used: %s", path, one_line(error))
        return empty, ""
    return content, text


def _is_status(value: Any) -> bool:
    return isinstance(value, list) and [type(number) for number in value] == [int, int]


_FILES = dict_of(list_of(_is_status))
_COUNTS = {"documents": is_count, "tokens": is_count, "ranges": dict_of(is_count)}
_is_stamp = fields_of(
    {
        "version": lambda value: value == _VERSION,
        "data_sets": dict_of(fields_of({_COUNTS_KEY: fields_of(_COUNTS), "files": _FILES})),
        "blends": _FILES,
    }
)
