"""Which documents of which token files train, validate and test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.config import ConfigError, DataConfig, parse_split
from megatron.config.parsing.split import SPLIT_NAMES
from megatron.config.parsing.weighted_paths import WeightedPath, parse_data_path, parse_groups
from megatron.config.sections.data import groups_option
from megatron.data.blended_dataset import integer_weights
from megatron.data.indexed_dataset import IndexedDataset

# Opens a prefix that a flag names.
Opener = Callable[[str, str], IndexedDataset]


@dataclass(frozen=True)
class Component:
    """The documents of one dataset that a blend reads. index_name: see IndexRequest."""

    dataset: IndexedDataset
    documents: range
    index_name: str | None = None


@dataclass(frozen=True)
class DocumentGroup:
    """What one split reads: a blend of components with these weights, mostly a single one."""

    name: str
    components: tuple[Component, ...]
    weights: tuple[int, ...]
    fractions: list[float] | list[list[float]]
    """What the user gave, in fractions: of train, valid and test, or START and END of each component."""

    @property
    def is_empty(self) -> bool:
        return not any(component.documents for component in self.components)


def open_once() -> Opener:
    """Opens every prefix at its first mention only: a dataset may train and validate."""
    opened: dict[str, IndexedDataset] = {}

    def open_dataset(prefix: str, option: str) -> IndexedDataset:
        if prefix not in opened:
            opened[prefix] = IndexedDataset(prefix, option)
        return opened[prefix]

    return open_dataset


def document_groups(data: DataConfig, split_name: str, open_dataset: Opener) -> tuple[DocumentGroup, ...]:
    """The groups of 'train', 'valid' or 'test': one of that name, which may be empty, with --data-path and
    --split; those of the user with --{split_name}-weighted-split-paths, none of them empty.

    Raises ConfigError for damaged data and for documents that are wanted of a dataset that has too few.
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
    name: str, paths: tuple[WeightedPath, ...], option: str, open_dataset: Opener
) -> DocumentGroup:
    components = []
    for path in paths:
        dataset = open_dataset(path.prefix, option)
        # Rounded as Megatron does; ranges that meet share the bound.
        documents = range(round(path.start * len(dataset)), round(path.end * len(dataset)))
        if not documents:
            raise ConfigError(
                f"{option}: {path.start:g}:{path.end:g} of the {len(dataset):,} documents of {path.prefix}, "
                f"in the group '{name}', is none of them: widen the range, or leave it out"
            )
        # Groups share index files where they read the same documents, whatever they are called.
        index_name = f"documents{documents.start}-{documents.stop}"
        components.append(Component(dataset, documents, index_name))
    weights = integer_weights([path.weight for path in paths])
    return DocumentGroup(name, tuple(components), weights, [[path.start, path.end] for path in paths])


def _split_group(data: DataConfig, split_name: str, open_dataset: Opener) -> DocumentGroup:
    paths = parse_data_path(data.data_path)
    place = SPLIT_NAMES.index(split_name)
    components = []
    for path in paths:
        dataset = open_dataset(path.prefix, "--data-path")
        documents = split_documents(data.split, len(dataset))[place]
        components.append(Component(dataset, range(0) if documents is None else documents))
    weights = integer_weights([path.weight for path in paths])
    group = DocumentGroup(split_name, tuple(components), weights, list(parse_split(data.split)))
    for component in group.components:
        if not component.documents and not group.is_empty:
            raise ConfigError(
                f"--split {data.split} leaves none of the {len(component.dataset):,} documents of "
                f"{component.dataset.source} to the {split_name} split, where the blend reads it too: change "
                "--split, leave the prefix out, or say with --train-weighted-split-paths what reads what"
            )
    return group


def split_documents(split: str, num_documents: int) -> tuple[range | None, range | None, range | None]:
    """The documents of train, valid and test, each a range of [0, num_documents); None for a split that has
    none.

    The bounds are Megatron's: each share is rounded to the nearest whole document (half to even), and the
    excess or lack of the three is taken from every upper bound. A split of weight 0 is None even where
    rounding would leave a document in it.
    """
    fractions = parse_split(split)
    bounds = [0]
    for fraction in fractions:
        bounds.append(bounds[-1] + int(round(fraction * float(num_documents))))
    excess = bounds[-1] - num_documents
    # With few documents Megatron's correction can fall below 0, which names no document.
    bounds = [0] + [max(bound - excess, 0) for bound in bounds[1:]]
    train, valid, test = (
        range(start, end) if fraction > 0 and end > start else None
        for fraction, start, end in zip(fractions, bounds[:-1], bounds[1:], strict=True)
    )
    return train, valid, test
