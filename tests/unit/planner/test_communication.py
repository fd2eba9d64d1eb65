"""Bytes per step by formula, against closed forms written out by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron.config.cli import parse_args
from megatron.mpu.layout import ParallelLayout
from megatron.planner.stages import plan_stages
from megatron.planner.timing.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    DATA,
    REDUCE_SCATTER,
    SEND,
    STAGES,
    TENSOR,
    TIED,
    Exchange,
    rank_communication,
)

LAYERS, HIDDEN, SEQ, MICRO, VOCAB = 4, 64, 32, 2, 512
LAYER = 12 * HIDDEN**2 + 13 * HIDDEN
H = 2 * MICRO * SEQ * HIDDEN
BASE = (
    f"--dry-run --num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {SEQ} "
    f"--max-position-embeddings {SEQ} --micro-batch-size {MICRO} --global-batch-size 64 --lr 1e-3 "
    f"--train-samples 6400 --vocab-size {VOCAB} --make-vocab-size-divisible-by 1 --bf16 "
    "--hidden-dropout 0 --attention-dropout 0"
)


def sums(flags: str, rank: int = 0, micro_batches: int = 8) -> Counter:
    """(group, operation) -> bytes of a step."""
    config = parse_args([*BASE.split(), *flags.split()], {})
    found = rank_communication(config, plan_stages(config, VOCAB), VOCAB, rank)
    total: Counter = Counter()
    for one in found.exchanges(micro_batches):
        total[one.group, one.operation] += one.calls * one.bytes
    return total


def test_one_process_exchanges_nothing() -> None:
    assert sums("") == {}


@pytest.mark.parametrize("zero", [0, 1])
def test_data_parallel_gradients_are_fp32_and_zero_gathers_16_bit_weights(zero: int) -> None:
    found = sums(f"--world-size 2 --zero-stage {zero}")
    parameters = VOCAB * HIDDEN + SEQ * HIDDEN + LAYERS * LAYER + 2 * HIDDEN
    loss = 4
    assert found[DATA, ALL_REDUCE] == (0 if zero else 4 * parameters) + loss
    assert found[DATA, REDUCE_SCATTER] == (4 * parameters if zero else 0)
    assert found[DATA, ALL_GATHER] == (2 * parameters if zero else 0)


@pytest.mark.parametrize(("zero", "gathered"), [(2, 0), (3, 2)])
def test_sharded_layers_are_reduced_in_every_micro_batch(zero: int, gathered: int) -> None:
    found = sums(f"--world-size 2 --zero-stage {zero}")
    outside = VOCAB * HIDDEN + SEQ * HIDDEN + 2 * HIDDEN
    assert found[DATA, REDUCE_SCATTER] == 8 * LAYERS * 4 * LAYER + 4 * outside
    updated = outside + (LAYERS * LAYER if zero == 2 else 0)
    assert found[DATA, ALL_GATHER] == 2 * updated + gathered * 8 * LAYERS * 2 * LAYER


@pytest.mark.parametrize(
    ("flags", "per_layer"), [("", 4), ("--checkpoint-activations", 5)], ids=["kept", "recomputed"]
)
def test_tensor_parallel_layers(flags: str, per_layer: int) -> None:
    found = sums(f"--world-size 2 --tensor-model-parallel-size 2 {flags}")
    replicated = LAYERS * 6 * HIDDEN + 2 * HIDDEN + SEQ * HIDDEN
    embedding_and_head = 2 * H
    assert found[TENSOR, ALL_REDUCE] == 8 * (LAYERS * per_layer * H + embedding_and_head) + 4 * replicated


def test_sequence_parallel_gathers_and_scatters_instead() -> None:
    found = sums("--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel")
    embedding = H
    assert found[TENSOR, ALL_GATHER] == 8 * (LAYERS * 6 * H + embedding)
    assert found[TENSOR, REDUCE_SCATTER] == 8 * (LAYERS * 4 * H + embedding)


def test_stages_send_hidden_states_and_share_the_embedding() -> None:
    flags = "--world-size 4 --pipeline-model-parallel-size 4"
    assert sums(flags, rank=0)[STAGES, SEND] == 8 * H
    assert sums(flags, rank=1)[STAGES, SEND] == 2 * 8 * H
    assert sums(flags, rank=0)[TIED, ALL_REDUCE] == 4 * VOCAB * HIDDEN
    assert sums(flags, rank=1)[TIED, ALL_REDUCE] == 0
    shared = sums(f"{flags} --world-size 8 --zero-stage 1", rank=3)
    assert shared[TIED, ALL_REDUCE] == 4 * VOCAB * HIDDEN / 2, "each replica owns a half"
    # With DualPipeV the first rank has the last stage too.
    v = "--world-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule dualpipev"
    assert sums(v, rank=0)[TIED, ALL_REDUCE] == 0
    # With interleaved stages 0 and 2 on rank 0, the activation of stage 1 and the gradient of 3 come back.
    loop = "--world-size 2 --pipeline-model-parallel-size 2 --virtual-pipeline-stages 2"
    assert sums(loop, rank=0)[STAGES, SEND] == sums(loop, rank=1)[STAGES, SEND] == 3 * 8 * H
    assert sums(loop, rank=0)[TIED, ALL_REDUCE] == 4 * VOCAB * HIDDEN


def test_a_tensor_parallel_rank_sends_its_part() -> None:
    flags = "--world-size 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    table = 8 * (1 + 3 + 2 + 2 + 1)
    assert sums(flags, rank=0)[STAGES, SEND] == 8 * (H // 2 + table)
    assert sums(f"{flags} --sequence-parallel", rank=0)[STAGES, SEND] == 8 * H // 2


def test_groups_have_the_ranks_of_the_layout() -> None:
    layout = ParallelLayout.create(16, tp_size=2, pp_size=4, rank=5)  # pipe 1, data 0, tensor 1
    assert Exchange(TENSOR, ALL_REDUCE, "", 1).ranks(layout) == (4, 5)
    assert Exchange(DATA, ALL_REDUCE, "", 1).ranks(layout) == (5, 7)
    assert Exchange(STAGES, SEND, "", 1, peer=2).ranks(layout) == (9,)
    assert Exchange(TIED, ALL_REDUCE, "", 1, peer=3).ranks(layout) == (5, 13)
    assert Exchange("model", ALL_REDUCE, "", 1).ranks(layout) == (0 + 0, 1, 4, 5, 8, 9, 12, 13)
    assert Exchange("pipeline", ALL_REDUCE, "", 1).ranks(layout) == (1, 5, 9, 13)
