"""The planned bytes and operations of a layer's pass are those of the simulated step."""

from __future__ import annotations

import pytest

from megatron.config.cli import parse_args
from megatron.planner.timing.work import Work, head_work, layer_work, program_of
from megatron.simulation.processes import run_in_processes
from megatron.simulation.world import simulate_rank

NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
BASE = (
    "--dry-run --hidden-size 512 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 2 --global-batch-size 64 --lr 1e-3 --train-samples 6400 --vocab-size 512 --bf16"
)
LLAMA = (
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --ffn-hidden-size 1408"
)
ZERO_BUBBLE = "--world-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"
# Flags, and how far the planned bytes may be from those counted.
ROWS = {
    "fused": (NO_DROPOUT, 0.02),
    "tensor-parallel": (f"{NO_DROPOUT} --world-size 2 --tensor-model-parallel-size 2", 0.03),
    "dropout": ("", 0.05),
    "tensor-parallel-dropout": ("--world-size 2 --tensor-model-parallel-size 2", 0.03),
    "tensor-parallel-llama": (f"{NO_DROPOUT} {LLAMA} --world-size 2 --tensor-model-parallel-size 2", 0.05),
    "dropout-without-kernels": ("--gpu v100-32gb", 0.05),
    "alibi-without-kernels": (f"{NO_DROPOUT} --gpu v100-32gb --position-embedding-type alibi", 0.05),
    "alibi": (f"{NO_DROPOUT} --position-embedding-type alibi", 0.05),
    "swiglu": (f"{NO_DROPOUT} --glu-activation swiglu", 0.05),
    "llama": (
        f"{NO_DROPOUT} {LLAMA}",
        0.05,
    ),
    "qwen3": (f"{NO_DROPOUT} {LLAMA} --qk-layernorm", 0.05),
    "olmo2": (
        f"{NO_DROPOUT} {LLAMA} --qk-layernorm --qk-layernorm-scope projection --layer-arrangement post-norm",
        0.05,
    ),
    "neox": (
        f"{NO_DROPOUT} --position-embedding-type rotary --rotary-percent 0.25 --layer-arrangement parallel",
        0.05,
    ),
    "falcon": (
        f"{NO_DROPOUT} --position-embedding-type rotary --layer-arrangement parallel-one-norm "
        "--disable-bias-linear --group-query-attention",
        0.05,
    ),
    "window": (f"{NO_DROPOUT} {LLAMA} --window-size 64", 0.05),
    "recomputed": (f"{NO_DROPOUT} --checkpoint-activations", 0.08),
    "zero-bubble": (f"{NO_DROPOUT} {ZERO_BUBBLE}", 0.06),
    "zero-bubble-llama-recomputed": (f"{NO_DROPOUT} {ZERO_BUBBLE} {LLAMA} --checkpoint-activations", 0.08),
}


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", ROWS)
def test_planned_bytes_of_a_layer_are_those_of_the_step(name: str) -> None:
    flags, tolerance = ROWS[name]
    stages = 2 if ZERO_BUBBLE in flags else 1
    few, many = (
        parse_args([*BASE.split(), *flags.split(), "--num-layers", str(n * stages)], {}) for n in (1, 3)
    )
    records = run_in_processes(simulate_rank, [(few, 0), (many, 0)])
    planned = layer_work(many, program_of(many))
    passes = {"ForwardPass": planned.forward, "BackwardPass": planned.backward}
    if stages > 1:
        passes["BackwardPass"] += planned.weight.times(-1)
        passes["WeightGradPass"] = planned.weight
    for kind, work in passes.items():
        one, three = (_work(record, kind) for record in records)
        found = Work((three.flops - one.flops) / 2, 0.0, (three.bytes - one.bytes) / 2)
        launches = (three.launches - one.launches) / 2
        assert work.flops == found.flops, kind
        assert work.bytes == pytest.approx(found.bytes, rel=tolerance), kind
        assert work.launches == pytest.approx(launches, rel=0.1), kind


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        f"{NO_DROPOUT} --world-size 2 --tensor-model-parallel-size 2",
        f"{NO_DROPOUT} --micro-batch-size 8",
        f"{NO_DROPOUT} --zero-stage 2 --world-size 2",
        f"{NO_DROPOUT} --gpu v100-32gb",
    ],
)
def test_planned_bytes_of_the_head_are_those_of_the_step(flags: str) -> None:
    """Of the additional rows of a larger vocabulary: the rest of the step is the same. The embedding counts
    as if it read its whole table; the simulated device also counts what `zeros_like` would read."""
    small, large = (
        parse_args([*BASE.split(), *flags.split(), "--num-layers", "1", "--vocab-size", str(rows)], {})
        for rows in (4096, 8192)
    )
    records = run_in_processes(simulate_rank, [(small, 0), (large, 0)])
    size = small.parallel.tensor_model_parallel_size
    planned = [head_work(large, program_of(large), rows // size) for rows in (4096, 8192)]
    for kind, fewer, more in zip(("ForwardPass", "BackwardPass"), *planned, strict=True):
        one, two = (_work(record, kind, ("embedding", "add_rows", "index_add_")) for record in records)
        assert more.flops - fewer.flops == two.flops - one.flops, kind
        assert more.bytes - fewer.bytes == pytest.approx(two.bytes - one.bytes, rel=0.08), kind


def _work(record, kind: str, left_out: tuple[str, ...] = ()) -> Work:
    (work,) = (work for instruction, work in record.rest.items() if instruction.kind == kind)
    counts = [count for name, count in work.operations.items() if name not in left_out]
    moved = sum(count.bytes_read + count.bytes_written for count in counts)
    return Work(work.flops, 0.0, moved, work.launched)
