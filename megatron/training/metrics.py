"""The logger of a run: console lines, a progress bar, TensorBoard and Weights & Biases."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor
from tqdm import tqdm

from megatron.checkpoint.record import TrainingState
from megatron.config import LoggingConfig
from megatron.errors import printable
from megatron.files import open_own, open_stream
from megatron.model.flops import tflops_per_device
from megatron.training.log_lines import (
    IntervalSummary,
    format_training_line,
    format_validation_lines,
    perplexity,
)
from megatron.training.writers import Writer


def open_log(path: str) -> TextIO:
    """Opens the file, device or pipe of --log-path for appending. Raises OSError for a symbolic link."""
    stream = open_stream(Path(path))
    return os.fdopen(open_own(path, os.O_APPEND) if stream is None else stream, "w")


class Output:
    """A text stream that is not written again after a failure. `problem`: a sentence about the failure."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self._name, self._stream = name, stream
        self.problem: str | None = None

    def write(self, text: str) -> int:
        """Writes a text and flushes it. Returns the number of characters, as streams do."""
        if self.problem is None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError) as error:  # ValueError: the stream is closed
                self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Does nothing, because `write` flushes. tqdm calls it."""

    def isatty(self) -> bool:
        """Returns whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Returns the stream's descriptor, from which tqdm gets the width of the terminal."""
        return self._stream.fileno()

    def close(self) -> None:
        """Closes the stream."""
        if self.problem is None:
            try:
                self._stream.close()
            except OSError as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.problem = f"WARNING: {self._name} cannot be written ({error}); the run continues without it"
        if self._stream is sys.stdout:
            # Otherwise Python would fail to write its buffer at exit, with exit code 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Outputs:
    """The console, the log file and the curve writers of a run. If one output fails, a sentence is printed
    once on the remaining outputs."""

    def __init__(self, console: Output, log: Output | None, writers: Sequence[Writer]) -> None:
        self.console = console
        self._texts = [console, *([] if log is None else [log])]
        self._writers = list(writers)

    @property
    def has_writers(self) -> bool:
        """Returns whether there are curve writers."""
        return bool(self._writers)

    def print(self, text: str, print_to_console: Callable[[str], object] | None = None) -> None:
        """Writes a line to the console and the log file. print_to_console: function that writes to the
        console instead."""
        text = printable(text)
        sound = [output for output in self._texts if output.problem is None]
        for output in sound:
            if output is self.console and print_to_console is not None:
                print_to_console(text)
            else:
                output.write(text + "\n")
        for output in sound:
            if output.problem is not None:
                self.print(output.problem, print_to_console)

    def each_writer(self, use: Callable[[Writer], None]) -> None:
        """Calls `use` with every writer. A writer that fails is not used again."""
        for writer in list(self._writers):
            try:
                use(writer)
            except OSError as error:
                self._writers.remove(writer)
                name = type(writer).__name__
                self.print(f"WARNING: {name} failed ({error}); the run continues without it")

    def close(self) -> None:
        """Closes the writers and the log file. May be called twice."""
        self.each_writer(lambda writer: writer.close())
        self._writers.clear()
        for output in self._texts:
            if output is not self.console:
                output.close()
        self._texts = [self.console]


# A run has diverged after this many steps with a loss above the loss of a uniform distribution. An untrained
# model has such a loss during a long warm-up, so steps count only after the loss has been lower, or after the
# learning rate has stopped rising.
_DIVERGED_STEPS = 100


@dataclass(frozen=True)
class StepRecord:
    """One training step. `loss` and `grad_norm` may be tensors; they are read only when a line is printed.

    state: training state after the step. seq_length: tokens per sample. loss: mean over the unmasked tokens
    of the global batch, NaN without such tokens. loss_scale: None without fp16. skipped: whether the weights
    were not updated, because of an fp16 overflow or a policy. seconds: wall time of the step. recorded:
    `StepMetrics` of the interval that ends with this step.
    """

    state: TrainingState
    total_iterations: int
    learning_rate: float
    global_batch_size: int
    seq_length: int
    loss: Tensor | float
    grad_norm: Tensor | float | None
    loss_scale: float | None
    skipped: bool
    seconds: float
    recorded: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Throughput:
    """Converts samples per second to other rates.

    flops_per_sample: function from the tokens per sample to the FLOPs of a sample
    (`megatron.model.flops.iteration_flops`). has_curriculum: whether the sequence length changes, so that
    lines include it.
    """

    flops_per_sample: Callable[[int], float]
    world_size: int
    data_parallel_size: int
    has_curriculum: bool = False


