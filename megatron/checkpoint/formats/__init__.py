"""Readers of the formats on disk: one module per format."""
