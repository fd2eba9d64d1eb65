"""The command lines of BigScience's published scripts are accepted, or refused for a fault of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.config import ConfigError, read_command_line
from megatron.engine.deepspeed_config import read_deepspeed_config
from tests.unit.config.published_scripts import SCRIPTS, Script

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


def deepspeed_json(script: Script) -> dict[str, object]:
    """The file that the scripts write beside their flags: it repeats them, but for the loss scale."""
    flags = script.flags()
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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_published_command_line_is_accepted_or_refused_for_its_own_fault(
    script: Script, tmp_path: Path
) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(deepspeed_json(script)))
    words = [*script.words(), "--deepspeed_config", str(file)]
    words += ["--dry-run", "--world-size", str(script.processes), "--local-rank=0"]
    if script.fault is None:
        command_line = read_command_line(words, {})
        config = read_deepspeed_config(command_line.config).config
        assert config.parallel.world_size == script.processes
        assert config.precision.loss_scale is None  # dynamic, as the file says and --loss-scale does not
        return
    with pytest.raises(ConfigError) as caught:
        read_command_line(words, {})
    assert script.fault in str(caught.value)
