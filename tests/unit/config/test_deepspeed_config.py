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
from megatron.engine.deepspeed_config import deepspeed_dict
from megatron.errors import UserError
from tests.unit.config.command_lines import SMALL, rows
from tests.unit.hostile import HOSTILE_VALUES, refusal

# As published scripts write it, for SMALL.
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
    """Reads settings as a DeepSpeed file with SMALL and more flags."""

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


def test_a_static_loss_scale_in_the_file_wins_too(read) -> None:
    settings = read({"fp16": {"enabled": True, "loss_scale": 128}}, "--fp16")
    assert settings.config.precision.loss_scale == 128.0
    assert len(settings.notes) == 1
    assert (
        "a static scale of 128 from the file overrides a dynamic scale from --loss-scale" in settings.notes[0]
    )


def test_a_file_without_loss_scale_leaves_the_flag_alone(read) -> None:
    settings = read({"fp16": {"enabled": True}}, "--fp16", "--loss-scale", "12")
    assert settings.config.precision.loss_scale == 12.0
    assert settings.notes == ()


def test_a_loss_scale_in_a_file_for_bf16_changes_nothing(read) -> None:
    settings = read({"fp16": {"enabled": False, "loss_scale": 5}, "bf16": {"enabled": True}}, "--bf16")
    assert settings.config.precision.loss_scale is None


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


CONTRADICTIONS = """
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
"""


@pytest.mark.parametrize(("words", "parts"), rows(CONTRADICTIONS))
def test_a_contradiction_names_the_key_and_the_flag(read, words: str, parts: list[str]) -> None:
    file, end = json.JSONDecoder().raw_decode(words)
    with pytest.raises(ConfigError) as caught:
        read(file, *words[end:].split())
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("file", "parts"),
    [
        ({"optimizer": {"type": "Adam"}}, ("optimizer", "--optimizer")),
        ({"scheduler": {"type": "WarmupLR"}}, ("scheduler", "--lr")),
        ({"amp": {"enabled": True}}, ("amp", "--fp16")),
        ({"activation_checkpointing": {"partition_activations": True}}, ("--checkpoint-activations",)),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, ("data_types.grad_accum_dtype is bf16", "fp32")),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            ("offload_optimizer to nvme", "not supported", "--cpu-offload"),
        ),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, ("offload_param", "not supported")),
        ({"fp16": {"auto_cast": True}}, ("fp16.auto_cast", "not supported")),
        ({"communication_data_type": "fp16"}, ("communication_data_type", "fp32")),
        ({"fp16": 5}, ("fp16 is 5", "braces")),
        ([1], ("expected a JSON object",)),
        ("{", ("not valid JSON",)),
    ],
)
def test_keys_that_flags_own_and_unsupported_keys_are_refused(
    read, file: Any, parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(file)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("loss_scale", "high"), ("initial_scale_power", 128)])
def test_an_invalid_loss_scale_is_refused(read, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"fp16.{key}"):
        read({"fp16": {"enabled": True, key: value}}, "--fp16")


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


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ({"pipeline": {"use_reentrant": True}}, "pipeline"),
        ({"pipeline": {"activation_checkpoint_interval": 1}}, "pipeline"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast"),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler"),
        ({"comms_logger": {"enabled": True}}, "comms_logger"),
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown"),
        ({"dump_state": True}, "dump_state"),
        ({"zero_force_ds_cpu_optimizer": True}, "zero_force_ds_cpu_optimizer"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel"),
        ({"train_batchsize": 8}, "train_batchsize"),
        ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal"),
        ({"checkpoint": {"use_node_local_storage": True}}, "checkpoint.use_node_local_storage"),
        ({"checkpoint": {"writer": {"type": "fast"}}}, "checkpoint.writer"),
    ],
)
def test_every_other_key_is_refused_with_what_to_do(read, file: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"has {key}\b|{key} is not supported") as caught:
        read(file)
    assert "remove it from the file" in str(caught.value)


@pytest.mark.parametrize("file", [{"memory_breakdown": "yes"}, {"tensorboard": True}])
def test_a_passed_on_key_with_a_value_of_the_wrong_type_is_refused(read, file: dict[str, Any]) -> None:
    (key,) = file
    with pytest.raises(ConfigError, match=rf"{key} is .*: expected"):
        read(file)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"fp16":' * 5000, '{"fp16": "\\ud800"}', "\x00", "1"])
def test_a_hostile_file_is_one_sentence(content: str, read) -> None:
    assert "ds_config.json" in refusal(lambda: read(content))


def test_a_hostile_pipe_or_device_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero")):
        words = [*SMALL, "--deepspeed_config", str(file)]
        assert str(file) in refusal(lambda words=words: read_command_line(words, {}))


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
