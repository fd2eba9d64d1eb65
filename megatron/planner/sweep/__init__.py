"""Sweeps: the same training command with several values of some flags, planned, measured and compared.

axes: the combinations. resolve: their configurations and predictions. folder: the record and the results.
local, slurm: the runs. summary, table: the report. docs/sweep.md describes the files.
"""
