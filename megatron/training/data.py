"""The data of a run: the number of samples of each split, and the loaders."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron.config import Config, ConfigError, DataConfig
from megatron.data.flags import (
    NO_EVALUATION_DATA,
    SPLIT_NAMES,
    parse_split,
    splits_with_own_data,
    token_files,
)
from megatron.data.gpt_dataset import (
    Datasets,
    RequestedGroups,
    build_gpt_datasets,
    index_requests,
    list_index_files,
    prepare_index_files,
    requested_groups,
)
from megatron.data.index_stamp import IndexStamp
from megatron.data.indexed_dataset import IndexedDataset, data_path
from megatron.data.loader import GPTBatchLoader
from megatron.data.mock_dataset import MockDataset
from megatron.data.sample import SampleDataset
from megatron.data.splits import Component, verify_token_files
from megatron.run import Run
from megatron.text_table import format_table

# An index above this size has a note. Building an index takes about a second per 100 MB.
_LARGE_INDEX_BYTES = 500_000_000
_MANY_INDICES = 300
# Number of tokens whose loss mask is read for the log (4 MB).
_MASK_TOKENS = 1 << 22


@dataclass(frozen=True)
class RunData:
    """The loaders of a run. train: loader of the training data; None without training.

    valid, test: loaders by their names in the log: 'validation', 'test' or the name of a weighted group.
    """

    train: GPTBatchLoader | None
    valid: dict[str, GPTBatchLoader]
    test: dict[str, GPTBatchLoader]


def data_report(run: Run) -> str:
    """Returns a table of the data that the run reads. It has notes on data sets that are left out or that
    --max-epochs-action limits, and a warning for each data set above --max-epochs-per-dataset.

    Raises ConfigError for a data set above the limit with --max-epochs-action stop, and for data of prompts
    without --reset-attention-mask.
    """
    config, data = run.config, run.config.data
    if data.mock_data:
        return "data       random tokens of the vocabulary (--mock-data)"
    samples = run.length.samples_read(config)
    groups = requested_groups(data, config.model.seq_length, samples, run.stamp)
    masked = [
        part.dataset
        for group, _ in chain(*groups)
        for part in group.components
        if part.dataset.loss_mask is not None
    ]
    if masked and not data.reset_attention_mask:
        raise ConfigError(
            f"{masked[0].source} has a loss mask (prompts and completions), and a sample has several "
            "documents: set --reset-attention-mask, so that a completion attends only to its own prompt"
        )
    if config.training.no_train and not any(groups[1:]):
        raise ConfigError(f"--eval-only finds {NO_EVALUATION_DATA}")
    usages = dataset_usage(groups, config.model.seq_length, config.training.seed, data.data_cache_path)
    exceeding = _exceeding(usages, data.max_epochs_per_dataset)
    if exceeding and data.max_epochs_action == "stop":
        raise ConfigError(
            f"--max-epochs-action stop: {exceeding[0]}"
            f"{f' ({len(exceeding)} data sets exceed it)' if len(exceeding) > 1 else ''}: add data, lower "
            "its weight, raise the limit, or set --max-epochs-action renormalize"
        )
    notes = [note for group, _ in chain(*groups) for note in group.notes]
    notes += [loss_mask_note(dataset) for dataset in {one.prefix: one for one in masked}.values()]
    return usage_table(
        usages, data.max_epochs_per_dataset, [*empty_split_notes(data, samples, groups), *notes]
    )


def loss_mask_note(dataset: IndexedDataset) -> str:
    """Returns a sentence about the loss mask of a data set. It reads only the beginning of the mask."""
    assert dataset.loss_mask is not None
    numbers = np.memmap(data_path(dataset.loss_mask.prefix), dtype=np.uint8, mode="r")[:_MASK_TOKENS]
    return (
        f"{dataset.prefix} has a loss mask (prompts or chats): {numbers.mean():.1%} of its first "
        f"{len(numbers):,} tokens count in the loss"
    )


def index_notes(run: Run) -> list[str]:
    """Returns a sentence for the log about missing index files; no sentence if a single process builds small
    files. Raises ConfigError with --require-prepared-indices if an index is not prepared."""
    ranks = run.config.parallel.world_size
    files = list_index_files(*_requested_samples(run), run.stamp)
    command = f"tools/prepare_indices.py --world-size {ranks} with the flags of this run"
    unprepared = [index.paths[0] for index in files if not index.is_prepared]
    if run.config.data.require_prepared_indices and unprepared:
        raise ConfigError(
            f"--require-prepared-indices: {len(unprepared):,} of {len(files):,} indices are not prepared, "
            f"such as {unprepared[0]}: run {command}, or remove the flag"
        )
    missing = [index for index in files if not all(map(os.path.exists, index.paths))]
    size = sum(index.num_bytes for index in missing)
    is_large = size > _LARGE_INDEX_BYTES or len(missing) > _MANY_INDICES
    if not missing or (ranks == 1 and not is_large):
        return []
    sentence = f"rank 0 builds {len(missing):,} indices of the data order ({size / 1e6:,.0f} MB)"
    if is_large:
        sentence += f"; {ranks:,} ranks wait for it. To build them before a job, run {command}"
    return [sentence]


def missing_token_file(config: Config) -> str:
    """Returns why this machine cannot read the data, for a dry run; "" if it can."""
    if not (files := token_files(config.data)) and not config.data.mock_data:
        return "no --data-path"
    for option, prefix, file in files:
        if not Path(file).is_file():
            return f"{option} {prefix}: {file} does not exist"
    return ""


def planned_data_report(run: Run) -> str:
    """Returns `data_report` for a dry run, or a line that names the missing data file.

    Raises ConfigError for damaged data and for a split with too few documents or tokens.
    """
    if missing := missing_token_file(run.config):
        return f"data       not checked: {missing}"
    run = run.with_stamp(verify_token_files(run.config.data))
    run.fingerprint  # noqa: B018 - raises its errors
    return data_report(run)


def _requested_samples(run: Run) -> tuple[DataConfig, int, int, tuple[int, int, int]]:
    """Returns the first arguments of `prepare_index_files` and `build_gpt_datasets`: (data section, sequence
    length, seed, numbers of samples of the train, valid and test split)."""
    config, samples = run.config, run.length.samples_per_split(run.config)
    return config.data, config.model.seq_length, config.training.seed, samples


def open_data(run: Run) -> RunData:
    """Builds missing index files, then opens the data on every rank. Collective."""
    config, mesh = run.config, run.mesh
    train, valid, test = _mock_datasets(run) if config.data.mock_data else _datasets_of_files(run)

    def loader(dataset: SampleDataset, num_workers: int, first_sample: int = 0) -> GPTBatchLoader:
        return GPTBatchLoader(
            dataset,
            micro_batch_size=config.batch.micro_batch_size,
            dp_rank=mesh.dp.rank,
            dp_size=mesh.dp_size,
            eod=run.vocab.eod,
            eod_mask_loss=config.data.eod_mask_loss,
            needs_document_ids=config.data.resets_documents,
            vocab_size=run.vocab.size,
            num_workers=num_workers,
            first_sample=first_sample,
            reads_tokens=config.parallel.reads_tokens(mesh.pp.rank),
        )

    def evaluated(datasets: tuple[SampleDataset, ...], unnamed: str) -> dict[str, GPTBatchLoader]:
        named = bool(config.data.train_weighted_split_paths)
        return {
            dataset.name if named else unnamed: loader(dataset, config.data.valid_num_workers)
            for dataset in datasets
        }

    return RunData(
        None if train is None else loader(train, config.data.num_workers, config.data.data_first_sample),
        evaluated(valid, "validation"),
        evaluated(test, "test"),
    )


def _datasets_of_files(run: Run) -> Datasets:
    where, mesh = _requested_samples(run), run.mesh
    stamp = run.stamp or IndexStamp(run.config.data)
    # Rank 0 builds first. On a shared file system, the other nodes find the files of rank 0 and only verify
    # them.
    if mesh.rank == 0:
        prepare_index_files(*where, stamp)
    dist.barrier()
    if run.config.parallel.local_rank == 0 and mesh.rank != 0:
        stamp.refresh()
        prepare_index_files(*where, stamp)
    dist.barrier()
    return build_gpt_datasets(*where, stamp)


def _mock_datasets(run: Run) -> Datasets:
    data, seq_length, seed, samples = _requested_samples(run)
    train, valid, test = (
        (MockDataset(name, wanted, seq_length, seed, run.vocab.size, run.vocab.eod),)
        if wanted and share
        else ()
        for name, wanted, share in zip(SPLIT_NAMES, samples, parse_split(data.split), strict=True)
    )
    return Datasets(train[0] if train else None, valid, test)


# More epochs than this in an evaluation are a typo in the flags: the index of so many samples would exhaust
# the memory. The index of _ALWAYS_ALLOWED_SAMPLES takes hundreds of MB and seconds.
_MAX_EVALUATION_EPOCHS = 1000
_ALWAYS_ALLOWED_SAMPLES = 10_000_000


@dataclass(frozen=True)
class DatasetUsage:
    """The data that a run reads from one data set, for one split or weighted group."""

    group: str
    prefix: str
    documents: int
    """Number of documents of the data set that belong to the split."""
    tokens: int
    """Number of tokens of these documents: one epoch."""
    samples: int
    """Number of samples that the run reads from the data set."""
    share: float
    """`samples` as a fraction of all samples of the group."""
    epochs: float
    """How many times the run reads each token of the data set, in all data sets of the group that contain the
    token. If ranges of documents overlap, the largest number of all tokens."""
    is_training: bool


def dataset_usage(
    groups: RequestedGroups, seq_length: int, seed: int, cache_folder: str | None = None
) -> list[DatasetUsage]:
    """Returns an entry for each data set that the run reads. groups: the result of `requested_groups`.

    Raises ConfigError for damaged data, for a split with fewer tokens than one sample, and for evaluations
    that repeat their data too often.
    """
    usages = []
    for is_training, requested in zip((True, False, False), groups, strict=True):
        for group, wanted in requested:
            requests = index_requests(group, wanted, seq_length, seed, cache_folder)
            counts = group.samples_of_components(wanted)
            tokens = [request.plan().tokens_per_epoch for request in requests]
            epochs = [samples * seq_length / one for samples, one in zip(counts, tokens, strict=True)]
            totals = _with_repeated(group.components, epochs)
            for request, samples, one, total in zip(requests, counts, tokens, totals, strict=True):
                usage = DatasetUsage(
                    group=group.name,
                    prefix=request.dataset.prefix,
                    documents=len(request.documents),
                    tokens=one,
                    samples=samples,
                    share=samples / wanted,
                    epochs=total,
                    is_training=is_training,
                )
                _check_evaluation(usage)
                usages.append(usage)
    return usages


def _with_repeated(components: Sequence[Component], epochs: Sequence[float]) -> list[float]:
    """Returns the `DatasetUsage.epochs` of each component of a group. epochs: epochs that each component
    reads, without the other components."""
    of_path: dict[str, list[tuple[range, float]]] = {}
    paths = [os.path.abspath(component.dataset.prefix) for component in components]
    for path, component, count in zip(paths, components, epochs, strict=True):
        of_path.setdefault(path, []).append((component.documents, count))
    totals = []
    for path, component in zip(paths, components, strict=True):
        parts = of_path[path]
        # The sum over overlapping ranges is largest at the beginning of one of the ranges.
        starts = {documents.start for documents, _ in parts if documents.start in component.documents}
        totals.append(max(sum(count for documents, count in parts if at in documents) for at in starts))
    return totals


def _check_evaluation(usage: DatasetUsage) -> None:
    if (
        not usage.is_training
        and usage.epochs > _MAX_EVALUATION_EPOCHS
        and usage.samples > _ALWAYS_ALLOWED_SAMPLES
    ):
        raise ConfigError(
            f"the evaluations of {usage.group} read {usage.samples:,} samples, which repeats the "
            f"{usage.tokens:,} tokens of {usage.prefix} {usage.epochs:,.0f} times: reduce --eval-iters, or "
            "raise --eval-interval"
        )


def empty_split_notes(
    data: DataConfig, num_samples: tuple[int, int, int], groups: RequestedGroups
) -> list[str]:
    """Returns a note for each split that a run reads and that has a weight in --split, but no documents.
    num_samples: numbers of samples of the train, valid and test split. groups: the result of
    `requested_groups`."""
    if splits_with_own_data(data):
        return []
    return [
        f"{name}: no documents, so it is not evaluated"
        for name, share, wanted, found in zip(
            SPLIT_NAMES, parse_split(data.split), num_samples, groups, strict=True
        )
        if wanted and share and not found
    ]


def usage_table(usages: Sequence[DatasetUsage], max_epochs: float, notes: Sequence[str] = ()) -> str:
    """Returns a table with a row per data set and group, the notes, and a warning for each data set that
    training reads more than `max_epochs` times."""
    rows = [["split", "data set", "documents", "tokens", "samples", "share", "epochs"]]
    for usage in usages:
        counts = [f"{count:,}" for count in (usage.documents, usage.tokens, usage.samples)]
        rows.append([usage.group, usage.prefix, *counts, f"{usage.share:.1%}", f"{usage.epochs:.3g}"])
    warnings = [
        f"warning: {sentence}: add data, lower its weight, or raise the flag"
        for sentence in _exceeding(usages, max_epochs)
    ]
    return "\n".join([format_table(rows, left_align=(0, 1)), *notes, *warnings])


def _exceeding(usages: Sequence[DatasetUsage], max_epochs: float) -> list[str]:
    """Returns a sentence for each data set that training reads more than `max_epochs` times. A data set that
    the flags name several times has one sentence, unless its documents are read different numbers of
    times."""
    limit = f"--max-epochs-per-dataset {max_epochs:g}"
    sentences = (
        f"training reads {usage.prefix} {usage.epochs:.2f} times, above {limit}"
        for usage in usages
        if usage.is_training and usage.epochs > max_epochs
    )
    return list(dict.fromkeys(sentences))
