"""A run whose processes are killed repeatedly during saves, and the checkpoint that each resume found. With
local saves each rank is a node, and a random node loses its disk before each start."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.checkpoints import state_after
from tests.support.layouts import Row, train, train_layout
from tests.support.local_saves import start
from tests.support.pool import WorldError, run_world

if TYPE_CHECKING:
    from megatron.checkpoint.manager import CheckpointManager

ROW = Row(dp=2, zero=1)
NODES = ("a", "b")
NOT_LOCAL = {"save_local": None, "save_local_interval": None}
# A start is killed in its first, second or third save, so that the run progresses.
SAVES = 3


@dataclass(frozen=True)
class Plan:
    """Which process is killed in a start of the run, and when."""

    victim: int
    """The rank whose process is killed."""
    is_writer: bool
    """Whether the rank's writer process is killed instead of the rank."""
    attempt: int
    """Number of the save in which the process is killed."""
    instant_s: float
    """Seconds from the begin of the save to the kill."""
    async_save: bool
    local_save: bool
    """Whether two of three saves are local."""
    save_format: str


@dataclass
class Outcome:
    """Results of a series of kills."""

    kills: int = 0
    unfinished: int = 0
    starts: int = 0
    good_resumes: int = 0
    """Starts that found the last checkpoint that was reported as saved, or a newer one."""
    steps: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def run_kill_test(
    folder: Path,
    kills: int,
    seed: int,
    async_save: bool = False,
    local_save: bool = False,
    save_format: str = "native",
) -> Outcome:
    """Kills and resumes until there were `kills` kills or a resume fails. async_save: saves are in the
    background, and half of the victims are writer processes. local_save: two of three saves are local."""
    started = time.monotonic()
    rng, outcome = random.Random(seed), Outcome()
    checkpoints, journal = folder / "save", folder / "journal"
    expected = run_world(2, train_layout, ROW, kills * SAVES + 1, timeout=3600.0)[0]
    complete, save_s = 0, 0.2
    while outcome.kills < kills and not outcome.failures:
        journal.unlink(missing_ok=True)
        plan = Plan(
            victim=rng.randrange(2),
            is_writer=(async_save or local_save) and rng.random() < 0.5,
            attempt=rng.randrange(SAVES),
            instant_s=rng.uniform(0.0, 1.1 * save_s),
            async_save=async_save,
            local_save=local_save,
            save_format=save_format,
        )
        if local_save:
            shutil.rmtree(folder / "disks" / NODES[rng.randrange(2)], ignore_errors=True)
        try:
            run_world(2, start_and_be_killed, folder, journal, plan)
            outcome.kills += plan.is_writer
        except WorldError as error:
            outcome.kills += 1
            if plan.is_writer or not any(kind == "started" for kind, *_ in read(journal)):
                outcome.failures.append(f"kill {outcome.kills}, {plan}: the run did not go on: {error}")
        outcome.starts += 1
        outcome.unfinished += any(checkpoints.glob("saving-*"))
        last = outcome.steps
        for kind, *values in read(journal):
            if kind == "started":
                outcome.good_resumes += values[0] > 0 and values[0] >= complete
                if values[0] < complete:
                    outcome.failures.append(f"step {complete} was saved, and step {values[0]} was resumed")
                # The last step may not be saved, and the save before it may still have been in flight.
                if values[0] < last - 2:
                    outcome.failures.append(f"step {last} was reached, and step {values[0]} was resumed")
            elif kind == "step":
                step, *numbers = values
                outcome.steps = max(outcome.steps, step)
                if numbers != list(expected[step - 1]):
                    outcome.failures.append(f"step {step} gave {numbers}, expected {expected[step - 1]}")
            else:
                complete, save_s = values
    outcome.seconds = time.monotonic() - started
    return outcome


def start_and_be_killed(folder: Path, journal: Path, plan: Plan) -> None:
    """Resumes, then trains and saves after each step, until the plan's victim dies. Runs inside `run_world`.
    Rank 0 records its actions in the journal."""
    settings = {"keep_last": 2, "save_format": plan.save_format, **({} if plan.local_save else NOT_LOCAL)}
    started = start(ROW, folder, NODES, **settings)
    manager, state = started.manager, started.state
    engine = manager.engine
    with open(journal if engine.global_rank == 0 else "/dev/null", "a") as file:

        def note(*entry: object) -> None:
            file.write(json.dumps(entry) + "\n")
            file.flush()

        def note_saved() -> None:
            for end in manager.background.take_outcomes():
                if not end.problem:
                    note("saved", end.iteration, end.seconds)

        note("started", state.iteration)
        for attempt in range(SAVES):
            ((loss, norm),) = train(engine, [state.iteration])
            step = state.iteration + 1
            note("step", step, loss, norm)
            note_saved()
            state = state_after(step)
            is_time = engine.global_rank == plan.victim and attempt == plan.attempt
            if is_time and not plan.is_writer:
                # An unhandled alarm ends a process as SIGKILL does: at once, at any point.
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, max(plan.instant_s, 1e-6))
            if is_time and plan.is_writer:
                threading.Timer(plan.instant_s, kill_writer, [manager]).start()
            began, saved = time.monotonic(), None
            if plan.local_save and attempt < SAVES - 1:
                manager.finish_save()
                note_saved()
                assert manager.save_local(state)
            else:
                saved = manager.save(state, plan.async_save)
            note_saved()
            if saved is not None:
                note("saved", step, time.monotonic() - began)
        time.sleep(plan.instant_s)  # the victim dies
        manager.finish_save()
        note_saved()


def kill_writer(manager: CheckpointManager) -> None:
    """Kills the writer process of a rank, if it has been started."""
    if (writer := manager.background.writer) is not None:
        os.kill(writer.process.pid, signal.SIGKILL)


def read(journal: Path) -> Iterator[list]:
    """Yields the complete entries of the journal."""
    for line in journal.read_text().splitlines() if journal.exists() else ():
        yield json.loads(line)
