"""Assigns documents to the train, valid and test splits."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

from megatron.config import ConfigError, DataConfig
from megatron.config.registries import DATA_ORDERS, DataOrder
from megatron.config.sections.data import data_option
from megatron.data.blended_dataset import Blend, BlendOrder
from megatron.data.flags import (
    SPLIT_NAMES,
    PathGroup,
    WeightedPath,
    parse_split,
    split_groups,
    splits_with_own_data,
)
from megatron.data.index_stamp import IndexStamp, statuses
from megatron.data.indexed_dataset import (
    IndexedDataset,
    check_loss_mask,
    data_path,
    file_paths,
    sample_digest,
)
from megatron.errors import UserError
from megatron.text_table import first_few
from megatron.tokenizer.vocabulary_record import read_record, record_path


@dataclass(frozen=True)
class Component:
    """The documents of one dataset in a blend."""

    dataset: IndexedDataset
    documents: range


@dataclass(frozen=True)
class DocumentGroup:
    """The data of one split or weighted group: one component, or a blend."""

    name: str
    components: tuple[Component, ...]
    blend: Blend | None
    fractions: list[Any]
    """The fractions in the user's flag: (train, valid, test) of --split, or [START, END] for each
    component."""
    order: DataOrder
    notes: tuple[str, ...] = ()
    """Sentences on what differs from the flags: components that are left out or limited."""
    renormalized_over: int | None = None
    """Number of samples for which --max-epochs-action renormalize changed the weights; None if it did not."""

    @property
    def is_empty(self) -> bool:
        """Whether the group has no documents."""
        return not any(component.documents for component in self.components)

    def samples_of_components(self, num_samples: int) -> list[int]:
        """Returns the number of samples of each component among the first `num_samples` of the group."""
        return [num_samples] if self.blend is None else self.blend.samples_of_components(num_samples)


def verify_token_files(data: DataConfig, shard: tuple[int, int] = (0, 1)) -> IndexStamp:
    """Reads the .idx files of all prefixes and checks every size and offset, and compares samples of the .bin
    files with their records. Skips files that are unchanged since the stamp recorded them. Returns the stamp
    with the verified files, for `IndexStamp.write`.

    shard: see `IndexStamp`. Raises UserError that names a damaged file. One process per node must call it
    before any process uses `IndexStamp.dataset`, which does not verify.
    """
    stamp = IndexStamp(data, shard)
    for option, prefix in stamp.prefixes:
        if stamp.counts(prefix) is not None:
            continue
        found = statuses(file_paths(prefix))
        dataset = IndexedDataset(prefix, option)
        record = read_record(prefix) or {}
        expected = record.get("bin_sample_sha256")
        if expected is not None and expected != sample_digest(data_path(prefix)):
            raise UserError(
                f"{option} {prefix}: the tokens of the .bin file differ from {record_path(prefix)}: "
                "another program replaced the file, or it is damaged; preprocess the data again"
            )
        check_loss_mask(dataset, record)
        stamp.record_token_files(dataset, found)
    return stamp


def document_groups(
    data: DataConfig, split_name: str, stamp: IndexStamp, seq_length: int, num_samples: int
) -> tuple[DocumentGroup, ...]:
    """Returns the document groups of the split 'train', 'valid' or 'test'.

    With weighted groups these are the groups of the flag. Otherwise it is one group with the name of the
    split, which may be empty. num_samples: number of samples that the run reads of each group.

    A blend leaves out components without tokens. It also leaves out components with fewer tokens than one
    sample has, unless the data order repeats these. --max-epochs-action renormalize changes the weights of
    the training data. Raises UserError for damaged data, and for a weighted group without documents.
    """
    return tuple(
        _document_group(data, split_name, group, stamp, seq_length, num_samples)
        for group in split_groups(data, split_name)
    )


def _document_group(
    data: DataConfig, split_name: str, named: PathGroup, stamp: IndexStamp, seq_length: int, num_samples: int
) -> DocumentGroup:
    order, has_ranges = DATA_ORDERS[data.data_order], bool(splits_with_own_data(data))
    components = [_component(data, split_name, path, stamp) for path in named.paths]
    tokens = [component.dataset.tokens_in(component.documents) for component in components]
    shortest = seq_length + 1 if named.is_by_size else order.shortest(seq_length)
    used = [i for i, count in enumerate(tokens) if count >= shortest]
    notes = _left_out_notes(named.name, components, tokens, shortest) if used else ()
    if not used:  # the split is empty, or has too few tokens, which `IndexRequest.plan` rejects
        used = list(range(len(components)))
        if has_ranges and not any(component.documents for component in components):
            path = named.paths[0]
            raise UserError(
                f"{data_option(data, split_name)}: the range {path.start:g}:{path.end:g} of {path.prefix} in "
                f"the group '{named.name}' contains none of its {len(components[0].dataset):,} documents: "
                "widen the range, or remove it"
            )
    paths = [named.paths[i] for i in used]
    blend = _blend_of(data, paths, [max(tokens[i] - 1, 0) // seq_length for i in used])
    ranges: list[Any] = [[path.start, path.end] for path in paths]
    fractions = ranges if has_ranges else list(parse_split(data.split))
    group = DocumentGroup(
        named.name, tuple(components[i] for i in used), blend, fractions, order, tuple(notes)
    )
    if split_name == "train" and data.max_epochs_action == "renormalize" and tokens[used[0]] >= shortest:
        return _renormalized(group, data, seq_length, max(num_samples, data.data_order_samples or 0))
    return group


def _blend_of(data: DataConfig, paths: Sequence[WeightedPath], sizes: Sequence[int]) -> Blend | None:
    """Returns the blend of a group; None if the group has one prefix. sizes: number of samples of each prefix
    in one epoch.

    In other programs a single prefix with a weight is a blend, too, but not in a weighted group, and not in
    Megatron-Core's --train-data-path.
    """
    kind: Any = DATA_ORDERS.load(data.data_order)
    weights = [path.weight for path in paths if path.weight is not None]
    not_blended = data.train_weighted_split_paths or (
        splits_with_own_data(data) and DATA_ORDERS[data.data_order].is_core
    )
    if len(paths) == 1 and (not_blended or not weights or not kind.blends_one):
        return None
    blend: Blend = kind.from_fractions(weights) if weights else kind.from_sizes(sizes)
    return blend


def _component(data: DataConfig, split_name: str, path: WeightedPath, stamp: IndexStamp) -> Component:
    dataset = stamp.dataset(path.prefix, data_option(data, split_name))
    if splits_with_own_data(data):
        # The bounds are rounded as in Megatron, and adjacent ranges share a bound.
        documents = range(round(path.start * len(dataset)), round(path.end * len(dataset)))
        return Component(dataset, documents)
    splits = split_documents(data.split, len(dataset), DATA_ORDERS[data.data_order])
    return Component(dataset, splits[SPLIT_NAMES.index(split_name)] or range(0))


def _left_out_notes(
    name: str, components: Sequence[Component], tokens: Sequence[int], shortest: int
) -> Iterator[str]:
    """Yields a note for each reason why components are left out of a group. shortest: number of tokens of a
    sample."""
    prefixes = [part.dataset.prefix for part in components]
    empty = [prefix for prefix, count in zip(prefixes, tokens, strict=True) if count == 0]
    short = [prefix for prefix, count in zip(prefixes, tokens, strict=True) if 0 < count < shortest]
    few = f"fewer tokens in it than a sample, {shortest:,}"
    for found, what in ((short, few), (empty, "no tokens in it")):
        if found:
            yield (
                f"note: {name} leaves out {len(found)} of {len(prefixes)} data sets, which have {what}: "
                f"{first_few(found)}"
            )


def _renormalized(group: DocumentGroup, data: DataConfig, seq_length: int, num_samples: int) -> DocumentGroup:
    """Returns the group with weights for which no component has more than --max-epochs-per-dataset epochs
    among the first `num_samples`.

    A component that would exceed the limit gets all samples within the limit; the other components share the
    rest in proportion to their weights. The new weights are numbers of samples, so the order gives each
    component exactly these numbers. Raises ConfigError if all components together have too few samples, or if
    two have common documents.
    """
    limit = data.max_epochs_per_dataset
    in_order = sorted(
        (os.path.abspath(part.dataset.prefix), part.documents.start, part.documents.stop)
        for part in group.components
    )
    for (path, _, stop), (following, start, _) in pairwise(in_order):
        if path == following and start < stop:
            raise ConfigError(
                f"--max-epochs-action renormalize: the {group.name} data name documents of {path} more than "
                "once: name them once, with the sum of the weights"
            )
    tokens = [part.dataset.tokens_in(part.documents) for part in group.components]
    caps = [math.floor(Fraction(limit) * count / seq_length) for count in tokens]
    counts = group.samples_of_components(num_samples)
    if all(count <= cap for count, cap in zip(counts, caps, strict=True)):
        return group
    if sum(caps) < num_samples:
        raise ConfigError(
            f"--max-epochs-action renormalize: the run reads {num_samples:,} training samples, and all its "
            f"data sets together have {sum(caps):,} in --max-epochs-per-dataset {limit:g}: add data, raise "
            "the limit, or shorten the run"
        )
    wanted, capped = counts, set[int]()
    weights = [1] if group.blend is None else group.blend.weights
    while exceeding := {i for i, count in enumerate(counts) if i not in capped and count > caps[i]}:
        capped |= exceeding
        free = [i for i in range(len(counts)) if i not in capped]
        rest = num_samples - sum(caps[i] for i in capped)
        counts = list(caps)
        shares = BlendOrder.from_fractions([Fraction(weights[i]) for i in free]) if free else None
        for i, share in zip(free, shares.samples_of_components(rest) if shares else (), strict=True):
            counts[i] = share
    used = [i for i, count in enumerate(counts) if count > 0]
    blend = BlendOrder.from_fractions([Fraction(counts[i]) for i in used]) if len(used) > 1 else None
    names = [
        f"{group.components[i].dataset.prefix} ({wanted[i]:,} -> {caps[i]:,} samples)" for i in sorted(capped)
    ]
    note = (
        f"note: the {group.name} data are renormalized over {num_samples:,} samples: {len(capped)} of "
        f"{len(counts)} data sets are read to --max-epochs-per-dataset {limit:g}, and the others share the "
        f"rest by their weights: {first_few(names)}"
    )
    ranges = splits_with_own_data(data)
    return replace(
        group,
        components=tuple(group.components[i] for i in used),
        blend=blend,
        fractions=[group.fractions[i] for i in used] if ranges else group.fractions,
        notes=(*group.notes, note),
        renormalized_over=num_samples,
    )


def split_documents(
    split: str, num_documents: int, order: DataOrder
) -> tuple[range | None, range | None, range | None]:
    """Returns the ranges of documents of train, valid and test, within [0, num_documents); None for an empty
    one.

    The bounds are integers, rounded half to even. Megatron-Core rounds the share of all documents before each
    bound. Megatron-DeepSpeed rounds the share of each split; it then subtracts from every upper bound the
    amount by which the sum exceeds `num_documents`. A split of weight 0 is None even if rounding would assign
    a document to it.
    """
    fractions = parse_split(split)
    if order.is_core:
        bounds = [round(share * num_documents) for share in accumulate(fractions, initial=0.0)]
    else:
        bounds = list(accumulate((round(share * num_documents) for share in fractions), initial=0))
        excess = bounds[-1] - num_documents
        # With few documents Megatron's subtraction can give negative bounds.
        bounds = [0] + [max(bound - excess, 0) for bound in bounds[1:]]
    train, valid, test = (
        range(start, end) if fraction > 0 and end > start else None
        for fraction, start, end in zip(fractions, bounds[:-1], bounds[1:], strict=True)
    )
    return train, valid, test
