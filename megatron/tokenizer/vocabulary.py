"""The vocabulary of a run: its true size and the end-of-document token."""

from dataclasses import dataclass
from pathlib import Path

from megatron.config import Config, ConfigError
from megatron.config.checks.data import token_file_prefixes
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.vocabulary_record import check_record, common_digest, vocabulary_digest


@dataclass(frozen=True)
class Vocabulary:
    """`size`: real tokens, without padding; `eod`: id of the token that ends a document, None if unknown;
    `digest`: of all tokens and their ids, of the token files' records if no tokenizer was given; None if
    unknown."""

    size: int
    eod: int | None
    digest: str | None = None


def find_vocabulary(config: Config) -> Vocabulary:
    """From the tokenizer, or from --vocab-size where the data was made without one.

    A dry run may lack the tokenizer's files, and then makes do with --pad-vocab-size-to.

    Raises ConfigError where the size cannot be known, and for token files made with another vocabulary.
    """
    data, model = config.data, config.model
    named = [data.vocab_file, data.merge_file, data.tokenizer_model, data.tokenizer_name_or_path]
    files = [name for name in named if name is not None]
    if files and (not config.training.dry_run or all(Path(name).exists() for name in files)):
        tokenizer = build_tokenizer(data)
        if model.vocab_size not in (None, tokenizer.vocab_size):
            raise ConfigError(
                f"--vocab-size {model.vocab_size} contradicts the tokenizer, which has "
                f"{tokenizer.vocab_size} tokens: leave the flag out"
            )
        digest = vocabulary_digest(tokenizer)
        for option, prefix in token_file_prefixes(data):
            check_record(prefix, option, digest)
        return Vocabulary(tokenizer.vocab_size, tokenizer.eod, digest)
    size = model.vocab_size or (model.pad_vocab_size_to if config.training.dry_run else None)
    if size is None:
        raise ConfigError(
            "the size of the vocabulary is unknown, for no tokenizer file is at hand: give the tokenizer's "
            "flags, or --vocab-size"
        )
    return Vocabulary(size, None, common_digest(token_file_prefixes(data)))
