from types import SimpleNamespace

import pytest
import torch

from megatron.mpu import random
from megatron.mpu.mesh import Axis
from megatron.mpu.random import DropoutRNG, dropout

ONE = Axis("tp")


def rng(*samples, seed=1234):
    return DropoutRNG(seed, samples)


def kept(shape, p, dropout_rng, salt="3.hidden", **kwargs):
    return dropout(torch.ones(shape), p, dropout_rng, salt, tp_group=ONE, **{"batch_dim": 0, **kwargs}) != 0


def test_with_p_0_dropout_returns_its_argument():
    x = torch.randn(2, 3)
    assert dropout(x, 0.0, DropoutRNG(1), "a", batch_dim=0, tp_group=ONE) is x


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_fraction_p_is_dropped_in_every_row_and_column_and_the_rest_scaled(p):
    x = torch.rand(4, 256, 512) + 1
    y = dropout(x, p, rng(1, 2, 3, 4), "a", batch_dim=0, tp_group=ONE)
    keep = y != 0
    torch.testing.assert_close(y[keep], x[keep] / (1 - p))
    dropped = (~keep).double()
    for dims in ((0, 1, 2), (1, 2), (0, 1), (0, 2)):
        counts = dropped.sum(dims)
        expected = p * keep.numel() / counts.numel()
        # The bound is 5.5 standard deviations. The constant is for the tail of small counts.
        assert (counts - expected).abs().max() < 5.5 * (expected * (1 - p)) ** 0.5 + 10, dims


def test_neighbors_samples_salts_and_seeds_are_independent():
    shape = (1, 512, 512)
    mask = kept(shape, 0.5, rng(7)).double()[0] * 2 - 1
    others = {
        "next sample": kept(shape, 0.5, rng(8))[0],
        "sample 7 + 2**32": kept(shape, 0.5, rng(7 + 2**32))[0],
        "other salt": kept(shape, 0.5, rng(7), "4.hidden")[0],
        "other seed": kept(shape, 0.5, rng(7, seed=1235))[0],
        "next column": (mask > 0).roll(1, 1),
        "next row": (mask > 0).roll(1, 0),
        "32 columns further": (mask > 0).roll(32, 1),
        "diagonal": (mask > 0).roll((1, 1), (0, 1)),
        "transposed": (mask > 0).t(),
    }
    limit = 5 / mask.numel() ** 0.5
    for name, other in others.items():
        assert (mask * (other.double() * 2 - 1)).mean().abs() < limit, name
    # Groups of four elements are tested, since a hash that only sums two keys fails at the corners of a
    # rectangle.
    for dy, dx in ((1, 1), (1, 2), (2, 1), (16, 16)):
        corners = mask * mask.roll(dy, 0) * mask.roll(dx, 1) * mask.roll((dy, dx), (0, 1))
        assert corners.mean().abs() < 2 * limit, (dy, dx)
    # All rows differ, and all columns differ.
    for lines in (mask, mask.t()):
        assert (lines @ lines.t() / 512 - torch.eye(512)).abs().max() < 6.5 / 512**0.5


def test_runs_of_equal_values_have_the_lengths_of_coin_tosses():
    mask = kept((1, 1024, 1024), 0.5, rng(11)).flatten()
    for length in range(1, 9):
        windows = mask.unfold(0, length, length)
        for pattern in (torch.ones(length, dtype=torch.bool), torch.zeros(length, dtype=torch.bool)):
            share = (windows == pattern).all(1).double().mean().item()
            expected = 2.0**-length
            assert abs(share - expected) < 5 * (expected * (1 - expected) / len(windows)) ** 0.5


def test_a_sample_has_its_mask_in_every_micro_batch():
    together = kept((4, 6, 64), 0.3, rng(10, 11, 12, 13))
    for row, sample in enumerate((10, 11, 12, 13)):
        assert torch.equal(kept((1, 6, 64), 0.3, rng(sample))[0], together[row])
    assert torch.equal(kept((2, 6, 64), 0.3, rng(13, 10)), together[[3, 0]])


def test_the_position_of_the_batch_dimension_does_not_matter():
    batch_first = kept((3, 16, 64), 0.3, rng(4, 5, 6))
    sequence_first = kept((16, 3, 64), 0.3, rng(4, 5, 6), batch_dim=1)
    assert torch.equal(sequence_first.transpose(0, 1), batch_first)
    assert torch.equal(kept((16, 3, 64), 0.3, rng(4, 5, 6), batch_dim=-2), sequence_first)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shard_dim", [1, 3, -1, -2])
