"""The arguments of a run: a command line, a checkpoint and DeepSpeed's file become one checked config.

command_line     reads all flags, and reports all mistakes in one error
checkpoint_args  flags that a checkpoint determines
checks           checks of settings against each other, with `data_checks` and `schedule_checks`
notes            settings without effect

Like `megatron.config`, this package imports neither torch nor deepspeed.
"""

from megatron.arguments.checks import validate
from megatron.arguments.command_line import (
    INTRODUCTION,
    CommandLine,
    complete_command_line,
    parse_args,
    read_command_line,
    require_flags,
)

__all__ = [
    "INTRODUCTION",
    "CommandLine",
    "complete_command_line",
    "parse_args",
    "read_command_line",
    "require_flags",
    "validate",
]
