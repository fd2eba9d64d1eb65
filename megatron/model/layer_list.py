"""What checkpoint tools need to know of the pipeline's layer list and of dtypes. It imports only torch: the
model's modules import DeepSpeed and torch.compile, which takes seconds."""

import torch

FIRST_TRANSFORMER_LAYER = 3
TIED_EMBEDDING = "embed"

PARAMETER_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
