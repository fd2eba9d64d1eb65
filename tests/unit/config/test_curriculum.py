"""The sequence lengths of a curriculum equal DeepSpeed's, and determine the length of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.arguments import read_command_line
from megatron.config import Config, ConfigError, TrainingConfig
from megatron.config.sections.curriculum import LengthCurriculum
from megatron.engine.deepspeed_config import read_curriculum
from megatron.optimizer.batch_schedule import BatchSchedule
from tests.unit.config.command_lines import SMALL

TR8B = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 64,
    "max_difficulty": 2048,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 360, "difficulty_step": 8},
}
TO_32 = {**TR8B, "min_difficulty": 8, "max_difficulty": 32}
DISCRETE = {
    **TO_32,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [8, 16, 32], "max_step": [3, 7]},
}


@pytest.mark.parametrize(
    "section",
    [
        TR8B,
        {
            **TR8B,
            "min_difficulty": 100,
            "schedule_config": {"total_curriculum_step": 97, "difficulty_step": 16},
        },
        {
            **TR8B,
            "schedule_type": "fixed_root",
            "schedule_config": {"total_curriculum_step": 300, "difficulty_step": 8, "root_degree": 2},
        },
        DISCRETE,
    ],
)
def test_lengths_are_those_of_deepspeeds_scheduler(section) -> None:
    scheduler = pytest.importorskip("deepspeed.runtime.data_pipeline.curriculum_scheduler")
    theirs = scheduler.CurriculumScheduler(section)
    ours = read_curriculum(section)
    for step in range(1, 400):
        assert ours.length_at(step) == theirs.update_difficulty(step), step
    assert ours.length_at(ours.steps - 1) < ours.length_at(ours.steps) == ours.length_at(10**9)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"curriculum_type": "vocabularyrarity"}, ("curriculum_type", "'seqlen'")),
        ({"schedule_type": "custom"}, ("schedule_type", "fixed_linear")),
        ({"min_difficulty": 4096}, ("min_difficulty 4096", "max_difficulty 2048")),
        ({"max_difficulty": 2044}, ("2044", "difficulty_step 8", "never")),
        ({"max_difficulty": "2048"}, ("max_difficulty", "integer")),
        ({"schedule_config": {"total_curriculum_step": 5}}, ("difficulty_step", "integer")),
        (
            {"schedule_config": {"total_curriculum_step": 10**12, "difficulty_step": 8}},
            ("1,000,000,000,000",),
        ),
        ({"schedule_config": 5}, ("schedule_config is 5", "braces")),
        (
            {
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [64, 2048], "max_step": []},
            },
            ("fixed_discrete", "one fewer"),
        ),
    ],
)
def test_a_section_with_invalid_settings_is_refused(changes, parts) -> None:
    with pytest.raises(ConfigError) as caught:
        read_curriculum({**TR8B, **changes})
    for part in parts:
        assert part in str(caught.value)
    without = {key: value for key, value in TR8B.items() if key != next(iter(changes))}
    with pytest.raises(ConfigError, match=f"has no {next(iter(changes))}"):
        read_curriculum(without)


def read(folder: Path, section, *flags: str) -> tuple[Config, tuple[str, ...]]:
    path = folder / "deepspeed.json"
    path.write_text(json.dumps({"curriculum_learning": section}))
    words = [*SMALL, *flags, "--deepspeed_config", str(path)]
    command = read_command_line(words, {})
    return command.config, command.notes


def test_the_file_sets_the_curriculum_with_a_note(tmp_path: Path) -> None:
    config, notes = read(tmp_path, TO_32)
    assert [config.seq_length_at(step) for step in (1, 180, 360, 1000)] == [8, 16, 32, 32]
    (note,) = notes
    assert "sequence length 8 at first, 32 from step 360 on" in note
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    off, notes = read(tmp_path, {**TO_32, "enabled": False})
    assert off.curriculum is None and notes == ()
    assert "curriculum" not in off.to_dict()


def test_a_curriculum_that_the_run_does_not_support_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"2048 tokens, --seq-length is 32"):
        read(tmp_path, TR8B)
    with pytest.raises(ConfigError, match=r"--compile with a curriculum"):
        read(tmp_path, TO_32, "--compile")
    tensor = ["--world-size", "4", "--tensor-model-parallel-size", "4", "--sequence-parallel"]
    odd = {**TO_32, "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 2}}
    with pytest.raises(ConfigError, match=r"of 10 tokens.*-model-parallel-size 4 with --sequence-parallel:"):
        read(tmp_path, odd, *tensor)
    assert read(tmp_path, TO_32, *tensor)[0].curriculum is not None


def test_the_end_of_a_run_is_found_by_its_real_tokens() -> None:
    curriculum = LengthCurriculum("fixed_discrete", 8, 32, lengths=(8, 16, 32), last_steps=(3, 7))
    for batches in (BatchSchedule(4), BatchSchedule(8, (2, 2, 20))):
        tokens, samples = [0], [0]
        for step in range(1, 31):
            size = batches.global_batch_size_at(samples[-1])
            samples.append(samples[-1] + size)
            tokens.append(tokens[-1] + size * curriculum.length_at(step))
        for target in range(1, tokens[-1], 7):
            expected = next(step for step, count in enumerate(tokens) if count >= target)
            training = TrainingConfig(train_iters=1000, train_tokens=target)
            assert batches.total_iterations(training, 32, curriculum) == expected
        for step in range(31):
            assert batches.tokens_of_samples(samples[step], 32, curriculum) == tokens[step]
        assert batches.tokens_of_samples(samples[5] + 1, 32, curriculum) == tokens[5] + 16
        assert batches.tokens_of_samples(10, 32, None) == 320
