#!/usr/bin/env python3
"""Measures training steps of this program and of a plain PyTorch loop on one device, in bf16.

    python benchmarks/device_throughput.py gpt --out FOLDER      the rows of phase gpt
    python benchmarks/device_throughput.py plan --out FOLDER     the planner's figures; needs no GPU
    python benchmarks/device_throughput.py prewarm --out FOLDER  only fills the caches of the compiler

Each row is written to FOLDER/rows.jsonl when it begins and when it ends, so a crash loses only one row, and
the next start continues with the next row. --tiny uses small models, for a CPU. The benchmark initializes
weights on the device, because a run's initialization on the CPU takes 10 s for 1.3 billion weights.
FOLDER/profile-ROW.txt has the kernels of a step and the gaps between them, and FOLDER/trace.json.gz has the
trace of the first profile.

MFU has three values. `mfu` counts Megatron's FLOPs, with the attention to all tokens
(megatron/model/flops.py); `mfu_palm` counts PaLM's 6 N + 12 L h s per token; `mfu_causal` counts half of
PaLM's attention.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import add_row, benchmark_parser, device_is_lost, read_rows
from benchmarks.plain_model import Model, plain_step
from megatron.cluster.devices import GPU_NAMES, gpu_of_process, set_library_defaults
from megatron.cluster.launch import temporary_environment
from megatron.cluster.processes import configure_logging
from megatron.config import LoggingConfig
from megatron.mpu.mesh import Mesh
from tests.support.measured_worlds import connect, make_engine, micro_batches

if TYPE_CHECKING:
    import torch

    from megatron.config import Config

PLANNED_CARD = "h100-80gb"
WARM_UP, TIMED = 2, 4
"""Each row has this number of steps that are not timed, and this number of timed steps."""
MICRO_BATCHES = 4
"""Number of micro-batches of each step."""
NO_TIME = "no time was left"
GAP_US = 20
"""A gap between two kernels that is longer than this, in us, means that the device has waited for the
host."""


MODELS = {
    "gpt-124m": Model(12, 768, 6, 1024, 50304),
    "gpt-125m": Model(12, 768, 12, 2048, 50304),
    "gpt-350m": Model(24, 1024, 16, 2048, 50304),
    "gpt-1.3b": Model(24, 2048, 16, 2048, 50304),
    "gpt-1.6b": Model(48, 1600, 25, 1024, 50304),
    "llama-1b": Model(16, 2048, 32, 4096, 128256, groups=8, ffn=8192),
    "llama-8b-8-layers": Model(8, 4096, 32, 4096, 128256, groups=8, ffn=14336, untied=True),
    "gpt-tiny": Model(2, 64, 2, 64, 512),
    "llama-tiny": Model(2, 64, 4, 64, 512, groups=2, ffn=128),
}
# Implementation -> flags. The plain PyTorch loop is 'plain' (eager) or 'plain-compile'.
FLAGS = {
    "ours": "",
    "ours-compile": "--compile",
    "ours-dropout": "--hidden-dropout 0.1 --attention-dropout 0.1",
    "ours-documents": "--reset-attention-mask --reset-position-ids",
    "ours-fp8": "--fp8-recipe blockwise",
    "ours-graph": "--cuda-graph-impl local",
    "ours-8bit": "--use-bnb-optimizer",
    "ours-recompute": "--checkpoint-activations",
    "ours-pytorch-kernels": "",
}


@dataclass(frozen=True)
class Row:
    """A row of the table: one measurement. min_tokens_per_s, min_mfu: targets on an H100."""

    name: str
    implementation: str
    micro_batch: int
    profiled: bool = False
    min_tokens_per_s: float = 0.0
    min_mfu: float = 0.0

    @property
    def key(self) -> dict[str, Any]:
        """Returns the columns that identify the row."""
        names = ("model", "implementation", "micro_batch")
        return dict(zip(names, (self.name, self.implementation, self.micro_batch), strict=True))

    @property
    def model(self) -> Model:
        return MODELS[self.name]

    @property
    def is_ours(self) -> bool:
        return self.implementation in FLAGS

    @property
    def expected_s(self) -> float:
        """Returns an estimate of the seconds that the row takes on a GPU."""
        return 50.0 if self.profiled or self.implementation.endswith("compile") else 20.0

    @property
    def samples(self) -> int:
        """Returns the number of samples of a step."""
        return MICRO_BATCHES * self.micro_batch

    def config(self, more: str = "") -> Config:
        flags = f"--bf16 --micro-batch-size {self.micro_batch} --global-batch-size {self.samples} {more} "
        return self.model.config(flags + FLAGS.get(self.implementation, ""))


# Phase -> its rows, the most important row first.
ROWS = {
    "gpt": [
        Row("gpt-1.3b", "ours", 8, profiled=True, min_tokens_per_s=45500, min_mfu=0.50),
        Row("gpt-1.3b", "plain-compile", 8, profiled=True),
        Row("gpt-1.3b", "ours-dropout", 8),
        Row("gpt-1.3b", "plain", 8),
    ],
    "llama": [
        Row("llama-1b", "ours", 4, profiled=True),
        Row("llama-8b-8-layers", "ours", 1, min_mfu=0.55),
        Row("llama-1b", "plain-compile", 4),
    ],
    "rest": [
        Row("gpt-125m", "ours", 16, profiled=True),
        Row("gpt-125m", "plain-compile", 16),
        Row("gpt-124m", "ours", 64, min_tokens_per_s=462000),  # modded-nanogpt's record 7, per GPU
        Row("gpt-1.6b", "ours", 16, min_tokens_per_s=48000),  # llm.c, per GPU
        Row("llama-8b-8-layers", "ours-fp8", 1),
        Row("gpt-1.3b", "ours-documents", 8),
        Row("gpt-125m", "ours-graph", 1),
        Row("gpt-125m", "ours", 1),
        Row("gpt-1.3b", "ours-compile", 8),
        Row("llama-8b-8-layers", "plain-compile", 1),
        Row("gpt-350m", "ours", 16),
        Row("llama-1b", "ours-compile", 4),
        Row("gpt-1.3b", "ours-8bit", 8),
        Row("gpt-1.3b", "ours-recompute", 8),
        Row("gpt-1.3b", "ours-pytorch-kernels", 8),
        Row("gpt-1.3b", "ours", 4),
        Row("llama-1b", "ours", 2),
        Row("gpt-125m", "ours", 8),
    ],
}
TINY_ROWS = {
    "gpt": [
        Row("gpt-tiny", "ours", 2, profiled=True),
        Row("gpt-tiny", "plain-compile", 2),
        Row("gpt-tiny", "plain", 2),
    ],
    "llama": [Row("llama-tiny", "ours", 2), Row("llama-tiny", "plain-compile", 2)],
    "rest": [
        Row("gpt-tiny", implementation, 2)
        for implementation in (
            "ours-dropout",
            "ours-documents",
            "ours-graph",
            "ours-recompute",
            "ours-8bit",
            "ours-pytorch-kernels",
        )
    ],
}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("phase", choices=(*ROWS, "plan", "prewarm"))
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--card", default="", help="PyTorch's name of the card for the plans (default: H100)")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="time limit: start no row that would probably end later"
    )
    arguments = parser.parse_args()
    rows = TINY_ROWS if arguments.tiny else ROWS
    if arguments.phase == "plan":
        add_plans([row for phase in rows.values() for row in phase], arguments)
    elif arguments.phase == "prewarm":
        # Layers are compiled one by one, so a model with one layer fills the caches.
        for row in (row for row in (*rows["gpt"], *rows["llama"]) if row.implementation == "plain-compile"):
            make_plain_step(row, replace(row.model, layers=1))()
            gc.collect()
    else:
        sys.exit(run_rows(rows[arguments.phase], arguments))


def run_rows(rows: list[Row], arguments: argparse.Namespace) -> int:
    """Runs the rows that the folder does not have yet. Returns 1 if rows failed, and 3 if the device
    failed."""

    deadline, failed = time.monotonic() + arguments.seconds, False
    set_library_defaults()
    configure_logging(LoggingConfig(log_level="info"))
    connect(rows[0].config())
    done = [
        {name: row[name] for name in rows[0].key}
        for row in read_rows(arguments.out, "throughput")
        if row.get("error") != NO_TIME
    ]
    for row in rows:
        gc.collect()
        if row.key in done:
            continue
        if time.monotonic() + row.expected_s > deadline:
            add_row(arguments.out, "throughput", **row.key, error=NO_TIME)
            continue
        add_row(arguments.out, "throughput", **row.key, error="the process ended during this row")
        try:
            columns = measure(row, arguments.out)
            add_row(arguments.out, "throughput", **row.key, **columns)
            failed |= "profile_error" in columns
        except Exception as error:
            traceback.print_exc()
            add_row(arguments.out, "throughput", **row.key, error=begin_of(error))
            if device_is_lost():
                return 3
            failed = True
    return int(failed)


def measure(row: Row, folder: Path) -> dict[str, Any]:
    """Measures a row and returns its columns."""
    import torch
    from deepspeed.accelerator import get_accelerator

    # The import is late, because DeepSpeed takes seconds to import.
    from megatron.training.startup_report import local_memory

    accelerator = get_accelerator()
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
    torch.compiler.reset()
    step = own_step(row) if row.is_ours else make_plain_step(row, row.model)
    losses, times = [], []
    for _ in range(WARM_UP + TIMED):
        accelerator.synchronize()
        start = time.perf_counter()
        losses.append(step())
        accelerator.synchronize()
        times.append(time.perf_counter() - start)
    memory = local_memory()
    found = figures(row, statistics.median(times[WARM_UP:])) | {
        "peak_gib": (memory.get("peak allocated") or memory["peak resident"]) / 2**30,
        "first_step_s": times[0],
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    if row.profiled:
        try:
            found |= profile(step, folder / f"profile-{row.name}-{row.implementation}")
        except Exception as error:  # a driver may forbid profiles
            traceback.print_exc()
            found["profile_error"] = begin_of(error)
    return found


def begin_of(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def figures(row: Row, seconds: float) -> dict[str, Any]:
    """Returns the columns with speed, MFU (None if the peak rate of the device is not known) and targets.
    seconds: time of a step."""
    # The import is late, because DeepSpeed takes seconds to import.
    from megatron.model.flops import iteration_flops, palm_flops
    from megatron.pipeline.stages import plan_stages

    model, config = row.model, row.config()
    tokens = row.samples * model.seq
    flops = iteration_flops(config, model.vocab, batch_size=row.samples, with_recomputation=False)
    palm = palm_flops(config, model.vocab, plan_stages(config, model.vocab).active_parameters, row.samples)
    gpu = gpu_of_process()
    rates = {
        "mfu": flops,
        "mfu_palm": palm,
        "mfu_causal": palm - 6 * tokens * model.layers * model.hidden * model.seq,
    }
    return {
        "tokens_per_s": tokens / seconds,
        "tflops": flops / seconds / 1e12,
        **{name: gpu and rate / seconds / gpu.peak_flops["bf16"] for name, rate in rates.items()},
        "min_tokens_per_s": row.min_tokens_per_s,
        "min_mfu": row.min_mfu,
    }


def make_batch(row: Row) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, row.model.vocab, (row.samples, row.model.seq + 1), generator=generator)


def make_plain_step(row: Row, model: Model) -> Callable[[], float]:
    from deepspeed.accelerator import get_accelerator

    device, batch = get_accelerator().current_device_name(), make_batch(row)
    on_cpu = device == "cpu"
    compiler = None if row.implementation == "plain" else "aot_eager" if on_cpu else "inductor"
    batch = batch if on_cpu else batch.pin_memory()
    return plain_step(model, batch, row.micro_batch, device, compiler)


def own_step(row: Row) -> Callable[[], float]:
    # The import is late, because DeepSpeed takes seconds to import.
    from megatron.kernels.selection import forget_decisions

    os.environ.pop("MEGATRON_KERNELS", None)
    if row.implementation == "ours-pytorch-kernels":
        os.environ["MEGATRON_KERNELS"] = "pytorch"
    forget_decisions()
    config, batch = row.config(), make_batch(row)
    mesh = Mesh.from_config(config.parallel, 0)
    engine = make_engine(config, mesh, row.model.vocab, device_values)
    return lambda: float(engine.train_step(micro_batches(batch, mesh, row.micro_batch), row.samples, 1e-4))


def device_values(spec: Any, seed: int, name: str, axes: Any, elements: range | None = None) -> torch.Tensor:
    """Returns initial values that are computed on the device. They differ from the initial values of a run
    with an equal seed."""
    import torch
    from deepspeed.accelerator import get_accelerator

    values = torch.empty(spec.local_shape(axes), device=get_accelerator().current_device_name())
    return values.fill_(spec.init_value) if spec.init_std is None else values.normal_(std=spec.init_std)


def profile(step: Callable[[], float], path: Path) -> dict[str, Any]:
    """Profiles a step; returns the share of its time in which the device is busy, its kernels and its long
    gaps. Writes the kernels to PATH.txt, and a trace unless the folder has one. On a CPU, operators take the
    role of kernels."""
    import torch
    from deepspeed.accelerator import get_accelerator

    # The import is late, because DeepSpeed takes seconds to import.
    from megatron.training.profiler import device_work, gaps_between, summary

    accelerator = get_accelerator()
    with torch.profiler.profile():  # the first profile loads libraries, which is a long gap
        torch.ones(1, device=accelerator.current_device_name())
        accelerator.synchronize()
    with torch.profiler.profile() as profiler:
        step()
    events, on_gpu = profiler.events(), accelerator.device_name() != "cpu"
    kernels = device_work(events, on_gpu)
    if not kernels:
        raise RuntimeError("the profile has no kernels")
    gaps, window = gaps_between(kernels)
    long_gaps_ms = sum(gap for gap in gaps if gap > GAP_US) / 1000
    lines = f"{long_gaps_ms:.3f} ms in gaps above {GAP_US} us\n{summary(events, 1, on_gpu, len(kernels))}\n"
    path.with_name(f"{path.name}.txt").write_text(lines)
    if not (trace := path.with_name("trace.json.gz")).exists():
        profiler.export_chrome_trace(str(trace))
    return {"busy": 1 - sum(gaps) / window, "long_gaps_ms": long_gaps_ms, "kernels": len(kernels)}


def add_plans(rows: list[Row], arguments: argparse.Namespace) -> None:
    """Adds a row with the plan of each measurement, except those with --compile, which the planner cannot
    predict."""
    # The import is late, because DeepSpeed takes seconds to import.
    from megatron.planner.layer_memory import planned_run
    from megatron.planner.memory import plan_memory
    from megatron.planner.step_time import planned_step

    card = GPU_NAMES.get(arguments.card, PLANNED_CARD)
    for row in rows:
        if not row.is_ours or row.implementation == "ours-compile":
            continue
        config, vocab = row.config(f"--gpu {card}"), row.model.vocab
        kernels = "pytorch" if row.implementation == "ours-pytorch-kernels" else ""
        with temporary_environment({"MEGATRON_KERNELS": kernels}):
            run = planned_run(config, vocab)
            (memory,), step = plan_memory(run), planned_step(run)
        assert step is not None
        add_row(
            arguments.out,
            "plans",
            **row.key,
            tokens_per_s=step.tokens_per_second,
            mfu=step.mfu,
            peak_gib=memory.total / 2**30,
        )


if __name__ == "__main__":
    main()
