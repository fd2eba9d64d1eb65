"""The training loop on a tiny model without files of data, for tests of what it does about trouble."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch

from megatron.checkpoint.manager import CheckpointManager, TrainingState
from megatron.cluster.exit_codes import RunStopped
from megatron.cluster.rank_reports import RankReport
from megatron.config import BatchSchedule, Config
from megatron.training.trainer import Trainer
from tests.distributed.layouts import EOD, GLOBAL_BATCH, RATE, VOCAB, build_engine, micro_batches

STEPS = 10
POISON = 7
"""The token of all labels of a bad batch."""


class Log:
    """In place of `MetricsLogger`: by iteration (loss, grad norm, skipped), and the lines."""

    def __init__(self):
        self.steps, self.records, self.lines = {}, [], []

    def log_step(self, record):
        self.steps[record.iteration] = (float(record.loss), float(record.grad_norm), record.skipped)
        self.records.append(record)

    def print(self, text):
        if not text.startswith(("memory", "saved")):
            self.lines.append(text)


class NoWatchdog:
    """The pool's processes outlive a run, and so would a watchdog."""

    report = RankReport(None, "0")

    def start(self, timeout_s, *, signals_handled):
        pass

    def heartbeat(self, iteration):
        pass


def make_trainer(config: Config, bad_iterations: tuple[int, ...] = (), steps: int = STEPS) -> Trainer:
    """The loop of `steps` iterations, inside `run_world`. `bad_iterations`: with labels of no sense."""
    config = replace(config, training=replace(config.training, exit_signal=()))
    engine = build_engine(config)

    def read(consumed, batch_size):
        step = consumed // GLOBAL_BATCH
        for tokens, (labels, mask) in micro_batches(engine, step):
            bad = step + 1 in bad_iterations
            yield tokens, (torch.full_like(labels, POISON) if bad else labels, mask)

    data = SimpleNamespace(train=SimpleNamespace(micro_batches=read), valid=None)
    length = SimpleNamespace(iterations=steps)
    rates = SimpleNamespace(rate=lambda progress: RATE)
    checkpoints = CheckpointManager(engine, VOCAB, EOD, {})
    batches = BatchSchedule.from_config(config.batch)
    return Trainer(config, engine, data, length, batches, rates, Log(), NoWatchdog(), checkpoints)


def outcome(trainer: Trainer):
    """(log of steps, lines, last state or the sentence that the run stopped with)."""
    try:
        end = trainer.train(TrainingState())
    except RunStopped as error:
        end = str(error)
    return trainer.metrics.steps, trainer.metrics.lines, end
