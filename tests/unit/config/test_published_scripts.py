"""The command lines of BigScience's published scripts are accepted, or rejected for a fault of the script.

Some ramp-ups have batch sizes that their layout does not support, because these runs started on a different
layout. They are accepted if they resume after these batch sizes, and rejected if they start from initial
weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.arguments import read_command_line
from megatron.config import ConfigError
from megatron.optimizer.batch_schedule import check_remaining_batches, first_supported_sample
from tests.unit.config.published_scripts import SCRIPTS, Script, published


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_published_command_line_is_accepted_or_refused_for_its_own_fault(
    script: Script, tmp_path: Path
) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(script.deepspeed_json()))
    words = [*script.words(), "--deepspeed_config", str(file)]
    words += ["--dry-run", "--world-size", str(script.processes), "--local-rank=0"]
    if script.fault is not None and script.first_supported_sample is None:
        with pytest.raises(ConfigError) as caught:
            read_command_line(words, {})
        assert script.fault in str(caught.value)
        return
    config = read_command_line(words, {}).config
    assert config.parallel.world_size == script.processes
    assert config.precision.loss_scale is None  # dynamic, by the file and not by --loss-scale


@pytest.mark.parametrize(
    ("name", "values", "ignored"),
    [
        (
            "tr11-176B-ml",
            {
                "parallel.partition_method": "type:transformer|embedding",  # the script quotes it
                "batch.rampup_batch_size": (192, 16, 9_765_625),
                "model.ffn_hidden_size": 4 * 14336,
                "model.kv_channels": 128,
                "precision.bf16": True,
                "schedule.lr_warmup_samples": 183_105,
                "data.tokenizer_type": "PretrainedFromHF",
            },
            {"--abort-on-unmet-fused-kernel-constraints"},
        ),
        (
            "tr8b-104B-cl",
            {
                "parallel.pipeline_model_parallel_size": 32,
                "data.tokenizer_type": "GPT2BPETokenizer",
                "precision.fp16": True,
                "precision.loss_scale": 12.0,
                "training.train_tokens": 300_000_000_000,
            },
            set(),
        ),
    ],
)
def test_a_published_command_line_sets_its_fields(
    name: str, values: dict[str, object], ignored: set[str]
) -> None:
    script = published(name)
    command = read_command_line([*script.words(), "--dry-run", "--world-size", str(script.processes)], {})
    assert {path: command.config.value(path) for path in values} == values
    notes = {note.split()[0] for note in command.notes if "is ignored" in note}
    assert notes == ignored | {"--deepspeed", "--deepspeed-activation-checkpointing", "--data-impl"}


RESUMED = [script for script in SCRIPTS if script.first_supported_sample is not None]


@pytest.mark.parametrize("script", RESUMED, ids=lambda script: script.name)
def test_a_published_ramp_up_is_accepted_once_its_unsupported_batches_are_past(script: Script) -> None:
    words = [*script.words(), "--dry-run", "--world-size", str(script.processes)]
    config = read_command_line(words, {}).config
    first = script.first_supported_sample
    assert first_supported_sample(config) == first
    check_remaining_batches(config, first)
    for consumed in (0, first - 1):
        with pytest.raises(ConfigError) as caught:
            check_remaining_batches(config, consumed)
        assert "is not divisible by" in str(caught.value) and f"{first:,} consumed samples" in str(
            caught.value
        )
    place = words.index("--load")
    with pytest.raises(ConfigError) as caught:
        read_command_line(words[:place] + words[place + 2 :], {})
    assert script.fault in str(caught.value)


def test_the_published_scripts_that_were_resumed_past_their_ramp_up() -> None:
    assert {script.name.split("-")[0] for script in RESUMED} == {
        *("tr3n", "tr3o", "tr11b", "tr11c", "tr11e", "tr11f")
    }
