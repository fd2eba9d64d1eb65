"""The Triton kernels of `megatron.kernels.attention`.

The queries are the last of the first `keys` tokens of a sequence of `seq` tokens: query row i has the
position keys - queries + i. Element offsets are int64, except within a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.kernels.triton_kernels import _keep, _row_keys

# Computes an fp32 product as three tensor-core products, which keep about 21 bits of the factors.
FP32_PRODUCT: tl.constexpr = tl.constexpr("tf32x3")
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_forward_kernel(
    query,
    key,
    value,
    out,
    log_sums,
    slopes,
    first_keys,
    sample_keys,
    sinks,
    sizes,
    query_strides,
    key_strides,
    value_strides,
    scale,
    softcapping,
    dropped_below,
    keep_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Computes attention. Each program computes a block of queries of one head of one sample. The longest
    rows start first. sizes: see `megatron.kernels.attention.Sizes`."""
    queries, keys, seq, batch, heads, group, first_head = sizes
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_QUERIES
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = first_row + tl.arange(0, BLOCK_QUERIES)
    first_position = keys - queries + first_row
    positions = keys - queries + rows
    columns = tl.arange(0, BLOCK_KEYS)

    query += sample.to(tl.int64) * query_strides.batch + head * query_strides.head
    key += sample.to(tl.int64) * key_strides.batch + head // group * key_strides.head
    value += sample.to(tl.int64) * value_strides.batch + head // group * value_strides.head
    q = _load_rows(query, first_row, query_strides.seq, queries, HEAD_DIM, BLOCK_QUERIES, BLOCK_DIM)
    scaling = scale, tl.load(slopes + head) if slopes is not None else None, softcapping
    firsts, first_block, last_first = _first_keys(
        first_keys, sample, positions, first_position, keys, seq, BLOCK_QUERIES, BLOCK_KEYS
    )
    if sample_keys is not None:
        row_keys = _hash_rows(sample_keys, sample, first_head + head, positions, seq)

    # The value is finite, so that a block without an allowed key gives exp2(-inf - largest) = 0 instead of
    # NaN.
    largest = tl.full([BLOCK_QUERIES], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    if sinks is not None:  # the sink is the first score, and its value is 0
        largest = tl.zeros_like(total) + tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    acc = tl.zeros([BLOCK_QUERIES, BLOCK_DIM], tl.float32)
    for start in range(first_block, tl.minimum(first_position + BLOCK_QUERIES, keys), BLOCK_KEYS):
        k = _load_rows(key, start, key_strides.seq, keys, HEAD_DIM, BLOCK_KEYS, BLOCK_DIM)
        scores = tl.dot(q, tl.trans(k), input_precision=FP32_PRODUCT)
        has_mask = (start + BLOCK_KEYS > first_position + 1) | (start < last_first)
        places = positions[:, None], (start + columns)[None, :]
        scores = _masked_scores(scores, places, scaling, firsts, has_mask)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        if sample_keys is not None:
            keep = _keep(row_keys[:, None], (start + columns)[None, :], dropped_below)
            weights = tl.where(keep, weights, 0.0)
        v = _load_rows(value, start, value_strides.seq, keys, HEAD_DIM, BLOCK_KEYS, BLOCK_DIM)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=FP32_PRODUCT)
        largest = new_largest

    inside = rows < queries
    acc *= (keep_scale / total)[:, None]
    out += (sample * heads + head).to(tl.int64) * HEAD_DIM
    _store_rows(out, acc, first_row, batch * heads * HEAD_DIM, queries, HEAD_DIM, BLOCK_QUERIES, BLOCK_DIM)
    tl.store(log_sums + tl.program_id(1).to(tl.int64) * queries + rows, largest + tl.log2(total), mask=inside)


