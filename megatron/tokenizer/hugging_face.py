"""Hugging Face tokenizers. They use the `transformers` library."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.errors import UserError, one_line
from megatron.tokenizer.base import TokenizerFlags, require_setting


class HuggingFaceTokenizer:
    """A tokenizer in a folder, or in the local Hugging Face cache under its name.

    Nothing is downloaded, because compute nodes have no internet access, and a run must not depend on the
    current contents of the hub.
    """

    name = "PretrainedFromHF"

    def __init__(self, name_or_path: str, parse_special: bool = False) -> None:
        from transformers import AutoTokenizer

        try:
            # Without trust_remote_code=False, transformers would ask whether it may run code from the folder.
            tokenizer = AutoTokenizer.from_pretrained(
                name_or_path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the type of the error depends on what is missing
            raise UserError(
                f"--tokenizer-name-or-path {name_or_path}: expected a folder with a tokenizer or a name in "
                f"the local Hugging Face cache ({one_line(error)})"
            ) from error
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"--tokenizer-name-or-path {name_or_path}: the tokenizer has no eos token, which is needed "
                "as the end-of-document token"
            )
        # Prevents a warning about documents longer than the context. They are split into samples later.
        tokenizer.model_max_length = int(1e30)
        self._tokenizer = self.source = tokenizer
        # len() is the number of tokens, which is too small if some ids are unused.
        self.vocab_size = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
        self.eod: int = tokenizer.eos_token_id
        self.bos: int = self.eod if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.adds_bos: bool = tokenizer.encode("a")[:1] == [self.bos]
        tokenizer.split_special_tokens = not parse_special
        self.parse_special = parse_special
        special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        if library := getattr(tokenizer, "backend_tokenizer", None):
            added = library.get_added_tokens_decoder()
            special |= {token.content: number for number, token in added.items() if token.special}
        self.special_tokens: dict[str, int] = special

    def vocabulary(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        batch = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
        return list(batch["input_ids"])

    def detokenize(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)


# Keys in which transformers 5 records how it loaded a tokenizer. transformers 4 passes them to the class.
_LOADING_KEYS = ("backend", "is_local", "local_files_only")


EXPORTED_TYPES = frozenset({"PretrainedFromHF", "GPT2BPETokenizer"})
"""Values of --tokenizer-type that `save_as_hugging_face` can write."""


def save_as_hugging_face(kind: str, flags: TokenizerFlags, folder: Path, max_length: int | None) -> None:
    """Saves the tokenizer of `flags`, of type `kind`, in `folder`, so that `AutoTokenizer` of transformers 4
    and 5 can load it.

    max_length: maximum number of tokens of the model; None for no limit. Raises UserError for a type without
    a Hugging Face equivalent, and OSError for a file that cannot be written.
    """
    from transformers import AutoTokenizer, GPT2TokenizerFast  # type: ignore[attr-defined]

    bound = {} if max_length is None else {"model_max_length": max_length}
    if kind == HuggingFaceTokenizer.name:
        source = Path(str(flags.tokenizer_name_or_path))
        tokenizer = AutoTokenizer.from_pretrained(
            source, local_files_only=True, trust_remote_code=False, **bound
        )
    elif kind == "GPT2BPETokenizer":
        source = folder
        shutil.copyfile(require_setting(flags.vocab_file, "--vocab-file", kind), folder / "vocab.json")
        shutil.copyfile(require_setting(flags.merge_file, "--merge-file", kind), folder / "merges.txt")
        tokenizer = GPT2TokenizerFast.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **bound
        )
    else:
        raise UserError(
            f"a {kind} cannot be converted for Hugging Face: set --no-tokenizer to convert only the model"
        )
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is Exception:  # tokenizers raises this class if it cannot write a file
            raise OSError(f"the tokenizer cannot be saved: {error}") from error
        raise
    model_file = source / "tokenizer.model"
    if model_file.is_file() and not (folder / model_file.name).exists():
        shutil.copyfile(model_file, folder / model_file.name)  # llama.cpp reads it
    path = folder / "tokenizer_config.json"
    settings = {key: value for key, value in json.loads(path.read_text()).items() if key not in _LOADING_KEYS}
    path.write_text(json.dumps(settings | _for_version_4(settings, tokenizer), indent=2) + "\n")


def _for_version_4(settings: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Returns settings of a tokenizer_config.json with which transformers 4 gives the same ids as version
    5."""
    # Without this entry, transformers 4 adds token_type_ids, which these models do not accept.
    changes: dict[str, Any] = {"model_input_names": ["input_ids", "attention_mask"]}
    if isinstance(special := settings.pop("extra_special_tokens", None), list):
        changes["additional_special_tokens"] = special
    elif special is not None:
        changes["extra_special_tokens"] = special
    if tokenizer.is_fast:
        # tokenizer.json contains everything that determines the ids; other classes of transformers 4 change
        # it.
        state = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"] or {}
        changes["tokenizer_class"] = "PreTrainedTokenizerFast"
        changes["add_prefix_space"] = state.get("add_prefix_space", False)
    return changes
