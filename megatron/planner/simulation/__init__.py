"""Simulates a training step without devices: see docs/simulation.md."""
