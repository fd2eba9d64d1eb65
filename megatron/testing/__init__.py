"""What tests and benchmarks share: worlds of processes, tiny models on every layout, peak memory.

`tests/` and `benchmarks/` import this package and never each other. No other package imports it.
"""
