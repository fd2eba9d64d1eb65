"""The GPT model. Begin with `gpt_model.py`, which has the whole model, from token ids to logits."""
