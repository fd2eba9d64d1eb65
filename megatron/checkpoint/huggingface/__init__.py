"""Converts models from and to Hugging Face transformers. family.py lists the model families."""
