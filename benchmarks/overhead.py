#!/usr/bin/env python3
"""What the trainer costs over a plain PyTorch loop, and what parallelism costs over ideal scaling, on a CPU.

    python benchmarks/overhead.py            about four minutes on two cores

4 layers, hidden 256, 8 heads, sequence 512, vocabulary 8192, micro-batch 2, global batch 8, fp32, one thread
per process. Every figure is a ratio of two things measured in the same run:

    1 process   tokens/s of the trainer's engine / those of a plain eager loop doing the same work
    DP=2, TP=2  tokens/s / twice those of 1 process
    PP=2        tokens/s / what the heaviest stage allows: its time per micro-batch, measured alone, times the
                m + p - 1 slots of the schedule
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
LAYERS, HIDDEN, HEADS, SEQ, VOCAB = 4, 256, 8, 512, 8192
MICRO_BATCH, GLOBAL_BATCH = 2, 8
TOKENS = GLOBAL_BATCH * SEQ
TARGETS = {"1 process": 0.97, "DP=2": 0.95, "TP=2": 0.85, "PP=2": 0.95}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8, help="timed steps per measurement (default: 8)")
    parser.add_argument("--worker", metavar="TP,PP", help=argparse.SUPPRESS)
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        tensor, pipeline = (int(degree) for degree in arguments.worker.split(","))
        run_worker(tensor, pipeline, arguments.rounds)
        return
    from benchmarks.machine import describe_machine

    print(describe_machine(), flush=True)
    single = launch(1, "1,1", arguments.rounds)
    data = launch(2, "1,1", arguments.rounds)
    tensor = launch(2, "2,1", arguments.rounds)
    pipeline = launch(2, "1,2", arguments.rounds)
    micro_batches = GLOBAL_BATCH // MICRO_BATCH
    allowed = TOKENS / (max(single["stages"]) * (micro_batches + 1))
    rows = [
        ("1 process", single["engine"], "plain eager loop", single["plain"]),
        ("DP=2", data["engine"], "twice 1 process", 2 * single["engine"]),
        ("TP=2", tensor["engine"], "twice 1 process", 2 * single["engine"]),
        ("PP=2", pipeline["engine"], "heaviest stage allows", allowed),
    ]
    print(f"{'':10} {'tokens/s':>9}  {'against':22} {'tokens/s':>9} {'ratio':>6} {'target':>7}")
    for name, measured, against, limit in rows:
        print(
            f"{name:10} {measured:9.0f}  {against:22} {limit:9.0f} "
            f"{measured / limit:6.2f} {TARGETS[name]:7.2f}"
        )


def launch(processes: int, degrees: str, rounds: int) -> dict:
    """Measures one layout in processes of its own; the result is the JSON in the last line of rank 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={processes}", __file__, "--worker", degrees, "--rounds", str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(result.stderr)
    return json.loads(result.stdout.strip().splitlines()[-1])


def run_worker(tensor_size: int, pipeline_size: int, rounds: int) -> None:
    """Times this layout; in a world of one also the plain loop, in turn with the engine, and each stage."""
    import torch

    from megatron.engine.pipeline_engine import GPTEngine
    from megatron.model.gpt_model import GPTModelPipe
    from megatron.mpu.layout import ParallelLayout
    from megatron.planner.stages import plan_stages
    from megatron.training.processes import join_world, leave_world, quiet_library_logs

    world = int(os.environ["WORLD_SIZE"])
    config = make_config(tensor_size, pipeline_size, world)
    quiet_library_logs(config.logging)
    rank = join_world(config)
    layout = ParallelLayout.create(world, tensor_size, pipeline_size, rank)
    tensor = layout.make_tensor_group()
    plan = plan_stages(config, VOCAB)
    model = GPTModelPipe(config, layout, tensor, VOCAB, 0, plan.bounds)
    engine = GPTEngine(config, layout, tensor, model)
    batch = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))

    def micro_batches() -> Iterator[tuple]:
        for first in range(layout.data_rank * MICRO_BATCH, GLOBAL_BATCH, layout.data * MICRO_BATCH):
            part = batch[first : first + MICRO_BATCH]
            yield part[:, :-1].contiguous(), (part[:, 1:].contiguous(), torch.ones(MICRO_BATCH, SEQ))

    steps: dict[str, Callable[[], object]] = {
        "engine": lambda: engine.train_step(micro_batches(), 0, GLOBAL_BATCH, 1e-4)
    }
    if world == 1:
        steps["plain"] = make_plain_step(batch)
    seconds = time_in_turn(steps, rounds)
    result: dict = {name: TOKENS / value for name, value in seconds.items()}
    if world == 1:
        half = plan_stages(make_config(1, 2, 2), VOCAB).bounds[1]
        result["stages"] = [
            time_stage(model, 0, half, batch, rounds),
            time_stage(model, half, len(plan.names), batch, rounds),
        ]
    if rank == 0:
        print(json.dumps(result), flush=True)
    leave_world()


def time_in_turn(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds per step; the steps take turns, so that a busy minute of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= 2:  # the first two warm up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def time_stage(model, first: int, last: int, batch, rounds: int) -> float:
    """Median seconds of one micro-batch, forward and backward, through layers first to last - 1 alone."""
    import torch

    tokens, labels = batch[:MICRO_BATCH, :-1].contiguous(), batch[:MICRO_BATCH, 1:].contiguous()
    hidden = torch.randn(SEQ, MICRO_BATCH, HIDDEN)

    def run() -> None:
        x = tokens if first == 0 else hidden.clone().requires_grad_()
        for layer in model.forward_funcs[first:last]:
            x = layer(x)
        if last == len(model.forward_funcs):
            model.loss_fn(x, (labels, torch.ones(MICRO_BATCH, SEQ))).backward()
        else:
            x.backward(hidden)

    return time_in_turn({"stage": run}, 2 * rounds)["stage"]


def make_config(tensor_size: int, pipeline_size: int, world: int):
    """The configuration of the measured run."""
    from megatron.config import (
        BatchConfig,
        Config,
        ModelConfig,
        ParallelConfig,
        ScheduleConfig,
        TrainingConfig,
    )

    return Config(
        model=ModelConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            seq_length=SEQ,
            max_position_embeddings=SEQ,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        batch=BatchConfig(micro_batch_size=MICRO_BATCH, global_batch_size=GLOBAL_BATCH),
        schedule=ScheduleConfig(lr=1e-4),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tensor_size,
            pipeline_model_parallel_size=pipeline_size,
            world_size=world,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        ),
        training=TrainingConfig(train_iters=1),
    )


def make_plain_step(batch) -> Callable[[], None]:
    """The same model, optimizer, clipping and accumulation as anyone would write them in plain PyTorch."""
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
