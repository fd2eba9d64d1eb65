"""The Triton kernels of `megatron.kernels.rotary`.

A head is three parts: the first elements of its rotated pairs (x), their second elements (y), and the
elements that are not rotated (z). Tiles are [heads, columns of a part].
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
    """A program moves some heads of a token from `projected` to query, key, value and gate, and rotates
    queries and keys; with weights after a norm of each head, which without betas is an RMS norm."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    gates = 0
    if gate is not None:
        gates = group
    size = group + gates + 2
    inside = head < groups * size
    is_query, is_key = head % size < group, head % size == group + gates
    first, second, rest, in_pairs, in_rest = _columns(
        HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS, BLOCK_REST
    )
    heads = projected + ((token * groups * size + head) * HEAD_DIM)[:, None]
    raw_x = tl.load(heads + first, mask=inside[:, None] & in_pairs, other=0.0)
    raw_y = tl.load(heads + second, mask=inside[:, None] & in_pairs, other=0.0)
    raw_z = tl.load(heads + rest, mask=inside[:, None] & in_rest, other=0.0)
    x, y, z = raw_x.to(tl.float32), raw_y.to(tl.float32), raw_z.to(tl.float32)
    if query_weight is not None:
        x, y, z, _ = _normalized(x, y, z, inside, in_pairs, in_rest, epsilon, query_beta is None, HEAD_DIM)
        x *= _of_heads(query_weight, key_weight, is_query, first, in_pairs, ZERO_CENTERED)
        y *= _of_heads(query_weight, key_weight, is_query, second, in_pairs, ZERO_CENTERED)
        z *= _of_heads(query_weight, key_weight, is_query, rest, in_rest, ZERO_CENTERED)
        if query_beta is not None:
            x += _of_heads(query_beta, key_beta, is_query, first, in_pairs, False)
            y += _of_heads(query_beta, key_beta, is_query, second, in_pairs, False)
            z += _of_heads(query_beta, key_beta, is_query, rest, in_rest, False)
    cos, sin = _angles(cosine, sine, token, batch, table_batch, first, in_pairs, ROTARY_DIM)
    turned_x, turned_y = x * cos - y * sin, y * cos + x * sin
    dtype = projected.dtype.element_ty
    rotates = (is_query | is_key)[:, None]
    places = _places(query, key, value, gate, token, head, inside, groups, group, gates, HEAD_DIM)
    _store_heads(places, first, in_pairs, tl.where(rotates, turned_x.to(dtype), raw_x))
    _store_heads(places, second, in_pairs, tl.where(rotates, turned_y.to(dtype), raw_y))
    _store_heads(places, rest, in_rest, tl.where(rotates, z.to(dtype), raw_z))


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
    """Writes the gradient of `projected` from the gradients of query, key, value and gate. A program has some
    heads of `BLOCK_TOKENS` tokens, one after the other.

    With weights the gradient overwrites `projected`. partial_sums[program]: the sums of the gradients of the
    weights of queries and keys, and of their betas.
    """
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    gates = 0
    if gate is not None:
        gates = group
    size = group + gates + 2
    is_query, is_key = head % size < group, head % size == group + gates
    first, second, rest, in_pairs, in_rest = _columns(
        HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS, BLOCK_REST
    )
    if query_weight is not None:
        x_factor = _of_heads(query_weight, key_weight, is_query, first, in_pairs, ZERO_CENTERED)
        y_factor = _of_heads(query_weight, key_weight, is_query, second, in_pairs, ZERO_CENTERED)
        z_factor = _of_heads(query_weight, key_weight, is_query, rest, in_rest, ZERO_CENTERED)
        x_sums = tl.zeros([BLOCK_HEADS, BLOCK_PAIRS], tl.float32)
        y_sums = tl.zeros([BLOCK_HEADS, BLOCK_PAIRS], tl.float32)
        z_sums = tl.zeros([BLOCK_HEADS, BLOCK_REST], tl.float32)
        x_beta_sums, y_beta_sums, z_beta_sums = x_sums, y_sums, z_sums
    for step in range(BLOCK_TOKENS):
        token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + step
        inside = (head < groups * size) & (token < tokens)
        places = _places(query, key, value, gate, token, head, inside, groups, group, gates, HEAD_DIM)
        dx = _load_heads(places, first, in_pairs)
        dy = _load_heads(places, second, in_pairs)
        dz = _load_heads(places, rest, in_rest)
        in_table = in_pairs & (token < tokens)
        cos, sin = _angles(cosine, sine, token, batch, table_batch, first, in_table, ROTARY_DIM)
        x = dx.to(tl.float32) * cos + dy.to(tl.float32) * sin
        y = dy.to(tl.float32) * cos - dx.to(tl.float32) * sin
        z = dz.to(tl.float32)
        heads = projected + ((token * groups * size + head) * HEAD_DIM)[:, None]
        x_mask, z_mask = inside[:, None] & in_pairs, inside[:, None] & in_rest
        if query_weight is not None:
            normed_x, normed_y, normed_z, rate = _normalized(
                tl.load(heads + first, mask=x_mask, other=0.0).to(tl.float32),
                tl.load(heads + second, mask=x_mask, other=0.0).to(tl.float32),
                tl.load(heads + rest, mask=z_mask, other=0.0).to(tl.float32),
                inside,
                in_pairs,
                in_rest,
                epsilon,
                query_beta is None,
                HEAD_DIM,
            )
            x_sums += x * normed_x
            y_sums += y * normed_y
            z_sums += z * normed_z
            if query_beta is not None:
                x_beta_sums += x
                y_beta_sums += y
                z_beta_sums += z
            x, y, z = x * x_factor, y * y_factor, z * z_factor
            x, y, z = _norm_gradient(
                x, y, z, normed_x, normed_y, normed_z, rate, query_beta is None, HEAD_DIM
            )
        dtype = projected.dtype.element_ty
        rotates = (is_query | is_key)[:, None]
        tl.store(heads + first, tl.where(rotates, x.to(dtype), dx), mask=x_mask)
        tl.store(heads + second, tl.where(rotates, y.to(dtype), dy), mask=x_mask)
        tl.store(heads + rest, tl.where(rotates, z.to(dtype), dz), mask=z_mask)
    if query_weight is not None:
        program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        sums = partial_sums + program * (2 if query_beta is None else 4) * HEAD_DIM
        _store_sums(sums, x_sums, is_query, is_key, first, in_pairs, HEAD_DIM)
        _store_sums(sums, y_sums, is_query, is_key, second, in_pairs, HEAD_DIM)
        _store_sums(sums, z_sums, is_query, is_key, rest, in_rest, HEAD_DIM)
        if query_beta is not None:
            _store_sums(sums + 2 * HEAD_DIM, x_beta_sums, is_query, is_key, first, in_pairs, HEAD_DIM)
            _store_sums(sums + 2 * HEAD_DIM, y_beta_sums, is_query, is_key, second, in_pairs, HEAD_DIM)
            _store_sums(sums + 2 * HEAD_DIM, z_beta_sums, is_query, is_key, rest, in_rest, HEAD_DIM)


