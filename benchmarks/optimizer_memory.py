#!/usr/bin/env python3
"""Bytes of optimizer state per parameter, Adam against 8-bit Adam (--use-bnb-optimizer), by pipeline stage.

    python benchmarks/optimizer_memory.py            about a minute on two cores

Two stages of 8 layers, hidden 512, vocabulary 16384, bf16, one process each. The bytes are those of the
tensors that the optimizer holds after a step. The word embedding (on both stages), norms, biases and small
parameters keep 32-bit moments; `8 bits` is the share of the other parameters. Both optimizers also have fp32
master weights, 4 bytes per parameter, which are not counted.
"""

import argparse

LAYERS, HIDDEN, HEADS, SEQ, VOCAB = 8, 512, 8, 64, 16384
STAGES = 2
TARGETS = {"adam": 8.0, "8-bit adam": 2.1}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", choices=TARGETS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_worker(arguments.worker)
        return
    from benchmarks.machine import describe_machine
    from tests.support.measured_worlds import World

    print(describe_machine(), flush=True)
    print("bytes of moments per parameter")
    print(
        f"{'':12} {'stage':>5} {'parameters':>11} {'8 bits':>7} {'of these':>9} {'target':>7} {'of all':>7}"
    )
    for name, target in TARGETS.items():
        world = World(__file__, name, STAGES)
        for stage in range(STAGES):
            of_all, quantized, share, count = (
                world.run(f"{what} {stage}") for what in ("all", "quantized", "share", "count")
            )
            found = f"{quantized:.3f}" if share else "-"
            limit = f"<= {target}" if share else ""
            sizes = f"{stage:5d} {count:11,.0f} {100 * share:5.1f} %"
            print(f"{name:12} {sizes} {found:>9} {limit:>7} {of_all:7.3f}")
        world.end()


def run_worker(name: str) -> None:
    from tests.support.measured_worlds import begin_worker, connect, make_engine, micro_batches, serve

    answers = begin_worker()
    import torch

    from megatron.cluster.processes import destroy_distributed
    from megatron.training.startup_report import local_moments

    config = make_config(eight_bit=name != "adam")
    layout, tp_group = connect(config)
    engine = make_engine(config, layout, tp_group, VOCAB)
    tokens = torch.randint(0, VOCAB, (STAGES, SEQ + 1))
    engine.train_step(micro_batches(tokens, layout, 1), STAGES, 1e-4)
    moments = local_moments(engine.optimizer).values()
    count, quantized = sum(m.local_numel for m in moments), [m for m in moments if m.actual_bits == {8}]
    in_8_bits = sum(m.local_numel for m in quantized)
    found = {
        "all": sum(m.state_bytes for m in moments) / count,
        "quantized": sum(m.state_bytes for m in quantized) / max(in_8_bits, 1),
        "share": in_8_bits / count,
        "count": float(count),
    }

    def answer(words: str) -> float:
        what, stage = words.split()
        return found[what] if int(stage) == layout.pipeline_stage else 0.0

    serve(answer, answers)
    destroy_distributed()


def make_config(eight_bit: bool):
    """The configuration of the measured run."""
    from tests.support.measured_worlds import config_of

    return config_of(
        f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {SEQ} "
        f"--max-position-embeddings {SEQ} --micro-batch-size 1 --global-batch-size {STAGES} --bf16 "
        f"--pipeline-model-parallel-size {STAGES} {'--use-bnb-optimizer' if eight_bit else ''}",
        STAGES,
    )


if __name__ == "__main__":
    main()
