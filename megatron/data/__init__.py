"""From token files to micro-batches.

indexed_dataset  the .bin and .idx files
splits           which documents train, validate and test
indices          the order of the samples
index_cache      that order as files beside the data
gpt_dataset      samples, by number
sampler          which samples each data rank reads
loader           micro-batches of tensors
preprocessing    from jsonl text to token files

The modules are imported one by one, so that preparing data does not wait for torch.
"""
