"""Records layers and optimizer steps without devices: see docs/simulation.md."""
