"""The Triton kernels of `megatron.kernels.rotary`.

A head has three parts: the first elements of its rotated pairs (x), the second elements of these pairs (y),
and the elements that are not rotated (z). Tiles are [heads, columns of a part].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotary_kernel(
    projected,
    query,
    key,
    value,
    gate,
    query_weight,
    key_weight,
    query_beta,
    key_beta,
    cosine,
    sine,
    batch,
    groups,
    group,
    table_batch,
    epsilon,
    ZERO_CENTERED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Moves some heads of a token, per program, from `projected` to query, key, value and gate, and rotates
    queries and keys. With weights it first applies a norm to each head; without betas this is an RMS norm."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    gates = 0
    if gate is not None:
        gates = group
    size = group + gates + 2
    inside = head < groups * size
    is_query, is_key = head % size < group, head % size == group + gates
    columns, exists = _columns(HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS, BLOCK_REST)
    heads = projected + ((token * groups * size + head) * HEAD_DIM)[:, None]
    raw = _load_parts(heads, columns, exists, inside)
    parts = [part.to(tl.float32) for part in raw]
    if query_weight is not None:
        parts, _ = _normalized(parts, exists, inside, epsilon, query_beta is None, HEAD_DIM)
        factors = _of_heads(query_weight, key_weight, is_query, columns, exists, ZERO_CENTERED)
        parts = [parts[i] * factors[i] for i in (0, 1, 2)]
        if query_beta is not None:
            betas = _of_heads(query_beta, key_beta, is_query, columns, exists, False)
            parts = [parts[i] + betas[i] for i in (0, 1, 2)]
    cos, sin = _angles(cosine, sine, token, batch, table_batch, columns[0], exists[0], ROTARY_DIM)
    x, y, z = parts
    rotated = (x * cos - y * sin, y * cos + x * sin, z)
    rotates = (is_query | is_key)[:, None]
    places = _places(token, head, inside, groups, group, gates, HEAD_DIM)
    for i in tl.static_range(3):
        result = tl.where(rotates, rotated[i].to(projected.dtype.element_ty), raw[i])
        _store_heads((query, key, value, gate), places, columns[i], exists[i], result)


@triton.jit
def rotary_backward_kernel(
    projected,
    query,
    key,
    value,
    gate,
    query_weight,
    key_weight,
    query_beta,
    cosine,
    sine,
    partial_sums,
    tokens,
    batch,
    groups,
    group,
    table_batch,
    epsilon,
    ZERO_CENTERED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Writes the gradient of `projected` from the gradients of query, key, value and gate. A program computes
    some heads of `BLOCK_TOKENS` tokens, one token after the other.

    With weights the gradient overwrites `projected`. partial_sums[program]: the sums of the gradients of the
    query weight, the key weight and their betas.
    """
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    gates = 0
    if gate is not None:
        gates = group
    size = group + gates + 2
    is_query, is_key = head % size < group, head % size == group + gates
    columns, exists = _columns(HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS, BLOCK_REST)
    if query_weight is not None:
        factors = _of_heads(query_weight, key_weight, is_query, columns, exists, ZERO_CENTERED)
        of_pairs = tl.zeros([BLOCK_HEADS, BLOCK_PAIRS], tl.float32)
        sums = [of_pairs, of_pairs, tl.zeros([BLOCK_HEADS, BLOCK_REST], tl.float32)]
        beta_sums = sums
    for step in range(BLOCK_TOKENS):
        token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + step
        inside = (head < groups * size) & (token < tokens)
        places = _places(token, head, inside, groups, group, gates, HEAD_DIM)
        raw = [_load_heads((query, key, value, gate), places, columns[i], exists[i]) for i in (0, 1, 2)]
        dx, dy, dz = [part.to(tl.float32) for part in raw]
        in_table = exists[0] & (token < tokens)
        cos, sin = _angles(cosine, sine, token, batch, table_batch, columns[0], in_table, ROTARY_DIM)
        grads = [dx * cos + dy * sin, dy * cos - dx * sin, dz]
        heads = projected + ((token * groups * size + head) * HEAD_DIM)[:, None]
        if query_weight is not None:
            loaded = [part.to(tl.float32) for part in _load_parts(heads, columns, exists, inside)]
            normed, rate = _normalized(loaded, exists, inside, epsilon, query_beta is None, HEAD_DIM)
            sums = [sums[i] + grads[i] * normed[i] for i in (0, 1, 2)]
            if query_beta is not None:
                beta_sums = [beta_sums[i] + grads[i] for i in (0, 1, 2)]
            grads = [grads[i] * factors[i] for i in (0, 1, 2)]
            grads = _norm_gradient(grads, normed, rate, query_beta is None, HEAD_DIM)
        rotates = (is_query | is_key)[:, None]
        for i in tl.static_range(3):
            result = tl.where(rotates, grads[i].to(projected.dtype.element_ty), raw[i])
            tl.store(heads + columns[i], result, mask=inside[:, None] & exists[i])
    if query_weight is not None:
        program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        place = partial_sums + program * (2 if query_beta is None else 4) * HEAD_DIM
        _store_sums(place, sums, is_query, is_key, columns, exists, HEAD_DIM)
        if query_beta is not None:
            _store_sums(place + 2 * HEAD_DIM, beta_sums, is_query, is_key, columns, exists, HEAD_DIM)


