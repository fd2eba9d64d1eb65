"""Tensor parallelism: the layout, the parameters that are cut over ranks, and the layers made of them."""
