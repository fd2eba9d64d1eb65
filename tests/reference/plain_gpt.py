"""A GPT in plain PyTorch, written in the simplest way: the reference for every layout.

It shares no code with `megatron`. Weights are a dict of unsharded tensors with the names of the pipeline's
layer list. Attention is computed from its definition, and the loss is `F.cross_entropy`.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tests.reference.plain_experts import expert_mlp
from tests.reference.plain_latent import latent_attention

GLU_LIMIT = 0.05
"""The limit of the clamped gates and values with glu="quick_geglu". Many of them reach it."""


def plain_gpt_logits(
    weights,
    tokens,
    *,
    layers,
    heads,
    positions="absolute",
    embed_norm=False,
    glu=None,
    vocab,
    groups=None,
    rotary=None,
    arrangement="pre-norm",
    window=None,
    pattern="W",
    full=None,
    exact_gelu=False,
    scale_embeddings=False,
    zero_centered=False,
    experts=None,
    no_rope="R",
    variant=None,
    latent=None,
    next_tokens=(),
):
    """Returns the logits [batch, seq, vocab] of the vocabulary without padding. tokens: [batch, seq].

    next_tokens: for each layer of multi-token prediction, the tokens [batch, seq] whose embeddings it reads.
    With it the result is a list of logits, the main model's first. groups: number of head groups that share
    keys and values. rotary: arguments of `rotate`. window: number of tokens that a token attends to, in
    layers with a W in `pattern`. Layers with an F have no window; full: their arguments of `rotate`. A norm
    without bias is an RMS norm. `weights` decides whether linear layers have biases, attention has norms of
    queries and keys, and the head is untied. scale_embeddings: whether embeddings are multiplied by
    sqrt(hidden). zero_centered: whether norms multiply by 1 + weight. experts: `PlainExperts` of the layers
    with a router. no_rope: pattern whose layers with an N have no rotary embeddings. variant: the `Variant`
    of the attention. latent: arguments of `latent_attention`.
    """
    variant = variant or Variant()
    embedding = weights["tied_modules.embed.word_embeddings.weight"]
    seq, hidden = tokens.shape[1], embedding.shape[1]
    scale = hidden**0.5 if scale_embeddings else 1.0
    x = embedding[tokens] * scale
    if zero_centered:
        norms = ("layernorm.weight", f"{layers + 4}.weight", ".enorm.weight", ".hnorm.weight")
        weights = {name: w + 1 if name.endswith(norms) else w for name, w in weights.items()}
    if embed_norm:
        name = "tied_modules.embed.word_embeddings.norm"
        x = F.layer_norm(x, (hidden,), weights[f"{name}.weight"], weights[f"{name}.bias"])
    if positions == "absolute":
        x = x + weights["tied_modules.embed.position_embeddings.weight"][:seq]

    def layer(index, number, x):
        def attend(x):
            is_full = pattern[number % len(pattern)] == "F"
            angles, width = (full, None) if is_full else (rotary, window)
            kind = None if no_rope[number % len(no_rope)] == "N" else positions
            if latent is not None:
                return latent_attention(weights, index, x, heads, norm, window=width, **latent)
            sizes = {"heads": heads, "groups": groups or heads, "dim": hidden // heads}
            sizes |= {} if is_full else variant.windows or {}
            return attention(weights, index, x, sizes, kind, angles or {}, width, variant)

        def feed(x):
            return mlp(weights, index, x, glu, exact_gelu, experts)

        def normed(name, x):
            return norm(weights, f"{index}.{name}_layernorm", x)

        if arrangement == "pre-norm":
            x = x + attend(normed("input", x))
            x = x + feed(normed("post_attention", x))
        elif arrangement == "post-norm":
            x = x + normed("post_attention", attend(x))
            x = x + normed("post_mlp", feed(x))
        elif arrangement == "pre-post-norm":
            x = x + normed("post_attention", attend(normed("input", x)))
            x = x + normed("post_mlp", feed(normed("pre_mlp", x)))
        elif arrangement == "parallel":
            x = x + attend(normed("input", x)) + feed(normed("post_attention", x))
        elif arrangement == "parallel-one-norm":
            x = x + attend(normed("input", x)) + feed(normed("input", x))
        return x

    for number in range(layers):
        x = layer(number + 3, number, x)
    x = norm(weights, str(layers + 4), x)
    found, head = [x], weights.get(f"{layers + 5}.lm_head.weight", embedding)[:vocab]
    for index, later in enumerate(next_tokens, layers + 7):
        both = (norm(weights, f"{index}.enorm", embedding[later] * scale), norm(weights, f"{index}.hnorm", x))
        x = linear(weights, f"{index}.eh_proj", torch.cat(both, -1))
        x = norm(weights, f"{index}.final_layernorm", layer(f"{index}.transformer_layer", layers - 1, x))
        found.append(x)
    logits = [soft_capped(x @ head.T, variant.logit_cap) for x in found]
    return logits if next_tokens else logits[0]


@dataclass(frozen=True)
class Variant:
    """A variant of attention.

    sink: the additional score of off-by-one; a learnable sink is among the weights. has_gate: whether gates
    follow the queries of their group in the rows, with one element per head if `gates_heads`. softplus:
    whether softplus is the gates' activation. score_cap, logit_cap: bounds X of X * tanh(x / X). largest: a
    list that gets the largest score of each head [heads] of each layer. value_dim, value_scale: size of value
    heads, and their multiplier. windows: different heads, groups or dim of layers with a window.
    """

    sink: float | None = None
    has_gate: bool = False
    gates_heads: bool = False
    softplus: bool = False
    value_dim: int | None = None
    value_scale: float = 1.0
    windows: dict | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    largest: list | None = None


def soft_capped(x, cap):
    return x if cap is None else cap * torch.tanh(x / cap)


def norm(weights, name, x):
    if f"{name}.bias" not in weights:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])


def linear(weights, name, x):
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def attention(weights, index, x, sizes, positions, rotary, window=None, variant=Variant()):
    batch, seq, _ = x.shape
    heads, groups, dim = sizes["heads"], sizes["groups"], sizes["dim"]
    shared, value_dim = heads // groups, variant.value_dim or dim
    gate_dim = (1 if variant.gates_heads else value_dim) * variant.has_gate
    qkv = linear(weights, f"{index}.self_attention.query_key_value", x)
    parts = qkv.reshape(batch, seq, groups, -1).split((shared * dim, shared * gate_dim, dim, value_dim), -1)
    q, gate, k, v = (  # [batch, heads, seq, .]
        torch.stack(
            [part[:, :, h // shared].unflatten(-1, (count, size))[:, :, h % count] for h in range(heads)],
            1,
        )
        for part, count, size in zip(
            parts, (shared, shared, 1, 1), (dim, gate_dim, dim, value_dim), strict=True
        )
    )
    v = v * variant.value_scale
    q = heads_norm(weights, f"{index}.self_attention.q_layernorm", q)
    k = heads_norm(weights, f"{index}.self_attention.k_layernorm", k, shared)
    if positions == "rotary":
        q, k = rotate(q, **rotary), rotate(k, **rotary)
    scores = soft_capped(q @ k.transpose(2, 3) / math.sqrt(dim), variant.score_cap)
    if positions == "alibi":
        slopes = torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)])  # heads: a power of two
        distance = torch.arange(seq)[None, :] - torch.arange(seq)[:, None]
        scores = scores + slopes[None, :, None, None] * distance
    allowed = torch.ones(seq, seq, dtype=torch.bool).tril()
    if window is not None:
        allowed = allowed.triu(1 - window)
    scores = scores.masked_fill(~allowed, float("-inf"))
    if variant.largest is not None:
        variant.largest.append(scores.amax((0, 2, 3)))
    exponentials = scores.exp()
    total = exponentials.sum(-1, keepdim=True)
    name = f"{index}.self_attention.core_attention.softmax_offset"
    if name in weights or variant.sink is not None:
        total = total + weights.get(name, torch.full((heads,), variant.sink or 0.0)).exp()[:, None, None]
    context = exponentials / total @ v  # [batch, heads, seq, dim]
    if variant.has_gate:
        context = context * (1.0 + gate.exp()).log() if variant.softplus else context / (1.0 + (-gate).exp())
    context = context.transpose(1, 2).flatten(2)
    return linear(weights, f"{index}.self_attention.dense", context)


def heads_norm(weights, name, x, copies=1):
    """Returns x [batch, heads, seq, dim] with each head normalized by the norm `name`, if there is one, and
    repeated `copies` times."""
    if f"{name}.weight" not in weights:
        return x
    if len(weights[f"{name}.weight"]) == x.shape[-1]:
        return norm(weights, name, x)
    first = x[:, ::copies]
    joined = norm(weights, name, first.transpose(1, 2).flatten(2))
    return joined.unflatten(2, first.shape[1::2]).transpose(1, 2).repeat_interleave(copies, 1)


def rotate(x, base=10000.0, part=1.0, interleaved=False, factor=1.0):
    """Rotates pairs by a complex multiplication. The pairs are (x[i], x[i + dim / 2]), with `interleaved`
    neighbors, in the first `part` of the elements. The angles are divided by `factor`."""
    seq, dim = x.shape[-2], int(part * x.shape[-1])
    x, rest = x[..., :dim], x[..., dim:]
    frequency = base ** (-torch.arange(0, dim, 2) / dim) / factor
    angle = torch.arange(seq)[:, None] * frequency[None, :]
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    parts = (turned.real, turned.imag)
    return torch.cat((torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1), rest), -1)


def mlp(weights, index, x, glu, exact_gelu=False, experts=None):
    def activation(wide):
        if glu is None:
            return F.gelu(wide, approximate="none" if exact_gelu else "tanh")
        value, gate = wide.chunk(2, -1)
        if glu == "quick_geglu":  # clamped, with an offset, as in gpt-oss
            value, gate = value.clamp(-GLU_LIMIT, GLU_LIMIT) + 1, gate.clamp(max=GLU_LIMIT)
        gates = {"geglu": F.gelu, "swiglu": F.silu, "reglu": F.relu, "liglu": lambda g: g}
        gates["quick_geglu"] = lambda g: g * torch.sigmoid(1.702 * g)
        gates["geglu_tanh"] = lambda g: F.gelu(g, approximate="tanh")
        return value * gates[glu](gate)

    if f"{index}.mlp.router.weight" in weights:
        return expert_mlp(experts, weights, index, x, activation)
    wide = activation(linear(weights, f"{index}.mlp.dense_h_to_4h", x))
    return linear(weights, f"{index}.mlp.dense_4h_to_h", wide)


def train_plain_gpt(
    weights, batches, *, lr, vocab, decay=0.01, clip=1.0, experts=None, mtp_layers=0, mtp_factor=0.1, **model
):
    """Trains on `batches`, a list of (tokens, labels) of global batches. Returns (loss, grad norm) of each
    step, with `mtp_layers` followed by the loss of each layer of multi-token prediction."""
    weights = {
        name: w.clone().requires_grad_() for name, w in weights.items() if ".router.expert" not in name
    }
    decayed = [w for name, w in weights.items() if w.dim() > 1 and name.endswith("weight")]
    others = [w for name, w in weights.items() if w.dim() == 1 or name.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}], lr=lr
    )
    history = []
    for tokens, labels in batches:
        if experts is not None:
            experts.begin_step()
        later = [F.pad(labels[:, k:], (0, k)) for k in range(mtp_layers)]
        logits = plain_gpt_logits(weights, tokens, vocab=vocab, experts=experts, next_tokens=later, **model)
        logits = logits if later else [logits]
        loss, *others = [
            F.cross_entropy(each[:, : labels.shape[1] - k].reshape(-1, vocab), labels[:, k:].reshape(-1))
            for k, each in enumerate(logits)
        ]
        optimizer.zero_grad()
        total = loss + sum(mtp_factor / mtp_layers * other for other in others)
        (total if experts is None else total + experts.losses).backward()
        total = torch.nn.utils.clip_grad_norm_(weights.values(), clip)
        optimizer.step()
        if experts is not None:
            experts.end_step()
        history.append((loss.item(), total.item(), *(other.item() for other in others)))
    return history
