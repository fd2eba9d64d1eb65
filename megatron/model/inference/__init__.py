"""Inference with the model: generates and scores texts, in one process or on a parallel layout."""
