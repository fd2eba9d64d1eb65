"""Model-parallel utilities: the mesh, sharded parameters and layers, collectives, cross entropy, dropout."""
