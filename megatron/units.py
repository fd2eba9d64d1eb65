"""Units of sizes."""

GIB = 2**30
"""Bytes of a GiB."""
