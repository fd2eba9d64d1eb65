"""For sizes beyond any run, a plan either takes seconds and little memory, or fails with one
error message."""

from __future__ import annotations

import dataclasses
import os
import typing
from pathlib import Path

import pytest

from megatron.arguments import parse_args, read_command_line
from megatron.arguments.data_checks import check_index_memory
from megatron.config.config import SECTIONS
from megatron.config.fields import flag_of, option_name
from megatron.errors import UserError
from megatron.optimizer.batch_schedule import BEGIN, Progress, RunLength
from megatron.pipeline.layer_times import read_layer_times
from megatron.planner.dry_run import planned_run_report
from megatron.planner.plan import make_plan
from tests.unit.config.command_lines import SMALL
from tests.unit.hostile import refusal

HUGE = 10**13


def plan(words: str) -> str:
    config = read_command_line([*SMALL, "--vocab-size", "1000", *words.split()], {}).config
    return planned_run_report(make_plan(config, 1000))


LARGEST = (
    "--num-layers 100000 --hidden-size 1048576 --ffn-hidden-size 16777216 --num-attention-heads 65536 "
    "--kv-channels 1048576 --v-channels 65536 --window-kv-channels 65536 "
    "--seq-length 16777216 --max-position-embeddings 16777216 --pad-vocab-size-to 2147483647 "
    "--group-query-attention --num-query-groups 65536 --window-num-query-groups 65536 "
    "--window-size 16777216 --window-pattern W F --window-num-attention-heads 65536 "
    "--position-embedding-type rotary --rope-scaling-type yarn "
    "--rope-original-max-position-embeddings 16777216 --num-experts 65536 --moe-router-topk 65536 "
    "--moe-router-num-groups 65536 --moe-router-group-topk 65536 --moe-router-group-score-topk 1 "
    "--mtp-num-layers 64"
)
LARGEST_LATENT = LARGEST.replace(
    "--kv-channels 1048576 --v-channels 65536 --window-kv-channels 65536", ""
).replace(
    "--group-query-attention --num-query-groups 65536 --window-num-query-groups 65536",
    "--multi-latent-attention --q-lora-rank 524288 --kv-lora-rank 524288 --qk-head-dim 524288 "
    "--qk-pos-emb-head-dim 524288 --v-head-dim 524288",
)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (LARGEST, ("16,777,216 tokens", "chunks", "Reduce one of the two")),
        (LARGEST_LATENT, ("16,777,216 tokens", "chunks", "Reduce one of the two")),
        (
            f"--micro-batch-size {HUGE} --global-batch-size {HUGE} --train-samples {HUGE}",
            ("--micro-batch-size is 10000000000000", "at most 1000000"),
        ),
        ("--num-layers 10000000", ("--num-layers is 10000000", "at most 100000")),
        ("--hidden-size 4000000000000", ("--hidden-size is 4000000000000", "at most 1048576")),
        ("--pad-vocab-size-to 4000000000000", ("--pad-vocab-size-to is 4000000000000", "at most 2147483647")),
        (
            "--rampup-batch-size 1 1 1000000000000 --global-batch-size 100000000001 --train-samples "
            "1000000000000",
            ("--rampup-batch-size 1 1 1000000000000", "100,000,000,000 increments", "INCREMENT"),
        ),
        ("--pipeline-model-parallel-size 1000000000 --world-size 1000000000", ("at most 100000",)),
        (
            "--num-layers 1000 --world-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule dualpipev",
            ("type:transformer", "1,006 layers", "1f1b"),
        ),
    ],
)
def test_a_size_that_cannot_be_planned_is_refused(words: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        plan(words)
    assert all(part in str(caught.value) for part in parts) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        f"--global-batch-size {HUGE} --train-samples {HUGE}",
        f"--global-batch-size {HUGE} --train-samples {HUGE} --partition-method time --world-size 2 "
        "--pipeline-model-parallel-size 2",
        f"--global-batch-size {HUGE} --train-samples {HUGE} --world-size 2 --pipeline-model-parallel-size 2 "
        "--pipeline-schedule dualpipev",
        f"--train-samples {HUGE} --save-interval {HUGE} --save x --eval-iters {HUGE} --eval-interval {HUGE}",
        f"--world-size {HUGE} --global-batch-size {HUGE} --train-samples {HUGE}",
    ],
)
def test_the_largest_sizes_are_planned(words: str) -> None:
    assert "heaviest" in plan(words)


def test_every_size_of_the_model_has_a_bound() -> None:
    types = typing.get_type_hints(SECTIONS["model"])
    for field in dataclasses.fields(SECTIONS["model"]):
        if types[field.name] in (int, int | None) and field.name != "mup_base_hidden_size":
            no_size = ("size", "divisible_by", "_in_bf16")  # the last ones number layers
            assert f"{option_name(field.name)} " in LARGEST + LARGEST_LATENT or field.name.endswith(no_size)
            assert flag_of(field).at_most is not None, field.name


def check_memory(words: str, start: Progress = BEGIN) -> None:
    config = read_command_line([*SMALL, "--data-path", "a", *words.split()], {}).config
    check_index_memory(config, RunLength.from_config(config, start), memory_bytes=10 * 10**9)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--train-samples 1000000000", ("--train-samples 1000000000", "1,000,000,000 samples", "32 GB")),
        (
            "--eval-interval 1 --eval-iters 100000000",
            ("--eval-iters 100000000 every --eval-interval 1", "reduce"),
        ),
    ],
)
def test_an_index_that_does_not_fit_into_memory_is_refused(words: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        check_memory(words)
    assert all(part in str(caught.value) for part in (*parts, "10 GB"))


@pytest.mark.parametrize(
    "words",
    [
        "--train-samples 300000000",
        "--train-samples 1000000000 --no-train --load c",
        "--eval-interval 1 --eval-iters 100000000 --split 1",
        # Each prefix has a separate index.
        "--train-samples 1000000000 --data-path 1 a 1 b 1 c 1 d",
    ],
)
def test_an_index_that_fits_or_is_not_needed_is_accepted(words: str) -> None:
    check_memory(words)


def test_mock_data_need_no_memory_for_an_index() -> None:
    words = "--mock-data --vocab-size 9 --train-samples 1000000000 --eval-interval 1 --eval-iters 100000000"
    config = read_command_line([*SMALL, *words.split()], {}).config
    check_index_memory(config, RunLength.from_config(config), memory_bytes=10**9)


def test_resumed_length_is_what_must_fit_into_memory() -> None:
    """The checkpoint has consumed most of the tokens, so fewer samples remain, and their index fits."""
    words = "--train-samples 1000000000 --train-tokens 32000000000"
    with pytest.raises(UserError, match="1,000,000,000 samples"):
        check_memory(words)
    check_memory(words, Progress(10, 80, 31_000_000_000))


def test_a_hostile_pipe_device_or_deep_file_of_a_partition_profile_is_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "deep").write_text("[" * 100_000)
    for name in ("pipe", "zero", "deep"):
        path = tmp_path / name
        words = [*SMALL, "--partition-method", "profile", "--partition-profile", str(path)]
        sentence = refusal(lambda words=words: read_layer_times(parse_args(words, {}), 1000))
        assert f"--partition-profile {path} cannot be read" in sentence
