"""Skipped iterations, loss spikes, non-finite values, and replicas that must stay equal."""
