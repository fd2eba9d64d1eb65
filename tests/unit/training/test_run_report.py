"""Tests the report at the start of a run and by --dry-run: stage map, memory, and what a resume changes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from megatron.arguments import parse_args, read_command_line
from megatron.checkpoint.compatibility import starting_from
from megatron.checkpoint.record import Checkpoint, TrainingState
from megatron.config import Config
from megatron.data.dataset_builder import IndexedDatasetBuilder
from megatron.data.vocabulary import Vocabulary
from megatron.errors import UserError
from megatron.pipeline.methods import Partition
from megatron.pipeline.stages import StagePlan, plan_stages
from megatron.run import Run
from megatron.training.run_report import (
    heaviest_line,
    pipeline_efficiency,
    planned_start,
    stage_map,
    start_notes,
)
from megatron.training.startup_report import format_memory_row
from megatron.units import GIB
from tests.support.layer_lists import layer_list
from tests.support.layouts import VOCAB
from tests.unit.checkpoint.native_folder import random_wholes, write_native
from tests.unit.config.command_lines import SMALL, WITHOUT_LENGTH

# The embedding has 1,000 parameters, a transformer layer 400 and the norm 8.
PARAMETERS = [0, 1_000, 0, *[400] * 6, 0, 8, 1_000]


def plan(bounds, weights, unit="ms", rank_of_stage=None, method="profile"):
    ranks = rank_of_stage or tuple(range(len(weights)))
    return StagePlan(method, layer_list(6), PARAMETERS, Partition(bounds, weights, unit), ranks, 3_408)


def columns(stages):
    """Returns the cells of the header and of each row. The last cell is the stage's content."""
    *rows, _ = stage_map(stages).splitlines()
    return [re.split(r"\s{2,}", row.strip()) for row in rows]


TWO_STAGES = plan([0, 7, 12], [30.0, 50.0])


def test_a_row_has_layers_weight_share_parameters_and_content():
    assert columns(TWO_STAGES) == [
        ["stage", "layers", "weight (ms)", "of mean", "parameters per rank", "content"],
        ["0", "0-6", "30", "0.75", "2,600", "embedding, 4 x transformer layer"],
        ["1", "7-11", "50", "1.25", "1,808", "2 x transformer layer, final norm, LM head"],
    ]


@pytest.mark.parametrize(
    ("bounds", "contents"),
    [
        ([0, 12], ["embedding, 6 x transformer layer, final norm, LM head"]),
        ([0, 2, 4, 12], ["embedding", "transformer layer", "5 x transformer layer, final norm, LM head"]),
        ([0, 3, 9, 10, 12], ["embedding", "6 x transformer layer", "nothing", "final norm, LM head"]),
        ([0, 1, 11, 12], ["nothing", "embedding, 6 x transformer layer, final norm", "LM head"]),
    ],
)
def test_the_content_of_a_stage_names_layers_and_no_functions(bounds, contents):
    stages = plan(bounds, [1.0] * (len(bounds) - 1))
    assert [row[-1] for row in columns(stages)[1:]] == contents


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_every_kind_of_norm_is_shown_as_the_final_norm(norm):
    config = parse_args([*SMALL, "--num-layers", "6", "--normalization", norm], {})
    titles = [layer.title for layer in plan_stages(config, VOCAB).layers]
    assert titles == ["", "embedding", "", *["transformer layer"] * 6, "", "final norm", "LM head"]


def test_numbers_are_right_aligned_with_their_header():
    header, *rows, _ = stage_map(TWO_STAGES).splitlines()
    for name, cell in [("layers", "0-6"), ("weight (ms)", "30"), ("parameters per rank", "2,600")]:
        assert rows[0].index(f"  {cell} ") + 2 + len(cell) == header.index(name) + len(name)
    assert len({row.index(first) for row, first in zip(rows, ("embedding", "2 x"), strict=True)}) == 1


def test_weights_without_a_unit_have_none_in_the_header():
    assert columns(plan([0, 7, 12], [4.0, 2.0], unit=""))[0][2] == "weight"


@pytest.mark.parametrize(
    ("weight", "shown"), [(2.0, "2"), (2.5, "2.5"), (14.0912, "14.09"), (0.055723, "0.05572")]
)
def test_weights_are_shown_with_four_digits(weight, shown):
    assert columns(plan([0, 7, 12], [weight, 1.0]))[1][2] == shown


def test_a_single_layer_is_not_shown_as_a_range_and_a_stage_may_be_empty():
    assert [row[1] for row in columns(plan([0, 3, 4, 12], [1.0, 1.0, 1.0]))[1:]] == ["0-2", "3", "4-11"]
    assert columns(plan([0, 7, 7, 12], [4.0, 0.0, 2.0]))[2] == ["1", "-", "0", "0.00", "0", "nothing"]


def test_embedding_and_head_on_one_stage_are_one_matrix():
    assert columns(plan([0, 12], [9.0]))[1][4] == f"{1_000 + 6 * 400 + 8:,}"


