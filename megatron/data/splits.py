"""Assignment of documents to the train, valid and test splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from megatron.config import DataConfig, parse_split
from megatron.config.data import SPLIT_NAMES, WeightedPath, parse_data_path, parse_groups
from megatron.config.registries import DATA_ORDERS, DataOrder
from megatron.config.sections.data import groups_option
from megatron.data.blended_dataset import Blend
from megatron.data.index_stamp import IndexStamp, statuses
from megatron.data.indexed_dataset import IndexedDataset, data_path, index_path, sample_digest
from megatron.errors import UserError
from megatron.tokenizer.vocabulary_record import read_record, record_path

# (prefix, flag that names it) -> dataset
DatasetOpener = Callable[[str, str], IndexedDataset]


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
    fractions: list[float] | list[list[float]]
    """The user's flag as fractions: of train, valid and test (--split), or START and END per component."""
    order: DataOrder

    @property
    def is_empty(self) -> bool:
        """Whether the group has no documents."""
        return not any(component.documents for component in self.components)

    def samples_of_components(self, num_samples: int) -> list[int]:
        """Returns the number of samples of each component among the first `num_samples` of the group."""
        return [num_samples] if self.blend is None else self.blend.samples_of_components(num_samples)


def verify_token_files(data: DataConfig, shard: tuple[int, int] = (0, 1)) -> IndexStamp:
    """Reads the .idx files of all prefixes and checks every size and offset, and samples of the .bin files,
    unless the stamp vouches for them. Returns the stamp with what was verified, for `IndexStamp.write`.

    shard: see `IndexStamp`. Raises UserError that names a damaged file. One process per node must call it
    before any process uses `dataset_opener`, which does not verify.
    """
    stamp = IndexStamp(data, shard)
    for option, prefix in stamp.prefixes:
        if stamp.facts(prefix) is not None:
            continue
        found = statuses((index_path(prefix), data_path(prefix)))
        dataset = IndexedDataset(prefix, option)
        record = read_record(prefix) or {}
        expected = record.get("bin_sample_sha256")
        if expected is not None and expected != sample_digest(data_path(prefix)):
            raise UserError(
                f"{option} {prefix}: the tokens of the .bin file are not those of {record_path(prefix)}: "
                "another program replaced the file, or it is damaged; preprocess the data again"
            )
        stamp.record_token_files(dataset, found)
    return stamp


def dataset_opener(stamp: IndexStamp) -> DatasetOpener:
    """Returns a function that opens the dataset of a prefix without verification, each prefix only once. The
    files that the stamp vouches for are opened when a document is read."""
    opened: dict[str, IndexedDataset] = {}

    def open_dataset(prefix: str, option: str) -> IndexedDataset:
        if prefix not in opened:
            opened[prefix] = IndexedDataset(prefix, option, verify=False, facts=stamp.facts(prefix))
        return opened[prefix]

    return open_dataset


def document_groups(
    data: DataConfig, split_name: str, open_dataset: DatasetOpener
) -> tuple[DocumentGroup, ...]:
    """Returns the document groups of the split 'train', 'valid' or 'test'.

    With --data-path and --split there is one group with the name of the split; it may be empty. With
    --{split_name}-weighted-split-paths there are the groups of that flag. Raises UserError for damaged data
    and for a component without documents.
    """
    if data.train_weighted_split_paths:
        option = groups_option(data, split_name)
        texts = getattr(data, f"{split_name}_weighted_split_paths")
        return tuple(
            _weighted_group(group.name, group.paths, option, data.data_order, open_dataset)
            for group in parse_groups(option, texts)
        )
    return (_split_group(data, split_name, open_dataset),)


def _weighted_group(
    name: str, paths: tuple[WeightedPath, ...], option: str, order: str, open_dataset: DatasetOpener
) -> DocumentGroup:
    components = []
    for path in paths:
        dataset = open_dataset(path.prefix, option)
        # The bounds are rounded as in Megatron. Adjacent ranges share a bound.
        documents = range(round(path.start * len(dataset)), round(path.end * len(dataset)))
        if not documents:
            raise UserError(
                f"{option}: the range {path.start:g}:{path.end:g} of {path.prefix} in the group '{name}' "
                f"contains none of its {len(dataset):,} documents: widen the range, or remove it"
            )
        components.append(Component(dataset, documents))
    blend = _blend_of(paths, order) if len(paths) > 1 else None
    ranges = [[path.start, path.end] for path in paths]
    return DocumentGroup(name, tuple(components), blend, ranges, DATA_ORDERS[order])


def _blend_of(paths: tuple[WeightedPath, ...], order: str) -> Blend:
    blend: Blend = DATA_ORDERS.load(order).from_fractions([path.weight for path in paths])
    return blend


def _split_group(data: DataConfig, split_name: str, open_dataset: DatasetOpener) -> DocumentGroup:
    paths = parse_data_path(data.data_path)
    split_index = SPLIT_NAMES.index(split_name)
    order = DATA_ORDERS[data.data_order]
    components = []
    for path in paths:
        dataset = open_dataset(path.prefix, "--data-path")
        documents = split_documents(data.split, len(dataset), order)[split_index]
        components.append(Component(dataset, range(0) if documents is None else documents))
    blends_one = DATA_ORDERS.load(data.data_order).blends_one and len(data.data_path) > 1
    blend = _blend_of(paths, data.data_order) if blends_one or len(paths) > 1 else None
    fractions = list(parse_split(data.split))
    group = DocumentGroup(split_name, tuple(components), blend, fractions, order)
    for component in group.components:
        if not component.documents and not group.is_empty:
            raise UserError(
                f"--split {data.split} assigns none of the {len(component.dataset):,} documents of "
                f"{component.dataset.source} to the {split_name} split, but the blend needs some: change "
                "--split, remove the prefix, or set the documents with --train-weighted-split-paths"
            )
    return group


def split_documents(
    split: str, num_documents: int, order: DataOrder
) -> tuple[range | None, range | None, range | None]:
    """Returns the documents of train, valid and test: ranges within [0, num_documents), None if empty.

    The bounds are integers, rounded half to even. Megatron-Core rounds the share of all documents before
    each bound. Megatron-DeepSpeed rounds the share of each split; then it subtracts the excess of the sum
    over `num_documents` from every upper bound. A split of weight 0 is None even if rounding would assign a
    document to it.
    """
    fractions = parse_split(split)
    if order.is_core:
        bounds = [round(share * num_documents) for share in accumulate(fractions, initial=0.0)]
    else:
        bounds = list(accumulate((round(share * num_documents) for share in fractions), initial=0))
        excess = bounds[-1] - num_documents
        # With few documents Megatron's correction can give negative bounds.
        bounds = [0] + [max(bound - excess, 0) for bound in bounds[1:]]
    train, valid, test = (
        range(start, end) if fraction > 0 and end > start else None
        for fraction, start, end in zip(fractions, bounds[:-1], bounds[1:], strict=True)
    )
    return train, valid, test
