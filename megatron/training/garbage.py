"""Python's garbage collector runs on all ranks after the same steps.

Otherwise it runs whenever enough objects have been created, at another time on each rank, and all ranks wait
for the one that it stops. A step creates no reference cycles with tensors, so memory does not grow between
collections. Megatron-LM has --manual-gc for this, torchtitan gc_freq.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The second step is the first one that creates no caches. Objects that exist after it stay: later collections
# do not visit them.
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
