"""Texts that flags and small files hold: partition methods, splits, weighted paths, curricula."""
