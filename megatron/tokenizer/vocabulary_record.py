"""Which vocabulary token files were made with: a small JSON file beside them, compared with a run's own.

Two tokenizers of equal size give equally valid token ids with other meanings, which nothing else would
notice. `{prefix}.tokenizer.json` holds the digest of the vocabulary that made `{prefix}.bin`. Token files of
other programs have no such file and are not compared.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from typing import Any

from megatron.config import ConfigError
from megatron.tokenizer.base import Tokenizer

_MAX_BYTES = 1 << 16


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 of all (id, token) pairs: equal for two tokenizers if each id means the same in both.

    The kind of the tokenizer is not part of it: GPT-2's files give one digest, whichever class reads them.
    """
    pairs = sorted((token_id, token) for token, token_id in tokenizer.vocabulary().items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def record_path(prefix: str) -> str:
    """The record's file beside the token files of `prefix`."""
    return f"{prefix}.tokenizer.json"


def remove_record(prefix: str) -> None:
    """Removes the record of token files that are about to be replaced: it must never describe other ones."""
    if os.path.exists(record_path(prefix)):
        os.remove(record_path(prefix))


def write_record(prefix: str, tokenizer: Tokenizer) -> None:
    """Writes the record of token files that `tokenizer` has made."""
    record = {
        "tokenizer_type": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "vocabulary_sha256": vocabulary_digest(tokenizer),
    }
    temporary = f"{record_path(prefix)}.{os.getpid()}.tmp"
    with open(temporary, "w") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, record_path(prefix))


def check_record(prefix: str, option: str, digest: str) -> None:
    """Raises ConfigError if the token files of `prefix` were made with another vocabulary than `digest`'s, or
    if their record is damaged. option: the flag that names the prefix."""
    path = record_path(prefix)
    if not os.path.exists(path):
        return
    record = _read(path)
    if record["vocabulary_sha256"] != digest:
        raise ConfigError(
            f"{option} {prefix} was tokenized with another vocabulary ({record['tokenizer_type']}, "
            f"{record['vocab_size']} tokens, SHA-256 {record['vocabulary_sha256'][:12]}) than this run's "
            f"tokenizer has (SHA-256 {digest[:12]}): give the tokenizer files that the data were made with"
        )


def common_digest(prefixes: Iterable[tuple[str, str]]) -> str | None:
    """The vocabulary that the records of token files agree on, None if there are no records.

    prefixes: (flag, prefix) pairs. Raises ConfigError if two records differ.
    """
    first: tuple[str, str] | None = None
    for option, prefix in prefixes:
        if not os.path.exists(record_path(prefix)):
            continue
        digest = _read(record_path(prefix))["vocabulary_sha256"]
        if first is not None and digest != first[1]:
            raise ConfigError(
                f"{option} {prefix} and {first[0]} were tokenized with different vocabularies: train on "
                "token files of one tokenizer"
            )
        first = first or (prefix, digest)
    return None if first is None else first[1]


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
        record = json.loads(content) if len(content) <= _MAX_BYTES else None
        if isinstance(record, dict) and {type(record.get(key)) for key in _TEXTS} == {str}:
            return {"vocab_size": "?", **record}
        reason = "expected a JSON object with " + " and ".join(_TEXTS)
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    raise ConfigError(
        f"{path} cannot be read ({reason}): preprocess the data again, or delete the file to skip "
        "the comparison"
    )


_TEXTS = ("tokenizer_type", "vocabulary_sha256")
