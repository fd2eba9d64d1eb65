"""The vocabulary record of token files: a JSON file that identifies the vocabulary with which they were made.

The token ids of two tokenizers of equal size are valid for both, but have different meanings. No other check
detects this. `{prefix}.tokenizer.json` holds the digest of the vocabulary of `{prefix}.bin`. A run compares
it with the digest of its own tokenizer. Token files of other frameworks have no record and are not compared.

The record also has the SHA-256 of the .bin file and of a sample of it (`bin_sha256`, `bin_sample_sha256`),
and, if preprocessing wrote it, the inputs and settings with which the files were made. Older records lack
these entries.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.errors import UserError
from megatron.files import HostileFileError, read_json, write_json
from megatron.tokenizer.base import Tokenizer

# Whether special tokens in texts became their ids. Older records lack the key; in their data they did.
PARSE_SPECIAL_KEY = "parse_special_tokens"


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Returns the SHA-256 of all (id, token) pairs. It is equal for two tokenizers whose ids have equal
    meanings.

    The type of the tokenizer is not included, so two classes that read the same files have one digest.
    """
    pairs = sorted((token_id, token) for token, token_id in tokenizer.vocabulary().items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def record_path(prefix: str) -> str:
    """Returns the path of the vocabulary record of the token files `prefix`."""
    return f"{prefix}.tokenizer.json"


def remove_record(prefix: str) -> None:
    """Removes the record of token files that are about to be replaced, so that it never describes the new
    files."""
    if os.path.exists(record_path(prefix)):
        os.remove(record_path(prefix))


def write_record(prefix: str, tokenizer: Tokenizer, details: Mapping[str, Any] | None = None) -> None:
    """Writes the record of the token files `prefix`, which were made with `tokenizer`. details: further
    entries, see the docstring of this module."""
    record = {
        "tokenizer_type": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "vocabulary_sha256": vocabulary_digest(tokenizer),
        **(details or {}),
    }
    write_json(Path(record_path(prefix)), record, indent=1)


def read_record(prefix: str) -> dict[str, Any] | None:
    """Returns the record of the token files `prefix`; None if there is none. Raises UserError if it is
    damaged."""
    path = record_path(prefix)
    return _read(path) if os.path.exists(path) else None


def copy_record(source: str, prefix: str, details: Mapping[str, Any]) -> None:
    """Writes a record of the token files `prefix` with the vocabulary in the record of `source`. details: see
    `write_record`."""
    record = _read(record_path(source))
    vocabulary = {key: record[key] for key in _VOCABULARY if key in record}
    write_json(Path(record_path(prefix)), {**vocabulary, **details}, indent=1)


def check_record(prefix: str, option: str, digest: str) -> None:
    """Compares the record of the token files `prefix`, if there is one, with the digest of a vocabulary.

    option: the flag that names the prefix. Raises UserError if the digests differ or the record is damaged.
    """
    record = read_record(prefix)
    if record is not None and record["vocabulary_sha256"] != digest:
        raise UserError(
            f"{option} {prefix} was tokenized with a vocabulary ({record['tokenizer_type']}, "
            f"{record['vocab_size']} tokens, SHA-256 {record['vocabulary_sha256'][:12]}) different from the "
            f"model's (SHA-256 {digest[:12]}): set the tokenizer files that made the data; if the model is "
            "already trained, preprocess the data again with its tokenizer (tools/preprocess_data.py)"
        )


def common_digest(prefixes: Iterable[tuple[str, str]]) -> str | None:
    """Returns the vocabulary digest in the records of several token files; None if there are no records.

    prefixes: (flag, prefix) pairs. Raises UserError if two records differ.
    """
    first: tuple[str, str] | None = None
    for option, prefix in prefixes:
        if not os.path.exists(record_path(prefix)):
            continue
        digest = _read(record_path(prefix))["vocabulary_sha256"]
        if first is not None and digest != first[1]:
            raise UserError(
                f"{option} {prefix} and {first[0]} were tokenized with different vocabularies: set "
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
_VOCABULARY = (*_TEXTS, "vocab_size", "eod")
