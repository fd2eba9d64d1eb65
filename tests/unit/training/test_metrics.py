"""Tests the metrics logger: lines, progress bar, TensorBoard, Weights & Biases."""

import dataclasses
import io
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.checkpoint.record import TrainingState
from megatron.config import LoggingConfig
from megatron.errors import UserError
from megatron.training.log_lines import parse_log_line
from megatron.training.metrics import MetricsLogger, StepRecord, Throughput
from megatron.training.writers import TensorBoardWriter, WandbWriter

THROUGHPUT = Throughput(
    flops_per_sample=lambda seq_length: 3e12 * seq_length / 512, world_size=4, data_parallel_size=2
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def record(iteration, **changes):
    return StepRecord(
        **{
            "state": TrainingState(iteration, 8 * iteration, 8 * iteration * 512),
            "total_iterations": 20,
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


def logged(log_interval, *records):
    """Returns the parsed lines of these steps."""
    stream = io.StringIO()
    logger = MetricsLogger(LoggingConfig(log_interval=log_interval), THROUGHPUT, stream=stream)
    for step in records:
        logger.log_step(step)
    return lines_of(stream)


def test_line_averages_its_interval():
    steps = [record(step, seconds=1.0 if step > 5 else 3.0) for step in range(1, 11)]
    first, second = logged(5, *steps)
    assert (first["iteration"], first["lm_loss"], first["seconds_per_iteration"]) == (5, 3.0, 3.0)
    assert (second["iteration"], second["lm_loss"], second["seconds_per_iteration"]) == (10, 8.0, 1.0)
    assert second["learning_rate"] == pytest.approx(1e-2)
    assert second["samples_per_second"] == 8.0
    assert second["tflops_per_device"] == pytest.approx(8 * 3 / 4)
    assert (second["consumed_samples"], second["consumed_tokens"]) == (80, 80 * 512)


def test_skipped_and_nan_steps_are_counted_and_excluded_from_the_mean():
    (line,) = logged(
        4,
        record(1, loss=2.0),
        record(2, loss=math.inf, skipped=True, grad_norm=math.inf),
        record(3, loss=9.0, skipped=True),
        record(4, loss=4.0, loss_scale=512.0),
    )
    assert (line["lm_loss"], line["loss_scale"]) == (3.0, 512.0)
    assert (line["number_of_skipped_iterations"], line["number_of_nan_iterations"]) == (2, 1)
    (line,) = logged(1, record(1, skipped=True))
    assert "lm_loss" not in line


def test_rates_with_a_growing_batch_size():
    steps = record(1, global_batch_size=4, seconds=1.0), record(2, global_batch_size=12, seconds=3.0)
    (line,) = logged(2, *steps)
    assert (line["global_batch_size"], line["samples_per_second"]) == (12, 4.0)


def test_losses_are_not_read_between_lines():
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


def test_remaining_steps_are_printed_at_the_end():
    stream = io.StringIO()
    logger = MetricsLogger(LoggingConfig(log_interval=100), THROUGHPUT, stream=stream)
    logger.log_step(record(20))
    assert [line["iteration"] for line in lines_of(stream)] == [20]
    logger.log_step(record(7, total_iterations=1000))
    logger.close()
    logger.close()
    assert [line["iteration"] for line in lines_of(stream)] == [20, 7]


def test_flush_prints_the_steps_before_another_text():
    stream = io.StringIO()
    logger = MetricsLogger(LoggingConfig(log_interval=100), THROUGHPUT, stream=stream)
    logger.log_step(record(7))
    logger.flush()
    logger.print("exiting program at iteration 7: SIGINT")
    logger.flush()
    logger.close()
    assert [line["iteration"] for line in lines_of(stream)] == [7]
    assert stream.getvalue().splitlines()[-1] == "exiting program at iteration 7: SIGINT"


def test_other_ranks_print_and_write_nothing(tmp_path):
    stream = Terminal()
    logging = LoggingConfig(log_interval=1, log_path=str(tmp_path / "run.log"))
    logger = MetricsLogger(logging, THROUGHPUT, enabled=False, stream=stream)
    logger.log_step(record(1))
    logger.log_validation(TrainingState(1, 8, 4096), 2.0)
    logger.print("hello")
    logger.close()
    assert stream.getvalue() == ""
    assert not list(tmp_path.iterdir())


def test_printed_lines_are_appended_to_the_log_file(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("of the start before\n")
    stream = io.StringIO()
    logger = MetricsLogger(LoggingConfig(log_interval=1, log_path=str(log)), THROUGHPUT, stream=stream)
    logger.log_step(record(1))
    logger.log_validation(TrainingState(1, 8, 4096), 2.0)
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


def test_progress_bar_shows_loss_and_speed_and_keeps_lines_intact():
    stream = Terminal()
    logger = MetricsLogger(LoggingConfig(log_interval=2), THROUGHPUT, stream=stream)
    for iteration in range(11, 21):
        logger.log_step(record(iteration))
        logger._bar.refresh()
    logger.log_validation(TrainingState(20, 160, 160 * 512), 2.5)
    logger.print("saved")
    logger.close()
    text = stream.getvalue()
    assert "2,048 tokens/s" in text and "loss 13.5000" in text and "10/20" not in text.splitlines()[-1]
    whole = [piece for line in text.split("\n") for piece in line.split("\r")[-1:]]
    assert [p["iteration"] for piece in whole if (p := parse_log_line(piece))] == [12, 14, 16, 18, 20, 20]
    assert all(
        piece.startswith((" iteration", " validation", "---", "saved")) for piece in whole if piece.strip()
    )


def test_validation_lines_contain_the_moment():
    stream = io.StringIO()
    logger = MetricsLogger(LoggingConfig(), THROUGHPUT, stream=stream)
    logger.log_validation(TrainingState(100, 800, 409600), 2.0)
    logger.log_validation(TrainingState(100, 800, 409600), 3.0, "test", "the end of training for test data")
    lines = stream.getvalue().splitlines()
    assert lines[1].startswith(
        " validation loss at iteration 100 | lm loss value: 2.000000E+00 | lm loss PPL: "
    )
    assert lines[4].startswith(" test loss at the end of training for test data | lm loss value: 3.0")


def test_a_step_without_unmasked_tokens_has_no_loss_and_does_not_change_the_mean():
    stream = io.StringIO()
    logger = MetricsLogger(LoggingConfig(log_interval=3), THROUGHPUT, stream=stream)
    for step, loss in enumerate((2.0, math.nan, 4.0, math.nan, math.nan, math.nan), start=1):
        logger.log_step(dataclasses.replace(record(step), loss=loss))
    first, second = map(parse_log_line, stream.getvalue().splitlines())
    assert (first["lm_loss"], first["number_of_nan_iterations"]) == (3.0, 1)
    assert math.isnan(second["lm_loss"])


def test_tensorboard_has_every_step_under_megatron_tags(tmp_path):
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
    logger.log_validation(TrainingState(3, 24, 24 * 512), 1.0)
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


def test_tensorboard_continues_without_doubled_steps_after_a_resume(tmp_path):
    """A run dies after step 8, resumes from step 5, dies a second time, and resumes with a smaller batch."""

    def run(steps, name, samples):
        writer = TensorBoardWriter(str(tmp_path / "events"), queue_size=10)
        logger = MetricsLogger(
            LoggingConfig(log_interval=1), THROUGHPUT, stream=io.StringIO(), writers=[writer]
        )
        for step in steps:
            state = TrainingState(step, samples(step), 512 * samples(step))
            logger.log_step(dataclasses.replace(record(step), state=state, loss=float(name)))
            if step % 2 == 0:
                logger.log_validation(state, float(name))
        logger.close()
        # TensorBoard reads files in the order of their names, which contain the second of their creation.
        (events,) = (tmp_path / "events").iterdir()
        events.rename(tmp_path / f"events.out.tfevents.{name}")

    run(range(1, 9), 1, lambda step: 8 * step)
    run(range(6, 8), 2, lambda step: 8 * step)
    run(range(6, 11), 3, lambda step: 40 + 4 * (step - 5))
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    counts = [8, 16, 24, 32, 40, 44, 48, 52, 56, 60]
    for axis, steps in (
        ("", range(1, 11)),
        (" vs samples", counts),
        (" vs tokens", [512 * n for n in counts]),
    ):
        found = [(event.step, event.value) for event in events.Scalars(f"lm-loss-training/lm loss{axis}")]
        assert found == list(zip(steps, [1.0] * 5 + [3.0] * 5, strict=True))
        found = [
            (event.step, event.value)
            for event in events.Scalars(f"lm-loss-validation/lm loss validation{axis}")
        ]
        assert found == list(zip(steps[1::2], [1.0] * 2 + [3.0] * 3, strict=True))


def test_tensorboard_has_optional_tags_only_with_their_flags(tmp_path):
    writer = TensorBoardWriter(str(tmp_path), queue_size=10)
    logger = MetricsLogger(LoggingConfig(log_interval=1), THROUGHPUT, stream=io.StringIO(), writers=[writer])
    logger.log_step(record(1))
    logger.log_validation(TrainingState(1, 8, 4096), 1.0, "test")
    logger.close()
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    groups = {tag.split("/")[0] for tag in tags}
    assert groups == {"learning-rate", "lm-loss-training", "grad-norm", "lm-loss-validation"}
    assert "lm-loss-validation/test/lm loss validation" in tags
    assert not any("ppl" in tag for tag in tags)


def test_unusable_tensorboard_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--tensorboard-dir"):
        TensorBoardWriter(str(tmp_path / "file" / "events"), queue_size=10)


def test_wandb_gets_every_value_with_its_step(monkeypatch):
    """wandb is not a dependency: a fake module has the calls that the program makes."""
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


def diverging(losses, log_interval=7, warmup=0, **options):
    """Returns the warnings of a run with these losses and a vocabulary of 1000 tokens (ln: 6.9). The learning
    rate rises for `warmup` steps."""
    stream = io.StringIO()
    logger = MetricsLogger(
        LoggingConfig(log_interval=log_interval, **options), THROUGHPUT, stream=stream, vocab_size=1000
    )
    for iteration, loss in enumerate(losses, start=1):
        skipped = loss is None
        logger.log_step(
            record(
                iteration,
                loss=math.nan if skipped else loss,
                skipped=skipped,
                total_iterations=len(losses),
                learning_rate=min(iteration, warmup) if warmup else 1.0,
            )
        )
    logger.close()
    return [line for line in stream.getvalue().splitlines() if "WARNING" in line]


def test_loss_above_that_of_a_uniform_distribution_is_warned_of_once():
    (line,) = diverging([3.0] * 20 + [7.0] * 300)
    assert "iteration 120:" in line and "6.91" in line and "100 steps" in line


def test_skipped_steps_neither_count_nor_end_the_count():
    (line,) = diverging([6.8] + [7.0] * 99 + [None] * 5 + [7.0])
    assert "iteration 106:" in line


@pytest.mark.parametrize("loss", [7.0, math.nan, math.inf])
def test_steps_of_a_warmup_do_not_count(loss):
    assert diverging([7.0] * 500, warmup=500) == []
    (line,) = diverging([7.0] * 400 + [loss] * 100, warmup=400)
    assert "iteration 500:" in line


def test_divergence_in_the_warmup_is_warned_of():
    (line,) = diverging([7.0] * 50 + [6.8] + [math.nan] * 50 + [7.0] * 50, warmup=500)
    assert "iteration 151:" in line


@pytest.mark.parametrize("losses", [[7.0] * 99, ([7.0] * 99 + [6.8]) * 3, [6.8] * 300, [None] * 300])
def test_ordinary_losses_are_not_warned_of(losses):
    assert diverging(losses) == []


def test_tensorboard_takes_the_values_of_a_diverged_run(tmp_path):
    writer = TensorBoardWriter(str(tmp_path), 1)
    logger = MetricsLogger(
        LoggingConfig(log_interval=2, log_validation_ppl_to_tensorboard=True),
        THROUGHPUT,
        stream=io.StringIO(),
        writers=[writer],
    )
    losses = [7.0, math.inf, math.nan, 1e30, 5.0]
    for iteration, loss in enumerate(losses, start=1):
        logger.log_step(record(iteration, loss=loss, grad_norm=loss, total_iterations=len(losses)))
        logger.log_validation(TrainingState(iteration, 8 * iteration, 4096 * iteration), loss)
    logger.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    for tag in ("lm-loss-training/lm loss", "grad-norm/grad-norm", "lm-loss-validation/lm loss validation"):
        assert [event.step for event in events.Scalars(tag)] == [1, 2, 3, 4, 5]
    found = [event.value for event in events.Scalars("lm-loss-training/lm loss")]
    assert found[::4] == [7.0, 5.0] and math.isinf(found[1]) and math.isnan(found[2])