@triton.jit
def attention_backward_query_kernel(
    query,
    key,
    value,
    out,
    grad,
    log_sums,
    grad_query,
    row_sums,
    row_keys,
    slopes,
    first_keys,
    sample_keys,
    sizes,
    query_strides,
    key_strides,
    value_strides,
    scale,
    softcapping,
    dropped_below,
    keep_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Computes the gradient of the queries from the inputs of the forward kernel. It also writes row_sums,
    sum(out * grad), and row_keys, the hashes of the rows, for the kernel of the keys."""
    queries, keys, seq, batch, heads, group, first_head = sizes
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_QUERIES
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = first_row + tl.arange(0, BLOCK_QUERIES)
    first_position = keys - queries + first_row
    positions = keys - queries + rows
    columns = tl.arange(0, BLOCK_KEYS)
    inside = rows < queries
    in_rows = tl.program_id(1).to(tl.int64) * queries + rows
    in_heads = (sample * heads + head).to(tl.int64) * HEAD_DIM
    width = batch * heads * HEAD_DIM

    query += sample.to(tl.int64) * query_strides.batch + head * query_strides.head
    key += sample.to(tl.int64) * key_strides.batch + head // group * key_strides.head
    value += sample.to(tl.int64) * value_strides.batch + head // group * value_strides.head
    o = _load_rows(out + in_heads, first_row, width, queries, HEAD_DIM, BLOCK_QUERIES, BLOCK_DIM)
    do = _load_rows(grad + in_heads, first_row, width, queries, HEAD_DIM, BLOCK_QUERIES, BLOCK_DIM)
    row_sum = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(row_sums + in_rows, row_sum, mask=inside)
    q = _load_rows(query, first_row, query_strides.seq, queries, HEAD_DIM, BLOCK_QUERIES, BLOCK_DIM)
    log_sum = tl.load(log_sums + in_rows, mask=inside, other=float("inf"))
    scaling = scale, tl.load(slopes + head) if slopes is not None else None, softcapping
    firsts, first_block, last_first = _first_keys(
        first_keys, sample, positions, first_position, keys, seq, BLOCK_QUERIES, BLOCK_KEYS
    )
    if sample_keys is not None:
        hashes = _hash_rows(sample_keys, sample, first_head + head, positions, seq)
        tl.store(row_keys + in_rows, hashes.to(tl.int64, bitcast=True), mask=inside)

    acc = tl.zeros([BLOCK_QUERIES, BLOCK_DIM], tl.float32)
    for start in range(first_block, tl.minimum(first_position + BLOCK_QUERIES, keys), BLOCK_KEYS):
        k = _load_rows(key, start, key_strides.seq, keys, HEAD_DIM, BLOCK_KEYS, BLOCK_DIM)
        scores = tl.dot(q, tl.trans(k), input_precision=FP32_PRODUCT)
        has_mask = (start + BLOCK_KEYS > first_position + 1) | (start < last_first)
        places = positions[:, None], (start + columns)[None, :]
        scores = _masked_scores(scores, places, scaling, firsts, has_mask)
        v = _load_rows(value, start, value_strides.seq, keys, HEAD_DIM, BLOCK_KEYS, BLOCK_DIM)
        grad_weights = tl.dot(do, tl.trans(v), input_precision=FP32_PRODUCT)
        if sample_keys is not None:
            keep = _keep(hashes[:, None], (start + columns)[None, :], dropped_below)
            grad_weights = tl.where(keep, grad_weights * keep_scale, 0.0)
        grad_scores = tl.exp2(scores - log_sum[:, None]) * (grad_weights - row_sum[:, None])
        if softcapping is not None:
            grad_scores *= _cap_slope(scores, softcapping)
        acc = tl.dot(grad_scores.to(k.dtype), k, acc, input_precision=FP32_PRODUCT)
    grad_query += in_heads
    _store_rows(grad_query, acc * scale, first_row, width, queries, HEAD_DIM, BLOCK_QUERIES, BLOCK_DIM)


@triton.jit
def attention_backward_key_kernel(
    query,
    key,
    value,
    grad,
    log_sums,
    row_sums,
    grad_key,
    grad_value,
    slopes,
    end_queries,
    row_keys,
    sizes,
    query_strides,
    key_strides,
    value_strides,
    scale,
    softcapping,
    dropped_below,
    keep_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Computes the gradients of keys and values. Each program sums a block of keys of one key head of one
    sample over the queries of all query heads that share this key head."""
    queries, keys, seq, batch, heads, group, first_head = sizes
    first_column = tl.program_id(0) * BLOCK_KEYS
    groups = heads // group
    sample, key_index = tl.program_id(1) // groups, tl.program_id(1) % groups
    columns = first_column + tl.arange(0, BLOCK_KEYS)
    width = batch * heads * HEAD_DIM

    query += sample.to(tl.int64) * query_strides.batch
    key += sample.to(tl.int64) * key_strides.batch + key_index * key_strides.head
    value += sample.to(tl.int64) * value_strides.batch + key_index * value_strides.head
    k = _load_rows(key, first_column, key_strides.seq, keys, HEAD_DIM, BLOCK_KEYS, BLOCK_DIM)
    v = _load_rows(value, first_column, value_strides.seq, keys, HEAD_DIM, BLOCK_KEYS, BLOCK_DIM)
    # The first query has the position `past`. The rows `begin` to `end` attend to some of the keys.
    past = keys - queries
    # Rows before `full_end` attend to all of the keys, if the keys precede the rows.
    begin, end, full_end = tl.maximum(first_column - past, 0), queries, queries
    if end_queries is not None:
        last = tl.minimum(first_column + BLOCK_KEYS, keys) - 1
        end = tl.minimum(tl.load(end_queries + sample.to(tl.int64) * seq + last) - past, queries)
        full_end = tl.load(end_queries + sample.to(tl.int64) * seq + first_column) - past
        ends = tl.load(end_queries + sample.to(tl.int64) * seq + columns, mask=columns < keys, other=0)

    acc_k = tl.zeros([BLOCK_KEYS, BLOCK_DIM], tl.float32)
    acc_v = tl.zeros([BLOCK_KEYS, BLOCK_DIM], tl.float32)
    # The sums, the scores and their gradients take nearly all registers. Therefore one loop runs over the
    # blocks of all query heads, and documents are masked by the end of each key: a thread has fewer keys than
    # queries.
    begin = begin // BLOCK_QUERIES * BLOCK_QUERIES
    head, start = key_index * group, begin
    for _ in range(group * tl.cdiv(end - begin, BLOCK_QUERIES)):
        scaling = scale, tl.load(slopes + head) if slopes is not None else None, softcapping
        in_heads = (sample * heads + head).to(tl.int64)
        rows = start + tl.arange(0, BLOCK_QUERIES)
        inside = rows < queries
        in_rows = in_heads * queries + rows
        of_head = query + head * query_strides.head
        q = _load_rows(of_head, start, query_strides.seq, queries, HEAD_DIM, BLOCK_QUERIES, BLOCK_DIM)
        scores = tl.dot(k, tl.trans(q), input_precision=FP32_PRODUCT)
        scores = _scaled_scores(scores, ((past + rows)[None, :], columns[:, None]), scaling)
        if (first_column + BLOCK_KEYS > past + start + 1) | (start + BLOCK_QUERIES > full_end):
            allowed = columns[:, None] <= (past + rows)[None, :]
            if end_queries is not None:
                allowed &= (past + rows)[None, :] < ends[:, None]
            scores = tl.where(allowed, scores, -float("inf"))
        log_sum = tl.load(log_sums + in_rows, mask=inside, other=float("inf"))
        weights = tl.exp2(scores - log_sum[None, :])
        do = _load_rows(grad + in_heads * HEAD_DIM, start, width, queries, HEAD_DIM, BLOCK_QUERIES, BLOCK_DIM)
        grad_weights = tl.dot(v, tl.trans(do), input_precision=FP32_PRODUCT)
        dropped = weights
        if row_keys is not None:
            hashes = tl.load(row_keys + in_rows, mask=inside, other=0).to(tl.uint64, bitcast=True)
            keep = _keep(hashes[None, :], columns[:, None], dropped_below)
            dropped = tl.where(keep, weights, 0.0)
            grad_weights = tl.where(keep, grad_weights * keep_scale, 0.0)
        row_sum = tl.load(row_sums + in_rows, mask=inside, other=0.0)
        grad_scores = weights * (grad_weights - row_sum[None, :])
        if softcapping is not None:
            grad_scores *= _cap_slope(scores, softcapping)
        acc_v = tl.dot(dropped.to(do.dtype), do, acc_v, input_precision=FP32_PRODUCT)
        acc_k = tl.dot(grad_scores.to(q.dtype), q, acc_k, input_precision=FP32_PRODUCT)
        start += BLOCK_QUERIES
        head += (start >= end).to(tl.int32)
        start = tl.where(start >= end, begin, start)

    in_groups, width = tl.program_id(1).to(tl.int64) * HEAD_DIM, tl.num_programs(1) * HEAD_DIM
    grad_key += in_groups
    grad_value += in_groups
    _store_rows(grad_key, acc_k * scale, first_column, width, keys, HEAD_DIM, BLOCK_KEYS, BLOCK_DIM)
    _store_rows(grad_value, acc_v * keep_scale, first_column, width, keys, HEAD_DIM, BLOCK_KEYS, BLOCK_DIM)


@triton.jit
def _load_rows(
    pointer, first, stride, length, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """Loads BLOCK rows of one head, starting at row `first`, as [BLOCK, BLOCK_DIM]. Rows from `length` on are
    zero."""
    row, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK_DIM)
    place = pointer + (tl.cast(first, tl.int64) + row)[:, None] * stride + column[None, :]
    return tl.load(place, mask=(first + row < length)[:, None] & (column < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _store_rows(
    pointer,
    values,
    first,
    stride,
    length,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    row, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK_DIM)
    place = pointer + (tl.cast(first, tl.int64) + row)[:, None] * stride + column[None, :]
    inside = (first + row < length)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(place, values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _first_keys(
    first_keys,
    sample,
    positions,
    first_position,
    keys,
    seq,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Returns three values: the first key of each query, [queries, 1] (None: key 0); the first key of the
    tile's first block of keys; and the first key of the tile's last query. A block of keys has no masked
    score if it starts at or after this last value and ends at or before the tile's first query."""
    firsts, first_block, last_first = None, 0, 0
    if first_keys is not None:
        first_keys += sample.to(tl.int64) * seq
        firsts = tl.load(first_keys + positions, mask=positions < keys, other=0)[:, None]
        first_block = tl.load(first_keys + first_position) // BLOCK_KEYS * BLOCK_KEYS
        last_first = tl.load(first_keys + tl.minimum(first_position + BLOCK_QUERIES, keys) - 1)
    return firsts, first_block, last_first


@triton.jit
def _masked_scores(scores, places, scaling, firsts, has_mask):
    """Returns `_scaled_scores`, with -inf where a query does not attend to a key. firsts: see `_first_keys`.
    has_mask: whether the block has such a pair of query and key. Most blocks have none."""
    scores = _scaled_scores(scores, places, scaling)
    if has_mask:
        rows, columns = places
        allowed = columns <= rows
        if firsts is not None:
            allowed &= columns >= firsts
        scores = tl.where(allowed, scores, -float("inf"))
    return scores


@triton.jit
def _scaled_scores(scores, places, scaling):
    """Returns the scaled and capped scores with ALiBi's bias, times log2(e). places: the positions of the
    queries and of the keys. scaling: scale, slope (None: no ALiBi) and cap (None: no cap)."""
    scale, slope, softcapping = scaling
    if softcapping is None:
        scores *= scale * LOG2_E
    else:
        # tanh(x) = 2 / (1 + exp(-2x)) - 1
        sigmoid = 1.0 / (1.0 + tl.exp2(scores * (-2.0 * LOG2_E * scale / softcapping)))
        scores = (2.0 * sigmoid - 1.0) * (softcapping * LOG2_E)
    if slope is not None:
        rows, columns = places
        scores += (columns - rows).to(tl.float32) * (slope * LOG2_E)
    return scores


@triton.jit
def _cap_slope(scores, softcapping):
    """Returns the derivative of a capped score. scores: the result of `_scaled_scores` without ALiBi; for
    -inf the derivative is 0."""
    tanh = tl.maximum(scores / (softcapping * LOG2_E), -1.0)
    return 1.0 - tanh * tanh


@triton.jit
def _hash_rows(sample_keys, sample, head, positions, seq):
    """Returns the keys (hashes) of rows of the scores [batch, heads, seq, seq], for the dropout mask."""
    return _row_keys(tl.load(sample_keys + sample), head.to(tl.int64) * seq + positions)
