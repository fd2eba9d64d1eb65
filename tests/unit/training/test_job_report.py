"""tools/job_report.py: from console logs to a table and a picture."""

import pytest

from megatron.training.logging.log_lines import IntervalSummary, format_training_line, format_validation_lines
from tools import job_report

# Of Megatron-LM of 2021, behind the prefix of a launcher, without rates.
PEERS_LINE = (
    "[3]: iteration {step:8d}/     200 | consumed samples: {step:12d} | "
    "elapsed time per iteration (ms): 500.0 | learning rate: 1.000E-04 | global batch size:    16 | "
    "lm loss: 3.000000E+00 | loss scale: 4096.0 | grad norm: 0.250 | "
    "number of skipped iterations:   1 | number of nan iterations:   0 |"
)


def training_line(iteration, loss):
    return format_training_line(
        IntervalSummary(
            iteration, 20, iteration, iteration, 1.0, 1e-3, 8, None, loss, None, 0.5, 0, 0, 8.0, 4e3, 1.0
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
def test_a_resumed_run_is_one_curve_in_which_the_later_start_counts(in_one_log):
    first, second = lines_of(range(1, 13)), lines_of(range(11, 21), offset=0.25)
    run = job_report.read_run([("a", first + second)] if in_one_log else [("a", first), ("b", second)])
    losses = run.curve("lm_loss")
    assert list(losses) == list(range(1, 21))
    assert (losses[10], losses[11]) == (0.0, -0.75)
    assert run.validation == {"validation": {10: 5.0, 20: 5.25}, "test": {12: 4.0, 20: 4.0}}
    assert [(start.iterations[0], start.iterations[-1]) for start in run.starts] == [(1, 12), (11, 20)]
    assert run.steps_run_again() == 2


def test_the_table_has_a_row_per_start_and_tells_what_was_lost(tmp_path, capsys):
    first, second = tmp_path / "1.out", tmp_path / "2.out"
    first.write_text("\n".join(lines_of(range(1, 13))))
    second.write_text("\n".join(lines_of(range(11, 21), offset=0.25)))
    picture = tmp_path / "made" / "run.png"
    job_report.main([str(first), str(second), "--output", str(picture)])
    head, *rows = capsys.readouterr().out.splitlines()
    assert (
        head.split()
        == "log steps lm loss smallest grad norm largest rate skipped s/step samples/s TFLOPs".split()
    )
    assert rows[0].split()[:4] == ["1.out", "1-12", "-2.0000", "-2.0000"]
    assert rows[1].split()[:4] == ["2.out", "11-20", "-9.7500", "-9.7500"]
    assert rows[2:5] == [
        "test loss 4.0000 at step 20, smallest 4.0000 at step 12",
        "validation loss 5.2500 at step 20, smallest 5.0000 at step 10",
        "2 steps were run again after a restart",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_old_logs_of_peers_give_throughput_too(tmp_path, capsys):
    log = tmp_path / "main_log.txt"
    log.write_text("\n".join(PEERS_LINE.format(step=step) for step in (10, 20, 30)))
    job_report.main([str(log), "--output", str(tmp_path / "run.png")])
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row == "main_log.txt 10-30 3.0000 3.0000 0.250 0.250 1.00e-04 3 0.5 32 -".split()


def mistake(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        job_report.main(arguments)
    assert left.value.code == 2
    return capsys.readouterr().err


def test_mistakes_are_one_sentence_and_status_2(tmp_path, capsys):
    log, absent = tmp_path / "empty.log", tmp_path / "absent.log"
    log.write_text("nothing here\n")
    assert mistake([str(log)], capsys) == (
        f"error: no training or validation line is in {log}: expected console logs of pretrain_gpt.py\n"
    )
    assert mistake([str(absent)], capsys) == f"error: {absent} cannot be read: No such file or directory\n"
    log.write_text(training_line(1, 2.0))
    assert "--output" in mistake([str(log), "--output", str(log / "run.png")], capsys)
