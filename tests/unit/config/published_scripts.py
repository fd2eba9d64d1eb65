"""The flags that BigScience's published sbatch scripts (bigscience-workshop/bigscience, folder train/) pass
to pretrain_gpt.py. published_scripts.txt has a line per script with its differences from the most common
script.

The values were read from the scripts; the text of the scripts is not copied. Not included: scripts that start
a different program, scripts that only copy logs, and tr8-104B-cl.slurm, which ends in its own shell
arithmetic on 126_953_125.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VALUES = {
    "@TRAIN": "TRAIN: 0.3 0:0.949 oscar/ar, 0.7 0:0.949 oscar/en",
    "@VALID": "VALID_AR: 1 0.949:0.999 oscar/ar",
    "@BOTH": "VALID_ALL: 0.3 0.949:0.999 oscar/ar, 0.7 0.949:0.999 oscar/en",
    "@TEST": "TEST_AR: 1 0.999:1 oscar/ar",
}

CURRICULUM: dict[str, object] = {
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 64,
        "max_difficulty": 2048,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 36000, "difficulty_step": 8},
    },
    "elastic_checkpoint": True,
}


@dataclass(frozen=True)
class Script:
    """A published script. processes: nodes x GPUs. fault: part of the error of a start from initial
    weights."""

    name: str
    processes: int
    changes: str
    fault: str | None = None

    def flags(self) -> dict[str, list[str]]:
        """Returns the script's flags with their values, without --deepspeed_config."""
        found: dict[str, list[str]] = {}
        _change(found, SHORT["commonest"])
        _change(found, self.changes)
        return found

    @property
    def first_supported_sample(self) -> int | None:
        """Returns the consumed samples from which the run can resume, if the fault is a batch size of the
        ramp-up.

        The layout of such a script supports only the full batch, which the ramp-up reaches after its SAMPLES.
        """
        is_in_ramp_up = self.fault is not None and self.fault.startswith("a batch of ")
        return int(self.flags()["--rampup-batch-size"][2]) if is_in_ramp_up else None

    def words(self) -> list[str]:
        return [word for flag, values in self.flags().items() for word in (flag, *values)]

    def deepspeed_json(self) -> dict[str, object]:
        """Returns the content of the script's DeepSpeed file. It repeats the flags, except for the loss
        scale."""
        flags = self.flags()
        fp16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2}
        fp16 |= {"min_loss_scale": 1, "initial_scale_power": 12}
        return {
            "train_micro_batch_size_per_gpu": int(flags["--micro-batch-size"][0]),
            "train_batch_size": int(flags["--global-batch-size"][0]),
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": int(flags["--zero-stage"][0])},
            **({"fp16": fp16} if "--fp16" in flags else {"bf16": {"enabled": True}}),
            **(CURRICULUM if "--train-tokens" in flags else {}),
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        }


def _change(flags: dict[str, list[str]], text: str) -> None:
    current: list[str] = []
    for word in text.split():
        name = word.removeprefix("~")
        expanded = SHORT.get(name, name)
        if word.startswith("~"):
            flags.pop(expanded)
        elif expanded != name and " " in expanded:
            _change(flags, expanded)
        elif expanded.startswith("--"):
            current = flags[expanded] = []
        else:
            current.append(VALUES.get(word, word))


# Lines 'NAME = WORDS' with shorthands for flags and changes, then a line for each script.
_LINES = re.sub(r"\n +", " ", Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")).splitlines()
SHORT = dict(line.split(" = ") for line in _LINES if " = " in line)


def _read_scripts() -> Iterator[Script]:
    for line in _LINES:
        if line and not line.startswith("#") and " = " not in line:
            head, _, rest = line.partition(":")
            name, processes = head.split()
            changes, _, fault = rest.partition(" ! ")
            yield Script(name, int(processes), changes.strip(), fault or None)


SCRIPTS = tuple(_read_scripts())


def published(name: str) -> Script:
    """Returns the script of this name."""
    return next(script for script in SCRIPTS if script.name == name)
