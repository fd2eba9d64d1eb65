"""The content of `run.json`: what a save records about the run, besides the files."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.formats.universal_info import INFO_KEY, derive_info, spec_record
from megatron.checkpoint.record import RUN_FILE, TrainingState
from megatron.config import Config
from megatron.config.registries import SAVE_FORMATS
from megatron.data.vocabulary import Vocabulary
from megatron.files import MAX_JSON_BYTES
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import spec_of
from megatron.mpu.world import gather_from_all_ranks
from megatron.optimizer.eight_bit import rule_record

if TYPE_CHECKING:
    from megatron.checkpoint.formats.writing import CheckpointWriter
    from megatron.engine.pipeline_engine import GPTEngine


def run_record(engine: GPTEngine, specs: dict[str, ParameterSpec], state: TrainingState) -> dict[str, Any]:
    """Returns the content of `run.json` without the files, the integrity record and the run's identity.
    specs: the specs of all parameters of the model, by name."""
    config, vocab = engine.run.config, engine.run.vocab
    return {
        "state": asdict(state),
        **model_record(config, vocab, engine.module.stages_record(), specs, ("torch", "deepspeed")),
        # The precision of moments in memory. In the files moments are always fp32.
        "optimizer_state": rule_record() if config.optimizer.use_bnb_optimizer else {"bits": 32},
        "data": engine.run.fingerprint,
        INFO_KEY: derive_info(specs, vocab.size),
    }


def model_record(
    config: Config,
    vocab: Vocabulary,
    stages: dict[str, Any],
    specs: dict[str, ParameterSpec],
    packages: tuple[str, ...],
) -> dict[str, Any]:
    """Returns the entries of `run.json` that describe a model and its layout. packages: names of the packages
    whose versions are recorded."""
    return {
        "config": config.to_dict(),
        "layout": layout_record(config),
        "stages": stages,
        "versions": {name: version(name) for name in packages},
        "vocab_size": vocab.size,
        "eod": vocab.eod,
        "parameters": {name: spec_record(spec) for name, spec in specs.items()},
    }


def layout_record(config: Config) -> dict[str, Any]:
    """Returns the layout in the form of `run.json`. Users and tools read it."""
    parallel = config.parallel
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "zero_stage": parallel.zero_stage,
        **(
            {"expert_model_parallel_size": parallel.expert_model_parallel_size}
            if config.model.num_experts
            else {}
        ),
        "cpu_offload": parallel.cpu_offload,
        "precision": config.precision.name,
        "optimizer": config.optimizer.optimizer,
    }


def all_specs(engine: GPTEngine) -> dict[str, ParameterSpec]:
    """Returns the spec of every parameter of the model, by name. Collective."""
    own = {name: spec_of(parameter) for name, parameter in engine.module.named_parameters()}
    return {name: spec for specs in gather_from_all_ranks(own) for name, spec in specs.items()}


def check_sharding(engine: GPTEngine) -> None:
    """Raises UserError on all ranks if a format in which the run saves cannot store the sharding of a
    parameter. Collective."""
    options = engine.run.config.checkpoint
    names = [options.save_format] if options.save else []
    names += ["native"] if options.save_local else []
    for name in names:
        writer: type[CheckpointWriter] = SAVE_FORMATS.load(name)
        writer.check_sharding(all_specs(engine))


def within_limit(*contents: dict[str, Any]) -> dict[str, Any]:
    """Returns the first content of `run.json` that is small enough for readers. Raises OSError if none is."""
    for content in contents:
        # The checksum, which is added later, takes less than 100 bytes.
        if (size := len(json.dumps(content, indent=2)) + 100) <= MAX_JSON_BYTES:
            return content
    raise OSError(f"{RUN_FILE} would have {size:,} bytes, expected at most {MAX_JSON_BYTES:,}")
