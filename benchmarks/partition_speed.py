#!/usr/bin/env python3
"""Speed of each partition method on a model whose head takes as much time as two transformer layers.

    python benchmarks/partition_speed.py      about two minutes on two cores

10 layers, hidden 256, 8 heads, sequence 256, vocabulary 7168 on PP=4; micro-batch 1, 8 of them per step,
fp32, one thread per process. Per token the head's matrix takes 2 h V = 3.7 MFLOP forward and a layer
24 h^2 + 4 h s = 1.8 MFLOP. The embedding has as many parameters as the head, but a lookup takes almost no
time. The work is that of 12 layers, 3 for each of the 4 stages.

    measured    forward and backward pass of a micro-batch through each stage, in its own process while all
                others are idle
    predicted   the slowest stage by the layer times that `profile` has measured
    allowed     tokens/s of 1F1B with the measured stages, simulated
    here        tokens/s of the real pipeline on this machine

With fewer than four cores the stages share them, and `here` hardly depends on the partition: all partitions
have the same work. `allowed` is the speed on four free cores. Layouts take turns, one step each, so that
other load on the machine affects all of them. Methods that give the same partition are measured once.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

LAYERS, HIDDEN, HEADS, SEQ, VOCAB = 10, 256, 8, 256, 7168
MICRO_BATCH, MICRO_BATCHES, STAGES = 1, 8, 4
TOKENS = MICRO_BATCH * MICRO_BATCHES * SEQ
WARM_UP = 2
DEEPSPEED_METHODS = ("type:transformer", "type:embed|transformer", "parameters")
ADDED_METHODS = ("type:embed:2|transformer:1", "memory", "time", "profile")
TARGET_ERROR = 0.10
# glibc keeps freed memory, as the allocator of a GPU does. Otherwise it may return the head's buffers to the
# kernel after every micro-batch, depending on the heap, and the same head takes 31 or 24 ms.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}


class Row(NamedTuple):
    """One method; times in seconds of a micro-batch's forward and backward pass."""

    method: str
    bounds: tuple[int, ...]
    measured: list[float]
    predicted: list[float]
    step: float
    """Of the real pipeline, for a whole step."""

    @property
    def allowed(self) -> float:
        """Tokens/s of 1F1B on a core per stage, simulated; a backward pass is twice a forward pass."""
        from megatron.pipeline.schedule import simulate_schedule

        forward = [seconds / 3 for seconds in self.measured]
        backward = [2 * seconds for seconds in forward]
        transfer = [0.0] * (STAGES - 1)
        return TOKENS / simulate_schedule("1f1b", forward, backward, transfer, MICRO_BATCHES).makespan

    @property
    def speed(self) -> float:
        return TOKENS / self.step

    @property
    def error(self) -> float:
        """The relative error of the predicted slowest stage."""
        return max(self.predicted) / max(self.measured) - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="timed steps per layout (default: 10)")
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_worker(arguments.worker)
        return
    from benchmarks.machine import describe_machine

    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments.rounds, str(Path(folder) / "layer_times.json"))
    print_rows(rows)


def print_rows(rows: list[Row]) -> None:
    milliseconds = [" ".join(f"{seconds * 1e3:.1f}" for seconds in row.measured) for row in rows]
    bounds = [" ".join(map(str, row.bounds)) for row in rows]
    wide, wider = max(map(len, bounds)), max(map(len, milliseconds))
    heads = f"{'measured, ms':{wider}}  largest  predicted  error  allowed tokens/s  here"
    print(f"{'':26}  {'bounds':{wide}}  {heads}")
    for row, partition, stages in zip(rows, bounds, milliseconds, strict=True):
        print(
            f"{row.method:26}  {partition:{wide}}  {stages:{wider}}  {max(row.measured) * 1e3:7.1f}  "
            f"{max(row.predicted) * 1e3:9.1f}  {row.error:+5.0%}  {row.allowed:16.0f}  {row.speed:4.0f}"
        )
    deepspeed, added = (
        max((row for row in rows if row.method in methods), key=lambda row: row.allowed)
        for methods in (DEEPSPEED_METHODS, ADDED_METHODS)
    )
    print(
        f"best of DeepSpeed's methods: {deepspeed.method}, {deepspeed.allowed:.0f} tokens/s allowed, "
        f"{deepspeed.speed:.0f} here\n"
        f"best of the added methods: {added.method}, {added.allowed:.0f} ("
        f"{added.allowed / deepspeed.allowed:.2f} times), {added.speed:.0f} here ("
        f"{added.speed / deepspeed.speed:.2f} times)"
    )
    profile = next(row for row in rows if row.method == "profile")
    print(
        f"profile predicted {max(profile.predicted) * 1e3:.1f} ms for its largest stage, "
        f"{max(profile.measured) * 1e3:.1f} ms were measured: {profile.error:+.1%} "
        f"(target: within {TARGET_ERROR:.0%})"
    )


