"""Units of sizes."""

GIB = 2**30
"""Number of bytes in a GiB."""
