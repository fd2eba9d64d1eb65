"""Tests 8-bit Adam: accuracy and round trips of codes and scales, and optimizer steps with them."""

import pytest
import torch
from torch import nn

from megatron.optimizer import eight_bit
from megatron.optimizer.eight_bit import EightBitAdam
from megatron.optimizer.quantized import BLOCK_SIZE, MAPS, QuantizedMoment, code_values, kernels, quantize

CPU = torch.device("cpu")


def moments(name, blocks=300):
    """Returns elements of all magnitudes, including tiny ones and blocks of zeros."""
    values = torch.randn(blocks, BLOCK_SIZE, generator=torch.Generator().manual_seed(7))
    values *= torch.logspace(-18, 6, blocks)[:, None]
    values[5] = 0.0
    return (values.square() if name == "exp_avg_sq" else values).view(-1)


@pytest.mark.parametrize("name", MAPS)
def test_each_element_becomes_the_nearest_value_of_the_map(name):
    elements, values = moments(name), code_values(name, CPU)
    codes, scales = quantize(elements, values)
    rows = elements.view(-1, BLOCK_SIZE)
    assert torch.equal(scales, rows.abs().amax(dim=1))
    distances = ((rows / scales[:, None]).nan_to_num()[..., None] - values).abs()
    chosen = distances.gather(2, codes.view(rows.shape).long()[..., None])[..., 0]
    assert (chosen <= distances.amin(dim=2) + 1e-7).all()


@pytest.mark.parametrize("name", MAPS)
def test_dequantized_elements_are_quantized_to_the_same_bits(name):
    """The first quantization is done by bitsandbytes, as in the optimizer's step, or by `quantize`."""
    elements, values = moments(name), code_values(name, CPU)
    bnb_codes, state = kernels().quantize_blockwise(elements, code=values, blocksize=BLOCK_SIZE)
    for codes, scales in (quantize(elements, values), (bnb_codes, state.absmax)):
        restored = kernels().dequantize_blockwise(codes, absmax=scales, code=values, blocksize=BLOCK_SIZE)
        again = quantize(restored, values)
        zero = (scales == 0).repeat_interleave(BLOCK_SIZE)  # any code times a scale of 0
        assert torch.equal(again[0][~zero], codes[~zero]) and torch.equal(again[1], scales)


def test_a_block_whose_largest_magnitude_is_negative_does_not_shrink():
    """bitsandbytes alone would shrink the block at each round trip, so `quantize` recovers the scale."""
    elements, values = -torch.linspace(0.5, 1.0, BLOCK_SIZE), code_values("exp_avg", CPU)
    moment = QuantizedMoment("exp_avg", BLOCK_SIZE, CPU)
    moment.write(0, elements)
    first = moment.read(0, BLOCK_SIZE)
    for _ in range(5):
        moment.write(0, moment.read(0, BLOCK_SIZE))
        assert torch.equal(moment.read(0, BLOCK_SIZE), first)
    _, state = kernels().quantize_blockwise(first, code=values, blocksize=BLOCK_SIZE)
    assert state.absmax.item() < 0.995


@pytest.mark.parametrize("name", MAPS)
def test_a_fragment_leaves_zeros_in_the_rest_of_its_last_block(name):
    moment = QuantizedMoment(name, 3 * BLOCK_SIZE, CPU)
    moment.write(0, moments(name)[-3 * BLOCK_SIZE :])
    elements = moments(name)[-BLOCK_SIZE - 10 :]
    moment.write(BLOCK_SIZE, elements)
    kept = moment.read(BLOCK_SIZE, 2 * BLOCK_SIZE)
    assert not kept[elements.numel() :].any() and kept[: elements.numel()].any()
    assert torch.equal(moment.read(BLOCK_SIZE, elements.numel()), kept[: elements.numel()])


def steps(bits, count, length=5000):
    """Returns weight and optimizer state after `count` steps. bits: bits of the moments; None means PyTorch's
    AdamW."""
    weight = nn.Parameter(torch.linspace(-1, 1, length))
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    group = {"params": [weight], "moment_bits": bits, "weight_decay": 0.1}
    make = torch.optim.AdamW if bits is None else EightBitAdam
    optimizer = make([group], **settings, weight_decay=0.0)
    random = torch.Generator().manual_seed(1)
    for _ in range(count):
        weight.grad = weight.detach() + 0.1 * torch.randn(length, generator=random)
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


def test_32_bits_step_as_adamw_does():
    (weight, state), (expected, plain) = steps(32, 20), steps(None, 20)
    torch.testing.assert_close(weight, expected)
    torch.testing.assert_close(state["exp_avg"], plain["exp_avg"])
    assert torch.equal(state["step"], plain["step"])


def test_8_bits_step_nearly_as_adamw_does():
    (weight, state), (expected, plain) = steps(8, 20), steps(None, 20)
    moved = (expected - torch.linspace(-1, 1, 5000)).norm()
    assert 0 < (weight - expected).norm() < 0.02 * moved
    assert state["exp_avg"].codes.dtype == torch.uint8
    torch.testing.assert_close(state["exp_avg"].read(0, 5000), plain["exp_avg"], atol=0.05, rtol=0)


@pytest.mark.parametrize("bits", [8, 32])
def test_pieces_of_a_step_are_the_step(bits, monkeypatch):
    expected, _ = steps(bits, 3)
    monkeypatch.setattr(eight_bit, "_ELEMENTS_AT_ONCE", 2 * BLOCK_SIZE)
    assert torch.equal(steps(bits, 3)[0], expected)
