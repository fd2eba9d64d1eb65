"""Saving, discovery, resume, verification, resharding and conversion of checkpoints."""
