"""Computes loss curves of small models on a device, and compares them with curves of one CPU process in fp32.

    python benchmarks/device_curves.py curves --out FOLDER         16 variants, at the same time on a GPU
    python benchmarks/device_curves.py ranks --out FOLDER          several ranks that share the device
    python benchmarks/device_curves.py resume --out FOLDER         a save in the background, and its resume
    .venv/bin/python benchmarks/device_curves.py golden            rewrites tests/golden/device_curves.json

--tiny uses smaller models, for a CPU. The token files are computed from integers alone, so their digest,
which the golden file contains, is equal on every machine. Regenerate the golden file only for a change that
is meant to alter the numbers, and name in the commit the numbers that changed and the reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import LLAMA, add_row, benchmark_parser
from megatron.data.dataset_builder import IndexedDatasetBuilder
from megatron.planner.sweep.run_log import parse_steps
from megatron.tokenizer.gpt2_bpe import END_OF_TEXT
from tests.support.forked import launch_variables
from tests.support.ports import free_ports

ROOT = Path(__file__).resolve().parents[1]
GOLDEN_FILE = ROOT / "tests" / "golden" / "device_curves.json"
VOCAB, DOCUMENTS, DOCUMENT_TOKENS = 4096, 600, 300

# Size -> flags of both models, number of iterations of a run.
SIZES = {
    "full": ("--num-layers 4 --hidden-size 512 --seq-length 256 --max-position-embeddings 256", 20),
    "tiny": ("--num-layers 2 --hidden-size 64 --seq-length 32 --max-position-embeddings 32", 6),
}
MODELS = {
    # With dropout, ALiBi and documents, the model uses all Triton kernels of a GPT.
    "gpt": "--num-attention-heads 8 --position-embedding-type alibi --reset-attention-mask",
    # This model has rotary positions, grouped queries, RMS norms, SwiGLU and plain causal attention.
    "llama": f"{LLAMA} --num-attention-heads 4 --num-query-groups 2 "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0",
}
BATCH = (
    "--micro-batch-size 4 --global-batch-size 8 --lr 3e-4 --lr-decay-style constant --split 969,30,1 "
    "--eval-iters 1 --eval-interval 1000 --log-interval 1 --log-level info --no-preflight"
)
FP32, BF16 = 1e-4, 2e-3


@dataclass(frozen=True)
class Case:
    """A run. bound: largest allowed relative difference of a loss from the golden curve. equal_to: case whose
    losses must be equal in every digit. after: case that must have ended before this one starts. saves,
    loads: whether the run saves to or loads from the checkpoint folder; a run that saves ends after half of
    the iterations. only_on_gpu: on a CPU the case would repeat a different case, or be too slow."""

    model: str
    flags: str = ""
    bound: float = FP32
    equal_to: str = ""
    after: str = ""
    ranks: int = 1
    saves: bool = False
    loads: bool = False
    only_on_gpu: bool = False
    environment: dict[str, str] = field(default_factory=dict)


# A static loss scale is used, because the dynamic scale begins with skipped steps.
FP16 = "--fp16 --loss-scale 1024"
DETERMINISTIC = "--deterministic-mode"
STARTS = 0.1
"""A bound that every run meets unless it fails to train. The phase `curves` finds smaller errors."""
# Phase -> name of a case -> case.
PHASES = {
    "smoke": {"smoke": Case("gpt", "--bf16 --require-kernels", STARTS)},
    "smoke-pytorch": {
        "smoke-pytorch": Case("gpt", "--bf16", STARTS, environment={"MEGATRON_KERNELS": "pytorch"})
    },
    "curves": {
        "gpt-fp32": Case("gpt", "--require-kernels"),
        "gpt-bf16": Case("gpt", "--bf16 --require-kernels", BF16, only_on_gpu=True),
        "llama-fp32": Case("llama"),
        "llama-bf16": Case("llama", "--bf16", BF16, only_on_gpu=True),
        "gpt-fp16": Case("gpt", FP16, BF16),
        "llama-fp16": Case("llama", FP16, BF16, only_on_gpu=True),
        "gpt-fp32-pytorch": Case("gpt", environment={"MEGATRON_KERNELS": "pytorch"}, only_on_gpu=True),
        "llama-fp32-pytorch": Case("llama", environment={"MEGATRON_KERNELS": "pytorch"}, only_on_gpu=True),
        "gpt-bf16-compile": Case("gpt", "--bf16 --compile", BF16, only_on_gpu=True),
        "gpt-bf16-recompute": Case("gpt", "--bf16 --checkpoint-activations", BF16, only_on_gpu=True),
        "gpt-bf16-offload": Case("gpt", "--bf16 --cpu-offload --zero-stage 1", BF16, only_on_gpu=True),
        "gpt-bf16-8bit-adam": Case("gpt", "--bf16 --use-bnb-optimizer", 1e-2),
        "llama-bf16-fp8": Case(
            "llama", "--bf16 --fp8-recipe blockwise --fp8-min-size 0", 1e-2, only_on_gpu=True
        ),
        "deterministic": Case("gpt", DETERMINISTIC, only_on_gpu=True),
        "deterministic-again": Case("gpt", DETERMINISTIC, equal_to="deterministic", only_on_gpu=True),
        "deterministic-graph": Case(
            "gpt", f"{DETERMINISTIC} --cuda-graph-impl local", equal_to="deterministic", only_on_gpu=True
        ),
    },
    "ranks": {
        "tp2-pp2": Case(
            "gpt",
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
            ranks=4,
        ),
        "zero3-cp2": Case("gpt", "--zero-stage 3 --context-parallel-size 2", ranks=4),
        "dp2-zero1-bf16": Case("llama", "--bf16 --zero-stage 1", BF16, ranks=2, only_on_gpu=True),
        "pp2-zero-bubble": Case(
            "llama",
            "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
            ranks=2,
            only_on_gpu=True,
        ),
    },
    "resume": {
        "uninterrupted": Case("gpt", DETERMINISTIC),
        "begun": Case("gpt", DETERMINISTIC, equal_to="uninterrupted", saves=True),
        "resumed": Case("gpt", DETERMINISTIC, equal_to="uninterrupted", after="begun", loads=True),
    },
}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("phase", choices=(*PHASES, "golden"))
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder of rows.jsonl and of curves/NAME.log"
    )
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="folder of tokens and checkpoints")
    parser.add_argument("--tiny", action="store_true", help="smaller models")
    parser.add_argument("--seconds", type=float, default=600, help="kill the runs after this time")
    arguments = parser.parse_args()
    if arguments.phase == "golden":
        write_golden()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `run_cases` then kills its runs
    size = "tiny" if arguments.tiny else "full"
    sys.exit(
        run_phase(arguments.phase, size, arguments.out, arguments.work or arguments.out, arguments.seconds)
    )


# --- Tokens ---


def write_tokens(folder: Path) -> str:
    """Writes token files and a vocabulary to the folder, unless they exist. Returns the digest of the ids.

    A document is a walk over the vocabulary, in which a hash selects one of four successors of each token. A
    model can therefore learn something, and the ids do not depend on the random numbers of any library."""
    file = folder / "tokens.bin"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rows = [mixed(np.arange(DOCUMENTS, dtype=np.uint64))]
        for position in range(1, DOCUMENT_TOKENS):
            choice = mixed(rows[0] + np.uint64(position)) % np.uint64(4)
            rows.append(mixed(rows[-1] % np.uint64(VOCAB - 1) * np.uint64(4) + choice))
        tokens = np.stack(rows, axis=1) % np.uint64(VOCAB - 1)
        tokens[:, -1] = VOCAB - 1  # the end-of-document token
        write_vocabulary(folder)
        with IndexedDatasetBuilder(folder / "tokens", np.uint16) as builder:
            builder.add_documents(tokens.astype(np.uint16).ravel(), [DOCUMENT_TOKENS] * DOCUMENTS)
            builder.finalize()
    return hashlib.sha256(file.read_bytes()).hexdigest()


def mixed(values: np.ndarray) -> np.ndarray:
    """Returns a hash of each value: the finalizer of SplitMix64 of the value plus a constant."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def write_vocabulary(folder: Path) -> None:
    """Writes the files of a tokenizer, whose tokens are GPT-2's 256 byte symbols and names that no merge
    produces."""
    from tokenizers.pre_tokenizers import ByteLevel

    names = sorted(ByteLevel.alphabet())
    names += [f"token{number}" for number in range(len(names), VOCAB - 1)]
    vocabulary = {name: number for number, name in enumerate([*names, END_OF_TEXT])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")


# --- Runs ---


@dataclass
class Running:
    """The processes of a case."""

    name: str
    case: Case
    processes: list[subprocess.Popen[bytes]]

    @property
    def has_ended(self) -> bool:
        codes = [process.poll() for process in self.processes]
        if any(codes):  # the other ranks would wait for the failed rank
            self.kill()
        return None not in codes or any(codes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def run_phase(phase: str, size: str, out: Path, work: Path, seconds: float) -> int:
    """Runs the cases of a phase and adds a row for each. Returns 1 if a case is wrong, and 124 if the time
    was too short. On a GPU all cases start at the same time."""
    deadline = time.monotonic() + seconds
    on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    golden = json.loads(GOLDEN_FILE.read_text())
    digest = write_tokens(work)
    if digest != golden["tokens"]:
        raise SystemExit(f"the tokens have the digest {digest}, expected {golden['tokens']}")
    (out / "curves").mkdir(parents=True, exist_ok=True)
    cases = {name: case for name, case in PHASES[phase].items() if not (on_cpu and case.only_on_gpu)}
    run_cases(cases, size, out, work, deadline, at_once=(os.cpu_count() or 1) if on_cpu else 99)
    failed, late = 0, time.monotonic() >= deadline
    for name, case in cases.items():
        row = compare(name, case, golden[size][case.model], out, SIZES[size][1])
        add_row(out, "losses", **row)
        failed += row["verdict"] != "ok"
    return 124 if late and failed else min(failed, 1)


def run_cases(
    cases: dict[str, Case], size: str, out: Path, work: Path, deadline: float, at_once: int
) -> None:
    """Starts each case when the case that it follows has ended, with at most `at_once` processes at a time,
    and waits for all cases. At the deadline, kills all processes."""
    waiting, running, ended = dict(cases), list[Running](), set[str]()
    try:
        while (waiting or running) and time.monotonic() < deadline:
            for one in [one for one in running if one.has_ended]:
                running.remove(one)
                ended.add(one.name)
            for name, case in list(waiting.items()):
                busy = sum(len(one.processes) for one in running)
                if (not case.after or case.after in ended) and (busy + case.ranks <= at_once or not busy):
                    running.append(start(name, waiting.pop(name), size, out, work))
            time.sleep(0.1)
    finally:
        for one in running:
            one.kill()


def start(name: str, case: Case, size: str, out: Path, work: Path) -> Running:
    """Starts the ranks of a case. Their output is written to curves/NAME.log."""
    flags, iterations = SIZES[size]
    words = [
        "pretrain_gpt.py",
        *flags.split(),
        *MODELS[case.model].split(),
        *BATCH.split(),
        *case.flags.split(),
    ]
    words += ["--train-iters", str(iterations), "--data-path", str(work / "tokens")]
    words += ["--vocab-file", str(work / "vocab.json"), "--merge-file", str(work / "merges.txt")]
    if case.saves:
        half = str(iterations // 2)
        words += ["--save", str(work / "checkpoints"), "--save-interval", half, "--exit-interval", half]
        words += ["--async-save"]
    if case.loads:
        words += ["--load", str(work / "checkpoints")]
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        words = [word for word in words if word != "--require-kernels"]
    if case.ranks > 1:
        words = ["-m", "tests.support.shared_gpu", *words]
    (port,) = free_ports(1)
    processes = []
    with open(log_of(out, name), "wb") as log:
        for rank in range(case.ranks):
            variables = launch_variables(rank, case.ranks, port) if case.ranks > 1 else {}
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **case.environment, **variables}
            command = [sys.executable, *words]
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
    return Running(name, case, processes)


# --- Comparison ---


def log_of(folder: Path, name: str) -> Path:
    return folder / "curves" / f"{name}.log"


def read_curve(log: Path) -> dict[int, tuple[float, float]]:
    """Returns iteration -> (loss, grad norm) from a log."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return {
        step["iteration"]: (float("nan") if step["loss"] is None else step["loss"], step["grad_norm"])
        for step in parse_steps(text)
    }


def compare(name: str, case: Case, golden: list[list[float]], out: Path, iterations: int) -> dict[str, Any]:
    """Returns the row of a case: the largest relative differences of its losses and grad norms from the
    expected curve, and a verdict."""
    found = read_curve(log_of(out, name))
    expected = {index + 1: (loss, norm) for index, (loss, norm) in enumerate(golden)}
    if case.equal_to:
        expected = read_curve(log_of(out, case.equal_to))
    half = iterations // 2
    wanted = range(half + 1 if case.loads else 1, (half if case.saves else iterations) + 1)
    bound = 0.0 if case.equal_to else case.bound
    row = {"run": name, "steps": len(found), "bound": bound}
    both = [step for step in wanted if step in found and step in expected]
    if len(both) < len(wanted):
        return row | {"verdict": f"only {len(both)} of {len(wanted)} steps: {last_error(out, name)}"}
    differences = {step: abs(found[step][0] / expected[step][0] - 1) for step in both}
    wrong = [step for step, difference in differences.items() if not difference <= bound]
    return row | {
        "difference": max(differences.values()),
        "difference_of_grad_norm": max(abs(found[step][1] / expected[step][1] - 1) for step in both),
        "verdict": f"BAD from step {wrong[0]}" if wrong else "ok",
    }


def last_error(out: Path, name: str) -> str:
    """Returns the last line of a log with an error, or the last line."""
    log = log_of(out, name)
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or ["no output"])[-1][:150]


def write_golden() -> None:
    """Computes each curve in one CPU process, and writes the golden file."""
    from tempfile import TemporaryDirectory

    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    with TemporaryDirectory() as name:
        folder = Path(name)
        golden: dict[str, Any] = {"tokens": write_tokens(folder)}
        (folder / "curves").mkdir()
        for size in SIZES:
            run_cases(
                {model: Case(model) for model in MODELS}, size, folder, folder, time.monotonic() + 3600, 2
            )
            curves = {model: read_curve(log_of(folder, model)) for model in MODELS}
            golden[size] = {model: [curve[step] for step in sorted(curve)] for model, curve in curves.items()}
            assert all(len(curve) == SIZES[size][1] for curve in golden[size].values()), last_error(
                folder, "gpt"
            )
    GOLDEN_FILE.write_text(json.dumps(golden, indent=1).replace("\n    ", " ").replace("\n   ]", "]") + "\n")


if __name__ == "__main__":
    main()
