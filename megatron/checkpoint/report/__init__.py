"""What tools print of checkpoints."""
