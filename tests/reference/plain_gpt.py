"""A GPT in plain PyTorch, written the simplest way: the reference for every layout.

It shares no code with `megatron`: weights come in as a dict of full tensors under the names of the
pipeline's layer list, attention is spelled out, the loss is `F.cross_entropy`.
"""

import math

import torch
import torch.nn.functional as F

from tests.reference.plain_experts import expert_mlp


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
):
    """tokens [batch, seq] -> logits [batch, seq, vocab] of the true vocabulary.

    groups: number of head groups that share keys and values. rotary: arguments of `rotate`. window: number of
    tokens that a token attends to, in the layers that have a W in `pattern`; the others have an F, and the
    arguments `full` of `rotate`. A norm without bias is an RMS norm. `weights` decides whether linear
    layers have biases, attention has norms of queries and keys, and the head is untied. scale_embeddings:
    by sqrt(hidden). zero_centered: norms multiply by 1 + weight. experts: `PlainExperts` of the layers that
    have a router.
    """
    embedding = weights["tied_modules.embed.word_embeddings.weight"]
    x = embedding[tokens]
    seq, hidden = x.shape[1], x.shape[2]
    if scale_embeddings:
        x = x * hidden**0.5
    if zero_centered:
        norms = ("layernorm.weight", f"{layers + 4}.weight")
        weights = {name: w + 1 if name.endswith(norms) else w for name, w in weights.items()}
    if embed_norm:
        name = "tied_modules.embed.word_embeddings.norm"
        x = F.layer_norm(x, (hidden,), weights[f"{name}.weight"], weights[f"{name}.bias"])
    if positions == "absolute":
        x = x + weights["tied_modules.embed.position_embeddings.weight"][:seq]
    for index in range(3, 3 + layers):

        def attend(x, index=index):
            is_full = pattern[(index - 3) % len(pattern)] == "F"
            angles, width = (full, None) if is_full else (rotary, window)
            return attention(weights, index, x, heads, groups or heads, positions, angles or {}, width)

        def feed(x, index=index):
            return mlp(weights, index, x, glu, exact_gelu, experts)

        def normed(name, x, index=index):
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
    x = norm(weights, str(layers + 4), x)
    return x @ weights.get(f"{layers + 5}.lm_head.weight", embedding)[:vocab].T


def norm(weights, name, x):
    if f"{name}.bias" not in weights:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])


def linear(weights, name, x):
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def attention(weights, index, x, heads, groups, positions, rotary, window=None):
    batch, seq, hidden = x.shape
    dim, shared = hidden // heads, heads // groups
    qkv = linear(weights, f"{index}.self_attention.query_key_value", x)
    qkv = qkv.reshape(batch, seq, groups, shared + 2, dim).transpose(1, 2)  # [batch, groups, seq, ., dim]
    q = torch.stack([qkv[:, h // shared, :, h % shared] for h in range(heads)], 1)  # [batch, heads, seq, dim]
    k, v = (torch.stack([qkv[:, h // shared, :, shared + i] for h in range(heads)], 1) for i in range(2))
    q = heads_norm(weights, f"{index}.self_attention.q_layernorm", q)
    k = heads_norm(weights, f"{index}.self_attention.k_layernorm", k, shared)
    if positions == "rotary":
        q, k = rotate(q, **rotary), rotate(k, **rotary)
    scores = q @ k.transpose(2, 3) / math.sqrt(dim)
    if positions == "alibi":
        slopes = torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)])  # heads: a power of two
        distance = torch.arange(seq)[None, :] - torch.arange(seq)[:, None]
        scores = scores + slopes[None, :, None, None] * distance
    allowed = torch.ones(seq, seq, dtype=torch.bool).tril()
    if window is not None:
        allowed = allowed.triu(1 - window)
    scores = scores.masked_fill(~allowed, float("-inf"))
    context = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, seq, hidden)
    return linear(weights, f"{index}.self_attention.dense", context)


def heads_norm(weights, name, x, copies=1):
    """Returns x [batch, heads, seq, dim] with each head repeated `copies` times."""
    if f"{name}.weight" not in weights:
        return x
    if len(weights[f"{name}.weight"]) == x.shape[-1]:
        return norm(weights, name, x)
    first = x[:, ::copies]
    joined = norm(weights, name, first.transpose(1, 2).flatten(2))
    return joined.unflatten(2, first.shape[1::2]).transpose(1, 2).repeat_interleave(copies, 1)


def rotate(x, base=10000.0, part=1.0, interleaved=False, factor=1.0):
    """Complex multiplication of the pairs (x[i], x[i + dim / 2]), or of neighbors, of the first `part`; the
    angles are divided by `factor`."""
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
        gates = {"geglu": F.gelu, "swiglu": F.silu, "reglu": F.relu, "liglu": lambda g: g}
        gates["geglu_tanh"] = lambda g: F.gelu(g, approximate="tanh")
        return value * gates[glu](gate)

    if f"{index}.mlp.router.weight" in weights:
        return expert_mlp(experts, weights, index, x, activation)
    wide = activation(linear(weights, f"{index}.mlp.dense_h_to_4h", x))
    return linear(weights, f"{index}.mlp.dense_4h_to_h", wide)


def train_plain_gpt(weights, batches, *, lr, vocab, decay=0.01, clip=1.0, experts=None, **model):
    """Trains on `batches`, a list of (tokens, labels) global batches; returns [(loss, grad norm), ...]."""
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
        logits = plain_gpt_logits(weights, tokens, vocab=vocab, experts=experts, **model)
        loss = F.cross_entropy(logits.reshape(-1, vocab), labels.reshape(-1))
        optimizer.zero_grad()
        (loss if experts is None else loss + experts.losses).backward()
        total = torch.nn.utils.clip_grad_norm_(weights.values(), clip)
        optimizer.step()
        if experts is not None:
            experts.end_step()
        history.append((loss.item(), total.item()))
    return history
