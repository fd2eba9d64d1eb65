"""One command prints equal runs on all layouts, through either launcher."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.end_to_end.command import Run, pretrain, pretrain_typed, scalars
from tests.end_to_end.flags import ABSOLUTE, MODEL, RAMPED, RAMPED_STEPS, SHORT

FLAGS = [*MODEL, *ABSOLUTE, *RAMPED]
FOUR = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", *FLAGS]
# Losses are printed with 7 digits, and the last digit may be rounded differently. Grad norms have three
# decimals.
TOLERANCE = {"lm_loss": 1e-5, "lm_loss_ppl": 1e-4, "grad_norm": 2e-3}


@pytest.fixture(scope="module")
def single(data: list[str]) -> Run:
    """Returns the run of one process under plain python, with the output of libraries during their import."""
    return pretrain_typed([*FLAGS, *data])


@pytest.fixture(scope="module")
def four(data: list[str]) -> Run:
    """Returns the run of two TP ranks times two stages."""
    return pretrain([*FOUR, *data], processes=4)


def assert_same_run(run: Run, other: Run) -> None:
    assert len(run.facts) == len(other.facts)
    for line, expected in zip(run.facts, other.facts, strict=True):
        assert line.keys() == expected.keys()
        for name, value in line.items():
            wanted = expected[name]
            if name in TOLERANCE:
                wanted = pytest.approx(wanted, rel=TOLERANCE[name])
            assert value == wanted, f"{name} of {line}"


def test_a_run_prints_every_step_in_megatrons_format(single: Run) -> None:
    assert single.exit_code == 0, single.stderr
    assert [step["iteration"] for step in single.steps] == list(range(1, RAMPED_STEPS + 1))
    # 2, 4, 6 and 8 samples per step. The size grows at each third of the first 24 samples.
    sizes = [2] * 4 + [4] * 2 + [6] * 2 + [8] * 12
    assert [step["global_batch_size"] for step in single.steps] == sizes
    assert [step["consumed_samples"] for step in single.steps] == [sum(sizes[: i + 1]) for i in range(20)]
    for step in single.steps:
        assert step["total_iterations"] == RAMPED_STEPS
        assert step["consumed_tokens"] == 32 * step["consumed_samples"]
        assert step["number_of_skipped_iterations"] == step["number_of_nan_iterations"] == 0
        samples = step["consumed_samples"]
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (samples - 10) / 90)))
        rate = 1e-3 * samples / 10 if samples <= 10 else 1e-4 + 9e-4 * cosine
        assert step["learning_rate"] == pytest.approx(rate, rel=1e-3)
    assert single.steps[0]["lm_loss"] == pytest.approx(math.log(600), abs=0.05)
    assert single.steps[-1]["lm_loss"] < single.steps[0]["lm_loss"] - 0.05


def test_validation_and_test_losses_are_printed(single: Run) -> None:
    moments = [(line["name"], line["at"]) for line in single.evaluations]
    assert moments == [
        *[("validation", f"iteration {n}") for n in (6, 12, 18)],
        ("validation", "the end of training for val data, iteration 20"),
        ("test", "the end of training for test data, iteration 20"),
    ]
    for line in single.evaluations:
        assert line["lm_loss_ppl"] == pytest.approx(math.exp(line["lm_loss"]), rel=1e-5)


def test_tensor_and_pipeline_parallel_print_the_run_of_one_process(single: Run, four: Run) -> None:
    assert four.exit_code == 0, four.stderr
    assert_same_run(four, single)


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["launch", "run"])
def test_both_launchers_print_the_run_of_one_process(launcher: str, data: list[str], single: Run) -> None:
    run = pretrain_typed([*FOUR, *data], processes=4, launcher=launcher).ok()
    assert_same_run(run, single)


@pytest.mark.full
@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, "--partition-method profile"),
        (3, "--partition-method stages:E,0,4+L"),
        (4, "--partition-method weighted_type:embed:2|transformer:1 --zero-stage 1"),
        (2, "--pipeline-schedule zero-bubble --checkpoint-activations --log-bubble"),
    ],
)
def test_other_stages_print_the_run_of_one_process(
    single: Run, data: list[str], processes: int, options: str
) -> None:
    pipeline = ["--pipeline-model-parallel-size", str(processes)]
    run = pretrain([*pipeline, *options.split(), *FLAGS, *data], processes=processes).ok()
    assert_same_run(run, single)


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "held"),
    [
        ("--pipeline-schedule dualpipev", [("0", "0"), ("1", "1"), ("1", "2"), ("0", "3")]),
        ("--virtual-pipeline-stages 2", [("0", "0"), ("1", "1"), ("0", "2"), ("1", "3")]),
    ],
)
def test_several_stages_per_rank_print_the_run_of_1f1b_and_the_stages_of_each_rank(
    schedule: str, held: list[tuple[str, str]], data: list[str]
) -> None:
    flags = [*MODEL, *ABSOLUTE, *SHORT, *data, "--pipeline-model-parallel-size", "2"]
    plain, several = (
        pretrain([*flags, *words.split()], processes=2) for words in ("--pipeline-schedule 1f1b", schedule)
    )
    assert plain.exit_code == several.exit_code == 0, several.stderr
    assert_same_run(several, plain)
    assert re.findall(r"^ +(\d)  +[\d.]+  +(\d)  +[\d-]+ ", several.stdout, re.MULTILINE) == held


@pytest.mark.full
def test_context_parallel_ranks_print_the_run_of_one_process_and_pipeline_ranks_go_on(
    data: list[str], single: Run, tmp_path: Path
) -> None:
    flags = [*FLAGS, *data, "--save", str(tmp_path), "--load", str(tmp_path)]
    both = ["--context-parallel-size", "2", "--tensor-model-parallel-size", "2"]
    first = pretrain_typed([*both, *flags, "--exit-interval", "10"], processes=4).ok()
    second = pretrain_typed(["--pipeline-model-parallel-size", "2", *flags], processes=2).ok()
    assert len(first.steps) == len(second.steps) == 10
    assert_same_run(replace(second, stdout=first.stdout + second.stdout), single)


@pytest.mark.full
def test_measured_times_are_kept_and_read_again(data: list[str], tmp_path: Path) -> None:
    times = tmp_path / "folder" / "times.json"
    method = ["--partition-method", "profile", "--partition-profile", str(times)]
    flags = [*MODEL, *ABSOLUTE, *SHORT, *data, *method]
    layout = ["--pipeline-model-parallel-size", "2"]
    measured = pretrain([*flags, *layout], processes=2)
    written = times.read_text()
    again = pretrain([*flags, *layout], processes=2)
    planned = pretrain([*flags, *layout, "--dry-run", "--world-size", "2"])
    assert len(stage_rows(measured)) == 2
    assert stage_rows(measured) == stage_rows(again) == stage_rows(planned)
    assert times.read_text() == written
    other = pretrain([*flags, "--micro-batch-size", "2"])
    assert other.exit_code == 2 and "micro_batch_size was 1, is 2" in other.stderr


def stage_rows(run: Run) -> list[str]:
    assert run.exit_code == 0, run.stderr
    return [line for line in run.stdout.splitlines() if re.match(" +[01] +\\d+-", line)]


def test_a_run_by_memory_has_the_stages_of_its_dry_run_and_no_planned_memory(data: list[str]) -> None:
    flags = [*MODEL, *ABSOLUTE, *SHORT, *data, "--partition-method", "memory"]
    flags += ["--pipeline-model-parallel-size", "2"]
    run = pretrain(flags, processes=2)
    planned = pretrain([*flags, "--dry-run", "--world-size", "2"])
    assert stage_rows(run) == stage_rows(planned) and len(stage_rows(run)) == 2
    assert "planned memory" in planned.stdout and "planned" not in run.stdout


@pytest.mark.full
def test_data_parallel_with_zero_and_recomputation_prints_the_run_of_one_process(
    single: Run, data: list[str], tmp_path: Path
) -> None:
    options = "--zero-stage 1 --ddp-bucket-size 1 --checkpoint-activations --num-workers 2".split()
    options += ["--log-timers-to-tensorboard"]
    options += ["--log-validation-ppl-to-tensorboard", "--log-batch-size-to-tensorboard"]
    options += ["--tensorboard-dir", str(tmp_path), "--deepspeed"]
    run = pretrain([*options, *FLAGS, *data], processes=2).ok()
    assert_same_run(run, single)
    assert run.stderr == ""
    assert run.stdout.count("--deepspeed is ignored") == 1
    assert_tensorboard_has_the_run(tmp_path, run)


def assert_tensorboard_has_the_run(folder: Path, run: Run) -> None:
    written = scalars(folder)
    by_step = {
        "lm-loss-training/lm loss": "lm_loss",
        "learning-rate/learning-rate": "learning_rate",
        "grad-norm/grad-norm": "grad_norm",
        "batch-size/batch-size": "global_batch_size",
    }
    for tag, name in by_step.items():
        assert [step for step, _ in written[tag]] == list(range(1, RAMPED_STEPS + 1))
        values = [value for _, value in written[tag]]
        assert values == pytest.approx([step[name] for step in run.steps], rel=1e-3)
        samples = [sample for sample, _ in written[f"{tag} vs samples"]]
        assert samples == [step["consumed_samples"] for step in run.steps]
    validation = "lm-loss-validation/lm loss validation"
    assert written.keys() >= {"iteration-time/iteration-time", validation, f"{validation} ppl"}


def test_a_run_prints_nothing_but_its_own_lines(single: Run, four: Run) -> None:
    assert single.stderr == ""
    assert four.stderr == ""
    own = r" iteration +\d+/| (validation|test) loss at |-+$|starting from |initializing from scratch"
    own += r"|learning rate: |note: |FLOPs |$"
    own += r"|(model|vocabulary|parameters|layout|batch|pipeline|ramp-up|stage|heaviest) | +\d+  +\d+-\d+ "
    own += r"|(split +data set|train|valid|test) +\S"
    own += r"| +[\d,]+ steps at batches of |memory after the first steps|  stage +\d+ \| resident "
    for line in single.stdout.splitlines() + four.stdout.splitlines():
        assert re.match(own, line), line
