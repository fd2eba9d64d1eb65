"""Opens a checkpoint of another framework as if a run of this program had saved it, for a conversion."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from megatron.checkpoint.foreign_arguments import MEGATRON_CORE, TRAINING_ARGUMENTS
from megatron.checkpoint.foreign_experts import expert_notes
from megatron.checkpoint.formats.state import StateReader
from megatron.checkpoint.huggingface.importer import config_without_run, specs_without_padding
from megatron.checkpoint.reading import lacks_configuration
from megatron.checkpoint.record import IMPORTED_KEY
from megatron.checkpoint.saving.run_record import model_record
from megatron.config import Config, ConfigError, ModelConfig
from megatron.config.config import SECTIONS
from megatron.data.vocabulary import Vocabulary, find_vocabulary
from megatron.errors import UserError, one_line
from megatron.pipeline.stages import plan_stages


def open_external(
    reader: StateReader,
    tokenizer: Mapping[str, Any],
    vocab_size: int | None,
    warn: Callable[[str], object] = lambda _: None,
) -> StateReader:
    """Returns the reader of an external checkpoint, with a `run.json` and the specs of its parameters. The
    configuration comes from the arguments in the checkpoint, or from the config.json of a Hugging Face model;
    settings that these do not determine have their defaults.

    tokenizer: settings of the tokenizer, which are fields of `DataConfig`. vocab_size: number of tokens
    without padding; None: the tokenizer's number, or without a tokenizer the checkpoint's (all rows of the
    word embeddings, if it records no number). warn: receives a sentence about arguments of the training that
    have no equivalent. Raises UserError if the arguments in the checkpoint do not describe the model, or do
    not fit its tensors.
    """
    checkpoint, recorded = reader.checkpoint, reader.recorded_model()
    if recorded is None:
        raise lacks_configuration(checkpoint)
    fields, num_tokens = recorded
    if vocab_size is None and not tokenizer:
        vocab_size = num_tokens
    args, own = checkpoint.run.get("args", {}), {field.name for field in dataclasses.fields(ModelConfig)}
    settings = {**fields, **args}
    given: dict[str, dict[str, Any]] = {
        section: {name: settings[name] for name in names if settings.get(name) is not None}
        for section, names in TRAINING_ARGUMENTS.items()
    }
    given["schedule"]["lr"] = given["schedule"].get("lr") or 1.0
    given["batch"] = {"global_batch_size": 1, "micro_batch_size": 1} | given["batch"]
    given["data"] |= tokenizer
    try:
        config = config_without_run(
            {name: value for name, value in fields.items() if name in own},
            vocab_size,
            **{section: SECTIONS[section](**values) for section, values in given.items()},
        )
    except (ConfigError, TypeError, ArithmeticError) as error:
        if isinstance(error, ConfigError) and not args:  # the model is already checked: a flag is wrong
            raise
        raise UserError(
            f"checkpoint {checkpoint.folder}: its arguments describe no model of this program "
            f"({one_line(error)})"
        ) from error
    if config.model.num_layers > len(reader.stored_names):  # specs of so many layers would fill the memory
        raise UserError(
            f"checkpoint {checkpoint.folder}: its arguments describe {config.model.num_layers:,} layers, and "
            f"it holds {len(reader.stored_names):,} parameters: it is damaged"
        )
    vocabulary = find_vocabulary(config)
    reader.check_external(config, vocabulary.size)
    describe_run(reader, config, vocabulary)
    if reader.program is MEGATRON_CORE and (replaced := [*expert_notes(args)]):
        warn(f"arguments of {MEGATRON_CORE.title} without an equivalent: {'; '.join(replaced)}")
    return reader


def describe_run(reader: StateReader, config: Config, vocabulary: Vocabulary) -> None:
    """Gives the checkpoint of another framework the `run.json` of a run that could have saved it, and the
    specs of its parameters without padding."""
    parallel, specs = config.parallel, specs_without_padding(config, vocabulary.size, vocabulary.eod)
    # The load of experts (`ONLY_IN_TRAINING`) is not in the checkpoint: a run starts from its initial value.
    specs = {name: spec for name, spec in specs.items() if name in reader.stored_names}
    stages = {
        "partition_method": parallel.partition_method,
        "pipeline_schedule": parallel.pipeline_schedule,
        "bounds": plan_stages(config, vocabulary.size).bounds,
    }
    run = model_record(config, vocabulary, stages, specs, ("torch", "transformers"))
    known = {"state": asdict(reader.checkpoint.state), "data": {}, IMPORTED_KEY: True, "files": {}}
    reader.checkpoint = replace(reader.checkpoint, run={**reader.recorded_optimizer(), **run, **known})
    reader.specs = specs
