"""The bytes that a rank sends in a step, counted at torch.distributed, equal the numbers in
docs/questions.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.model.layer_list import FIRST_TRANSFORMER_LAYER, final_norm_of
from tests.distributed.test_optimizer import reduce_scatters
from tests.support.layouts import (
    GLOBAL_BATCH,
    SEQ,
    Row,
    build_engine,
    build_model,
    config_of,
    no_messages_in_default_group,
    sample_tokens,
    train,
)
from tests.support.pool import run_world

HIDDEN = 32
LAYER_PARAMETERS = 12 * HIDDEN**2 + 13 * HIDDEN
ACTIVATION_BYTES = 2 * SEQ * HIDDEN
"""Bytes of one layer's output for a micro-batch of one sample, in bf16."""


@contextmanager
def counted_bytes() -> Iterator[dict[str, float]]:
    """Counts the bytes that this rank sends with ring collectives, by collective. Point-to-point messages
    count as 'send'."""
    sent: dict[str, float] = {}
    kept: dict[str, Callable[..., Any]] = {}

    def count(name: str, payload: int, factor: Callable[[int], float]) -> None:
        original = kept[name] = getattr(dist, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            tensor = kwargs.get("tensor", args[payload] if len(args) > payload else None)
            size = dist.get_world_size(kwargs.get("group"))
            bytes_ = tensor.numel() * tensor.element_size() * factor(size)
            sent[name] = sent.get(name, 0) + bytes_
            return original(*args, **kwargs)

        setattr(dist, name, counting)

    count("all_reduce", 0, lambda size: 2 * (size - 1) / size)
    new = hasattr(dist, "all_gather_single")  # the names of torch 2.13
    count("all_gather_single" if new else "all_gather_into_tensor", 0, lambda size: (size - 1) / size)
    count("reduce_scatter_single" if new else "reduce_scatter_tensor", 1, lambda size: (size - 1) / size)
    exchange = kept["batch_isend_irecv"] = dist.batch_isend_irecv

    def counting_messages(messages: list[dist.P2POp]) -> list[dist.Work]:
        own = [message.tensor for message in messages if message.op is dist.isend]
        sent["send"] = sent.get("send", 0) + sum(x.numel() * x.element_size() for x in own)
        return exchange(messages)

    dist.batch_isend_irecv = counting_messages
    try:
        yield sent
    finally:
        for name, original in kept.items():
            setattr(dist, name, original)


def sent_in_a_step(row: Row, num_layers: int) -> dict[str, float]:
    torch.manual_seed(0)
    engine = build_engine(config_of(row, model={"num_layers": num_layers}))
    with reduce_scatters():
        train(engine, [0])  # the first step also makes the optimizer's state
        with counted_bytes() as sent:
            train(engine, [1])
    return sent


def sent_per_layer(row: Row) -> float:
    """Returns the bytes that each additional layer adds on rank 0."""
    few, many = (run_world(row.world_size, sent_in_a_step, row, layers)[0] for layers in (2, 4))
    return (sum(many.values()) - sum(few.values())) / 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Row(dp=2, zero=1, precision="bf16"), (4 + 2) * LAYER_PARAMETERS / 2),
        (Row(dp=2, zero=3, precision="bf16"), (2 + 2 + 4) * LAYER_PARAMETERS * GLOBAL_BATCH / 2 / 2),
        (Row(tp=2, precision="bf16"), 8 * ACTIVATION_BYTES * GLOBAL_BATCH / 2),
        # The recomputation stops before the last all-reduce of a layer.
        (Row(tp=2, precision="bf16", recompute=True), 10 * ACTIVATION_BYTES * GLOBAL_BATCH / 2),
    ],
    ids=str,
)
def test_bytes_per_layer(row: Row, expected: float) -> None:
    assert sent_per_layer(row) == pytest.approx(expected, rel=0.05)


@pytest.mark.full
def test_bytes_between_stages_do_not_depend_on_the_number_of_layers() -> None:
    row = Row(pp=3, precision="bf16")
    for layers in (3, 6):
        first, middle, last = run_world(3, sent_in_a_step, row, layers)
        assert first["send"] == last["send"] == ACTIVATION_BYTES * GLOBAL_BATCH
        assert middle["send"] == 2 * ACTIVATION_BYTES * GLOBAL_BATCH


def sends_in(is_default: bool) -> None:
    ranks = dist.group.WORLD if is_default else dist.new_group([0, 1])
    with no_messages_in_default_group():
        operation = dist.isend if dist.get_rank() == 0 else dist.irecv
        message = dist.P2POp(operation, torch.zeros(1), 1 - dist.get_rank(), ranks)
        for work in dist.batch_isend_irecv([message]):
            work.wait()


def test_the_layout_tests_find_a_message_in_the_default_group() -> None:
    """`train_layout`, which all tests of layouts use, raises an error for such a message."""
    run_world(2, sends_in, False)
    with pytest.raises(Exception, match="in the default group"):
        run_world(2, sends_in, True)


def wrong_inputs(row: Row, changes: dict[str, dict[str, Any]]) -> list[str]:
    """Runs a micro-batch through all layers. Returns the layers between embedding and head (included) whose
    input does not match its description."""
    config = config_of(row, **changes)
    _, module = build_model(config)
    layer_io, wrong = sample_tokens(0, 2)[:, :SEQ], []
    for index, function in module.functions_of_chunk(0).items():
        if FIRST_TRANSFORMER_LAYER - 1 <= index <= final_norm_of(config.model.num_layers) + 1:
            tensors = [layer_io] if isinstance(layer_io, torch.Tensor) else layer_io
            found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
            expected = module.context.input_specs(index, 2, SEQ)
            wrong += [f"layer {index}: {found}, not {expected}"] * (found != expected)
        layer_io = function(layer_io)
    return wrong


DOCUMENTS = {"data": {"reset_attention_mask": True}}
AFTER_NORM = {"model": {"apply_residual_connection_post_layernorm": True}}


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        (Row(), {}),
        (Row(precision="bf16"), {**DOCUMENTS, "precision": {"bf16": True, "fp32_residual_connection": True}}),
        (
            Row(precision="bf16"),
            {**AFTER_NORM, "precision": {"bf16": True, "fp32_residual_connection": True}},
        ),
        (Row(tp=2, precision="fp16"), {"parallel": {"sequence_parallel": True}}),
        (Row(cp=2), DOCUMENTS),
    ],
)
def test_inputs_of_layers_have_the_described_shapes(row: Row, changes: dict[str, dict[str, Any]]) -> None:
    """A stage allocates its input from this description, without a message from the previous stage."""
    assert run_world(row.world_size, wrong_inputs, row, changes) == [[]] * row.world_size
