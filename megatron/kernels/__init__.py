"""Triton kernels for GPUs.

Each operator is one kernel launch, so the simulated accelerator counts it as one operation with its bytes.
The operators' files import without triton, which is optional and whose import takes 0.4 s. The kernels
themselves are in `triton_kernels`, `norm_triton`, `rotary_triton`, `attention_triton`, `fp8_triton` and
`grouped_triton`. Each operator has a reference implementation in PyTorch, which also serves CPUs and GPUs
without triton:

    dropout        dropout, bias and residual addition  `mpu.random.dropout_add`
    layer_norm     dropout_add, and the norm of the sum `model.norm`
    activation     plain or gated activation,           `model.activations`
                   gradient of the bias before it
    optimizer      norms of many tensors                `optimizer.gradient_norm.accurate_norm`
                   copy that finds non-finite elements  `optimizer.flat_group.move_grad`
                   AdamW                                `torch.optim.AdamW`
    attention      flash attention with hash dropout    `model.attention.core_attention.CoreAttention`
    windowed_attention
                   PyTorch's flash kernel with a window `model.attention.core_attention.CoreAttention`
    cross_entropy  loss and gradient of logits          `mpu.logit_chunks.LogitChunks`
    embedding      gradient of an embedding             `mpu.embedding._add_rows`
    rotary         split projection, norms of heads,    `model.attention.qk_norm.head_norms`,
                   rotary positions                     `model.position.RotaryEmbedding.rotate`
    fp8            FP8 matrices and their products      in `fp8` itself
    grouped_linear products of groups with experts      loops in `grouped_linear` itself

Gradients of biases and norms are sums over rows in a fixed order, without atomic additions: see
`column_sums`. `operators` makes an operator of a function that launches a kernel. `selection` chooses between
kernel and reference implementation. For attention `model.attention.choice` chooses; for experts
`grouped_linear.implementation` does, which can also choose torch's grouped product.
"""
