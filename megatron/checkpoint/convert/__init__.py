"""Conversions: universal checkpoints and Hugging Face."""
