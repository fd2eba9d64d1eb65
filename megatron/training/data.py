"""The data of a run: how many samples each split must have, and one loader per split."""

from dataclasses import dataclass

import torch.distributed as dist

from megatron.config import Config, ConfigError
from megatron.data.gpt_dataset import (
    VOCABULARY_KEY,
    Samples,
    build_gpt_datasets,
    data_fingerprint,
    prepare_index_files,
)
from megatron.data.loader import GPTBatchLoader
from megatron.mpu.layout import ParallelLayout
from megatron.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True)
class RunLength:
    """How long a run is, in the units that its parts count in."""

    iterations: int
    train_samples: int

    def samples_per_split(self, config: Config) -> tuple[int, int, int]:
        """Samples that training, validation and test read; validation: per interval and at the end."""
        training, batch = config.training, config.batch.global_batch_size
        validations = self.iterations // training.eval_interval + 1
        return (
            0 if training.no_train else self.train_samples,
            validations * training.eval_iters * batch,
            training.eval_iters * batch,
        )


@dataclass(frozen=True)
class RunData:
    """A loader of the training data, None where nothing is read, and of what is evaluated, by the name under
    which it is logged: 'validation' and 'test', or those of the weighted groups."""

    train: GPTBatchLoader | None
    valid: dict[str, GPTBatchLoader]
    test: dict[str, GPTBatchLoader]


def run_fingerprint(config: Config, length: RunLength, vocabulary: Vocabulary) -> dict:
    """What identifies the training data, its order and its vocabulary; ConfigError if there is no document to
    train on."""
    model, training = config.model, config.training
    fingerprint = data_fingerprint(config.data, model.seq_length, training.seed, length.train_samples)
    if fingerprint["epochs"] is None and not training.no_train:
        raise ConfigError(
            f"--split {config.data.split} leaves no document of {' '.join(fingerprint['paths'])} to train on"
        )
    return {**fingerprint, VOCABULARY_KEY: vocabulary.digest} if vocabulary.digest else fingerprint


def open_data(config: Config, layout: ParallelLayout, length: RunLength, vocabulary: Vocabulary) -> RunData:
    """Builds what index files are missing, then opens them on every rank. Collective."""
    samples = length.samples_per_split(config)
    where = (config.data, config.model.seq_length, config.training.seed, samples)
    # Rank 0 first: on a shared file system the other nodes then find the files and only verify them.
    if layout.rank == 0:
        prepare_index_files(*where)
    dist.barrier()
    if config.parallel.local_rank == 0 and layout.rank != 0:
        prepare_index_files(*where)
    dist.barrier()
    train, valid, test = build_gpt_datasets(*where)

    def loader(dataset: Samples, num_workers: int) -> GPTBatchLoader:
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

    def evaluated(datasets: tuple[Samples, ...], unnamed: str) -> dict[str, GPTBatchLoader]:
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
