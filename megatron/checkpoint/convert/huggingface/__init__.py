"""BLOOM and GPT-2 from and to Hugging Face transformers."""
