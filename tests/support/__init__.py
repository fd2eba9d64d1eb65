"""What tests and benchmarks share: worlds of processes, tiny models on every layout, peak memory.

It imports neither other tests nor benchmarks, and is the only part of `tests` that benchmarks import.
"""

# A process that has not answered after so many seconds hangs. On a quiet machine the slowest one of the
# tests takes 40 s, and one machine has been 15 times as slow.
HANG_TIMEOUT_S = 1200.0
