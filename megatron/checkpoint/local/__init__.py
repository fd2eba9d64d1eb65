"""Checkpoints on the disks of the nodes, mirrored to a partner node."""