def measure(rounds: int, profile: str) -> list[Row]:
    """Everything in the table. `profile`: the file of the layer times."""
    from megatron.cluster.processes import configure_logging
    from megatron.config import LoggingConfig
    from tests.support.measured_worlds import World

    configure_logging(LoggingConfig())

    from megatron.pipeline.layer_times import read_layer_times
    from megatron.pipeline.stages import layer_kinds, plan_stages

    single = World(__file__, profile, 1, KEEP_MEMORY)
    single.run("profile")
    pipeline = World(__file__, profile, STAGES, KEEP_MEMORY)
    seconds = read_layer_times(make_config("profile", STAGES, profile), VOCAB)
    plans = {
        method: plan_stages(make_config(method, STAGES), VOCAB, seconds if method == "profile" else None)
        for method in DEEPSPEED_METHODS + ADDED_METHODS
    }
    partitions = sorted({tuple(plan.bounds) for plan in plans.values()})
    stages = sorted({stage for partition in partitions for stage in pairwise(partition)})
    work: dict[tuple[int, ...], Callable[[], float]] = {
        partition: lambda partition=partition: pipeline.run(" ".join(map(str, partition)))
        for partition in partitions
    }
    alone: dict[tuple[int, int], Callable[[], float]] = {
        stage: lambda stage=stage: single.run(" ".join(map(str, stage))) for stage in stages
    }
    stage_times, steps = turns(alone, rounds), turns(work, rounds)
    for world in (single, pipeline):
        world.end()
    rows = []
    for method, plan in plans.items():
        layer_seconds = [seconds[kind] for kind in layer_kinds(plan.names)]
        rows.append(
            Row(
                method,
                tuple(plan.bounds),
                [stage_times[stage] for stage in pairwise(plan.bounds)],
                [sum(layer_seconds[first:last]) for first, last in pairwise(plan.bounds)],
                steps[tuple(plan.bounds)],
            )
        )
    return rows


def turns(work: dict, rounds: int) -> dict:
    """Median seconds of each piece of work; they take turns."""
    times = {name: [] for name in work}
    for turn in range(rounds + WARM_UP):
        for name, run in work.items():
            seconds = run()
            if turn >= WARM_UP:
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def run_worker(profile: str) -> None:
    """Work is 'profile', or bounds: of one stage in a single process, of all stages in several."""
    from tests.support.measured_worlds import begin_worker, connect, make_engine, make_stage_step, serve

    answers = begin_worker()
    import torch

    from megatron.cluster.processes import destroy_distributed
    from megatron.pipeline.layer_times import find_layer_times
    from tests.support.measured_worlds import micro_batches

    size = int(os.environ["WORLD_SIZE"])
    config = make_config("type:transformer", size)
    layout, tp_group = connect(config)
    batch = torch.randint(0, VOCAB, (MICRO_BATCHES, SEQ + 1), generator=torch.Generator().manual_seed(0))
    steps: dict[str, Callable[[], object]] = {}

    def make_pipeline_step(bounds: list[int]) -> Callable[[], object]:
        engine = make_engine(config, layout, tp_group, VOCAB, bounds)
        samples = MICRO_BATCH * MICRO_BATCHES
        return lambda: engine.train_step(micro_batches(batch, layout, MICRO_BATCH), samples, 1e-4)

    if size == 1:
        model = make_engine(config, layout, tp_group, VOCAB).module
        profiled = make_config("profile", size, profile)
        steps["profile"] = lambda: find_layer_times(profiled, layout, tp_group, VOCAB, 0)

    def run(name: str) -> None:
        if name not in steps:  # in the warm-up
            bounds = [int(bound) for bound in name.split()]
            steps[name] = (
                make_stage_step(model, *bounds, batch[:MICRO_BATCH])
                if size == 1
                else make_pipeline_step(bounds)
            )
        steps[name]()

    serve(run, answers)
    destroy_distributed()


def make_config(method: str, stages: int, profile: str | None = None):
    """The configuration of the measured run."""
    from tests.support.measured_worlds import config_of

    return config_of(
        f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {SEQ} "
        f"--max-position-embeddings {SEQ} --hidden-dropout 0 --attention-dropout 0 "
        f"--micro-batch-size {MICRO_BATCH} --global-batch-size {MICRO_BATCH * MICRO_BATCHES} "
        f"--pipeline-model-parallel-size {stages} --partition-method {method} "
        + (f"--partition-profile {profile}" if profile else ""),
        stages,
    )


if __name__ == "__main__":
    main()