def test_with_dualpipev_the_first_columns_are_the_rank_and_its_weight():
    rows = columns(plan([0, 4, 6, 8, 12], [1.0, 2.0, 3.0, 6.0], rank_of_stage=(0, 1, 1, 0)))
    assert [row[:4] for row in rows] == [
        ["rank", "its weight", "stage", "layers"],
        ["0", "7", "0", "0-3"],
        ["1", "5", "1", "4-5"],
        ["1", "5", "2", "6-7"],
        ["0", "7", "3", "8-11"],
    ]
    assert [row[5] for row in rows[1:]] == ["1.17", "0.83", "0.83", "1.17"], "of the mean of the ranks"
    assert rows[4][6] == "408", "rank 0 has the head's matrix already: it is the embedding's"


# --- the line about the heaviest stage ---


def test_the_last_line_names_the_heaviest_stage():
    assert stage_map(TWO_STAGES).splitlines()[-1] == heaviest_line(TWO_STAGES)


IMBALANCE = "imbalance loses up to"


@pytest.mark.parametrize(
    ("stages", "line"),
    [
        # Mean 40 ms, longest 50 ms: the average stage is idle for a fifth of the time.
        (
            TWO_STAGES,
            f"stage 1 by --partition-method profile, max/mean = 1.250: {IMBALANCE} 20.0 % efficiency",
        ),
        # Other stages do not wait for a stage with more memory.
        (
            plan([0, 7, 12], [30.0, 50.0], "GiB", method="memory"),
            "stage 1 by --partition-method memory, max/mean = 1.250: it needs 25.0 % more than the mean",
        ),
        # The first of equally heavy stages is named.
        (
            plan([0, 4, 8, 12], [2.0, 2.0, 2.0], unit="", method="uniform"),
            "stage 0 by --partition-method uniform, max/mean = 1.000: all stages are equal",
        ),
        # Two of three stages work: a third of the efficiency is lost.
        (
            plan([0, 7, 7, 12], [3.0, 0, 3.0]),
            f"stage 0 by --partition-method profile, max/mean = 1.500: {IMBALANCE} 33.3 % efficiency",
        ),
        # With DualPipeV stage 3 is the heaviest, but rank 1 has more to do: 4 + 5 compared with 1 + 6.
        (
            plan([0, 4, 6, 8, 12], [1.0, 4.0, 5.0, 6.0], rank_of_stage=(0, 1, 1, 0)),
            f"rank 1 by --partition-method profile, max/mean = 1.125: {IMBALANCE} 11.1 % efficiency",
        ),
    ],
)
def test_the_heaviest_stage_is_named_with_what_it_costs(stages, line):
    assert heaviest_line(stages) == f"heaviest   {line}"


def test_layers_that_weigh_nothing_have_no_heaviest_stage():
    weightless = plan([0, 7, 12], [0.0, 0.0], method="type:embed:0")
    assert heaviest_line(weightless).startswith("heaviest   none")
    assert [row[3] for row in columns(weightless)[1:]] == ["-", "-"]


def test_pipeline_efficiency_counts_the_steps_of_filling_and_draining():
    assert pipeline_efficiency(8, 1) == 1
    assert pipeline_efficiency(1, 4) == 0.25
    assert pipeline_efficiency(128, 12) == pytest.approx(128 / 139)


def test_row_has_the_range_of_its_ranks():
    """The values are from a tensor-parallel group of BigScience: 24.0, 24.8, 24.0 and 28.2 GB."""
    peaks = {8: 24.0, 9: 24.8, 10: 24.0, 11: 28.2}
    row = format_memory_row({rank: {"peak allocated": int(peak * GIB)} for rank, peak in peaks.items()})
    assert row.split() == "peak allocated 24.000 to 28.200 (rank 11)".split()


def notes(flags: str, saved_flags: str = "", iteration: int = 0, finetune: bool = False) -> list[str]:
    """Returns the notes of a run with `flags` that starts at an iteration from a checkpoint with
    `saved_flags`."""
    config, checkpoint = parse_args([*WITHOUT_LENGTH, *flags.split()], {}), None
    if iteration:
        saved = parse_args([*WITHOUT_LENGTH, *saved_flags.split()], {})
        state = TrainingState(iteration, 8 * iteration, 8 * 32 * iteration)
        checkpoint = Checkpoint(Path("x"), state, {"config": saved.to_dict()}, weights_only=finetune)
    run = Run.from_config(config, Vocabulary(VOCAB, None))
    return start_notes(checkpoint, starting_from(checkpoint, run))


@pytest.mark.parametrize("iteration", [0, 50, 99])
def test_ordinary_start_and_resume_have_no_notes(iteration: int) -> None:
    assert notes("--train-iters 100", "--train-iters 100", iteration) == []


@pytest.mark.parametrize("flags", ["--train-samples 125", "--train-samples 800 --train-tokens 4000"])
def test_rounded_last_batch_is_not_a_learning_rate_of_0(flags: str) -> None:
    assert notes(flags) == []


