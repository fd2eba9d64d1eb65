"""Latent attention in plain PyTorch, one head at a time: the reference for `LatentSelfAttention`."""

import math

import torch


def yarn_frequency(dim, base, factor, original, slow, fast):
    """Returns the frequencies of DeepSeek's `DeepseekV2YarnRotaryEmbedding`, by its formulas."""
    frequency = base ** (-torch.arange(0, dim, 2) / dim)

    def place(rotations):
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(place(fast)), 0), min(math.ceil(place(slow)), dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequency / factor * ramp + frequency * (1 - ramp)


def latent_attention(
    weights,
    index,
    x,
    heads,
    norm,
    *,
    plain=128,
    rotated=64,
    value=128,
    base=10000.0,
    yarn=None,
    mscale=1.0,
    mscale_all=0.0,
    window=None,
    largest=None,
):
    """Computes the attention. x: [batch, seq, hidden]; the result has this shape, too. norm: function of
    (weights, name, vector). plain, rotated, value: sizes of the parts of a head. yarn: further arguments of
    `yarn_frequency`. largest: as in `plain_gpt.Variant`."""
    name = f"{index}.self_attention"
    batch, seq, _ = x.shape

    def linear(part, x):
        return x @ weights[f"{name}.{part}.weight"].T + weights.get(f"{name}.{part}.bias", 0.0)

    def normed(part, x):
        return norm(weights, f"{name}.{part}", x) if f"{name}.{part}.weight" in weights else x

    frequency, turn, scale = base ** (-torch.arange(0, rotated, 2) / rotated), 1.0, (plain + rotated) ** -0.5
    if yarn is not None:
        frequency = yarn_frequency(rotated, base, **yarn)
        grows = [0.1 * m * math.log(yarn["factor"]) + 1 for m in (mscale, mscale_all)]
        turn, scale = grows[0] / grows[1], scale * grows[1] ** 2
    angle = torch.arange(seq)[:, None] * frequency[None, :]
    rotation = torch.polar(torch.full_like(angle, turn), angle)

    def rotate(x):
        pairs = torch.view_as_complex(x.reshape(batch, seq, -1, 2))
        return torch.view_as_real(pairs * rotation).flatten(-2)

    if f"{name}.q_proj.weight" in weights:
        queries = linear("q_proj", x)
    else:
        queries = linear("q_up_proj", normed("q_layernorm", linear("q_down_proj", x)))
    down = linear("kv_down_proj", x)
    shared = rotate(down[..., -rotated:])
    both = linear("kv_up_proj", normed("kv_layernorm", down[..., :-rotated]))
    allowed = torch.ones(seq, seq, dtype=torch.bool).tril()
    if window is not None:
        allowed = allowed.triu(1 - window)
    outputs, maxima = [], []
    for q, kv in zip(queries.chunk(heads, -1), both.chunk(heads, -1), strict=True):
        scores = q[..., :plain] @ kv[..., :plain].transpose(1, 2)
        scores = (scores + rotate(q[..., plain:]) @ shared.transpose(1, 2)) * scale
        scores = scores.masked_fill(~allowed, float("-inf"))
        maxima.append(scores.max())
        outputs.append(scores.softmax(-1) @ kv[..., -value:])
    if largest is not None:
        largest.append(torch.stack(maxima))
    return linear("dense", torch.cat(outputs, -1))
