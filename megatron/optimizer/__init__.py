"""What moves the weights: parameter groups, optimizers and the learning-rate schedule."""
