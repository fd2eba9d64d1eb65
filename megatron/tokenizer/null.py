"""A tokenizer without files, whose tokens are numbers."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.errors import UserError


class NullTokenizer:
    """Megatron-LM's NullTokenizer: the text '7 3' has the tokens 7 and 3. The vocabulary consists of the
    numbers below `num_tokens`, and the end-of-document token, whose id is `num_tokens`."""

    name = "NullTokenizer"
    adds_bos = False

    def __init__(self, num_tokens: int, parse_special: bool = False) -> None:
        self.parse_special, self.special_tokens = parse_special, dict[str, int]()
        self.eod = self.bos = num_tokens
        self.vocab_size = num_tokens + 1

    def vocabulary(self) -> dict[str, int]:
        return {str(token): token for token in range(self.vocab_size)}

    def tokenize(self, text: str) -> list[int]:
        words = text.split()
        for word in words:
            if not (word.isdecimal() and word.isascii() and len(word) < 20 and int(word) < self.vocab_size):
                raise UserError(
                    f"NullTokenizer: expected numbers below {self.vocab_size}, found '{word[:40]}'"
                )
        return list(map(int, words))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return list(map(self.tokenize, texts))

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(token)) for token in ids)
