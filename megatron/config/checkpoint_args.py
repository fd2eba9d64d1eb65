"""--use-checkpoint-args: the flags of the model and the tokenizer, from the configuration in a checkpoint."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config.config import SECTIONS, Config
from megatron.config.fields import changes_model, option_name
from megatron.config.registries import TOKENIZERS
from megatron.config.sections.checkpoint import CheckpointConfig
from megatron.errors import ConfigError

TOKENIZER_FIELDS = frozenset({"tokenizer_type"}).union(
    *(tokenizer.settings for tokenizer in TOKENIZERS.values())
)


@dataclass(frozen=True)
class SavedConfig:
    """The configuration that a checkpoint records.

    source: the checkpoint's folder. consumed_samples: of the checkpoint. is_of_branch: with --branch-at, it
    is of the branch itself, since the branch point cannot be read any more.
    """

    source: str
    config: Config
    consumed_samples: int = 0
    is_of_branch: bool = False


ReadSavedConfig = Callable[[CheckpointConfig], SavedConfig]


def add_checkpoint_args(settings: dict[str, Any], saved: SavedConfig) -> str:
    """Adds the flags of a checkpoint to the given ones, and returns a note for the log.

    settings: the given flags, by 'section.field'. Raises ConfigError for a given flag that changes the model
    and has another value in the checkpoint. Other given flags take precedence over the checkpoint's.
    """
    typed_tokenizer = any(f"data.{name}" in settings for name in TOKENIZER_FIELDS)
    is_finetuning = settings.get("checkpoint.finetune", False)
    unused = saved.config.model.unused_fields()  # their values may follow from others, such as --seq-length
    for section, field, annotation in _taken_fields(is_finetuning):
        value = getattr(getattr(saved.config, section), field.name)
        if not _has_type(value, annotation):
            raise ConfigError(
                f"checkpoint {saved.source}: {section}.{field.name} in its config is of type "
                f"{type(value).__name__}: the file is damaged, or another program wrote it"
            )
        is_of_tokenizer = field.name in (TOKENIZER_FIELDS | {"vocab_size"})
        if (is_of_tokenizer and typed_tokenizer) or (section == "model" and field.name in unused):
            continue
        name = f"{section}.{field.name}"
        typed = settings.setdefault(name, value)
        if typed != value and changes_model(SECTIONS[section], field):
            has = "does not have it" if value in (None, False) else f"has {value}"
            raise ConfigError(
                f"{option_name(field.name)} {'' if typed is True else f'{typed} '}contradicts "
                f"--use-checkpoint-args: checkpoint {saved.source} {has}; remove one of the two flags"
            )
    return f"the flags of the model and the tokenizer are those of {saved.source} (--use-checkpoint-args)"


def _taken_fields(is_finetuning: bool) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """(section, field, annotation) of the settings that are taken. Fine-tuning may treat documents in another
    way."""
    for section in ("model", "data"):
        kind = SECTIONS[section]
        annotations = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            of_model = changes_model(kind, field) and not is_finetuning
            if section == "model" or of_model or field.name in TOKENIZER_FIELDS:
                yield section, field, annotations[field.name]


def _has_type(value: Any, annotation: Any) -> bool:
    """Whether a value from a file has the type of a field, such as `int | None`."""
    kinds = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return type(value) in kinds or (type(value) is int and float in kinds)
