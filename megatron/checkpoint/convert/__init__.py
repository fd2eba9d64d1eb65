"""From one format to another: universal checkpoints and Hugging Face."""
