"""The configuration of a run: frozen sections, whose fields are the flags, and the parser made of them.

Importing it loads neither torch nor deepspeed, so that a misspelled flag is reported at once.
`megatron.arguments` reads a command line and checks the settings against each other.
"""

from megatron.config.config import Config
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
from megatron.errors import ConfigError

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ScheduleConfig",
    "StabilityConfig",
    "TrainingConfig",
    "padded_vocab_size",
]
