"""Memory of a step by formula: of a layer, of the optimizer's buffers, of a stage at its peak."""
