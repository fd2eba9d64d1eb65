"""Memory of a step: the replay of a rank's schedule over recorded layers, and what fits on a device."""
