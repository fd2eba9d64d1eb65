"""The configuration of a run: frozen sections whose fields are the flags, and the parser that is generated
from them.

The package imports neither torch nor deepspeed, so that a misspelled flag is reported at once.
`megatron.arguments` reads a command line and checks the settings against each other.
"""

from megatron.config.config import Config as Config
from megatron.config.model import padded_vocab_size as padded_vocab_size
from megatron.config.sections.batch import BatchConfig as BatchConfig
from megatron.config.sections.checkpoint import CheckpointConfig as CheckpointConfig
from megatron.config.sections.data import DataConfig as DataConfig
from megatron.config.sections.logging import LoggingConfig as LoggingConfig
from megatron.config.sections.model import ModelConfig as ModelConfig
from megatron.config.sections.optimizer import OptimizerConfig as OptimizerConfig
from megatron.config.sections.parallel import ParallelConfig as ParallelConfig
from megatron.config.sections.precision import PrecisionConfig as PrecisionConfig
from megatron.config.sections.schedule import ScheduleConfig as ScheduleConfig
from megatron.config.sections.stability import StabilityConfig as StabilityConfig
from megatron.config.sections.training import TrainingConfig as TrainingConfig
from megatron.errors import ConfigError as ConfigError
