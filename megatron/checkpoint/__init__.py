"""Checkpoints: what is written, how it is found again, and how one part of it is read."""
