"""What the logger prints and writes, and what it leaves alone."""

import io
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.config import ConfigError, LoggingConfig
from megatron.training.logging.metrics import (
    MetricsLogger,
    StepRecord,
    Throughput,
    ValidationRecord,
    parse_log_line,
)
from megatron.training.logging.writers import TensorBoardWriter, WandbWriter

THROUGHPUT = Throughput(
    flops_per_sample=lambda seq_length: 3e12 * seq_length / 512, world_size=4, data_parallel_size=2
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def record(iteration, **changes):
    return StepRecord(
        **{
            "iteration": iteration,
            "total_iterations": 20,
            "consumed_samples": 8 * iteration,
            "consumed_tokens": 8 * iteration * 512,
            "learning_rate": 1e-3 * iteration,
            "global_batch_size": 8,
            "seq_length": 512,
            "loss": torch.tensor(float(iteration)),
            "grad_norm": torch.tensor(0.5),
            "loss_scale": None,
            "skipped": False,
            "seconds": 2.0,
            **changes,
        }
    )


def lines_of(stream):
    return [parsed for line in stream.getvalue().splitlines() if (parsed := parse_log_line(line))]


def test_a_line_averages_its_interval_and_ends_with_the_last_step():
    stream = io.StringIO()
    logger = MetricsLogger(LoggingConfig(log_interval=5), THROUGHPUT, stream=stream)
    for iteration in range(1, 11):
        logger.log_step(record(iteration, seconds=1.0 if iteration > 5 else 3.0))
    first, second = lines_of(stream)
    assert (first["iteration"], first["lm_loss"], first["seconds_per_iteration"]) == (5, 3.0, 3.0)
    assert (second["iteration"], second["lm_loss"], second["seconds_per_iteration"]) == (10, 8.0, 1.0)
    assert second["learning_rate"] == pytest.approx(1e-2)
    assert second["samples_per_second"] == 8.0
    assert second["tflops_per_device"] == pytest.approx(8 * 3 / 4)
    assert (second["consumed_samples"], second["consumed_tokens"]) == (80, 80 * 512)


def test_skipped_and_nan_steps_are_counted_and_left_out_of_the_mean():
    stream = io.StringIO()
    logger = MetricsLogger(LoggingConfig(log_interval=4), THROUGHPUT, stream=stream)
    logger.log_step(record(1, loss=2.0))
    logger.log_step(record(2, loss=math.inf, skipped=True, grad_norm=math.inf))
    logger.log_step(record(3, loss=9.0, skipped=True))
    logger.log_step(record(4, loss=4.0, loss_scale=512.0))
    (line,) = lines_of(stream)
    assert (line["lm_loss"], line["loss_scale"]) == (3.0, 512.0)
    assert (line["number_of_skipped_iterations"], line["number_of_nan_iterations"]) == (2, 1)


def test_an_interval_of_skipped_steps_has_no_loss():
    stream = io.StringIO()
    logger = MetricsLogger(LoggingConfig(log_interval=1), THROUGHPUT, stream=stream)
    logger.log_step(record(1, skipped=True))
    assert "lm_loss" not in lines_of(stream)[0]


def test_rates_hold_while_the_batch_grows():
    stream = io.StringIO()
    logger = MetricsLogger(LoggingConfig(log_interval=2), THROUGHPUT, stream=stream)
    logger.log_step(record(1, global_batch_size=4, seconds=1.0))
    logger.log_step(record(2, global_batch_size=12, seconds=3.0))
    (line,) = lines_of(stream)
    assert (line["global_batch_size"], line["samples_per_second"]) == (12, 4.0)


def test_losses_are_not_touched_between_lines():
    class Watched(torch.Tensor):
        uses = 0

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            Watched.uses += 1
            return super().__torch_function__(function, types, args, kwargs or {})

    logger = MetricsLogger(LoggingConfig(log_interval=3), THROUGHPUT, stream=io.StringIO())
    losses = [torch.tensor(float(n)).as_subclass(Watched) for n in range(3)]
    Watched.uses = 0
    logger.log_step(record(1, loss=losses[0], grad_norm=losses[0]))
    logger.log_step(record(2, loss=losses[1], grad_norm=losses[1]))
    assert Watched.uses == 0
    logger.log_step(record(3, loss=losses[2], grad_norm=losses[2]))
    assert Watched.uses > 0


def test_the_last_iteration_and_an_early_end_leave_nothing_unsaid():
    stream = io.StringIO()
    logger = MetricsLogger(LoggingConfig(log_interval=100), THROUGHPUT, stream=stream)
    logger.log_step(record(20))
    assert [line["iteration"] for line in lines_of(stream)] == [20]
    logger.log_step(record(7, total_iterations=1000))
    logger.close()
    logger.close()
    assert [line["iteration"] for line in lines_of(stream)] == [20, 7]


def test_other_ranks_say_nothing_and_write_nothing(tmp_path):
    stream = Terminal()
    logging = LoggingConfig(log_interval=1, log_path=str(tmp_path / "run.log"))
    logger = MetricsLogger(logging, THROUGHPUT, enabled=False, stream=stream)
    logger.log_step(record(1))
    logger.log_validation(ValidationRecord(1, 8, 4096, 2.0))
    logger.print("hello")
    logger.close()
    assert stream.getvalue() == ""
    assert not list(tmp_path.iterdir())


def test_the_log_file_grows_by_what_is_printed(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("of the start before\n")
    stream = io.StringIO()
    logger = MetricsLogger(LoggingConfig(log_interval=1, log_path=str(log)), THROUGHPUT, stream=stream)
    logger.log_step(record(1))
    logger.log_validation(ValidationRecord(1, 8, 4096, 2.0))
    assert log.read_text() == "of the start before\n" + stream.getvalue()
    logger.close()


def test_no_bar_without_a_terminal():
    stream = io.StringIO()
    logger = MetricsLogger(LoggingConfig(log_interval=1), THROUGHPUT, stream=stream)
    for iteration in range(1, 21):
        logger.log_step(record(iteration))
    logger.close()
    assert "\r" not in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 20


def test_on_a_terminal_a_bar_tells_loss_and_speed_and_leaves_lines_whole():
    stream = Terminal()
    logger = MetricsLogger(LoggingConfig(log_interval=2), THROUGHPUT, stream=stream)
    for iteration in range(11, 21):
        logger.log_step(record(iteration))
        logger._bar.refresh()
    logger.log_validation(ValidationRecord(20, 160, 160 * 512, 2.5))
    logger.print("saved")
    logger.close()
    text = stream.getvalue()
    assert "2,048 tokens/s" in text and "loss 13.5000" in text and "10/20" not in text.splitlines()[-1]
    whole = [piece for line in text.split("\n") for piece in line.split("\r")[-1:]]
    assert [p["iteration"] for piece in whole if (p := parse_log_line(piece))] == [12, 14, 16, 18, 20, 20]
    assert all(
        piece.startswith((" iteration", " validation", "---", "saved")) for piece in whole if piece.strip()
    )


def test_validation_lines_name_the_moment():
    stream = io.StringIO()
    logger = MetricsLogger(LoggingConfig(), THROUGHPUT, stream=stream)
    logger.log_validation(ValidationRecord(100, 800, 409600, 2.0))
    logger.log_validation(
        ValidationRecord(100, 800, 409600, 3.0, "test", "the end of training for test data")
    )
    lines = stream.getvalue().splitlines()
    assert lines[1].startswith(
        " validation loss at iteration 100 | lm loss value: 2.000000E+00 | lm loss PPL: "
    )
    assert lines[4].startswith(" test loss at the end of training for test data | lm loss value: 3.0")


def test_tensorboard_holds_every_step_under_the_peers_tags(tmp_path):
    logging = LoggingConfig(
        log_interval=2,
        log_timers_to_tensorboard=True,
        log_batch_size_to_tensorboard=True,
        log_validation_ppl_to_tensorboard=True,
    )
    writer = TensorBoardWriter(str(tmp_path), queue_size=10)
    logger = MetricsLogger(logging, THROUGHPUT, stream=io.StringIO(), writers=[writer])
    for iteration in (1, 2):
        logger.log_step(record(iteration, loss_scale=256.0))
    logger.log_step(record(3, skipped=True, loss_scale=128.0))
    logger.log_validation(ValidationRecord(3, 24, 24 * 512, 1.0))
    logger.close()
    events = EventAccumulator(str(tmp_path)).Reload()

    def points(tag):
        return [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]

    assert points("lm-loss-training/lm loss") == [(1, 1.0), (2, 2.0)]
    assert points("lm-loss-training/lm loss vs samples") == [(8, 1.0), (16, 2.0)]
    assert points("lm-loss-training/lm loss vs tokens") == [(4096, 1.0), (8192, 2.0)]
    assert points("learning-rate/learning-rate") == [(1, 1e-3), (2, 2e-3), (3, 3e-3)]
    assert points("grad-norm/grad-norm") == [(1, 0.5), (2, 0.5)]
    assert points("loss-scale/loss-scale") == [(1, 256), (2, 256), (3, 128)]
    assert points("batch-size/batch-size vs samples") == [(8, 8), (16, 8), (24, 8)]
    assert points("lm-loss-validation/lm loss validation") == [(3, 1.0)]
    assert points("lm-loss-validation/lm loss validation ppl vs tokens") == [(24 * 512, math.e)]
    assert points("iteration-time/iteration-time") == [(2, 2.0), (3, 2.0)]
    assert points("iteration-time/samples per second per replica") == [(2, 2.0), (3, 2.0)]


def test_tensorboard_leaves_out_what_no_flag_asked_for(tmp_path):
    writer = TensorBoardWriter(str(tmp_path), queue_size=10)
    logger = MetricsLogger(LoggingConfig(log_interval=1), THROUGHPUT, stream=io.StringIO(), writers=[writer])
    logger.log_step(record(1))
    logger.log_validation(ValidationRecord(1, 8, 4096, 1.0, "test"))
    logger.close()
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    groups = {tag.split("/")[0] for tag in tags}
    assert groups == {"learning-rate", "lm-loss-training", "grad-norm", "lm-loss-validation"}
    assert "lm-loss-validation/test/lm loss validation" in tags
    assert not any("ppl" in tag for tag in tags)


def test_a_tensorboard_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--tensorboard-dir"):
        TensorBoardWriter(str(tmp_path / "file" / "events"), queue_size=10)


def test_every_value_goes_to_wandb_with_its_place(monkeypatch):
    """A stand-in for wandb, which is no dependency, with the calls that are made of it."""
    logged, started, ended = [], [], []

    def init(**settings):
        started.append(settings)
        return SimpleNamespace(
            define_metric=lambda *_, **__: None, log=logged.append, finish=lambda: ended.append(True)
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=RuntimeError))
    writer = WandbWriter("gpt", "first", {"model": {"num_layers": 2}})
    logger = MetricsLogger(LoggingConfig(log_interval=1), THROUGHPUT, stream=io.StringIO(), writers=[writer])
    logger.log_step(record(3))
    logger.close()
    (settings,) = started
    assert settings["project"] == "gpt" and settings["name"] == "first" and settings["config"]["model"]
    place = {"iteration": 3, "consumed samples": 24, "consumed tokens": 24 * 512}
    curves = {
        "learning-rate/learning-rate": 3e-3,
        "lm-loss-training/lm loss": 3.0,
        "grad-norm/grad-norm": 0.5,
    }
    assert logged == [place | curves] and ended == [True]
