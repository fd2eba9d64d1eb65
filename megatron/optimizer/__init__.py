"""Parameter groups, optimizers with mixed precision and ZeRO, and the learning-rate schedule."""
