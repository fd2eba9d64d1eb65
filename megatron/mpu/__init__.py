"""Model-parallel utilities: layout, sharded parameters and layers, collectives, cross entropy, dropout."""
