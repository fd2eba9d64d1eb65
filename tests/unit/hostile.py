"""Helpers for tests of hostile files: bounds on memory and time, mutations, folders that must not change."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.errors import UserError

MUTATIONS = [40, pytest.param(2000, marks=pytest.mark.full)]
"""Number of mutations for each reader: in the gate, and in the full matrix."""
_MIB = 1 << 20


@contextmanager
def bounds(memory_mib: int = 512, cpu_s: float = 60.0) -> Iterator[None]:
    """Limits the additional address space and the processor time of this process within the block. A
    malicious file then fails the test instead of the machine. Both limits are far above what an honest file
    takes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + memory_mib * _MIB

    def out_of_time(*_: Any) -> None:
        raise AssertionError(f"it took more than {cpu_s} s of processor time")

    handler = signal.signal(signal.SIGPROF, out_of_time)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGPROF, handler)


def refusal(read: Callable[[], Any], kind: type[UserError] = UserError) -> str:
    """Returns the error with which reading a file is rejected, within bounds."""
    with bounds(), pytest.raises(kind) as caught:
        read()
    return checked_sentence(caught.value)


def checked_sentence(error: UserError) -> str:
    """Returns an error's text. Asserts that it is one line that a terminal can show, and that memory did not
    run out."""
    text = str(error)
    assert text.isprintable() and len(text) < 1500, text
    assert "MemoryError" not in text and "allocate" not in text, text
    return text


def snapshot(folder: Path) -> dict[str, str]:
    """Returns every name below a folder with a digest of its content."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }


@st.composite
def _changes(draw: st.DrawFn) -> list[tuple[str, float, int, bytes]]:
    """Draws changes: (kind, position in the bytes from 0 to 1, number of bytes, new bytes)."""
    kinds = st.sampled_from(["overwrite", "insert", "delete", "repeat", "cut", "number"])
    change = st.tuples(kinds, st.floats(0, 1), st.integers(1, 64), st.binary(min_size=1, max_size=8))
    return draw(st.lists(change, min_size=1, max_size=4))


def mutated(content: bytes, changes: list[tuple[str, float, int, bytes]]) -> bytes:
    """Returns the bytes after all changes."""
    for kind, place, count, new in changes:
        at = int(place * len(content))
        if kind == "overwrite":
            content = content[:at] + new + content[at + len(new) :]
        elif kind == "insert":
            content = content[:at] + new + content[at:]
        elif kind == "delete":
            content = content[:at] + content[at + count :]
        elif kind == "repeat":
            content = content[:at] + content[at : at + count] * 3 + content[at + count :]
        elif kind == "cut":
            content = content[:at]
        else:
            number = int.from_bytes(new, "little").to_bytes(8, "little")
            content = content[:at] + number + content[at + 8 :]
    return content


def fuzz(
    examples: int,
    read: Callable[[], Any],
    change: Callable[[st.DataObject, list[tuple[str, float, int, bytes]]], None],
    untouched: Path,
) -> None:
    """Calls `change` and then `read` `examples` times. Asserts that each read succeeds or is rejected with
    one sentence, and that the folder `untouched` does not change. The mutations are equal in every run."""
    before = snapshot(untouched)

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data(), _changes())
    def one(data: st.DataObject, changes: list[tuple[str, float, int, bytes]]) -> None:
        change(data, changes)
        try:
            read()
        except UserError as error:
            checked_sentence(error)
        assert snapshot(untouched) == before

    with bounds(memory_mib=1024, cpu_s=600.0):
        one()


HOSTILE_VALUES = [
    *(None, True, -1, 0, 1, 2**31, 2**70, 1.5, float("nan"), "", "..", "../victim", "/dev/zero", "a/b", "\0"),
    *("\ud800", "x" * 5000, [], {}, [[]], {"": {}}, [1, 2], "\x1b[2J\nerror: "),
]


def mutated_json(value: Any, data: st.DataObject) -> Any:
    """Returns the value with one of its parts, or one of its keys, replaced."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 4)):
        key = data.draw(st.sampled_from(sorted(value)))
        if data.draw(st.integers(0, 9)) == 0:
            renamed = data.draw(
                st.sampled_from(["..", "../../victim", "/dev/zero", "x\0y", "", "a" * 300, "b"])
            )
            return {renamed if name == key else name: entry for name, entry in value.items()}
        if data.draw(st.integers(0, 19)) == 0:
            return {name: entry for name, entry in value.items() if name != key}
        return {**value, key: mutated_json(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.integers(0, 4)):
        index = data.draw(st.integers(0, len(value) - 1))
        return [*value[:index], mutated_json(value[index], data), *value[index + 1 :]]
    return data.draw(st.sampled_from(HOSTILE_VALUES))
