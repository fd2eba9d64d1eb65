"""Works around entry 14 of `megatron/engine/workarounds.py`. It is in `mpu` because the model calls it."""

import torch


def initialize_vector_math() -> None:
    """Initializes MKL's vector math in one thread, with one element. It must be called before anything else
    is computed. Further calls cost microseconds."""
    one = torch.ones(1, device="cpu")
    for function in (torch.exp, torch.log, torch.sin, torch.cos, torch.tanh, torch.erf):
        function(one)
