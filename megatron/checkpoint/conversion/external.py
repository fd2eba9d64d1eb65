"""Opens a checkpoint of another framework as if a run of this program had saved it, for a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.formats.state import StateReader
from megatron.checkpoint.huggingface.importer import (
    config_without_run,
    first_run_record,
    specs_without_padding,
)
from megatron.checkpoint.reading import lacks_configuration
from megatron.checkpoint.record import Checkpoint
from megatron.config import ConfigError, DataConfig
from megatron.errors import UserError, one_line
from megatron.tokenizer.vocabulary import find_vocabulary


def open_external(
    checkpoint: Checkpoint, tokenizer: Mapping[str, Any], vocab_size: int | None
) -> StateReader:
    """Returns the reader of an external checkpoint, with a `run.json` and the specs of its parameters. The
    configuration comes from the arguments in the checkpoint; what they do not determine has its default.

    tokenizer: its settings, fields of `DataConfig`. vocab_size: number of tokens without padding; None: that
    of the tokenizer, or without one all rows of the word embeddings. Raises UserError if the arguments in the
    checkpoint do not describe the model, or describe another one than its tensors.
    """
    reader = open_reader(checkpoint)
    recorded = reader.recorded_model()
    if recorded is None:
        raise lacks_configuration(checkpoint)
    fields, rows = recorded
    if vocab_size is None and not tokenizer:
        vocab_size = rows
    try:
        config = config_without_run(fields, vocab_size, DataConfig(**tokenizer))
    except (ConfigError, TypeError, ArithmeticError) as error:
        raise UserError(
            f"checkpoint {checkpoint.folder}: its arguments describe no model of this program "
            f"({one_line(error)})"
        ) from error
    vocabulary = find_vocabulary(config)
    reader.check_external(config, vocabulary.size)
    specs = specs_without_padding(config, vocabulary.size, vocabulary.eod)
    run = first_run_record(config, vocabulary.size, vocabulary.eod, specs)
    found = type(reader)(replace(checkpoint, run={**run, "state": asdict(checkpoint.state)}))
    found.specs = specs
    return found
