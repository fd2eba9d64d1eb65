"""All checks of settings against each other, before any process group is created."""

from __future__ import annotations

from megatron.config.checks.batch import check_batches, check_curriculum, check_length
from megatron.config.checks.checkpoint import check_checkpoint, check_finetuning, check_stability
from megatron.config.checks.data import check_data, check_files, check_index_memory, host_memory_bytes
from megatron.config.checks.dependencies import check_dependencies
from megatron.config.checks.harness import check_harness, check_harness_installed
from megatron.config.checks.model import check_model
from megatron.config.checks.optimizer import check_optimizer, check_precision
from megatron.config.checks.parallel import check_layout, check_pipeline
from megatron.config.checks.recomputation import check_recomputation
from megatron.config.checks.schedule import check_schedule
from megatron.config.config import Config
from megatron.config.errors import ConfigError


def validate(config: Config) -> None:
    """Raise ConfigError for the first combination of settings that cannot be run."""
    if config.training.simulate and not config.training.dry_run:
        raise ConfigError(
            "--simulate simulates a step and trains nothing: add --dry-run, or remove --simulate"
        )
    if config.training.gpu is not None and config.training.device_memory is not None:
        raise ConfigError(
            f"--gpu {config.training.gpu} and --device-memory {config.training.device_memory:g} both give "
            "the memory of a device: remove one of them"
        )
    check_layout(config)
    check_model(config)
    check_pipeline(config)
    check_batches(config)
    check_length(config)
    check_recomputation(config)
    check_schedule(config)
    check_precision(config.precision)
    check_optimizer(config.optimizer)
    check_checkpoint(config.checkpoint)
    check_finetuning(config)
    check_stability(config.stability, config.checkpoint)
    if config.curriculum is not None:
        check_curriculum(config.curriculum, config.model, config.parallel, config.training)
    check_harness(config)
    check_data(config)
    if not config.training.dry_run:
        check_files(config.data)
        check_index_memory(config, host_memory_bytes())
        check_dependencies(config)
        check_harness_installed(config)
