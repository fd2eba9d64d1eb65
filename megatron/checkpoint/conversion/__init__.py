"""Conversions of saved checkpoints without a model: their sources; the universal format by several tasks."""