@pytest.mark.parametrize("iteration", [50, 100, 120])
def test_fine_tuning_starts_at_0_whatever_the_checkpoint_has_reached(iteration: int) -> None:
    assert notes("--train-iters 100", "--train-iters 100 --global-batch-size 16", iteration, True) == []


@pytest.mark.parametrize("iteration", [100, 120])
def test_nothing_to_train(iteration: int) -> None:
    (note,) = notes("--train-iters 100", "--train-iters 100", iteration)
    assert f"nothing to train: the checkpoint is at iteration {iteration}" in note and "iteration 100" in note
    assert notes("--train-iters 100 --no-train --load c", "--train-iters 100", iteration) == []


@pytest.mark.parametrize(
    ("now", "parts"),
    [
        (
            "--global-batch-size 16",
            ("8 samples there (up to 8)", "16 samples from iteration 51 on (up to 16)"),
        ),
        ("--rampup-batch-size 4 4 1000", ("8 samples there", "4 samples from iteration 51 on (up to 8)")),
    ],
)
def test_changed_batch_size(now: str, parts: tuple[str, ...]) -> None:
    (note,) = notes(f"--train-samples 8000 {now}", "--train-samples 8000", 50)
    assert all(part in note for part in parts)


def test_changed_settings_of_the_updates_are_one_line() -> None:
    saved = "--hidden-dropout 0.2 --adam-beta2 0.95 --clip-grad 0.5 --init-method-std 0.02 --sgd-momentum 0.5"
    now = "--hidden-dropout 0 --adam-beta2 0.98 --clip-grad 1 --init-method-std 0.01"
    (note,) = notes(f"--train-iters 100 {now}", f"--train-iters 100 {saved}", 50)
    assert note == (
        "the run continues with other settings than the checkpoint's: --hidden-dropout was 0.2, is 0.0; "
        "--init-method-std was 0.02, is 0.01; --adam-beta2 was 0.95, is 0.98; --clip-grad was 0.5, is 1.0"
    )
    assert notes(f"--train-iters 100 {now}", f"--train-iters 100 {saved}", 50, finetune=True) == []


@pytest.mark.parametrize(
    ("now", "saved", "warned"),
    [
        ("--train-iters 200 --use-checkpoint-lr-scheduler", "--train-iters 100", True),
        ("--train-iters 200 --override-lr-scheduler", "--train-iters 100", False),
        ("--train-iters 200 --use-checkpoint-lr-scheduler", "--train-iters 100 --min-lr 1e-5", False),
        ("--train-iters 200 --use-checkpoint-lr-scheduler", "--train-iters 300", False),
    ],
)
def test_checkpoint_schedule_that_ends_before_the_run(now: str, saved: str, warned: bool) -> None:
    found = notes(now, saved, 100)
    assert len(found) == warned
    for note in found:
        assert "learning rate is 0 from 100 iterations on and the run ends at 200" in note
        assert "--override-lr-scheduler" in note


def test_decay_that_ends_before_a_new_run() -> None:
    (note,) = notes("--train-iters 200 --lr-decay-iters 100")
    assert "WARNING: the learning rate is 0" in note and "--min-lr" in note


# --- the checkpoint of a dry run ---


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns a folder with a checkpoint at iteration 5, and the prefix of data on which it was not
    trained."""
    folder = tmp_path_factory.mktemp("places")
    config = read_command_line([*SMALL, "--dry-run", "--vocab-size", str(VOCAB)], {}).config
    write_native(folder / "checkpoints", config, random_wholes(config), 5)
    with IndexedDatasetBuilder(folder / "data", np.uint16) as builder:
        builder.add_documents([1] * 1000, [100] * 10)
        builder.finalize()
    return folder / "checkpoints", folder / "data"


def planned(load: Path, data: Path, *flags: str) -> list[str]:
    words = [*SMALL, "--dry-run", "--vocab-size", str(VOCAB), "--load", str(load), "--data-path", str(data)]
    config: Config = read_command_line([*words, *flags], {}).config
    return planned_start(Run.from_config(config))[1]


def test_dry_run_names_the_checkpoint_that_a_run_starts_from(places: tuple[Path, Path]) -> None:
    (note,) = planned(*places, "--override-data")
    assert f"starting from {places[0] / 'global_step5'}, iteration 5" in note


@pytest.mark.parametrize(
    ("flags", "named"),
    [((), "trained on other data"), (("--override-data", "--lr", "1"), "trained with another schedule")],
)
def test_dry_run_refuses_what_a_run_refuses(flags, named: str, places: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match=named):
        planned(*places, *flags)


def test_dry_run_without_the_folder_or_the_data_says_so(places: tuple[Path, Path]) -> None:
    load, data = places
    (note,) = planned(load.parent / "absent", data)
    assert "not checked" in note and "absent does not exist here" in note
    (note,) = planned(load, data.parent / "absent")
    assert f"--load {load} is not checked: --data-path" in note
