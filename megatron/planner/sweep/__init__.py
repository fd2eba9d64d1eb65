"""Sweeps: one training command with several values of some flags is planned, measured and compared.

axes: builds the combinations. resolve: checks and plans them. folder: reads and writes the files of a sweep,
which docs/sweep.md describes. local, slurm: run the combinations. run_log: reads the result of a run.
summary, table: make the report.
"""