@triton.jit
def _columns(
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Returns the columns of the parts of a head, and which columns of pairs and of the rest exist."""
    pair, rest = tl.arange(0, BLOCK_PAIRS), ROTARY_DIM + tl.arange(0, BLOCK_REST)
    first, second = pair, pair + ROTARY_DIM // 2
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    return first, second, rest, pair < ROTARY_DIM // 2, rest < HEAD_DIM


@triton.jit
def _places(query, key, value, gate, token, head, inside, groups, group, gates, HEAD_DIM: tl.constexpr):
    """Returns the addresses of a token's heads in query, key, value and gate, and which heads are in each."""
    index, place = head // (group + gates + 2), head % (group + gates + 2)
    of_query = ((token * groups * group + index * group + place) * HEAD_DIM)[:, None]
    of_group = ((token * groups + index) * HEAD_DIM)[:, None]
    of_gate = None
    if gate is not None:
        of_gate = gate + of_query - group * HEAD_DIM
    return (
        query + of_query,
        key + of_group,
        value + of_group,
        of_gate,
        (inside & (place < group))[:, None],
        (inside & (place == group + gates))[:, None],
        (inside & (place > group + gates))[:, None],
        (inside & (place >= group) & (place < group + gates))[:, None],
    )


@triton.jit
def _load_heads(places, column, in_columns):
    query, key, value, gate, is_query, is_key, is_value, is_gate = places
    x = tl.load(query + column, mask=is_query & in_columns, other=0.0)
    k = tl.load(key + column, mask=is_key & in_columns, other=0.0)
    v = tl.load(value + column, mask=is_value & in_columns, other=0.0)
    x = tl.where(is_query, x, tl.where(is_key, k, v))
    if gate is not None:
        x = tl.where(is_gate, tl.load(gate + column, mask=is_gate & in_columns, other=0.0), x)
    return x


@triton.jit
def _store_heads(places, column, in_columns, x):
    query, key, value, gate, is_query, is_key, is_value, is_gate = places
    if gate is not None:
        tl.store(gate + column, x, mask=is_gate & in_columns)
    tl.store(query + column, x, mask=is_query & in_columns)
    tl.store(key + column, x, mask=is_key & in_columns)
    tl.store(value + column, x, mask=is_value & in_columns)


@triton.jit
def _angles(cosine, sine, token, batch, table_batch, first, in_table, ROTARY_DIM: tl.constexpr):
    """Returns cosines and sines of a token, [1, pairs]."""
    place = (token // batch * table_batch + token % batch % table_batch) * ROTARY_DIM + first
    cos = tl.load(cosine + place, mask=in_table, other=0.0)
    sin = tl.load(sine + place, mask=in_table, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def _mean(x, y, z, HEAD_DIM: tl.constexpr):
    """Returns the mean of each head, [heads, 1]."""
    return ((tl.sum(x, 1) + tl.sum(y, 1) + tl.sum(z, 1)) / HEAD_DIM)[:, None]


@triton.jit
def _normalized(x, y, z, inside, in_pairs, in_rest, epsilon, IS_RMS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Returns the heads without mean, times their reciprocal deviations, and these, [heads, 1]."""
    if not IS_RMS:
        mean = _mean(x, y, z, HEAD_DIM)
        x = tl.where(inside[:, None] & in_pairs, x - mean, 0.0)
        y = tl.where(inside[:, None] & in_pairs, y - mean, 0.0)
        z = tl.where(inside[:, None] & in_rest, z - mean, 0.0)
    rate = 1.0 / tl.sqrt_rn(_mean(x * x, y * y, z * z, HEAD_DIM) + epsilon)
    return x * rate, y * rate, z * rate, rate


@triton.jit
def _norm_gradient(x, y, z, normed_x, normed_y, normed_z, rate, IS_RMS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Returns the gradients of heads. x, y, z: the gradients of their results of `_normalized`."""
    inner, shift = _mean(x * normed_x, y * normed_y, z * normed_z, HEAD_DIM), 0.0
    if not IS_RMS:
        shift = _mean(x, y, z, HEAD_DIM)
    x = (x - normed_x * inner - shift) * rate
    y = (y - normed_y * inner - shift) * rate
    return x, y, (z - normed_z * inner - shift) * rate


@triton.jit
def _of_heads(of_query, of_key, is_query, column, in_columns, ZERO_CENTERED: tl.constexpr):
    """Returns [heads, columns]: the vector of queries for query heads, the vector of keys for the others."""
    query = tl.load(of_query + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    key = tl.load(of_key + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    vector = tl.where(is_query[:, None], query, key)
    if ZERO_CENTERED:
        vector += 1.0
    return vector


@triton.jit
def _store_sums(sums, of_heads, is_query, is_key, column, in_columns, HEAD_DIM: tl.constexpr):
    """Sums [heads, columns] over the query heads, and over the key heads."""
    tl.store(sums + column, tl.sum(tl.where(is_query[:, None], of_heads, 0.0), 0), mask=in_columns)
    tl.store(sums + HEAD_DIM + column, tl.sum(tl.where(is_key[:, None], of_heads, 0.0), 0), mask=in_columns)
