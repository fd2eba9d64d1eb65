"""The environment of the tests, set before PyTorch and triton read it: `tests/conftest.py` imports it first.

Threads of OpenMP wait for each other in a loop that does not yield. If other processes use the cores too, as
in these tests, several threads take many times as long as one thread.

Without a GPU, the Triton kernels of the tests run in Triton's interpreter. Triton reads the variable during
its import, and PyTorch and DeepSpeed import Triton if it is installed.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
