"""The vocabulary of a run: size, end-of-document token and digest."""

from dataclasses import dataclass
from pathlib import Path

from megatron.config import Config
from megatron.config.registries import TOKENIZERS
from megatron.data.flags import missing_tokenizer_files, token_file_prefixes
from megatron.errors import UserError
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.vocabulary_record import check_record, common_digest, vocabulary_digest


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a run, from its tokenizer or its token files."""

    size: int
    """Number of tokens without padding."""
    eod: int | None
    """Id of the end-of-document token; None if unknown."""
    digest: str | None = None
    """The `vocabulary_digest` of the tokenizer, or the digest in the records of token files; None if
    unknown."""


def find_vocabulary(config: Config) -> Vocabulary:
    """Returns the vocabulary of the run's tokenizer, or of --vocab-size if the run has no tokenizer.

    A dry run without tokenizer files can use --pad-vocab-size-to. Raises UserError if the size is unknown,
    or if token files were made with a different vocabulary.
    """
    data, model = config.data, config.model
    choice = None if data.tokenizer_type is None else TOKENIZERS[data.tokenizer_type]
    files = [value for name in TOKENIZERS.settings() if (value := getattr(data, name)) is not None]
    needs_no_files = choice is not None and not choice.settings
    has_files = files and (not config.training.dry_run or all(Path(name).exists() for name in files))
    if needs_no_files or has_files:
        tokenizer = build_tokenizer(data, model.vocab_size)
        takes_size = choice is not None and choice.takes_vocab_size
        if not takes_size and model.vocab_size not in (None, tokenizer.vocab_size):
            raise UserError(
                f"--vocab-size {model.vocab_size} contradicts the tokenizer, which has "
                f"{tokenizer.vocab_size} tokens: remove the flag"
            )
        digest = vocabulary_digest(tokenizer)
        for option, prefix in token_file_prefixes(data):
            check_record(prefix, option, digest)
        return Vocabulary(tokenizer.vocab_size, tokenizer.eod, digest)
    size = model.vocab_size or (model.pad_vocab_size_to if config.training.dry_run else None)
    if size is None:
        missing = [*missing_tokenizer_files(data), "no tokenizer is set: set the flags of a tokenizer"]
        raise UserError(f"the size of the vocabulary is unknown: {missing[0]}, or set --vocab-size")
    return Vocabulary(size, None, common_digest(token_file_prefixes(data)))
