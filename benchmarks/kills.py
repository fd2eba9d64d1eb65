"""Nothing that was complete is lost, whenever a process dies while a checkpoint is written.

    .venv/bin/python benchmarks/kills.py              # 200 kills: 10 minutes
    .venv/bin/python benchmarks/kills.py --kills 20

A tiny model trains on two data-parallel ranks with ZeRO-1 and saves after every step. Again and again one of
the two, by lot, is killed at a random instant of a save, and the run starts anew. Each start must find a
checkpoint that is no older than the last one that was said to be saved, load it with its certificate, and
print the losses of a run that was never interrupted, to the last bit. Exit code 1 at the first that does not.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe_machine  # noqa: E402
from tests.distributed.layouts import (  # noqa: E402
    EOD,
    GLOBAL_BATCH,
    SEQ,
    VOCAB,
    Row,
    build_engine,
    config_of,
    train,
)
from tests.distributed.pool import WorldError, run_world  # noqa: E402

ROW = Row(dp=2, zero=1)
FINGERPRINT = {"paths": ["corpus"], "seed": 1234}
# A start is killed in its first, second or third save: so the run moves on.
SAVES = 3


def main() -> None:
    """Prints how it went; exits with 1 if a resume was not a good one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the instants (default: 0)")
    arguments = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        outcome = kill_again_and_again(Path(folder), arguments.kills, arguments.seed)
    print(
        f"{outcome.kills} kills, of which {outcome.unfinished} left an unfinished save behind; "
        f"{outcome.starts} starts, {outcome.good_resumes} good resumes over {outcome.steps} steps, "
        f"{outcome.seconds:.0f} s"
    )
    for fault in outcome.faults:
        print(f"FAULT: {fault}")
    sys.exit(1 if outcome.faults else 0)


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
    faults: list[str] = field(default_factory=list)


def kill_again_and_again(folder: Path, kills: int, seed: int) -> Outcome:
    """Kills and resumes until `kills` are reached or one resume was not good."""
    started = time.monotonic()
    lot, outcome = random.Random(seed), Outcome()
    checkpoints, journal = folder / "checkpoints", folder / "journal"
    expected = run_world(2, train_uninterrupted, kills * SAVES + 1, timeout=3600.0)[0]
    complete, save_s = 0, 0.2
    while outcome.kills < kills and not outcome.faults:
        journal.unlink(missing_ok=True)
        instant = lot.uniform(0.0, 1.1 * save_s)
        try:
            run_world(
                2, start_and_be_killed, checkpoints, journal, lot.randrange(2), SAVES, instant, lot.random()
            )
        except WorldError as error:
            outcome.kills += 1
            if not any(kind == "started" for kind, *_ in read(journal)):
                outcome.faults.append(f"kill {outcome.kills}: the run could not start again: {error}")
        outcome.starts += 1
        outcome.unfinished += any(checkpoints.glob("saving-*"))
        for kind, *values in read(journal):
            if kind == "started":
                outcome.good_resumes += values[0] > 0 and values[0] >= complete
                if values[0] < complete:
                    outcome.faults.append(f"step {complete} was saved, and step {values[0]} was resumed")
            elif kind == "step":
                step, *numbers = values
                outcome.steps = max(outcome.steps, step)
                if numbers != list(expected[step - 1]):
                    outcome.faults.append(f"step {step} gave {numbers}, expected {expected[step - 1]}")
            else:
                complete, save_s = values
    outcome.seconds = time.monotonic() - started
    return outcome


def train_uninterrupted(steps: int) -> list[tuple[float, float]]:
    """(loss, grad norm) of every step, inside `run_world`."""
    return train(build_engine(config_of(ROW)), range(steps))


def start_and_be_killed(
    checkpoints: Path, journal: Path, victim: int, saves: int, instant: float, chance: float
) -> None:
    """Resumes, then trains and saves step by step; rank `victim` dies `instant` seconds after it began one
    of the `saves` saves. Rank 0 writes into the journal what it did. Inside `run_world`."""
    from megatron.checkpoint.discovery import TrainingState
    from megatron.checkpoint.manager import (
        find_checkpoint,
        restore_or_init,
        save_checkpoint,
        select_valid_checkpoint,
    )

    folders = {"load": str(checkpoints), "save": str(checkpoints)}
    config = config_of(ROW, checkpoint={**folders, "keep_last": 2})
    checkpoints.mkdir(exist_ok=True)
    found = find_checkpoint(config, VOCAB, FINGERPRINT)
    found = select_valid_checkpoint(found, config, VOCAB, FINGERPRINT)
    engine = build_engine(config)
    state = restore_or_init(engine, found, FINGERPRINT, lambda text: None)
    with open(journal if engine.global_rank == 0 else "/dev/null", "a") as file:

        def note(*entry: object) -> None:
            file.write(json.dumps(entry) + "\n")
            file.flush()

        note("started", state.iteration)
        for save in range(saves):
            ((loss, norm),) = train(engine, [state.iteration])
            step = state.iteration + 1
            note("step", step, loss, norm)
            state = TrainingState(step, step * GLOBAL_BATCH, step * GLOBAL_BATCH * SEQ)
            if engine.global_rank == victim and save == int(chance * saves):
                # An alarm that nobody handles ends a process as SIGKILL does: at once, wherever it is.
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, max(instant, 1e-6))
            began = time.monotonic()
            save_checkpoint(engine, checkpoints, state, VOCAB, EOD, FINGERPRINT)
            note("saved", step, time.monotonic() - began)
        # The victim's alarm goes off.
        time.sleep(instant)


def read(journal: Path) -> Iterator[list]:
    """The entries of the journal that were written to the end."""
    for line in journal.read_text().splitlines() if journal.exists() else ():
        yield json.loads(line)


if __name__ == "__main__":
    main()
