"""Models from and to Hugging Face transformers. registry.py lists the families."""
