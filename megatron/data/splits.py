"""Assignment of documents to the train, valid and test splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.config import DataConfig, parse_split
from megatron.config.data import SPLIT_NAMES, WeightedPath, parse_data_path, parse_groups, token_file_prefixes
from megatron.config.sections.data import groups_option
from megatron.data.blended_dataset import integer_weights
from megatron.data.indexed_dataset import IndexedDataset, data_path, sample_digest
from megatron.errors import UserError
from megatron.tokenizer.vocabulary_record import read_record, record_path

# (prefix, flag that names it) -> dataset
DatasetOpener = Callable[[str, str], IndexedDataset]


@dataclass(frozen=True)
class Component:
    """The documents of one dataset in a blend. index_name: see `IndexRequest`."""

    dataset: IndexedDataset
    documents: range
    index_name: str | None = None


@dataclass(frozen=True)
class DocumentGroup:
    """The data of one split or weighted group: one component, or a blend of several with integer weights."""

    name: str
    components: tuple[Component, ...]
    weights: tuple[int, ...]
    fractions: list[float] | list[list[float]]
    """The user's flag as fractions: of train, valid and test (--split), or START and END per component."""

    @property
    def is_empty(self) -> bool:
        """Whether the group has no documents."""
        return not any(component.documents for component in self.components)


def verify_token_files(data: DataConfig) -> None:
    """Reads the .idx files of all prefixes and checks every size and offset, and samples of the .bin files.

    Raises UserError that names a damaged file. One process per node must call it before any process uses
    `dataset_opener`, which does not verify.
    """
    for option, prefix in dict.fromkeys(token_file_prefixes(data)):
        IndexedDataset(prefix, option)
        record = read_record(prefix) or {}
        expected = record.get("bin_sample_sha256")
        if expected is not None and expected != sample_digest(data_path(prefix)):
            raise UserError(
                f"{option} {prefix}: the tokens of the .bin file are not those of {record_path(prefix)}: "
                "another program replaced the file, or it is damaged; preprocess the data again"
            )


def dataset_opener() -> DatasetOpener:
    """Returns a function that opens the dataset of a prefix without verification, each prefix only once."""
    opened: dict[str, IndexedDataset] = {}

    def open_dataset(prefix: str, option: str) -> IndexedDataset:
        if prefix not in opened:
            opened[prefix] = IndexedDataset(prefix, option, verify=False)
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
            _weighted_group(group.name, group.paths, option, open_dataset)
            for group in parse_groups(option, texts)
        )
    return (_split_group(data, split_name, open_dataset),)


def _weighted_group(
    name: str, paths: tuple[WeightedPath, ...], option: str, open_dataset: DatasetOpener
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
        # Groups that read the same documents share index files.
        index_name = f"documents{documents.start}-{documents.stop}"
        components.append(Component(dataset, documents, index_name))
    weights = integer_weights([path.weight for path in paths])
    return DocumentGroup(name, tuple(components), weights, [[path.start, path.end] for path in paths])


def _split_group(data: DataConfig, split_name: str, open_dataset: DatasetOpener) -> DocumentGroup:
    paths = parse_data_path(data.data_path)
    split_index = SPLIT_NAMES.index(split_name)
    components = []
    for path in paths:
        dataset = open_dataset(path.prefix, "--data-path")
        documents = split_documents(data.split, len(dataset))[split_index]
        components.append(Component(dataset, range(0) if documents is None else documents))
    weights = integer_weights([path.weight for path in paths])
    group = DocumentGroup(split_name, tuple(components), weights, list(parse_split(data.split)))
    for component in group.components:
        if not component.documents and not group.is_empty:
            raise UserError(
                f"--split {data.split} assigns none of the {len(component.dataset):,} documents of "
                f"{component.dataset.source} to the {split_name} split, but the blend needs some: change "
                "--split, remove the prefix, or set the documents with --train-weighted-split-paths"
            )
    return group


def split_documents(split: str, num_documents: int) -> tuple[range | None, range | None, range | None]:
    """Returns the documents of train, valid and test: ranges within [0, num_documents), None if empty.

    The bounds equal Megatron's: each share is rounded to an integer (half to even); then the excess of the
    sum over `num_documents` is subtracted from every upper bound. A split of weight 0 is None even if
    rounding would assign a document to it.
    """
    fractions = parse_split(split)
    bounds = [0]
    for fraction in fractions:
        bounds.append(bounds[-1] + int(round(fraction * float(num_documents))))
    excess = bounds[-1] - num_documents
    # With few documents Megatron's correction can give negative bounds.
    bounds = [0] + [max(bound - excess, 0) for bound in bounds[1:]]
    train, valid, test = (
        range(start, end) if fraction > 0 and end > start else None
        for fraction, start, end in zip(fractions, bounds[:-1], bounds[1:], strict=True)
    )
    return train, valid, test
