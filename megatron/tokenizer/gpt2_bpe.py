"""GPT-2's byte-level BPE from vocab.json and merges.txt. It uses the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.errors import UserError

END_OF_TEXT = "<|endoftext|>"


class GPT2BPETokenizer:
    """Gives the token ids of OpenAI's GPT-2 encoder for these two files. That encoder reads `<|endoftext|>`
    in a text as ordinary text. With `parse_special`, it gives the ids of transformers' GPT-2 tokenizer."""

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str, merge_file: str, parse_special: bool = False) -> None:
        try:
            model = models.BPE.from_file(vocab_file, merge_file)
        except Exception as error:  # the library raises plain Exceptions
            raise UserError(
                f"--vocab-file {vocab_file} with --merge-file {merge_file}: not a GPT-2 vocabulary with its "
                f"merges ({error})"
            ) from error
        tokenizer = tokenizers.Tokenizer(model)
        vocabulary = tokenizer.get_vocab()
        if END_OF_TEXT not in vocabulary:
            raise UserError(f"--vocab-file {vocab_file}: the end-of-document token {END_OF_TEXT} is missing")
        absent = [symbol for symbol in pre_tokenizers.ByteLevel.alphabet() if symbol not in vocabulary]
        if absent:
            # The library would silently drop these bytes from a text.
            raise UserError(
                f"--vocab-file {vocab_file}: {len(absent)} of the 256 byte symbols of a GPT-2 "
                "vocabulary are missing"
            )
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([END_OF_TEXT])
        tokenizer.encode_special_tokens = not parse_special
        self._tokenizer = self.source = tokenizer
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod = vocabulary[END_OF_TEXT]
        self.bos, self.adds_bos = self.eod, False
        self.parse_special, self.special_tokens = parse_special, {END_OF_TEXT: self.eod}

    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            encoding.ids
            for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)
