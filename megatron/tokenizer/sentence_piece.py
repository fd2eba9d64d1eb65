"""SentencePiece models. They use the `sentencepiece` library."""

from __future__ import annotations

from collections.abc import Sequence

import sentencepiece

from megatron.errors import UserError


class SentencePieceTokenizer:
    """The tokenizer of a SentencePiece .model file. Its end-of-sentence piece is the end-of-document token.
    The library reads control pieces such as `</s>` in a text as ordinary text, so `parse_special` has no
    effect."""

    name = "SentencePieceTokenizer"

    def __init__(self, model_file: str, parse_special: bool = False) -> None:
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=model_file)
        except (RuntimeError, OSError) as error:
            raise UserError(f"--tokenizer-model {model_file}: not a SentencePiece model") from error
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod: int = self._processor.eos_id()
        if self.eod < 0:
            raise UserError(
                f"--tokenizer-model {model_file}: has no end-of-sentence piece (eos_id is -1), needed "
                "as the end-of-document token"
            )
        own_bos: int = self._processor.bos_id()
        self.bos, self.adds_bos = (self.eod if own_bos < 0 else own_bos), False
        self.parse_special = False
        self.special_tokens = {
            piece: number for piece, number in self.vocabulary().items() if self._processor.is_control(number)
        }

    @property
    def source(self) -> bytes:
        """The content of the model file."""
        return bytes(self._processor.serialized_model_proto())

    def vocabulary(self) -> dict[str, int]:
        return {self._processor.id_to_piece(token_id): token_id for token_id in range(self.vocab_size)}

    def tokenize(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # One thread, because preprocessing already runs one process per core.
        return list(self._processor.encode(list(texts), num_threads=1))

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(id) for id in ids]))
