"""Parsers of structured flag values and small files: partition methods, splits, weighted paths, curricula."""
