"""tools/job_report.py turns console logs into a table and a plot."""

import os
from pathlib import Path

import pytest

from megatron.checkpoint.record import Checkpoint, TrainingState, describe_start
from megatron.commands import job_report
from megatron.training.log_lines import IntervalSummary, format_training_line, format_validation_lines
from tests.unit.hostile import bounds, refusal

# A line of Megatron-LM of 2021, with the prefix of a launcher and without throughput.
PEERS_LINE = (
    "[3]: iteration {step:8d}/     200 | consumed samples: {step:12d} | "
    "elapsed time per iteration (ms): 500.0 | learning rate: 1.000E-04 | global batch size:    16 | "
    "lm loss: 3.000000E+00 | loss scale: 4096.0 | grad norm: 0.250 | "
    "number of skipped iterations:   1 | number of nan iterations:   0 |"
)


def training_line(iteration, loss):
    return format_training_line(
        IntervalSummary(
            iteration, 20, iteration, 2 * iteration, 1.0, 1e-3, 8, None, loss, None, 0.5, 0, 0, 8.0, 4e3, 1.0
        )
    )


def lines_of(iterations, offset=0.0):
    lines = ["some banner"]
    for iteration in iterations:
        lines.append(training_line(iteration, 10 - iteration + offset))
        if iteration % 10 == 0:
            lines += format_validation_lines("validation", f"iteration {iteration}", 5.0 + offset)
    return lines + format_validation_lines("test", "the end of training for test data", 4.0)


@pytest.mark.parametrize("in_one_log", [False, True])
def test_resumed_run_is_one_curve(in_one_log):
    first, second = lines_of(range(1, 13)), lines_of(range(11, 21), offset=0.25)
    run = job_report.read_run([("a", first + second)] if in_one_log else [("a", first), ("b", second)])
    losses = run.curve("lm_loss")
    assert list(losses) == list(range(1, 21))
    assert (losses[10], losses[11]) == (0.0, -0.75)
    assert run.validation == {"validation": {10: 5.0, 20: 5.25}, "test": {12: 4.0, 20: 4.0}}
    assert [(start.iterations[0], start.iterations[-1]) for start in run.starts] == [(1, 12), (11, 20)]
    assert run.repeated_iterations() == 2


def test_repeated_iterations_are_counted_from_the_checkpoint():
    """The run prints a line every 5 iterations and saves at iteration 7. It resumes from there."""
    first = lines_of(range(5, 16, 5))
    for start, repeated in (
        (describe_start(Checkpoint(Path("ckpt/global_step7"), TrainingState(7), {}), None), 8),
        (describe_start(None, None), 15),
    ):
        run = job_report.read_run([("a", first), ("b", [start, *lines_of(range(10, 21, 5))])])
        assert run.repeated_iterations() == repeated


@pytest.mark.parametrize(
    "start",
    [
        describe_start(Checkpoint(Path("ckpt/global_step5"), TrainingState(5), {}), None),
        describe_start(None, None),
        "[0]:  successfully loaded checkpoint from ckpt [ t 0, p 0 ] at iteration 5",
    ],
)
def test_a_start_in_the_same_log_without_a_repeated_iteration_is_a_start(start):
    lines = [start, *lines_of(range(1, 6)), start, *lines_of(range(6, 10))]
    run = job_report.read_run([("a", lines)])
    assert [(start.iterations[0], start.iterations[-1]) for start in run.starts] == [(1, 5), (6, 9)]


