"""The loop around the step: what it prints, when it stops, how it evaluates."""
