"""The DeepSpeed JSON file may repeat the flags but not contradict them. It sets the loss scale."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import CommandLine, parse_args, read_command_line
from megatron.config import ConfigError
from megatron.config.foreign_flags import foreign_flags
from megatron.engine.deepspeed_config import deepspeed_dict
from megatron.errors import UserError
from tests.unit.config.command_lines import SMALL, rows
from tests.unit.hostile import HOSTILE_VALUES, refusal

# A file for SMALL in the form of published scripts.
PUBLISHED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 12,
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


@pytest.fixture
def read(tmp_path: Path):
    """Returns a function that reads settings as a DeepSpeed file with SMALL and more flags."""

    def read_settings(settings: Any, *words: str) -> CommandLine:
        file = tmp_path / "ds_config.json"
        file.write_text(settings if isinstance(settings, str) else json.dumps(settings))
        words = (*SMALL, *words, "--deepspeed_config", str(file))
        return read_command_line(words, {})

    return read_settings


def test_without_a_file_nothing_changes() -> None:
    command = read_command_line(SMALL, {})
    assert command == CommandLine(parse_args(SMALL, {}), ())


def test_a_published_file_agrees_and_its_loss_scale_wins(read) -> None:
    settings = read(PUBLISHED, "--fp16", "--loss-scale", "12")
    precision = settings.config.precision
    assert precision.loss_scale is None
    assert precision.initial_loss_scale == 4096
    assert precision.loss_scale_window == 500
    assert (precision.hysteresis, precision.min_loss_scale) == (2, 1.0)
    assert (
        "a dynamic scale from the file overrides a static scale of 12 from --loss-scale" in settings.notes[0]
    )
    assert len([note for note in settings.notes if "overrides" in note]) == 3
    assert any("steps_per_print 2000 is not used" in note for note in settings.notes)


def test_only_a_loss_scale_for_fp16_in_the_file_replaces_the_flag(read) -> None:
    fixed = read({"fp16": {"enabled": True, "loss_scale": 128}}, "--fp16")
    assert fixed.config.precision.loss_scale == 128.0
    (note,) = fixed.notes
    assert "a static scale of 128 from the file overrides a dynamic scale from --loss-scale" in note
    without = read({"fp16": {"enabled": True}}, "--fp16", "--loss-scale", "12")
    assert (without.config.precision.loss_scale, without.notes) == (12.0, ())
    bf16 = read({"fp16": {"enabled": False, "loss_scale": 5}, "bf16": {"enabled": True}}, "--bf16")
    assert bf16.config.precision.loss_scale is None


def test_auto_and_null_leave_the_decision_to_the_flags(read) -> None:
    file = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": None,
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": "auto"},
        "bf16": "auto",
        "optimizer": None,
    }
    settings = read(file, "--fp16", "--loss-scale", "12")
    assert settings.notes == ()
    assert settings.config.precision.loss_scale == 12.0
    assert deepspeed_dict(settings.config, 8)["zero_optimization"] == {"stage": 0}


REFUSED = """
{"train_micro_batch_size_per_gpu": 2} => train_micro_batch_size_per_gpu is 2; --micro-batch-size is 1
{"train_batch_size": 16} => train_batch_size is 16; --global-batch-size is 8
{"gradient_accumulation_steps": 4} => gradient_accumulation_steps is 4; --global-batch-size; is 8
{"gradient_clipping": 0.5} => gradient_clipping is 0.5; --clip-grad is 1.0
{"zero_optimization": {"stage": 1}} => zero_optimization.stage is 1; --zero-stage is 0
{"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": true}}}
    => zero_optimization.offload_optimizer to cpu is true; --cpu-offload is false
{"zero_optimization": {"cpu_offload": false}} --cpu-offload
    => zero_optimization.offload_optimizer to cpu is false; --cpu-offload is true
{"fp16": {"enabled": true}} => fp16.enabled is true; --fp16 is false
{"fp16": {"enabled": false}} --fp16 => fp16.enabled is false; --fp16 is true
{"bf16": {"enabled": true}} => bf16.enabled is true; --bf16 is false
{"bfloat16": {"enabled": true}} => bfloat16.enabled is true; --bf16 is false
{"data_types": {"grad_accum_dtype": "bf16"}} => data_types.grad_accum_dtype is bf16; fp32; remove it from
{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}
    => offload_optimizer to nvme; not supported; remove it from; --cpu-offload
{"zero_optimization": {"offload_param": {"device": "cpu"}}} => offload_param; not supported; remove it from
{"fp16": {"auto_cast": true}} => fp16.auto_cast is not supported; remove it from the file
{"zero_force_ds_cpu_optimizer": true} => has zero_force_ds_cpu_optimizer; remove it from the file
{"managed_gradient_accumulation": false} => has managed_gradient_accumulation; remove it from the file
{"tensor_parallel": {"autotp_size": 2}} => has tensor_parallel; remove it from the file
{"train_batchsize": 8} => has train_batchsize; did you mean train_batch_size; remove it from the file
{"checkpoint": {"load_universal": true}} => checkpoint.load_universal is not supported; remove it from
{"checkpoint": {"use_node_local_storage": true}} => checkpoint.use_node_local_storage; remove it from
{"checkpoint": {"writer": {"type": "fast"}}} => checkpoint.writer is not supported; remove it from the file
{"fp16": 5} => fp16 is 5; braces
{"tensorboard": true} => tensorboard is True: expected an object
{"memory_breakdown": "yes"} => memory_breakdown is "yes": expected true or false
{"fp16": {"enabled": true, "loss_scale": "high"}} --fp16 => fp16.loss_scale is "high": expected a number
{"fp16": {"enabled": true, "initial_scale_power": 128}} --fp16 => fp16.initial_scale_power is 128; 0 to 127
{"fp16": {"enabled": true, "hysteresis": 0}} --fp16 => --hysteresis is 0: expected at least 1
[1] => expected a JSON object
{"fp16" => not valid JSON
"""


@pytest.mark.parametrize(("words", "parts"), rows(REFUSED), ids=lambda v: v if isinstance(v, str) else "")
def test_a_contradiction_or_another_key_is_refused_with_the_key_and_the_remedy(
    read, words: str, parts: list[str]
) -> None:
    content, dashes, flags = words.partition(" --")
    with pytest.raises(ConfigError) as caught:
        read(content, *(dashes + flags).split())
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [True, {"enabled": True}, {"type": "Adam"}], ids=str)
def test_a_key_that_flags_own_is_refused_with_the_alternative(read, value: object) -> None:
    keys = foreign_flags().deepspeed_keys
    with pytest.raises(ConfigError) as caught:
        read(dict.fromkeys(keys, value))
    assert [line.strip() for line in str(caught.value).splitlines()] == [
        f"the DeepSpeed config has {key}: {answer}" for key, answer in keys.items()
    ]


def test_a_disabled_section_has_no_effect(read) -> None:
    settings = read(
        {
            "curriculum_learning": {"enabled": False},
            "amp": {"enabled": False},
            "sparse_gradients": False,
            "flops_profiler": {"enabled": False},
            "comms_logger": {"enabled": False},
        }
    )
    assert settings.notes == ()


def test_an_absent_file_is_refused_by_a_run_and_noted_by_a_plan(tmp_path: Path) -> None:
    for ending in (".bin", ".idx"):
        (tmp_path / f"text{ending}").touch()
    absent = str(tmp_path / "none.json")
    words = [*SMALL, "--vocab-size", "9", "--data-path", str(tmp_path / "text"), "--deepspeed_config", absent]
    plan = read_command_line(words, {})
    assert absent in plan.notes[0]
    assert deepspeed_dict(plan.config, 8)["train_batch_size"] == 8
    run = [word for word in words if word != "--dry-run"]
    with pytest.raises(ConfigError, match="--deepspeed_config .*none.json"):
        read_command_line(run, {})


def test_deepspeed_is_configured_for_fp32_without_clipping() -> None:
    config = parse_args([*SMALL, "--world-size", "2", "--bf16", "--zero-stage", "1"], {})
    assert deepspeed_dict(config, 8) == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_is_configured_for_zero_1_at_most(read, stage: int) -> None:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}
    settings = read({"zero_optimization": zero}, "--zero-stage", str(stage), "--cpu-offload")
    assert deepspeed_dict(settings.config, 8)["zero_optimization"] == {"stage": 1}


def test_with_a_ramp_up_deepspeed_gets_the_batch_size_of_the_next_step() -> None:
    config = parse_args([*SMALL, "--rampup-batch-size", "2", "2", "100"], {})
    settings_dict = deepspeed_dict(config, 2)
    assert (settings_dict["train_batch_size"], settings_dict["gradient_accumulation_steps"]) == (2, 2)


def test_monitoring_keys_are_passed_on_and_noted(read) -> None:
    watching = {
        "wandb": {"enabled": True},
        "tensorboard": {"enabled": True, "output_path": "folder"},
        "memory_breakdown": True,
        "checkpoint": {"tag_validation": "Fail", "parallel_write": {"pipeline_stage": True}},
    }
    settings = read({**PUBLISHED, **watching, "csv_monitor": {"enabled": False}}, "--fp16")
    settings_dict = deepspeed_dict(settings.config, 8)
    assert {key: settings_dict[key] for key in watching} == watching
    assert settings_dict["gradient_clipping"] == 0.0
    assert "fp16" not in settings_dict and "steps_per_print" not in settings_dict
    notes = [note for note in settings.notes if "is passed to DeepSpeed" in note]
    assert sorted(note.split()[3] for note in notes) == sorted(watching)


def test_all_zero_settings_except_the_stage_are_ignored_with_a_note(read) -> None:
    zero = {"stage": 1, "allgather_bucket_size": 5e8, "overlap_comm": False, "reduce_bucket_size": "auto"}
    settings = read({"zero_optimization": zero}, "--zero-stage", "1")
    assert deepspeed_dict(settings.config, 8)["zero_optimization"] == {"stage": 1}
    note, *_ = settings.notes
    assert "zero_optimization (allgather_bucket_size, overlap_comm) is deprecated and ignored: " in note


@pytest.mark.parametrize("content", ["[" * 100_000, '{"fp16":' * 5000, '{"fp16": "\\ud800"}', "\x00", "1"])
def test_a_hostile_file_is_one_sentence(content: str, read) -> None:
    assert "ds_config.json" in refusal(lambda: read(content))


def test_a_hostile_pipe_or_device_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero")):
        words = [*SMALL, "--deepspeed_config", str(file)]
        assert str(file) in refusal(lambda words=words: read_command_line(words, {}))


@pytest.mark.gate(rows=7)
@pytest.mark.parametrize(
    "section", ["", "fp16", "bf16", "data_types", "zero_optimization", "checkpoint", "new"]
)
@pytest.mark.parametrize("words", [[], ["--fp16"]])
def test_hostile_values_are_accepted_or_refused_by_a_sentence(section: str, words: list[str], read) -> None:
    inside = PUBLISHED.get(section) or {
        "parallel_write": {},
        "offload_optimizer": "cpu",
        "grad_accum_dtype": 1,
    }
    keys = inside if section else PUBLISHED
    for key in keys:
        for value in [*HOSTILE_VALUES, 10**400]:
            changed = {**keys, key: value}
            with suppress(UserError):
                read({**PUBLISHED, section: changed} if section else changed, *words)
