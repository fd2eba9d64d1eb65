"""The training loop: steps, evaluation, logging, early exit."""
