"""The training loop on a tiny model without data files, for tests of its error handling."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import torch

from megatron.checkpoint.manager import CheckpointManager
from megatron.checkpoint.record import TrainingState
from megatron.cluster.exit_codes import RunStopped
from megatron.cluster.rank_reports import RankReport
from megatron.config import BatchSchedule, Config
from megatron.testing.layouts import EOD, GLOBAL_BATCH, RATE, VOCAB, build_engine, micro_batches
from megatron.training.trainer import Trainer

STEPS = 10
POISON = 7
"""The token of all labels of a bad batch."""


class Log:
    """Replaces `MetricsLogger`: (loss, grad norm, skipped) by iteration, and the lines."""

    def __init__(self):
        self.steps, self.records, self.lines = {}, [], []

    def log_step(self, record):
        self.steps[record.iteration] = (float(record.loss), float(record.grad_norm), record.skipped)
        self.records.append(record)

    def flush(self):
        """The values are read at once."""

    def print(self, text):
        if not text.startswith(("memory", "saved")):
            self.lines.append(text)


class NoWatchdog:
    """The pool's processes outlive a run, and a watchdog would too."""

    report = RankReport(None, "0")

    def set_handled_signals(self, numbers):
        pass

    def phase(self, phase):
        return nullcontext()

    def heartbeat(self):
        pass


def make_trainer(config: Config, bad_iterations: tuple[int, ...] = (), steps: int = STEPS) -> Trainer:
    """The loop of `steps` iterations, inside `run_world`. bad_iterations: those with random labels."""
    config = replace(config, training=replace(config.training, exit_signal=()))
    engine = build_engine(config)

    def read(consumed, batch_size):
        step = consumed // GLOBAL_BATCH
        for tokens, (labels, mask) in micro_batches(engine, step):
            bad = step + 1 in bad_iterations
            yield tokens, (torch.full_like(labels, POISON) if bad else labels, mask)

    data = SimpleNamespace(train=SimpleNamespace(micro_batches=read), valid=None)
    length = SimpleNamespace(iterations=steps)
    rates = SimpleNamespace(lr=lambda progress: RATE)
    checkpoints = CheckpointManager(engine, config.checkpoint.save or "", VOCAB, EOD, {})
    batches = BatchSchedule.from_config(config.batch)
    planned = [0.0] * config.parallel.pipeline_model_parallel_size
    return Trainer(config, engine, data, length, batches, rates, Log(), NoWatchdog(), checkpoints, planned)


def outcome(trainer: Trainer):
    """(log of steps, lines, last state or the message with which the run stopped)."""
    try:
        end = trainer.train(TrainingState())
    except RunStopped as error:
        end = str(error)
    return trainer.metrics.steps, trainer.metrics.lines, end
