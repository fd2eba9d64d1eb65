"""The training loop: steps, evaluation, logging, stability, evaluation tasks (harness), early exit."""
