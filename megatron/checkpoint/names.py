"""Checks names that were read from a file before they are used in paths.

Names of parameters, files and checkpoints become paths that are opened, written or deleted. Each must be a
plain name, or for some files a few plain names with / between them, so that the path stays inside its folder.
For any other name a HostileFileError quotes the name and the file that contains it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.files import HostileFileError
from megatron.mpu.parameter_spec import ParameterSpec, Shard

# File systems allow 255 bytes per path component, and the program may add a suffix to a name.
_MAX_LENGTH = 200
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=-]*")
_PARAMETER = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
# `run.json` of a universal checkpoint lists zero/<parameter>/<file>: three parts.
_MAX_PARTS = 3
_MAX_SHOWN = 60
# The file in which torch.distributed.checkpoint stores its table of tensors.
METADATA_FILE = ".metadata"
# The key of the integrity record in `run.json`, and the key of the canary loss in that record. Both keys keep
# the names of version 0.1, so that every version reads the checkpoints of every other version.
INTEGRITY_KEY = "certificate"
CANARY_KEY = "probe"


def shown(name: object) -> str:
    """Returns a name as an error message shows it: quoted, shortened, without control characters."""
    text = repr(name[: 2 * _MAX_SHOWN]) if isinstance(name, (str, bytes)) else f"a {type(name).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def is_plain(name: object) -> bool:
    """Returns whether a value is a string that is one path component, without `..` and control characters."""
    return isinstance(name, str) and len(name) <= _MAX_LENGTH and bool(PLAIN_NAME.fullmatch(name))


def check_plain(name: object, source: Path | str, what: str = "file") -> str:
    """Returns the name if it is plain; raises HostileFileError otherwise. source: the file that contains the
    name. what: what the name stands for, such as "checkpoint"."""
    if not is_plain(name):
        raise _name_error(name, source, what, "letters, digits and any of _ . + @ = -")
    return str(name)


def check_file(name: object, source: Path | str) -> str:
    """Returns the path of a file inside a checkpoint; raises HostileFileError unless it consists of plain
    names with / between them or is the table of torch.distributed.checkpoint. source: see `check_plain`."""
    if name == METADATA_FILE:
        return METADATA_FILE
    parts = name.split("/", _MAX_PARTS) if isinstance(name, str) else []
    if not (0 < len(parts) <= _MAX_PARTS and all(map(is_plain, parts))):
        raise _name_error(name, source, "file", "a path inside the checkpoint's folder")
    return str(name)


def check_parameter(name: object, source: Path | str) -> str:
    """Returns a parameter's name if it consists of words with dots between them, since it becomes the name of
    a folder; raises HostileFileError otherwise."""
    named = isinstance(name, str) and len(name) <= _MAX_LENGTH and _PARAMETER.fullmatch(name)
    if not named or str(name).endswith(".pt"):
        raise _name_error(name, source, "parameter", "words with dots between them")
    return str(name)


def _name_error(name: object, source: Path | str, what: str, expected: str) -> HostileFileError:
    return HostileFileError(
        f"{source} names a {what} {shown(name)}, expected {expected}: it may be malicious; check where it "
        "comes from"
    )


def check_run(run: Any, source: Path) -> None:
    """Checks every name in a `run.json`, and the types of the values from which paths and sizes are computed.

    Raises HostileFileError for an unsafe name, and ValueError for a value of the wrong type.
    """
    if not isinstance(run, dict):
        raise ValueError(f"it holds a {type(run).__name__}, expected an object")
    for name, entry in _mapping(run, "files").items():
        check_file(name, source)
        if not isinstance(entry, dict) or not _is_count(entry.get("bytes")):
            raise ValueError(f"it does not say how many bytes {name} has")
    for name, record in _mapping(run, "parameters").items():
        check_parameter(name, source)
        _check_record(name, record)
    lineage = run.get("lineage", [])
    if not isinstance(lineage, list):
        raise ValueError("its lineage is not a list")
    for entry in lineage:
        # An entry is the name of a checkpoint's folder, or a record with this name under "name".
        check_plain(entry.get("name") if isinstance(entry, dict) else entry, source, "checkpoint")
    for name, by_parameter in _mapping(_mapping(run, INTEGRITY_KEY), "digests").items():
        check_plain(name, source, "state")
        if not isinstance(by_parameter, dict) or not all(isinstance(d, str) for d in by_parameter.values()):
            raise ValueError(f"its digests of {name} are not an object of strings")
        for parameter in by_parameter:
            check_parameter(parameter, source)
    _check_numbers(run)


def _mapping(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = record.get(key)
    if not isinstance(value, (dict, type(None))):
        raise ValueError(f"its {key} is not an object")
    return value or {}


def _check_record(name: str, record: Any) -> None:
    """Raises ValueError unless the record has the form that `spec_record` writes."""
    shape = record.get("whole_shape") if isinstance(record, dict) else None
    if not isinstance(shape, list) or not is_shape(shape):
        raise ValueError(f"it does not give the shape of {name}")
    dim, blocks, rows = (record.get(key) for key in ("shard_dim", "blocks", "used_rows"))
    dim_is_valid = dim is None or (_is_count(dim) and dim < len(shape))
    sharding = record.get("sharding", [])
    for shard in sharding if isinstance(sharding, list) else [None]:
        dim_is_valid = dim_is_valid and (
            isinstance(shard, list)
            and [type(entry) for entry in shard] == [int, str, int]
            and 0 <= shard[0] < len(shape)
            and 0 < shard[2]
        )
    if dim_is_valid:
        try:
            ParameterSpec(tuple(shape), tuple(Shard(*shard) for shard in sharding))
        except ValueError:
            dim_is_valid = False
    if not (
        dim_is_valid and _is_count(blocks) and blocks > 0 and (rows is None or 0 < _count(rows) <= shape[0])
    ):
        raise ValueError(f"it does not say how {name} is sharded")


def _check_numbers(run: Mapping[str, Any]) -> None:
    state = _mapping(run, "state")
    for name, value in state.items():
        if not is_plain(name):
            raise ValueError(f"its state has a field {shown(name)}")
        numbers = value if isinstance(value, list) else [value]
        if not all(type(number) in (int, float) for number in numbers):
            raise ValueError(f"{name} of its state is not a number")
    for name in ("iteration", "consumed_samples", "consumed_tokens", "pending_evaluations"):
        if not _is_count(state.get(name, 0)):
            raise ValueError(f"{name} of its state is not a count")
    for name, size in (("vocab_size", run.get("vocab_size", 1)), *_mapping(run, "layout").items()):
        if name in ("vocab_size", "tensor_model_parallel_size") and not 0 < _count(size):
            raise ValueError(f"its {name} is not a positive number")
    if not (run.get("eod") is None or _is_count(run["eod"])):
        raise ValueError("its eod is not the id of a token")


def is_shape(shape: Iterable[Any]) -> bool:
    """Returns whether a tensor can have this shape: 1 to 8 dimensions, none of them empty."""
    sizes = list(shape)
    total = 1
    for size in sizes[:9]:
        total *= _count(size)
    return 0 < len(sizes) <= 8 and 0 < total < 1 << 62


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _count(value: Any) -> int:
    """Returns a count unchanged, and 0 for any other value."""
    return value if _is_count(value) else 0
