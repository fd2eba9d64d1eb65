"""Any Hugging Face tokenizer, over `transformers`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron.config import ConfigError
from megatron.tokenizer.base import TokenizerFlags, require_setting


class HuggingFaceTokenizer:
    """The tokenizer in a folder, or of a model name that is already in the local Hugging Face cache.

    Nothing is downloaded: compute nodes have no way out, and a run must not depend on what a hub serves
    today.
    """

    name = "PretrainedFromHF"

    def __init__(self, name_or_path: str) -> None:
        from transformers import AutoTokenizer

        try:
            # Without trust_remote_code=False it would ask on the terminal whether to run the folder's code.
            tokenizer = AutoTokenizer.from_pretrained(
                name_or_path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # OSError, ValueError, KeyError, ImportError: depends on what is missing
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(
                f"--tokenizer-name-or-path {name_or_path}: not a folder with a tokenizer, nor a name in the "
                f"local Hugging Face cache ({first_line})"
            ) from error
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"--tokenizer-name-or-path {name_or_path}: the tokenizer has no eos token, which ends a "
                "document"
            )
        # A document may be longer than any model's context: it is cut into samples later.
        tokenizer.model_max_length = int(1e30)
        self._tokenizer = tokenizer
        # len() counts the entries; ids with holes between them can go higher.
        self.vocab_size = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
        self.eod: int = tokenizer.eos_token_id

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


def save_as_hugging_face(kind: str, flags: TokenizerFlags, folder: Path, max_length: int | None) -> None:
    """Writes the tokenizer of `flags`, whose type is `kind`, into `folder` for `AutoTokenizer` to find.

    max_length: tokens that the model can read, None for a model without such a bound. Raises ConfigError for
    a kind that has no Hugging Face form.
    """
    from transformers import AutoTokenizer, GPT2TokenizerFast

    bound = {} if max_length is None else {"model_max_length": max_length}
    if kind == HuggingFaceTokenizer.name:
        tokenizer = AutoTokenizer.from_pretrained(
            flags.tokenizer_name_or_path, local_files_only=True, trust_remote_code=False, **bound
        )
    elif kind == "GPT2BPETokenizer":
        shutil.copyfile(require_setting(flags.vocab_file, "--vocab-file", kind), folder / "vocab.json")
        shutil.copyfile(require_setting(flags.merge_file, "--merge-file", kind), folder / "merges.txt")
        tokenizer = GPT2TokenizerFast.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **bound
        )
    else:
        raise ConfigError(
            f"a {kind} cannot be written for Hugging Face: --no-tokenizer writes the model alone"
        )
    tokenizer.save_pretrained(folder)
