#!/usr/bin/env python3
"""Overhead of the trainer over a plain PyTorch loop, and of parallelism over ideal scaling, on a CPU.

    python benchmarks/overhead.py            about two minutes on two cores

4 layers, hidden 256, 8 heads, sequence 512, vocabulary 8192, micro-batch 2, global batch 8, fp32, one thread
per process, each process of a layout bound to its own core. All layouts are started at once and take turns,
one step each, so that other load on the machine affects all of them. Every figure is a ratio of two medians
of the same run:

    1 process   tokens/s of the trainer's engine / those of a plain eager loop doing the same work
    DP=2, TP=2  tokens/s / twice those of 1 process
    PP=2        tokens/s / the limit of the slowest stage: its time per micro-batch, measured alone, times the
                m + p - 1 slots of the schedule
    2 alone     two independent processes / twice those of 1 process: the slowdown of the machine itself when
                both cores are busy
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
LAYERS, HIDDEN, HEADS, SEQ, VOCAB = 4, 256, 8, 512, 8192
MICRO_BATCH, GLOBAL_BATCH = 2, 8
TOKENS = GLOBAL_BATCH * SEQ
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12, help="timed steps per measurement (default: 12)")
    parser.add_argument("--worker", metavar="TP,PP", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        tensor, pipeline = (int(degree) for degree in arguments.worker.split(","))
        run_worker(tensor, pipeline)
        return
    from benchmarks.machine import describe_machine

    print(describe_machine(), flush=True)
    measured = measure(arguments.rounds)
    single = TOKENS / measured["1 process"]
    slots = GLOBAL_BATCH // MICRO_BATCH + 1
    heaviest = TOKENS / (max(measured["stage 0"], measured["stage 1"]) * slots)
    rows = [
        ("1 process", "plain eager loop", TOKENS / measured["plain"], "0.97"),
        ("DP=2", "twice 1 process", 2 * single, "0.95"),
        ("TP=2", "twice 1 process", 2 * single, "0.85"),
        ("PP=2", "heaviest stage allows", heaviest, "0.95"),
        ("2 alone", "twice 1 process", 2 * single, ""),
    ]
    print(f"{'':10} {'tokens/s':>9}  {'against':22} {'tokens/s':>9} {'ratio':>6} {'target':>7}")
    for name, against, limit, target in rows:
        speed = TOKENS / measured[name]
        print(f"{name:10} {speed:9.0f}  {against:22} {limit:9.0f} {speed / limit:6.2f} {target:>7}")


def measure(rounds: int) -> dict[str, float]:
    """Median seconds per step, by name of what was measured."""
    from megatron.testing.measured_worlds import World

    single, other, data = (World(__file__, "1,1", processes) for processes in (1, 1, 2))
    tensor, pipeline = World(__file__, "2,1", 2), World(__file__, "1,2", 2)

    def both_at_once() -> float:
        other.start("engine")
        single.start("engine")
        return max(single.seconds(), other.seconds()) / 2  # each did a complete step

    work: dict[str, Callable[[], float]] = {
        "1 process": lambda: single.run("engine"),
        "plain": lambda: single.run("plain"),
        "DP=2": lambda: data.run("engine"),
        "TP=2": lambda: tensor.run("engine"),
        "PP=2": lambda: pipeline.run("engine"),
        "2 alone": both_at_once,
        "stage 0": lambda: single.run("stage 0"),
        "stage 1": lambda: single.run("stage 1"),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds + WARM_UP):
        for name, run in work.items():
            seconds = run()
            if turn >= WARM_UP:
                times[name].append(seconds)
    for world in (single, other, data, tensor, pipeline):
        world.end()
    return {name: statistics.median(values) for name, values in times.items()}


def run_worker(tensor_size: int, pipeline_size: int) -> None:
    """For each line of the input, does the work that it names, and answers with its seconds."""
    if int(os.environ["WORLD_SIZE"]) > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    from megatron.testing.measured_worlds import make_stage_step, redirect_stdout, serve

    answers = redirect_stdout()
    from megatron.cluster.processes import configure_logging
    from megatron.config import LoggingConfig

    configure_logging(LoggingConfig())

    import torch

    from megatron.cluster.processes import destroy_distributed, init_distributed
    from megatron.engine.pipeline_engine import GPTEngine
    from megatron.model.pipeline_module import GPTModelPipe
    from megatron.mpu.layout import ParallelLayout
    from megatron.planner.stages import plan_stages

    world = int(os.environ["WORLD_SIZE"])
    config = make_config(tensor_size, pipeline_size, world)
    rank = init_distributed(config)
    layout = ParallelLayout.create(world, tensor_size, pipeline_size, rank)
    tensor = layout.make_tp_group()
    plan = plan_stages(config, VOCAB)
    model = GPTModelPipe(config, layout, tensor, VOCAB, 0, plan.bounds)
    engine = GPTEngine(config, layout, tensor, model)
    batch = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))

    def micro_batches() -> Iterator[tuple]:
        for first in range(layout.dp_rank * MICRO_BATCH, GLOBAL_BATCH, layout.dp_size * MICRO_BATCH):
            part = batch[first : first + MICRO_BATCH]
            yield part[:, :-1].contiguous(), (part[:, 1:].contiguous(), torch.ones(MICRO_BATCH, SEQ))

    work: dict[str, Callable[[], object]] = {
        "engine": lambda: engine.train_step(micro_batches(), 0, GLOBAL_BATCH, 1e-4)
    }
    if world == 1:
        bound = plan_stages(make_config(1, 2, 2), VOCAB).bounds[1]
        work["plain"] = make_plain_step(batch)
        for stage, (first, last) in enumerate([(0, bound), (bound, len(plan.names))]):
            work[f"stage {stage}"] = make_stage_step(model, first, last, batch[:MICRO_BATCH])
    serve(lambda name: work[name](), answers)
    destroy_distributed()


def make_config(tensor_size: int, pipeline_size: int, world: int):
    """The configuration of the measured run."""
    from megatron.testing.measured_worlds import config_of

    return config_of(
        f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {SEQ} "
        f"--max-position-embeddings {SEQ} --hidden-dropout 0 --attention-dropout 0 "
        f"--micro-batch-size {MICRO_BATCH} --global-batch-size {GLOBAL_BATCH} "
        f"--tensor-model-parallel-size {tensor_size} --pipeline-model-parallel-size {pipeline_size}",
        world,
    )


def make_plain_step(batch) -> Callable[[], None]:
    """The same model, optimizer, clipping and accumulation in plain PyTorch."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
            self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
            self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch_size, seq, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(batch_size, seq, 3, HEADS, HIDDEN // HEADS)
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(context.transpose(1, 2).reshape(batch_size, seq, HIDDEN))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQ, HIDDEN)
            self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(HIDDEN)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.norm(x) @ self.words.weight.T

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        for part in batch.split(MICRO_BATCH):
            logits = model(part[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, VOCAB), part[:, 1:].reshape(-1))
            (loss * MICRO_BATCH / GLOBAL_BATCH).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
