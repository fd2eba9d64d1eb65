"""What tests and benchmarks share: worlds of processes, tiny models on every layout, peak memory.

It imports neither tests nor benchmarks, and is the only part of `tests` that benchmarks import.
"""
