"""Model parallel utilities: the layout, tensor-parallel parameters, layers, collectives, cross entropy,
dropout."""
