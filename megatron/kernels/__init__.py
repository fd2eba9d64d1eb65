"""Triton kernels for GPUs.

A file `x.py` declares PyTorch operators and imports without triton; `x_triton.py` beside it has the kernels.
An operator is one kernel launch, so the simulated accelerator counts it as one operation with its bytes. Each
kernel has a plain PyTorch twin, which CPUs and GPUs without triton use:

    dropout        dropout, bias and residual addition  `mpu.random.dropout_add`
    norms          norms of many tensors                `optimizer.gradient_norm.accurate_norm`
    attention      flash attention with hash dropout    `model.core_attention.CoreAttention`
    cross_entropy  loss and gradient of logits          `mpu.logit_chunks.LogitChunks`
    embedding      gradient of an embedding             `mpu.embedding._add_rows`

`selection` decides between kernel and twin, of attention `model.attention_choice`.
"""
