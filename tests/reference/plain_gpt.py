"""A GPT in plain PyTorch, written the simplest way: what every layout is compared with.

It shares no code with `megatron`: weights come in as a dict of full tensors under the names of the
pipeline's layer list, attention is spelt out, the loss is `F.cross_entropy`.
"""

import math

import torch
import torch.nn.functional as F


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
):
    """tokens [batch, seq] -> logits [batch, seq, vocab] of the true vocabulary.

    groups: of heads with common keys and values. rotary: arguments of `rotate`. Norms without bias are RMS
    norms; linear layers have the biases that `weights` has; a head of its own replaces the embedding.
    """
    embedding = weights["tied_modules.embed.word_embeddings.weight"]
    x = embedding[tokens]
    seq, hidden = x.shape[1], x.shape[2]
    if embed_norm:
        name = "tied_modules.embed.word_embeddings.norm"
        x = F.layer_norm(x, (hidden,), weights[f"{name}.weight"], weights[f"{name}.bias"])
    if positions == "absolute":
        x = x + weights["tied_modules.embed.position_embeddings.weight"][:seq]
    for index in range(3, 3 + layers):
        x = x + attention(
            weights,
            index,
            norm(weights, f"{index}.input_layernorm", x),
            heads,
            groups or heads,
            positions,
            rotary or {},
        )
        x = x + mlp(weights, index, norm(weights, f"{index}.post_attention_layernorm", x), glu)
    x = norm(weights, str(layers + 4), x)
    return x @ weights.get(f"{layers + 5}.lm_head.weight", embedding)[:vocab].T


def norm(weights, name, x):
    if f"{name}.bias" not in weights:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])


def linear(weights, name, x):
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def attention(weights, index, x, heads, groups, positions, rotary):
    batch, seq, hidden = x.shape
    dim, shared = hidden // heads, heads // groups
    qkv = linear(weights, f"{index}.self_attention.query_key_value", x)
    qkv = qkv.reshape(batch, seq, groups, shared + 2, dim).transpose(1, 2)  # [batch, groups, seq, ., dim]
    q = torch.stack([qkv[:, h // shared, :, h % shared] for h in range(heads)], 1)  # [batch, heads, seq, dim]
    k, v = (torch.stack([qkv[:, h // shared, :, shared + i] for h in range(heads)], 1) for i in range(2))
    if positions == "rotary":
        q, k = rotate(q, **rotary), rotate(k, **rotary)
    scores = q @ k.transpose(2, 3) / math.sqrt(dim)
    if positions == "alibi":
        slopes = torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)])  # heads: a power of two
        distance = torch.arange(seq)[None, :] - torch.arange(seq)[:, None]
        scores = scores + slopes[None, :, None, None] * distance
    allowed = torch.ones(seq, seq, dtype=torch.bool).tril()
    scores = scores.masked_fill(~allowed, float("-inf"))
    context = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, seq, hidden)
    return linear(weights, f"{index}.self_attention.dense", context)


def rotate(x, base=10000.0, part=1.0, interleaved=False):
    """Complex multiplication of the pairs (x[i], x[i + dim / 2]), or of neighbours, of the first `part`."""
    seq, dim = x.shape[-2], int(part * x.shape[-1])
    x, rest = x[..., :dim], x[..., dim:]
    frequency = base ** (-torch.arange(0, dim, 2) / dim)
    angle = torch.arange(seq)[:, None] * frequency[None, :]
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    parts = (turned.real, turned.imag)
    return torch.cat((torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1), rest), -1)


def mlp(weights, index, x, glu):
    wide = linear(weights, f"{index}.mlp.dense_h_to_4h", x)
    if glu is None:
        wide = F.gelu(wide, approximate="tanh")
    else:
        value, gate = wide.chunk(2, -1)
        wide = value * {"geglu": F.gelu, "swiglu": F.silu, "reglu": F.relu, "liglu": lambda g: g}[glu](gate)
    return linear(weights, f"{index}.mlp.dense_4h_to_h", wide)


def train_plain_gpt(weights, batches, *, lr, vocab, decay=0.01, clip=1.0, **model):
    """Trains on `batches`, a list of (tokens, labels) global batches; returns [(loss, grad norm), ...]."""
    weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
    decayed = [w for name, w in weights.items() if w.dim() == 2]
    others = [w for name, w in weights.items() if w.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}], lr=lr
    )
    history = []
    for tokens, labels in batches:
        logits = plain_gpt_logits(weights, tokens, vocab=vocab, **model)
        loss = F.cross_entropy(logits.reshape(-1, vocab), labels.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        total = torch.nn.utils.clip_grad_norm_(weights.values(), clip)
        optimizer.step()
        history.append((loss.item(), total.item()))
    return history
