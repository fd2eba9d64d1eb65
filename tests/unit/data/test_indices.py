"""Compares the sample order with the documented algorithm, one token and one epoch at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.indices import build_sample_index, build_sample_order, plan_epochs


def slow_boundaries(sizes: list[int], order: list[int], seq_length: int, num_samples: int) -> list[list[int]]:
    """Returns the boundaries of samples. Walks over the documents, takes seq_length + 1 tokens at a time and
    steps back one token."""
    rows, position, offset = [[0, 0]], 0, 0
    for _ in range(num_samples):
        lacking = seq_length + 1
        while True:
            available = sizes[order[position]] - offset
            if available >= lacking:
                offset += lacking - 1
                break
            lacking -= available
            position, offset = position + 1, 0
        rows.append([position, offset])
    return rows


def slow_order(
    sizes: list[int], documents: range, seq_length: int, num_samples: int, seed: int
) -> tuple[list[int], list[list[int]], list[int]]:
    tokens = sum(sizes[i] for i in documents)
    epochs = 1
    while (epochs * tokens - 1) // seq_length < num_samples:
        epochs += 1
    total = (epochs * tokens - 1) // seq_length
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    separate = epochs > 1 and num_samples - before_last < int(0.95 * ((tokens - 1) // seq_length))

    generator = np.random.RandomState(seed)

    def shuffled(values: list[int]) -> list[int]:
        array = np.array(values, dtype=np.int64)
        generator.shuffle(array)
        return array.tolist()

    if separate:
        order = shuffled(list(documents) * (epochs - 1))
        order += shuffled(list(documents))
    else:
        order = shuffled(list(documents) * epochs)
    rows = slow_boundaries(sizes, order, seq_length, total)
    if separate:
        shuffle = shuffled(list(range(before_last)))
        shuffle += shuffled(list(range(before_last, total)))
    else:
        shuffle = shuffled(list(range(total)))
    return order, rows, shuffle


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], range, int, int, int]:
    sizes = draw(st.lists(st.one_of(st.just(0), st.integers(0, 40)), min_size=1, max_size=12))
    start = draw(st.integers(0, len(sizes) - 1))
    documents = range(start, draw(st.integers(start + 1, len(sizes))))
    tokens = sum(sizes[i] for i in documents)
    if tokens < 2:
        sizes[start] += 2
        tokens += 2
    seq_length = draw(st.integers(1, min(tokens - 1, 30)))
    return sizes, documents, seq_length, draw(st.integers(1, 200)), draw(st.integers(0, 2**32 - 1))


@settings(deadline=None, max_examples=300)
@given(cases())
def test_the_order_is_the_documented_one(case: tuple[list[int], range, int, int, int]) -> None:
    sizes, documents, seq_length, num_samples, seed = case
    array = np.array(sizes, dtype=np.int32)
    plan = plan_epochs(int(array[documents.start : documents.stop].sum()), seq_length, num_samples, 0.95)
    index = build_sample_order(array, documents, seq_length, seed, plan)
    order, rows, shuffle = slow_order(sizes, documents, seq_length, num_samples, seed)
    assert index.documents.tolist() == order
    assert index.samples.tolist() == rows
    assert index.shuffle.tolist() == shuffle
    assert len(shuffle) == plan.total_samples >= num_samples


@pytest.mark.parametrize(
    "num_samples, separate",
    [(100, False), (101, True), (194, True), (195, False), (200, False), (201, True), (295, False)],
)
def test_a_last_epoch_used_by_less_than_95_percent_is_shuffled_separately(
    num_samples: int, separate: bool
) -> None:
    # 1001 tokens make 100 samples of 10 + 1. Without the last epoch there are 100, 200, ... samples.
    plan = plan_epochs(1001, 10, num_samples, 0.95)
    assert plan.num_epochs == -(-num_samples // 100)
    assert plan.separate_last_epoch is separate


def test_golden_order() -> None:
    """The order must not change, so that a run can always resume. numpy guarantees RandomState's stream."""
    sizes = np.array([5, 0, 7, 3, 9], dtype=np.int32)
    index = build_sample_order(sizes, range(5), 4, 1234, plan_epochs(24, 4, 8, 0.95))
    assert index.documents.tolist() == [4, 0, 1, 2, 3, 3, 2, 1, 0, 4]
    assert index.samples.tolist() == [
        [0, 0],
        [0, 4],
        [0, 8],
        [1, 3],
        [3, 2],
        [3, 6],
        [5, 0],
        [6, 1],
        [6, 5],
        [8, 2],
        [9, 1],
        [9, 5],
    ]
    assert index.shuffle.tolist() == [2, 0, 4, 3, 1, 6, 10, 7, 5, 9, 8]


def test_the_first_sample_begins_in_the_first_document_even_if_it_is_empty() -> None:
    sizes = np.array([0, 3, 0, 4], dtype=np.int32)
    rows = build_sample_index(sizes, np.arange(4), 3, 2)
    assert rows.tolist() == [[0, 0], [3, 0], [3, 3]] == slow_boundaries([0, 3, 0, 4], [0, 1, 2, 3], 3, 2)


def test_token_counts_beyond_32_bits_do_not_overflow() -> None:
    sizes = np.full(5, 2**31 - 1, dtype=np.int32)
    seq_length = 2**20
    total = (5 * (2**31 - 1) - 1) // seq_length
    rows = build_sample_index(sizes, np.arange(5), seq_length, total)
    last_token = int(rows[-1, 0]) * (2**31 - 1) + int(rows[-1, 1])
    assert last_token == total * seq_length > 2**33


def test_planning_many_epochs_takes_constant_time() -> None:
    plan = plan_epochs(tokens_per_epoch=3, seq_length=2048, num_samples=10**12, last_epoch_threshold=0.95)
    assert (plan.num_epochs * 3 - 1) // 2048 >= 10**12 > ((plan.num_epochs - 1) * 3 - 1) // 2048
