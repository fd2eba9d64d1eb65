"""The data pipeline, from jsonl text to micro-batches of tensors.

text_files       finds the text files of --input and of a shard of them, and reads their lines
preprocessing    tokenizes text into token files
indexed_dataset  reads and writes token files: Megatron's .bin and .idx
splits           assigns documents to the train, valid and test splits
indices          computes the document, sample and shuffle index of a split, and stores them as .npy files
index_stamp      records which files were verified, so that later starts skip them
gpt_dataset      map-style datasets of samples, one per split
blended_dataset  blends several datasets by weights
loader           assigns samples to data-parallel ranks, and reads the micro-batches of a rank

This file imports nothing, because preprocessing does not need torch, whose import takes seconds.
"""
