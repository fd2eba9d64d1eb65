"""What a run reads of each data set: documents, tokens, samples and epochs, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config import ConfigError, DataConfig, parse_split
from megatron.config.parsing.split import SPLIT_NAMES
from megatron.data.blended_dataset import BlendOrder
from megatron.data.gpt_dataset import index_requests, requested_groups
from megatron.text_table import format_table

# An evaluation that repeats its data so often has a typo in its flags. The index of so many samples takes
# hundreds of MB and seconds, that of a hundred times as many all memory.
_MAX_EVALUATION_EPOCHS = 1000
_ALWAYS_ALLOWED_SAMPLES = 10_000_000


@dataclass(frozen=True)
class DatasetUsage:
    """What a run reads of one data set for one split or weighted group."""

    group: str
    prefix: str
    documents: int
    """Documents of the data set that belong to the split."""
    tokens: int
    """Tokens of these documents: one epoch."""
    samples: int
    """Samples that the run reads from the data set."""
    share: float
    """These samples as a fraction of all samples of the group."""
    epochs: float
    """How many times the run reads each token."""
    is_training: bool


def dataset_usage(
    data: DataConfig, seq_length: int, seed: int, num_samples: tuple[int, int, int]
) -> list[DatasetUsage]:
    """What a run reads. num_samples: samples of the train, valid and test split; 0: not read, no entry.

    Raises ConfigError for damaged data, for a split with fewer tokens than one sample, and for evaluations
    that repeat their data without end.
    """
    usages = []
    for is_training, groups in zip((True, False, False), requested_groups(data, num_samples), strict=True):
        for group, wanted in groups:
            requests = index_requests(group, wanted, seq_length, seed, data.data_cache_path)
            counts = BlendOrder(group.weights).samples_of_components(wanted)
            for request, samples in zip(requests, counts, strict=True):
                tokens = request.plan().tokens_per_epoch
                usage = DatasetUsage(
                    group=group.name,
                    prefix=request.dataset.prefix,
                    documents=len(request.documents),
                    tokens=tokens,
                    samples=samples,
                    share=samples / wanted,
                    epochs=samples * seq_length / tokens,
                    is_training=is_training,
                )
                _check_evaluation(usage)
                usages.append(usage)
    return usages


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


def splits_without_documents(data: DataConfig, num_samples: tuple[int, int, int]) -> list[str]:
    """The splits that a run reads and that have a weight in --split, but no documents. num_samples: as
    above."""
    if data.train_weighted_split_paths:
        return []
    found = requested_groups(data, num_samples)
    return [
        name
        for name, share, wanted, groups in zip(
            SPLIT_NAMES, parse_split(data.split), num_samples, found, strict=True
        )
        if wanted and share and not groups
    ]


def usage_table(
    usages: Sequence[DatasetUsage], max_epochs: float, without_documents: Sequence[str] = ()
) -> str:
    """A row per data set and group, a line per split of `without_documents`, and a warning per data set that
    training reads more than `max_epochs` times."""
    rows = [["split", "data set", "documents", "tokens", "samples", "share", "epochs"]]
    for usage in usages:
        counts = [f"{count:,}" for count in (usage.documents, usage.tokens, usage.samples)]
        rows.append([usage.group, usage.prefix, *counts, f"{usage.share:.1%}", f"{usage.epochs:.3g}"])
    warnings = [
        f"warning: training reads {usage.prefix} {usage.epochs:.2f} times, above --max-epochs-per-dataset "
        f"{max_epochs:g}: add data, lower its weight, or raise the flag"
        for usage in usages
        if usage.is_training and usage.epochs > max_epochs
    ]
    empty = [f"{name}: no documents, so it is not evaluated" for name in without_documents]
    return "\n".join([format_table(rows, left_align=(0, 1)), *empty, *warnings])
