"""The vocabulary record of token files: a JSON file that identifies the vocabulary they were made with.

Two tokenizers of equal size give valid token ids with different meanings, which no other check detects.
`{prefix}.tokenizer.json` holds the digest of the vocabulary of `{prefix}.bin`. A run compares it with the
digest of its own tokenizer. Token files of other programs have no record and are not compared.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.errors import UserError
from megatron.files import HostileFileError, read_json, write_json
from megatron.tokenizer.base import Tokenizer


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 of all (id, token) pairs. It is equal for two tokenizers if their ids have the same meaning.

    The type of the tokenizer is not included: two classes that read the same files give the same digest.
    """
    pairs = sorted((token_id, token) for token, token_id in tokenizer.vocabulary().items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def record_path(prefix: str) -> str:
    """The path of the vocabulary record of the token files `prefix`."""
    return f"{prefix}.tokenizer.json"


def remove_record(prefix: str) -> None:
    """Remove the record of token files that will be replaced, so that it never describes other files."""
    if os.path.exists(record_path(prefix)):
        os.remove(record_path(prefix))


def write_record(prefix: str, tokenizer: Tokenizer) -> None:
    """Write the record of the token files `prefix`, which were made with `tokenizer`."""
    record = {
        "tokenizer_type": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "vocabulary_sha256": vocabulary_digest(tokenizer),
    }
    write_json(Path(record_path(prefix)), record, indent=1)


def read_record(prefix: str) -> dict[str, Any] | None:
    """The record of the token files `prefix`, None if there is none. Raises UserError if it is damaged."""
    path = record_path(prefix)
    return _read(path) if os.path.exists(path) else None


def copy_record(source: str, prefix: str) -> None:
    """Copy the record of the token files `source` to `prefix`, whose tokens have the same vocabulary."""
    write_json(Path(record_path(prefix)), _read(record_path(source)), indent=1)


def check_record(prefix: str, option: str, digest: str) -> None:
    """Compare the record of the token files `prefix`, if there is one, with the digest of a vocabulary.

    option: the flag that names the prefix. Raises UserError if the digests differ or the record is damaged.
    """
    record = read_record(prefix)
    if record is not None and record["vocabulary_sha256"] != digest:
        raise UserError(
            f"{option} {prefix} was tokenized with another vocabulary ({record['tokenizer_type']}, "
            f"{record['vocab_size']} tokens, SHA-256 {record['vocabulary_sha256'][:12]}) than the model's "
            f"(SHA-256 {digest[:12]}): give the tokenizer files that the data was made with, or, if the "
            "model is trained already, make the data again with its tokenizer (tools/preprocess_data.py)"
        )


def common_digest(prefixes: Iterable[tuple[str, str]]) -> str | None:
    """The vocabulary digest in the records of several token files; None if there are no records.

    prefixes: (flag, prefix) pairs. Raises UserError if two records differ.
    """
    first: tuple[str, str] | None = None
    for option, prefix in prefixes:
        if not os.path.exists(record_path(prefix)):
            continue
        digest = _read(record_path(prefix))["vocabulary_sha256"]
        if first is not None and digest != first[1]:
            raise UserError(
                f"{option} {prefix} and {first[0]} were tokenized with different vocabularies: use "
                "token files of one tokenizer"
            )
        first = first or (prefix, digest)
    return None if first is None else first[1]


def _read(path: str) -> dict[str, Any]:
    try:
        record = read_json(Path(path))
        if isinstance(record, dict) and {type(record.get(key)) for key in _TEXTS} == {str}:
            return {"vocab_size": "?", **record}
        reason = "expected a JSON object with " + " and ".join(_TEXTS)
    except (OSError, ValueError, HostileFileError) as error:
        reason = str(error)
    raise UserError(
        f"{path} cannot be read ({reason}): preprocess the data again, or delete the file to skip "
        "the comparison"
    )


_TEXTS = ("tokenizer_type", "vocabulary_sha256")