@triton.jit
def _columns(
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Returns the columns of the three parts of a head, and masks of the columns that exist."""
    pair, rest = tl.arange(0, BLOCK_PAIRS), ROTARY_DIM + tl.arange(0, BLOCK_REST)
    first, second = pair, pair + ROTARY_DIM // 2
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    in_pairs = pair < ROTARY_DIM // 2
    return (first, second, rest), (in_pairs, in_pairs, rest < HEAD_DIM)


@triton.jit
def _load_parts(heads, columns, exists, inside):
    return [tl.load(heads + columns[i], mask=inside[:, None] & exists[i], other=0.0) for i in (0, 1, 2)]


@triton.jit
def _places(token, head, inside, groups, group, gates, HEAD_DIM: tl.constexpr):
    """Returns the offsets of a token's heads in query, in key and value, and in gate, and masks of the heads
    that belong to query, key, value and gate."""
    index, place = head // (group + gates + 2), head % (group + gates + 2)
    of_query = ((token * groups * group + index * group + place) * HEAD_DIM)[:, None]
    of_group = ((token * groups + index) * HEAD_DIM)[:, None]
    is_query = (inside & (place < group))[:, None]
    is_gate = (inside & (place >= group) & (place < group + gates))[:, None]
    is_key = (inside & (place == group + gates))[:, None]
    is_value = (inside & (place > group + gates))[:, None]
    return of_query, of_group, of_query - group * HEAD_DIM, is_query, is_key, is_value, is_gate


@triton.jit
def _load_heads(tensors, places, column, in_columns):
    """Loads a part of the heads. tensors: query, key, value and gate (None: no gate)."""
    query, key, value, gate = tensors
    of_query, of_group, of_gate, is_query, is_key, is_value, is_gate = places
    x = tl.load(query + of_query + column, mask=is_query & in_columns, other=0.0)
    k = tl.load(key + of_group + column, mask=is_key & in_columns, other=0.0)
    v = tl.load(value + of_group + column, mask=is_value & in_columns, other=0.0)
    x = tl.where(is_query, x, tl.where(is_key, k, v))
    if gate is not None:
        gates = tl.load(gate + of_gate + column, mask=is_gate & in_columns, other=0.0)
        x = tl.where(is_gate, gates, x)
    return x


@triton.jit
def _store_heads(tensors, places, column, in_columns, x):
    query, key, value, gate = tensors
    of_query, of_group, of_gate, is_query, is_key, is_value, is_gate = places
    if gate is not None:
        tl.store(gate + of_gate + column, x, mask=is_gate & in_columns)
    tl.store(query + of_query + column, x, mask=is_query & in_columns)
    tl.store(key + of_group + column, x, mask=is_key & in_columns)
    tl.store(value + of_group + column, x, mask=is_value & in_columns)


@triton.jit
def _angles(cosine, sine, token, batch, table_batch, first, in_table, ROTARY_DIM: tl.constexpr):
    """Returns the cosines and sines of a token, each [1, pairs]."""
    place = (token // batch * table_batch + token % batch % table_batch) * ROTARY_DIM + first
    cos = tl.load(cosine + place, mask=in_table, other=0.0)
    sin = tl.load(sine + place, mask=in_table, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def _mean(x, y, z, HEAD_DIM: tl.constexpr):
    """Returns the mean over the elements of each head, [heads, 1]."""
    return ((tl.sum(x, 1) + tl.sum(y, 1) + tl.sum(z, 1)) / HEAD_DIM)[:, None]


@triton.jit
def _normalized(parts, exists, inside, epsilon, IS_RMS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Returns the heads minus their means, times their reciprocal deviations, and the reciprocal deviations
    [heads, 1]. An RMS norm subtracts no mean."""
    if not IS_RMS:
        mean = _mean(parts[0], parts[1], parts[2], HEAD_DIM)
        parts = [tl.where(inside[:, None] & exists[i], parts[i] - mean, 0.0) for i in (0, 1, 2)]
    x, y, z = parts
    rate = 1.0 / tl.sqrt_rn(_mean(x * x, y * y, z * z, HEAD_DIM) + epsilon)
    return (x * rate, y * rate, z * rate), rate


@triton.jit
def _norm_gradient(grads, normed, rate, IS_RMS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Returns the gradients of the heads. grads: the gradients of the normalized heads (see
    `_normalized`)."""
    x, y, z = [grads[i] * normed[i] for i in (0, 1, 2)]
    inner, shift = _mean(x, y, z, HEAD_DIM), 0.0
    if not IS_RMS:
        shift = _mean(grads[0], grads[1], grads[2], HEAD_DIM)
    return [(grads[i] - normed[i] * inner - shift) * rate for i in (0, 1, 2)]


@triton.jit
def _of_heads(of_query, of_key, is_query, columns, exists, ZERO_CENTERED: tl.constexpr):
    """Returns, for each part [heads, columns], the vector of queries for query heads and the vector of keys
    for key heads."""
    queries = [tl.load(of_query + columns[i], mask=exists[i], other=0.0).to(tl.float32) for i in (0, 1, 2)]
    keys = [tl.load(of_key + columns[i], mask=exists[i], other=0.0).to(tl.float32) for i in (0, 1, 2)]
    one = 1.0 if ZERO_CENTERED else 0.0
    return [tl.where(is_query[:, None], queries[i][None, :], keys[i][None, :]) + one for i in (0, 1, 2)]


@triton.jit
def _store_sums(place, sums, is_query, is_key, columns, exists, HEAD_DIM: tl.constexpr):
    """Stores the sums of [heads, columns] over the query heads and over the key heads."""
    for i in tl.static_range(3):
        of_query = tl.sum(tl.where(is_query[:, None], sums[i], 0.0), 0)
        of_key = tl.sum(tl.where(is_key[:, None], sums[i], 0.0), 0)
        tl.store(place + columns[i], of_query, mask=exists[i])
        tl.store(place + HEAD_DIM + columns[i], of_key, mask=exists[i])
