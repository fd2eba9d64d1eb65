"""Trains GPT models of 1 M to 1 T parameters with tensor, pipeline and data parallelism on DeepSpeed."""

__version__ = "0.3.0"
