"""Units of sizes."""

GIB = 2**30
"""Bytes in a GiB."""
