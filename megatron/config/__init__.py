"""The configuration of a run: frozen sections, the command line generated from them, and the checks.

Importing it loads neither torch nor deepspeed, so that a misspelled flag is reported at once.
"""

from megatron.config.batch import BatchSchedule
from megatron.config.cli import CommandLine, complete_command_line, parse_args, read_command_line
from megatron.config.config import Config
from megatron.config.data import parse_split
from megatron.config.model import padded_vocab_size
from megatron.config.sections.batch import BatchConfig
from megatron.config.sections.checkpoint import CheckpointConfig
from megatron.config.sections.data import DataConfig
from megatron.config.sections.logging import LoggingConfig
from megatron.config.sections.model import ModelConfig
from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.parallel import ParallelConfig
from megatron.config.sections.precision import PrecisionConfig
from megatron.config.sections.schedule import ScheduleConfig
from megatron.config.sections.stability import StabilityConfig
from megatron.config.sections.training import TrainingConfig
from megatron.config.validate import validate
from megatron.errors import ConfigError

__all__ = [
    "BatchConfig",
    "BatchSchedule",
    "CheckpointConfig",
    "CommandLine",
    "Config",
    "ConfigError",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ScheduleConfig",
    "TrainingConfig",
    "StabilityConfig",
    "complete_command_line",
    "padded_vocab_size",
    "parse_args",
    "parse_split",
    "read_command_line",
    "validate",
]