class MetricsLogger:
    """Logs steps and evaluations on one rank. On other ranks (enabled=False), every method returns at once.

    A line is printed every `log_interval` steps, at the last iteration, and at `close` for the remaining
    steps. Tensors are read only when a line is printed, so that the steps in between do not synchronize the
    device.
    """

    def __init__(
        self,
        logging: LoggingConfig,
        throughput: Throughput,
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
        writers: Sequence[Writer] = (),
        vocab_size: int | None = None,
    ) -> None:
        """Opens the log file of --log-path, if set. stream: output of lines, and of a progress bar if it is a
        terminal (default: stdout). writers: curve writers. vocab_size: vocabulary size for the warning that
        the loss stays above the loss of a uniform distribution; None for no warning."""
        self._logging = logging
        self._throughput = throughput
        self._enabled = enabled
        self._pending: list[tuple[float, StepRecord]] = []
        self._bar: tqdm | None = None
        self._last_loss: float | None = None
        self._uniform_loss = math.inf if vocab_size is None else math.log(vocab_size)
        self._diverged_steps = 0
        self._may_have_diverged = False
        self._highest_rate = -math.inf
        self._console = Output("the console", sys.stdout if stream is None else stream)
        log = None
        if enabled and logging.log_path:
            log = Output(f"--log-path {logging.log_path}", open_log(logging.log_path))
        self._outputs = Outputs(self._console, log, writers if enabled else [])

    def log_step(self, record: StepRecord) -> None:
        """Records one step. If a line is due, prints a line and writes the curve values of the steps since
        the last line."""
        if not self._enabled:
            return
        self._pending.append((time.time(), record))
        if self._logging.is_logged(record.state.iteration, record.total_iterations):
            self.flush()
        self._move_bar(record)

    def log_validation(
        self, state: TrainingState, loss: float, name: str = "validation", at: str = ""
    ) -> None:
        """Prints and writes one evaluation. loss: mean over the unmasked tokens. name: 'validation', 'test'
        or the name of a group. at: printed text for the time of the evaluation; '' for 'iteration N'."""
        if not self._enabled:
            return
        self.print("\n".join(format_validation_lines(name, at or f"iteration {state.iteration}", loss)))
        prefix = "lm-loss-validation" if name == "validation" else f"lm-loss-validation/{name}"
        values = {f"{prefix}/lm loss validation": loss}
        if self._logging.log_validation_ppl_to_tensorboard:
            values[f"{prefix}/lm loss validation ppl"] = perplexity(loss)
        self._write(values, state, time.time())
        self._flush_writers()

    def log_tasks(self, state: TrainingState, results: Mapping[str, Mapping[str, float]]) -> None:
        """Prints a line for each of --eval-harness-tasks, and writes its metrics. results: task -> metric ->
        value."""
        if not self._enabled:
            return
        for task, metrics in results.items():
            values = "".join(f" {name}: {value:.6E} |" for name, value in metrics.items())
            self.print(f" task {task} at iteration {state.iteration} |{values}")
            tags = {f"eval-harness/{task}/{name}": value for name, value in metrics.items()}
            self._write(tags, state, time.time())
        self._flush_writers()

    def print(self, text: str) -> None:
        """Prints a text, above the progress bar if there is one."""
        if not self._enabled:
            return
        above_bar = None if self._bar is None else partial(self._bar.write, file=self._console)
        self._outputs.print(text, above_bar)

    def close(self) -> None:
        """Prints and writes the remaining steps, and closes the progress bar and the writers. May be called
        twice."""
        self.flush()
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._outputs.close()

    def flush(self) -> None:
        """Prints and writes the steps since the last line."""
        if not self._pending:
            return
        records = [record for _, record in self._pending]
        losses = _read([record.loss for record in records])
        summary = self._summarize(records, losses)
        self._last_loss = summary.lm_loss
        self.print(format_training_line(summary))
        self._warn_of_divergence(records, losses)
        if self._outputs.has_writers:
            norms = _read([math.nan if r.grad_norm is None else r.grad_norm for r in records])
            for (when, record), loss, norm in zip(self._pending, losses, norms, strict=True):
                self._write_step(record, loss, norm, when)
            if self._logging.log_timers_to_tensorboard:
                self._write_throughput(summary, records[-1])
            self._flush_writers()
        self._pending.clear()

    def _warn_of_divergence(self, records: Sequence[StepRecord], losses: Sequence[float]) -> None:
        for record, loss in zip(records, losses, strict=True):
            if record.learning_rate <= self._highest_rate:
                self._may_have_diverged = True
            self._highest_rate = max(self._highest_rate, record.learning_rate)
            if record.skipped:
                continue
            if loss <= self._uniform_loss:
                self._diverged_steps, self._may_have_diverged = 0, True
            elif self._may_have_diverged:  # true for NaN, too
                self._diverged_steps += 1
            if self._diverged_steps == _DIVERGED_STEPS:
                self.print(
                    f"WARNING: iteration {record.state.iteration}: the loss has been above ln(vocabulary "
                    f"size) = {self._uniform_loss:.2f}, the loss of a uniform distribution, or NaN, for "
                    f"{_DIVERGED_STEPS} steps: the training has probably diverged; resume from an earlier "
                    "checkpoint with a lower learning rate, or skip the data "
                    "(--skip-train-iteration-range, --spike-policy)"
                )
                self._uniform_loss = math.inf  # warn once per process

    def _summarize(self, records: Sequence[StepRecord], losses: Sequence[float]) -> IntervalSummary:
        last = records[-1]
        seconds = max(sum(record.seconds for record in records), 1e-9)
        samples = sum(record.global_batch_size for record in records)
        tokens = sum(record.global_batch_size * record.seq_length for record in records)
        flops = sum(
            record.global_batch_size * self._throughput.flops_per_sample(record.seq_length)
            for record in records
        )
        counted = [loss for record, loss in zip(records, losses, strict=True) if not record.skipped]
        # A step that was not skipped has a loss, unless all of its tokens are masked.
        counted = [loss for loss in counted if not math.isnan(loss)] or counted
        return IntervalSummary(
            iteration=last.state.iteration,
            total_iterations=last.total_iterations,
            consumed_samples=last.state.consumed_samples,
            consumed_tokens=last.state.consumed_tokens,
            seconds_per_iteration=seconds / len(records),
            learning_rate=last.learning_rate,
            global_batch_size=last.global_batch_size,
            seq_length=last.seq_length if self._throughput.has_curriculum else None,
            lm_loss=sum(counted) / len(counted) if counted else None,
            loss_scale=last.loss_scale,
            grad_norm=None if last.grad_norm is None else float(last.grad_norm),
            recorded=last.recorded,
            skipped=sum(record.skipped for record in records),
            not_finite=sum(not math.isfinite(loss) for loss in losses),
            samples_per_second=samples / seconds,
            tokens_per_second=tokens / seconds,
            tflops_per_device=tflops_per_device(flops, seconds, self._throughput.world_size),
        )

    def _move_bar(self, record: StepRecord) -> None:
        if not self._console.isatty():
            return
        if self._bar is None:
            self._bar = tqdm(
                total=record.total_iterations,
                initial=record.state.iteration - 1,
                file=self._console,
                desc="training",
                unit="step",
                dynamic_ncols=True,
                leave=False,
            )
        tokens = record.global_batch_size * record.seq_length
        parts = [f"{tokens / max(record.seconds, 1e-9):,.0f} tokens/s"]
        if self._last_loss is not None:
            parts.insert(0, f"loss {self._last_loss:.4f}")
        self._bar.set_postfix_str(", ".join(parts), refresh=False)
        self._bar.update(record.state.iteration - self._bar.n)  # more than 1 after skipped iterations

    def _write_step(self, record: StepRecord, loss: float, grad_norm: float, when: float) -> None:
        values = {"learning-rate/learning-rate": record.learning_rate}
        if self._logging.log_batch_size_to_tensorboard:
            values["batch-size/batch-size"] = record.global_batch_size
        if self._throughput.has_curriculum:
            values["curriculum_seqlen"] = record.seq_length
        if record.loss_scale is not None:
            values["loss-scale/loss-scale"] = record.loss_scale
        if not record.skipped:  # the loss and norm of a skipped step are not part of the curve
            values["lm-loss-training/lm loss"] = loss
            if record.grad_norm is not None:
                values["grad-norm/grad-norm"] = grad_norm
        values |= {f"{name}/{name}": value for name, value in record.recorded.items()}
        self._write(values, record.state, when)

    def _write_throughput(self, summary: IntervalSummary, last: StepRecord) -> None:
        replicas = self._throughput.data_parallel_size
        values = {
            "iteration-time": summary.seconds_per_iteration,
            "samples per second": summary.samples_per_second,
            "samples per second per replica": summary.samples_per_second / replicas,
            "tokens per second": summary.tokens_per_second,
            "tokens per second per replica": summary.tokens_per_second / replicas,
            "TFLOPs per gpu (estimated)": summary.tflops_per_device,
        }
        self._write(
            {f"iteration-time/{name}": value for name, value in values.items()}, last.state, time.time()
        )

    def _write(self, values: Mapping[str, float], state: TrainingState, when: float) -> None:
        self._outputs.each_writer(lambda writer: writer.write(values, state, when))

    def _flush_writers(self) -> None:
        self._outputs.each_writer(lambda writer: writer.flush())


def _read(values: Sequence[Tensor | float]) -> list[float]:
    """Returns the values as floats, with one transfer for all tensors among them."""
    tensors = [value.detach().reshape(()).float() for value in values if isinstance(value, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(read) if isinstance(value, Tensor) else float(value) for value in values]
