"""The rows of the memory table."""

from megatron.training.startup_report import format_memory_row
from megatron.units import GIB


def test_row_has_the_range_of_its_ranks():
    """The ranks of a tensor-parallel group of BigScience had 24.0, 24.8, 24.0 and 28.2 GB."""
    peaks = {8: 24.0, 9: 24.8, 10: 24.0, 11: 28.2}
    row = format_memory_row({rank: {"peak allocated": int(peak * GIB)} for rank, peak in peaks.items()})
    assert row.split() == "peak allocated 24.000 to 28.200 (rank 11)".split()
