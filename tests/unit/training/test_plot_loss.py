"""tools/plot_loss.py: from console logs to a picture."""

from megatron.training.log_lines import IntervalSummary, format_training_line, format_validation_lines
from tools import plot_loss


def training_line(iteration, loss):
    return format_training_line(
        IntervalSummary(
            iteration, 20, iteration, iteration, 1.0, 1e-3, 8, None, loss, None, 0.5, 0, 0, 8.0, 4e3, 1.0
        )
    )


def write_log(path, iterations, offset=0.0):
    lines = ["some banner"]
    for iteration in iterations:
        lines.append(training_line(iteration, 10 - iteration + offset))
        if iteration % 10 == 0:
            lines += format_validation_lines("validation", f"iteration {iteration}", 5.0 + offset)
    lines += format_validation_lines("test", "the end of training for test data", 4.0)
    path.write_text("\n".join(lines))
    return path


def test_a_resumed_run_is_one_curve_in_which_the_later_log_counts(tmp_path):
    first = write_log(tmp_path / "1.log", range(1, 13))
    second = write_log(tmp_path / "2.log", range(11, 21), offset=0.25)
    curves = plot_loss.read_curves((first.read_text() + "\n" + second.read_text()).splitlines())
    assert list(curves.loss) == list(range(1, 21))
    assert (curves.loss[10], curves.loss[11]) == (0.0, -0.75)
    assert curves.validation == {"validation": {10: 5.0, 20: 5.25}, "test": {12: 4.0, 20: 4.0}}


def test_a_picture_is_written(tmp_path, capsys):
    log = write_log(tmp_path / "run.log", range(1, 21))
    output = tmp_path / "made" / "loss.png"
    assert plot_loss.main([str(log), "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    assert "20 training and 3 validation points" in capsys.readouterr().out


def test_a_log_without_lines_is_one_sentence_and_status_2(tmp_path, capsys):
    log = tmp_path / "empty.log"
    log.write_text("nothing here\n")
    assert plot_loss.main([str(log), "--output", str(tmp_path / "loss.png")]) == 2
    assert capsys.readouterr().err == f"plot_loss: no training or validation line is in {log}\n"
    assert not (tmp_path / "loss.png").exists()


def test_a_missing_log_is_one_sentence_and_status_2(tmp_path, capsys):
    assert plot_loss.main([str(tmp_path / "absent.log")]) == 2
    assert capsys.readouterr().err == f"plot_loss: {tmp_path / 'absent.log'}: No such file or directory\n"
