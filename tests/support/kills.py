"""A run whose processes are killed repeatedly during saves, and what each resume found."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.checkpoints import FINGERPRINT, make_manager, state_after
from tests.support.layouts import VOCAB, Row, build_engine, config_of, train, train_layout
from tests.support.pool import WorldError, run_world

ROW = Row(dp=2, zero=1)
# A start is killed in its first, second or third save, so that the run progresses.
SAVES = 3


@dataclass
class Outcome:
    """What happened in a series of kills."""

    kills: int = 0
    unfinished: int = 0
    starts: int = 0
    good_resumes: int = 0
    """Starts that found a checkpoint as new as the last that was said to be saved."""
    steps: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def run_kill_test(folder: Path, kills: int, seed: int) -> Outcome:
    """Kills and resumes until `kills` are reached or a resume fails."""
    started = time.monotonic()
    rng, outcome = random.Random(seed), Outcome()
    checkpoints, journal = folder / "checkpoints", folder / "journal"
    expected = run_world(2, train_layout, ROW, kills * SAVES + 1, timeout=3600.0)[0]
    complete, save_s = 0, 0.2
    while outcome.kills < kills and not outcome.failures:
        journal.unlink(missing_ok=True)
        instant = rng.uniform(0.0, 1.1 * save_s)
        try:
            run_world(
                2, start_and_be_killed, checkpoints, journal, rng.randrange(2), SAVES, instant, rng.random()
            )
        except WorldError as error:
            outcome.kills += 1
            if not any(kind == "started" for kind, *_ in read(journal)):
                outcome.failures.append(f"kill {outcome.kills}: the run could not start again: {error}")
        outcome.starts += 1
        outcome.unfinished += any(checkpoints.glob("saving-*"))
        for kind, *values in read(journal):
            if kind == "started":
                outcome.good_resumes += values[0] > 0 and values[0] >= complete
                if values[0] < complete:
                    outcome.failures.append(f"step {complete} was saved, and step {values[0]} was resumed")
            elif kind == "step":
                step, *numbers = values
                outcome.steps = max(outcome.steps, step)
                if numbers != list(expected[step - 1]):
                    outcome.failures.append(f"step {step} gave {numbers}, expected {expected[step - 1]}")
            else:
                complete, save_s = values
    outcome.seconds = time.monotonic() - started
    return outcome


def start_and_be_killed(
    checkpoints: Path, journal: Path, victim: int, saves: int, instant: float, chance: float
) -> None:
    """Resumes, then trains and saves after each step; rank `victim` dies `instant` seconds after it began one
    of the `saves` saves. Rank 0 records its actions in the journal. Inside `run_world`."""
    from megatron.checkpoint.selection import find_checkpoint, select_valid_checkpoint

    folders = {"load": str(checkpoints), "save": str(checkpoints)}
    config = config_of(ROW, checkpoint={**folders, "keep_last": 2})
    checkpoints.mkdir(exist_ok=True)
    found = find_checkpoint(config, VOCAB, FINGERPRINT)
    found = select_valid_checkpoint(found, config, VOCAB, FINGERPRINT)
    engine = build_engine(config)
    manager = make_manager(engine, checkpoints)
    state = manager.restore_or_init(found, lambda text: None)
    with open(journal if engine.global_rank == 0 else "/dev/null", "a") as file:

        def note(*entry: object) -> None:
            file.write(json.dumps(entry) + "\n")
            file.flush()

        note("started", state.iteration)
        for attempt in range(saves):
            ((loss, norm),) = train(engine, [state.iteration])
            step = state.iteration + 1
            note("step", step, loss, norm)
            state = state_after(step)
            if engine.global_rank == victim and attempt == int(chance * saves):
                # An unhandled alarm ends a process as SIGKILL does: at once, at any point.
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, max(instant, 1e-6))
            began = time.monotonic()
            manager.save(state)
            note("saved", step, time.monotonic() - began)
        # The victim's alarm goes off.
        time.sleep(instant)


def read(journal: Path) -> Iterator[list]:
    """The complete entries of the journal."""
    for line in journal.read_text().splitlines() if journal.exists() else ():
        yield json.loads(line)
