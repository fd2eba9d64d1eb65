"""Data-parallel communication that computation hides: that of the buckets of layers
(`megatron.optimizer.buckets`), and that of sharded layers (`megatron.optimizer.sharded_units`).

The gradients of a bucket are reduce-scattered from the time at which the last backward pass of a step has
passed its layers. Its weights are all-gathered after the optimizer's update, and the first forward pass of
the next step waits for them at the bucket's first layer. The collectives of a rank run one after the other.
Collectives are given as (bytes, seconds). All layers are taken to need the same time, so the bytes that have
been reduced show how far the pass has come.
"""

from __future__ import annotations

from collections.abc import Sequence

Collective = tuple[int, float]


def reduction_after_backward(backward: float, buckets: Sequence[Collective], others: float) -> float:
    """Seconds from the end of the last backward pass until all gradients are reduced.

    backward: seconds of that pass. buckets: in the order of the layers. others: seconds of the reductions
    that start at the end of the pass.
    """
    total = sum(size for size, _ in buckets)
    done, finished = 0, 0.0
    for size, seconds in reversed(buckets):
        done += size
        finished = max(finished, backward * done / total) + seconds
    return (finished - backward if buckets else 0.0) + others


def wait_for_weights(forward: float, buckets: Sequence[Collective], others: float, start: float) -> float:
    """Seconds for which the first forward pass waits for weights, all-gathered from time 0 on.

    forward: seconds of that pass. buckets: in the order of the layers. others: seconds of the all-gathers
    before those of the buckets, which the pass needs when it starts. start: when the pass could start.
    """
    total = sum(size for size, _ in buckets)
    arrived = others
    clock = max(start, arrived)
    for size, seconds in buckets:
        arrived += seconds
        clock = max(clock, arrived) + forward * size / total
    return clock - start - (forward if buckets else 0.0)


def wait_for_units(compute: float, communication: float, units: int) -> float:
    """Seconds for which a pass waits for collectives of equal units. Those of a unit run while another one
    computes; nothing hides the first.

    compute, communication: seconds of the pass without the other. units: number of sharded layers
    (`megatron.optimizer.sharded_units`), or of chunks of a product (`megatron.mpu.tp_overlap`).
    """
    if not units:
        return 0.0
    return (communication + (units - 1) * max(communication - compute, 0.0)) / units
