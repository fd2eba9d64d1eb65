"""Tests that no complete checkpoint is lost when a process dies at any time during a save, and that a killed
preprocessing continues.

    .venv/bin/python benchmarks/kills.py              # 200 kills: 10 minutes
    .venv/bin/python benchmarks/kills.py --kills 20
    .venv/bin/python benchmarks/kills.py --async-save --kills 50
    .venv/bin/python benchmarks/kills.py --local-save --kills 50
    .venv/bin/python benchmarks/kills.py --preprocessing --kills 50

A tiny model trains on two data-parallel ranks with ZeRO-1 and saves after every step. Repeatedly, a random
rank is killed at a random time during a save, and the run is launched again. Each launch must find a
checkpoint at least as new as the last checkpoint that was reported as saved, verify it on loading, and
reproduce the losses of an uninterrupted run to the last bit. The exit code is 1 at the first failure.

With --preprocessing, the benchmark sends SIGKILL or SIGTERM at a random time to the main process or a worker
of each of two shards. No process and no temporary file may remain, and the repeated command must write the
files of an undisturbed command.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

from benchmarks.machine import benchmark_parser, describe_machine
from megatron.tokenizer.gpt2_bpe import END_OF_TEXT
from tests.support.kills import run_kill_test
from tests.support.preprocessing_kills import kill_shards

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Prints the result. Exits with 1 if a resume failed."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--async-save", action="store_true", help="save in the background, and kill writers, too"
    )
    parser.add_argument(
        "--local-save",
        action="store_true",
        help="two of three saves are local, and one of the two nodes loses its disk before each start",
    )
    parser.add_argument("--preprocessing", action="store_true", help="kill shards of preprocess_data.py")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random times (default: 0)")
    arguments = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        if arguments.preprocessing:
            print_preprocessing(Path(folder), arguments.kills, arguments.seed)
            return
        outcome = run_kill_test(
            Path(folder), arguments.kills, arguments.seed, arguments.async_save, arguments.local_save
        )
    print(
        f"{outcome.kills} kills, {outcome.unfinished} of them with an unfinished save; "
        f"{outcome.starts} launches, {outcome.good_resumes} good resumes over {outcome.steps} steps, "
        f"{outcome.seconds:.0f} s"
    )
    for fault in outcome.failures:
        print(f"FAULT: {fault}")
    sys.exit(1 if outcome.failures else 0)


def print_preprocessing(folder: Path, kills: int, seed: int) -> None:
    """Kills the shards of a preprocessing and prints the result. Raises AssertionError if a file is wrong or
    something remains."""
    text = (ROOT / "docs" / "LOG.md").read_text(encoding="utf-8")
    trainer = ByteLevelBPETokenizer()
    trainer.train_from_iterator([text], 2000, special_tokens=[END_OF_TEXT], show_progress=False)
    trainer.save_model(str(folder))
    lines = "".join(json.dumps({"text": part}) + "\n" for part in text.split("\n\n"))
    for number in range(8):
        (folder / f"{number}.jsonl").write_text(lines * (number + 1))
    flags = ["--input", f"{folder}/*.jsonl", "--tokenizer-backend", "reference"]
    flags += ["--vocab-file", f"{folder}/vocab.json", "--merge-file", f"{folder}/merges.txt"]
    outcome = kill_shards(folder, flags, kills, seed)
    print(
        f"{outcome.unfinished} kills of shards that had not ended ({dict(outcome.kills)}): no orphans and no "
        f"temporary files; {outcome.completed} complete runs with equal bytes, {outcome.seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
