"""Converts saved checkpoints without building a model. Several tasks together can write the universal
format."""
