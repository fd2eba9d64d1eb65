"""Runs Python's garbage collector on all ranks after the same steps.

By default the collector runs on each rank at a different time, whenever enough objects have been created, and
all ranks wait for the rank that it stops. A step creates no reference cycles with tensors, so memory does not
grow between collections. (Megatron-LM has --manual-gc for this purpose, torchtitan has gc_freq.)
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The objects that exist after this many steps are frozen: later collections do not visit them. The second
# step is the first step that creates no caches.
_FROZEN_AFTER = 2
_INTERVAL = 100


@contextmanager
def collections_after_steps() -> Iterator[Callable[[int], None]]:
    """Turns automatic collections off in the block. Yields a function that must be called after each step
    with the number of steps that this process has taken."""
    was_enabled, is_frozen = gc.isenabled(), False

    def after_step(num_steps: int) -> None:
        nonlocal is_frozen
        if num_steps >= _FROZEN_AFTER and not is_frozen:
            gc.collect()
            gc.freeze()
            is_frozen = True
        elif is_frozen and num_steps % _INTERVAL == 0:
            gc.collect()

    gc.disable()
    try:
        yield after_step
    finally:
        if is_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
