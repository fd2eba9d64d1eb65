"""Helpers that tests and benchmarks share: worlds of processes, tiny models on every layout, peak memory.

This package imports neither other tests nor benchmarks. It is the only part of `tests` that benchmarks
import.
"""

# A process that has not answered after this many seconds is considered hung. On a quiet machine the slowest
# process of the tests takes 40 s. One machine was 15 times as slow.
HANG_TIMEOUT_S = 1200.0
