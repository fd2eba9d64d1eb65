"""The GPT model. This page leads through its files in reading order.

Shapes: b = batch, s = sequence, h = hidden, n = heads, d = head dimension (kv_channels), V = vocabulary. TP
is the tensor-parallel degree. With TP = 1 every layer below is an ordinary PyTorch layer, and a first reading
can assume that: `ColumnParallelLinear`, `RowParallelLinear` are then `nn.Linear`, `VocabParallelEmbedding` is
`nn.Embedding`.

    tokens [b, s]
      embedding.py     EmbeddingPipe: word + position embeddings, dropout                -> [b, s, h]
      gpt_model.py     to_sequence_first: Megatron's layout for the layers               -> [s, b, h]
      transformer.py   ParallelTransformerLayerPipe, num_layers times                    -> [s, b, h]
                         x = x + dropout(attention(norm(x)))
                         x = x + dropout(mlp(norm(x)))
      attention.py       ParallelSelfAttention: [s, b, h] -> query, key, value [b, n, s, d]
                         softmax(query @ key.T * scale + bias) @ value -> [s, b, h]
      mlp.py             ParallelMLP: h -> 4h -> activation -> h, plain or gated
      norm.py            layer norm with fp32 statistics
      position.py        ALiBi biases, rotary angles, the causal and per-document masks
      gpt_model.py     to_batch_first                                                    -> [b, s, h]
      norm.py          final norm                                                        -> [b, s, h]
      embedding.py     lm_head: hidden @ word_embeddings.T                               -> logits [b, s, V]
      gpt_model.py     CrossEntropy: mean loss over samples                              -> scalar

What tensor parallelism changes (TP > 1): each rank holds n / TP heads, 4h / TP columns of the MLP, V / TP
rows of the word embedding and the same columns of the logits. Activations between the blocks are replicated,
or with --sequence-parallel [s / TP, b, h] per rank. The layers in `megatron.mpu.layers` do this behind the
interface of `nn.Linear`; the model's code is the same.

`gpt_model.pipeline_layers` is the model as a list of layers. `gpt_model.GPTModelPipe` runs one pipeline stage
of this list on DeepSpeed. `single_process.GPTModel` runs the whole list in one process, without DeepSpeed's
engine: the shortest complete forward pass in this package. `recompute.py` adds activation checkpointing,
`generation.py` samples text.
"""