def test_the_table_has_a_row_per_start_and_the_repeated_iterations(tmp_path, capsys):
    first, second = tmp_path / "1.out", tmp_path / "2.out"
    first.write_text("\n".join(lines_of(range(1, 13))))
    second.write_text("\n".join(lines_of(range(11, 21), offset=0.25)))
    picture = tmp_path / "made" / "run.png"
    job_report.main([str(first), str(second), "--output", str(picture)])
    head, *rows = capsys.readouterr().out.splitlines()
    assert (
        head.split()
        == "log iterations lm loss lowest grad norm highest lr skipped s/iteration samples/s TFLOPs".split()
    )
    assert rows[0].split()[:4] == ["1.out", "1-12", "-2.0000", "-2.0000"]
    assert rows[1].split()[:4] == ["2.out", "11-20", "-9.7500", "-9.7500"]
    assert rows[2:5] == [
        "test loss 4.0000 at iteration 20, lowest 4.0000 at iteration 12",
        "validation loss 5.2500 at iteration 20, lowest 5.0000 at iteration 10",
        "2 iterations were repeated after a restart",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("checkpoint", [Checkpoint(Path("a/global_step5"), TrainingState(5), {}), None])
def test_log_that_begins_from_scratch_names_compare(checkpoint):
    logs = [
        ("a.log", [describe_start(None, None), *lines_of(range(1, 6))]),
        ("b.log", [describe_start(checkpoint, None), *lines_of(range(1, 6))]),
    ]
    text = job_report.report(job_report.read_run(logs))
    assert ("note: b.log begins from scratch" in text and "--compare" in text) == (checkpoint is None)


def test_megatron_lm_logs_give_throughput(tmp_path, capsys):
    log = tmp_path / "main_log.txt"
    log.write_text("\n".join(PEERS_LINE.format(step=step) for step in (10, 20, 30)))
    job_report.main([str(log), "--output", str(tmp_path / "run.png")])
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row == "main_log.txt 10-30 3.0000 3.0000 0.250 0.250 1.00e-04 3 0.5 32 -".split()


def test_a_comparison_has_a_row_per_run(tmp_path, capsys):
    first, second, old = tmp_path / "first.log", tmp_path / "second.log", tmp_path / "old.log"
    first.write_text("\n".join(lines_of(range(1, 13))))
    second.write_text("\n".join(lines_of(range(1, 16)) + lines_of(range(11, 21), offset=0.25)))
    old.write_text("\n".join(PEERS_LINE.format(step=step) for step in (10, 20, 30)))
    picture = tmp_path / "comparison.png"
    job_report.main(["--compare", str(first), str(second), str(old), "--output", str(picture)])
    head, *lines, wrote = capsys.readouterr().out.splitlines()
    rows, differences = lines[:3], lines[3:]
    assert head.split() == (
        "run iterations lm loss at 10 test loss validation loss s/iteration tokens/s TFLOPs restarts".split()
    )
    # The lines have 2 tokens per sample and 8 samples per second: see training_line and PEERS_LINE.
    assert rows[0].split() == "first.log 12 -2.0000 0.0000 4.0000 5.0000 1 16 1 0".split()
    assert rows[1].split() == "second.log 20 -9.7500 0.0000 4.0000 5.2500 1 16 1 1".split()
    assert rows[2].split() == "old.log 30 3.0000 3.0000 - - 0.5 - - 0".split()
    assert differences == [
        "second.log differs from first.log by 0.0e+00 of lm loss at iteration 1, by at most 2.5e-01 at "
        "iteration 11 (12 compared)",
        "old.log differs from first.log by 3.0e+00 of lm loss at iteration 10, by at most 3.0e+00 at "
        "iteration 10 (1 compared)",
    ]
    assert wrote == f"wrote {picture}" and picture.read_bytes().startswith(b"\x89PNG")


def test_runs_without_a_common_iteration_have_no_common_loss(tmp_path):
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    for log, iteration in zip(logs, (1, 2), strict=True):
        log.write_text(training_line(iteration, 2.0))
    head = job_report.comparison(job_report.read_runs(logs)).splitlines()[0]
    assert head.split() == "run iterations lm loss s/iteration tokens/s TFLOPs restarts".split()


def test_runs_of_the_same_file_name_are_compared_under_their_paths(tmp_path):
    logs = [tmp_path / folder / "train.log" for folder in ("a", "b")]
    for log in logs:
        log.parent.mkdir()
        log.write_text(training_line(1, 2.0))
    assert list(job_report.read_runs(logs)) == [str(log) for log in logs]


def mistake(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        job_report.main(arguments)
    assert left.value.code == 2
    return capsys.readouterr().err


def test_user_errors_are_one_sentence_and_exit_code_2(tmp_path, capsys):
    log, absent = tmp_path / "empty.log", tmp_path / "absent.log"
    log.write_text("nothing here\n")
    error = mistake([str(log)], capsys)
    assert str(log) in error and error.count("\n") == 1
    assert mistake([str(absent)], capsys) == f"error: {absent} cannot be read: No such file or directory\n"
    log.write_text(training_line(1, 2.0))
    assert "--compare" in mistake(["--compare", str(log)], capsys)
    assert "--compare" in mistake(["--compare", str(log), str(log)], capsys)
    assert "--output" in mistake([str(log), "--output", str(log / "run.png")], capsys)


@pytest.mark.parametrize(
    "unit",
    ["a", " ", "1", "iteration ", "iteration 1/", "a loss at ", "starting from ", "a.b-", ", iteration 1"]
    + ["successfully loaded checkpoint ", "|", "lm loss: 1 |", "iteration 1/ 2 | ", "\x00", "\r"],
)
def test_a_hostile_line_is_read_in_time_that_is_linear_in_its_length(unit, tmp_path):
    (tmp_path / "log").write_text(training_line(1, 2.0) + "\n" + unit * (500_000 // len(unit)) + "\n")
    with bounds(cpu_s=20.0):
        run = job_report.read_logs([tmp_path / "log"])
    assert run.curve("lm_loss")[1] in (2.0, 1.0)


def test_a_hostile_pipe_device_or_endless_log_is_one_sentence(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "endless").write_text("\n")
    os.truncate(tmp_path / "endless", 1 << 40)
    for name in ("pipe", "zero", "folder", "endless"):
        assert str(tmp_path / name) in refusal(lambda name=name: job_report.read_logs([tmp_path / name]))


@pytest.mark.parametrize(
    "values",
    [
        {"lm loss": "nan", "grad norm": "inf", "iteration": "nan", "global batch size": "1e308"},
        {"lm loss": "9" * 4000, "consumed tokens": "9" * 4299, "consumed samples": "9" * 30},
        {"lm loss": "-1e308", "elapsed time per iteration (s)": "1e-320", "kind": "1", "name": "2"},
    ],
)
def test_hostile_numbers_in_a_log_are_reported_and_drawn(values, tmp_path):
    fields = "".join(f"{name}: {value} | " for name, value in values.items())
    lines = [f"iteration {step}/ {'9' * 18} | {fields}" for step in (1, 2, int("9" * 18))]
    lines.append(f"valid loss at iteration {'9' * 30} | iteration: nan | lm loss value: inf | ")
    (tmp_path / "log").write_text("\n".join([*lines, "iteration " + "9" * 5000 + "/ 2 | lm loss: 1 |"]))
    (tmp_path / "other").write_text(training_line(1, 2.0))
    job_report.main([str(tmp_path / "log"), "--output", str(tmp_path / "a.png")])
    logs = [str(tmp_path / name) for name in ("log", "other")]
    job_report.main(["--compare", *logs, "--output", str(tmp_path / "b.png")])
    assert (tmp_path / "a.png").stat().st_size and (tmp_path / "b.png").stat().st_size


def test_a_hostile_title_is_no_formula_and_a_name_moves_no_cursor(tmp_path, capsys):
    log = tmp_path / "\x1b[2J$\\frac{$.log"
    log.write_text(training_line(1, 2.0))
    job_report.main([str(log), "--output", str(tmp_path / "a.png"), "--title", r"$\frac{$ $x^$"])
    job_report.main([str(log), "--output", str(tmp_path / "b.png")])
    assert "\x1b" not in (output := capsys.readouterr().out) and r"\x1b[2J" in output
