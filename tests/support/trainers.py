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
from megatron.config import Config
from megatron.training.build import build_trainer
from megatron.training.trainer import Trainer
from tests.support.layouts import GLOBAL_BATCH, RATE, build_engine, micro_batches

STEPS = 10
POISON = 7
"""The token that all labels of a bad batch have."""


class Log:
    """Replaces `MetricsLogger`: keeps (loss, grad norm, skipped) by iteration, and the log lines."""

    def __init__(self):
        self.steps, self.records, self.lines = {}, [], []

    def log_step(self, record):
        self.steps[record.state.iteration] = (float(record.loss), float(record.grad_norm), record.skipped)
        self.records.append(record)

    def flush(self):
        """Does nothing: `log_step` has already read the values."""

    def print(self, text):
        if not text.startswith(("memory", "saved")):
            self.lines.append(text)


class NoWatchdog:
    """Replaces the watchdog, whose thread would outlive the run in a process of the pool."""

    report = RankReport(None, "0")

    def set_handled_signals(self, numbers):
        pass

    def set_device_entries(self, entries, flight_record):
        pass

    def phase(self, phase):
        return nullcontext()

    def heartbeat(self):
        pass


def make_trainer(config: Config, bad_iterations: tuple[int, ...] = (), steps: int = STEPS) -> Trainer:
    """Returns a training loop of `steps` iterations, inside `run_world`. bad_iterations: iterations with
    random labels."""
    training = replace(config.training, exit_signal=(), train_iters=steps)
    schedule = replace(config.schedule, lr=RATE, lr_decay_style="constant")
    engine = build_engine(replace(config, training=training, schedule=schedule))

    def read(consumed, batch_size):
        step = consumed // GLOBAL_BATCH
        for batch in micro_batches(engine, step):
            bad = step + 1 in bad_iterations
            yield replace(batch, labels=torch.full_like(batch.labels, POISON)) if bad else batch

    def data(*_: object) -> SimpleNamespace:
        return SimpleNamespace(train=SimpleNamespace(micro_batches=read, masks_tokens=False), valid=None)

    folder = config.checkpoint.save or ""
    checkpoints = CheckpointManager(engine, folder)
    return build_trainer(engine, checkpoints, Log(), NoWatchdog(), data=data)


def outcome(trainer: Trainer):
    """Returns (log of steps, log lines, last state or the message with which the run stopped)."""
    try:
        end = trainer.train(TrainingState())
    except RunStopped as error:
        end = str(error)
    return trainer.metrics.steps, trainer.metrics.lines, end
