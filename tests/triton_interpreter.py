"""Without a GPU, the Triton kernels of the tests run in triton's interpreter.

Triton reads the variable when it is imported, which PyTorch and DeepSpeed do where it is installed. So
`tests/conftest.py` imports this module first.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