def test_the_masks_of_the_shards_make_the_mask_of_the_full_activation(size, shard_dim):
    shape = (2, 8, 12, 20)
    x = torch.rand(shape) + 1
    full = dropout(x, 0.4, rng(3, 4), "a", batch_dim=0, tp_group=ONE)
    parts = [
        dropout(
            part,
            0.4,
            rng(3, 4),
            "a",
            batch_dim=0,
            shard_dim=shard_dim,
            tp_group=Axis("tp", rank=rank, size=size),
        )
        for rank, part in enumerate(x.chunk(size, shard_dim))
    ]
    assert torch.equal(torch.cat(parts, shard_dim), full)


def test_a_replicated_activation_has_the_same_mask_on_all_ranks():
    x = torch.rand(2, 8, 12) + 1
    first, second = (
        dropout(x, 0.4, rng(3, 4), "a", batch_dim=0, tp_group=Axis("tp", rank=rank, size=2))
        for rank in (0, 1)
    )
    assert torch.equal(first, second)


def test_large_activations_are_masked_as_small_ones():
    large = kept((1, 40, 20000), 0.5, rng(5))  # more than one piece
    assert torch.equal(kept((1, 3, 20000), 0.5, rng(5)), large[:, :3])
    assert torch.equal(kept((1, 40, 100), 0.5, rng(5)), large[:, :, :100])


def test_recomputation_finds_the_samples_of_its_forward_pass():
    dropout_rng = rng(1, 2)
    before = kept((2, 4, 64), 0.5, dropout_rng)
    samples = dropout_rng.samples
    with dropout_rng.use_samples((3, 4)):
        with dropout_rng.use_samples(samples):
            assert torch.equal(kept((2, 4, 64), 0.5, dropout_rng), before)
        assert dropout_rng.samples == (3, 4)


def test_the_keys_of_a_micro_batch_are_copied_once_and_lie_at_multiples_of_16_bytes(monkeypatch):
    """The recomputation in the backward pass uses the copied keys even while the samples of another
    micro-batch are set."""
    dropout_rng, copies = DropoutRNG(7), []
    accelerator = SimpleNamespace(pin_memory=lambda x: copies.append(x) or x)
    monkeypatch.setattr(random, "get_accelerator", lambda: accelerator)
    salts = [f"{layer}.mlp" for layer in range(5)]

    def keys():
        return [dropout_rng.device_keys(salt, torch.device("cpu")) for salt in salts]

    with dropout_rng.use_samples((4, 5, 6)):  # the first micro-batch records the salts that layers use
        keys()
    copies.clear()
    with dropout_rng.use_samples((1, 2, 9)):
        found, samples = keys(), dropout_rng.samples
    assert len(copies) == 1
    with dropout_rng.use_samples((3, 4, 5)), dropout_rng.use_samples(samples):
        again = keys()
    assert len(copies) == 1
    for salt, one, other in zip(salts, found, again, strict=True):
        assert one.tolist() == other.tolist() == DropoutRNG(7, (1, 2, 9)).sample_keys(salt)
        assert one.data_ptr() % 16 == found[0].data_ptr() % 16


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="outside"):
        kept((1, 4), 1.0, rng(1))
    with pytest.raises(ValueError, match="3 samples, and the RNG 2"):
        kept((3, 4), 0.1, rng(1, 2))
    with pytest.raises(ValueError, match="last dimension"):
        kept((4, 3), 0.1, rng(1, 2, 3), batch_dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.3])
def test_kept_elements_are_scaled_in_fp32_so_that_the_mean_stays(dtype, p):
    x = (torch.rand(4, 512, 512, generator=torch.Generator().manual_seed(4)) + 1).to(dtype).requires_grad_()
    y = dropout(x, p, rng(1, 2, 3, 4), "a", batch_dim=0, tp_group=ONE)
    gradient = (torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) + 1).to(dtype)
    y.backward(gradient)
    keep = y.detach() != 0
    scale = torch.tensor(1 / (1 - p), dtype=torch.float32)
    for result, argument in ((y, x), (x.grad, gradient)):
        assert result.dtype == dtype and not result[~keep].any()
        assert torch.equal(result[keep], (argument[keep].float() * scale).to(dtype))
        kept_mean = argument.detach()[keep].double().mean()
        # A scale that is rounded to bf16 would change the mean by 1.5e-3. The scale is fp32, so each element
        # is rounded only once, and the rounding errors average out.
        assert result.detach()[keep].double().mean().item() * (1 - p) == pytest.approx(
            kept_mean.item(), rel=1e-4
        )


def test_a_large_fp16_value_that_is_dropped_is_zero_and_not_nan():
    x = torch.full((1, 64, 64), 65000.0, dtype=torch.float16)
    y = dropout(x, 0.5, rng(1), "a", batch_dim=0, tp_group=ONE)
    assert set(y.unique().tolist()) == {0.0, float("inf")}
