"""Opens a checkpoint of another framework as if a run of this program had saved it, for a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.formats.state import StateReader
from megatron.checkpoint.formats.universal_info import spec_record
from megatron.checkpoint.huggingface.importer import config_without_run, specs_without_padding
from megatron.checkpoint.reading import lacks_configuration
from megatron.checkpoint.record import IMPORTED_KEY, Checkpoint
from megatron.checkpoint.saving.run_record import layout_record
from megatron.config import Config, ConfigError, DataConfig, OptimizerConfig, PrecisionConfig
from megatron.errors import UserError, one_line
from megatron.pipeline.stages import plan_stages
from megatron.tokenizer.vocabulary import Vocabulary, find_vocabulary

# Arguments of Megatron that its optimizer takes from a checkpoint.
_OPTIMIZER_ARGS = ("adam_beta1", "adam_beta2", "adam_eps", "weight_decay")


def open_external(
    checkpoint: Checkpoint, tokenizer: Mapping[str, Any], vocab_size: int | None
) -> StateReader:
    """Returns the reader of an external checkpoint, with a `run.json` and the specs of its parameters. The
    configuration comes from the arguments in the checkpoint; what they do not determine has its default.

    tokenizer: its settings, fields of `DataConfig`. vocab_size: number of tokens without padding; None: the
    tokenizer's, or without one the checkpoint's (all rows of the word embeddings, if it records no number).
    Raises UserError if the arguments in the checkpoint do not describe the model, or describe another one
    than its tensors.
    """
    reader = open_reader(checkpoint)
    recorded = reader.recorded_model()
    if recorded is None:
        raise lacks_configuration(checkpoint)
    fields, num_tokens = recorded
    if vocab_size is None and not tokenizer:
        vocab_size = num_tokens
    args = checkpoint.run["args"]
    precision = {name: args.get(name) is True for name in ("bf16", "fp16")}
    optimizer = {name: args[name] for name in _OPTIMIZER_ARGS if args.get(name) is not None}
    try:
        config = config_without_run(
            fields,
            vocab_size,
            DataConfig(**tokenizer),
            PrecisionConfig(**precision),
            OptimizerConfig(**optimizer),
        )
    except (ConfigError, TypeError, ArithmeticError) as error:
        raise UserError(
            f"checkpoint {checkpoint.folder}: its arguments describe no model of this program "
            f"({one_line(error)})"
        ) from error
    if config.model.num_layers > len(reader.stored_names):  # such a model would fill the memory
        raise UserError(
            f"checkpoint {checkpoint.folder}: its arguments describe {config.model.num_layers:,} layers, and "
            f"it holds {len(reader.stored_names):,} parameters: it is damaged"
        )
    vocabulary = find_vocabulary(config)
    reader.check_external(config, vocabulary.size)
    describe_run(reader, config, vocabulary)
    return reader


def describe_run(reader: StateReader, config: Config, vocabulary: Vocabulary) -> None:
    """Gives a checkpoint of another framework the `run.json` of a run that could have saved it, and the specs
    of its parameters, without padding."""
    parallel, specs = config.parallel, specs_without_padding(config, vocabulary.size, vocabulary.eod)
    run = {
        "state": asdict(reader.checkpoint.state),
        "config": config.to_dict(),
        "layout": layout_record(config),
        "stages": {
            "partition_method": parallel.partition_method,
            "pipeline_schedule": parallel.pipeline_schedule,
            "bounds": plan_stages(config, vocabulary.size).bounds,
        },
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "vocab_size": vocabulary.size,
        "eod": vocabulary.eod,
        "data": {},
        IMPORTED_KEY: True,
        "parameters": {name: spec_record(spec) for name, spec in specs.items()},
        "files": {},
    }
    reader.describe(run, specs)
