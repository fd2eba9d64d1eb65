"""Opens a checkpoint for a tool: finds it in a folder, and builds the tokenizer that it was trained with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.checkpoint.compatibility import check_vocabulary
from megatron.checkpoint.convert.to_universal import LATEST_UNIVERSAL_FILE
from megatron.checkpoint.discovery import LATEST_FILE, RUN_FILE, Checkpoint, find_latest, is_universal
from megatron.checkpoint.formats.universal import find_universal
from megatron.checkpoint.integrity.files import HostileFileError
from megatron.checkpoint.integrity.names import one_line
from megatron.config import Config, ConfigError
from megatron.config.registries import TOKENIZERS
from megatron.data.gpt_dataset import VOCABULARY_KEY
from megatron.tokenizer import Tokenizer, TokenizerFlags, build_tokenizer
from megatron.tokenizer.vocabulary_record import vocabulary_digest

RUN_PARTS = ("config", "layout", "stages", "vocab_size", "eod")
# Limit for integers in a run's settings (tokens, samples, seeds).
_LARGEST_SIZE = 1 << 53


def read_checkpoint(folder: str | Path, universal: bool = False, allow_external: bool = False) -> Checkpoint:
    """The checkpoint in `folder`, or the one that `latest` in it names, or where there is no native one, or
    if `universal`, the one that `latest_universal` names; ConfigError where there is none.

    allow_external: take one of another program too, which has no config.
    """
    folder = Path(folder)
    if universal or is_universal(folder):
        checkpoint = find_universal(folder)
    else:
        native = find_latest(folder) if folder.is_dir() else None
        if native is None and not (folder / LATEST_UNIVERSAL_FILE).is_file():
            raise ConfigError(
                f"{folder}: there is no checkpoint, expected a folder with the file `{LATEST_FILE}` or "
                f"`{LATEST_UNIVERSAL_FILE}`, or a global_stepN folder with {RUN_FILE}"
            )
        checkpoint = native or find_universal(folder)
    if not checkpoint.is_external:
        check_run_file(checkpoint)
    elif not allow_external:
        raise ConfigError(
            f"checkpoint {checkpoint.folder} was made by another program and lacks the full configuration of "
            "the model and its vocabulary: start pretrain_gpt.py from it, with the flags of the model, "
            "--universal_checkpoint and --save, and use the checkpoint that this run saves"
        )
    return checkpoint


def check_run_file(checkpoint: Checkpoint) -> None:
    """Raises ConfigError if `run.json` lacks a part that describes the model or its layout, or is
    malformed."""
    lacking = [part for part in RUN_PARTS if part not in checkpoint.run]
    if lacking:
        raise ConfigError(f"checkpoint {checkpoint.folder}: {RUN_FILE} lacks {', '.join(lacking)}")
    try:
        config = Config.from_dict(checkpoint.run["config"])
        layers, parameters = config.model.num_layers, len(checkpoint.run.get("parameters") or ())
        if parameters and layers > parameters:
            raise HostileFileError(
                f"checkpoint {checkpoint.folder}: {RUN_FILE} has a config of {layers:,} layers, and only "
                f"{parameters:,} parameters"
            )
        if max(_sizes(checkpoint.run["config"])) > _LARGEST_SIZE:
            raise ConfigError(f"a number is larger than {_LARGEST_SIZE:,}")
    except HostileFileError:
        raise
    except (AttributeError, TypeError, ValueError, ArithmeticError, ConfigError) as error:
        raise ConfigError(
            f"checkpoint {checkpoint.folder}: the config in {RUN_FILE} cannot be read ({one_line(error)})"
        ) from error


def _sizes(settings: Any) -> Iterator[int]:
    """The integers in a nested config, and 0."""
    yield 0
    for value in settings.values() if isinstance(settings, dict) else ():
        yield from _sizes(value)
        if isinstance(value, int):
            yield value


def tokenizer_settings(flags: TokenizerFlags) -> dict[str, str]:
    """The tokenizer flags that are given to a tool, by field of DataConfig."""
    names = {"tokenizer_type"}.union(*(tokenizer.settings for tokenizer in TOKENIZERS.values()))
    return {name: getattr(flags, name) for name in sorted(names) if getattr(flags, name)}


def tokenizer_flags(flags: TokenizerFlags, checkpoint: Checkpoint) -> TokenizerFlags:
    """The tool's tokenizer flags if any is given, else those of the run that wrote the checkpoint."""
    return flags if tokenizer_settings(flags) else checkpoint.config.data


def find_tokenizer(flags: TokenizerFlags, checkpoint: Checkpoint) -> Tokenizer:
    """Builds the tokenizer of the flags if any is given, else the checkpoint's. ConfigError if it is not the
    one that the checkpoint was trained with."""
    tokenizer = build_tokenizer(tokenizer_flags(flags, checkpoint))
    if (tokenizer.vocab_size, tokenizer.eod) != (checkpoint.vocab_size, checkpoint.eod):
        raise ConfigError(
            f"checkpoint {checkpoint.folder} was trained with {checkpoint.vocab_size} tokens and "
            f"end-of-document id {checkpoint.eod}, but this tokenizer has {tokenizer.vocab_size} and "
            f"{tokenizer.eod}: "
            "give the flags of the tokenizer that it was trained with"
        )
    check_vocabulary(checkpoint, {VOCABULARY_KEY: vocabulary_digest(tokenizer)})
    return tokenizer
