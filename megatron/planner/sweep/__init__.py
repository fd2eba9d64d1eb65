"""Sweeps: one training command with several values of some flags, planned, measured and compared.

axes: makes the combinations. resolve: checks and plans them. folder: the files of a sweep, which
docs/sweep.md describes. local, slurm: run them. run_log: reads the result of a run. summary, table: the
report.
"""
