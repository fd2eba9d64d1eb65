"""The data of a run: the number of samples of each split, and the loaders."""

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron.config import Config, ConfigError
from megatron.config.batch import RunLength
from megatron.config.checks.data import token_file_prefixes
from megatron.data.blended_dataset import SampleDataset
from megatron.data.gpt_dataset import (
    VOCABULARY_KEY,
    build_gpt_datasets,
    data_fingerprint,
    prepare_index_files,
)
from megatron.data.indexed_dataset import data_path, index_path
from megatron.data.loader import GPTBatchLoader
from megatron.data.report import dataset_usage, usage_table
from megatron.data.splits import verify_token_files
from megatron.mpu.layout import ParallelLayout
from megatron.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True)
class RunData:
    """The loaders of a run. train is None if training is skipped.

    valid and test: by the name in the log, which is 'validation', 'test' or the name of a weighted group.
    """

    train: GPTBatchLoader | None
    valid: dict[str, GPTBatchLoader]
    test: dict[str, GPTBatchLoader]


def run_fingerprint(config: Config, length: RunLength, vocabulary: Vocabulary | None = None) -> dict:
    """Identifies the training data, its order and its vocabulary, as JSON types for a checkpoint.

    Raises ConfigError if there is no document to train on.
    """
    model, training = config.model, config.training
    # Also of an evaluation, which reads no training samples.
    num_samples = max(length.data_samples(config), config.data.data_order_samples or 0)
    fingerprint = data_fingerprint(config.data, model.seq_length, training.seed, num_samples)
    if fingerprint["epochs"] is None and not training.no_train:
        raise ConfigError(
            f"--split {config.data.split} assigns no document of {' '.join(fingerprint['paths'])} to "
            "the train split: give it a larger weight"
        )
    if config.data.data_first_sample:
        fingerprint["first_sample"] = config.data.data_first_sample
    if vocabulary is None or vocabulary.digest is None:
        return fingerprint
    return {**fingerprint, VOCABULARY_KEY: vocabulary.digest}


def data_report(config: Config, length: RunLength) -> str:
    """The table of what the run reads of each data set, with a warning above --max-epochs-per-dataset."""
    samples = length.samples_read(config)
    usages = dataset_usage(config.data, config.model.seq_length, config.training.seed, samples)
    return usage_table(usages, config.data.max_epochs_per_dataset)


def planned_data_report(config: Config, length: RunLength) -> str:
    """`data_report` for a dry run. Without the data files, says which one is missing.

    Raises ConfigError for damaged data and for a split with too few documents or tokens.
    """
    if not (config.data.data_path or config.data.train_weighted_split_paths):
        return "data       not checked: no --data-path"
    for option, prefix in token_file_prefixes(config.data):
        for path in (data_path(prefix), index_path(prefix)):
            if not Path(path).is_file():
                return f"data       not checked: {option} {prefix}: {path} does not exist"
    verify_token_files(config.data)
    run_fingerprint(config, length)
    return data_report(config, length)


def open_data(config: Config, layout: ParallelLayout, length: RunLength, vocabulary: Vocabulary) -> RunData:
    """Build missing index files, then open the data on every rank. Collective."""
    samples = length.samples_per_split(config)
    where = (config.data, config.model.seq_length, config.training.seed, samples)
    # Rank 0 is first. On a shared file system the other nodes find its files and only verify them.
    if layout.rank == 0:
        prepare_index_files(*where)
    dist.barrier()
    if config.parallel.local_rank == 0 and layout.rank != 0:
        prepare_index_files(*where)
    dist.barrier()
    train, valid, test = build_gpt_datasets(*where)

    def loader(dataset: SampleDataset, num_workers: int) -> GPTBatchLoader:
        return GPTBatchLoader(
            dataset,
            micro_batch_size=config.batch.micro_batch_size,
            dp_rank=layout.dp_rank,
            dp_size=layout.dp_size,
            eod=vocabulary.eod,
            eod_mask_loss=config.data.eod_mask_loss,
            vocab_size=vocabulary.size,
            num_workers=num_workers,
        )

    def evaluated(datasets: tuple[SampleDataset, ...], unnamed: str) -> dict[str, GPTBatchLoader]:
        named = bool(config.data.train_weighted_split_paths)
        return {
            dataset.name if named else unnamed: loader(dataset, config.data.valid_num_workers)
            for dataset in datasets
        }

    return RunData(
        None if train is None else loader(train, config.data.num_workers),
        evaluated(valid, "validation"),
        evaluated(test, "test"),
    )
