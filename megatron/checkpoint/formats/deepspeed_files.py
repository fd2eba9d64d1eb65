"""DeepSpeed's files: their names, and where each parameter's fp32 values and moments are in them.

Every (stage, TP rank) pair writes a file of flat fp32 partitions and the position of each parameter in them;
with ZeRO, each data-parallel rank of the pair writes one. The pieces of a parameter, in the order of the
data-parallel ranks, form its tensor-parallel shard.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.formats.torch_archive import read_file
from megatron.checkpoint.names import check_parameter, check_plain
from megatron.errors import UserError, one_line
from megatron.files import expect_layout
from megatron.mapped_file import release_pages

if TYPE_CHECKING:
    from torch import Tensor

# The name of a parameter's fp32 values; its moments have the optimizer's names.
VALUES = "fp32"
_ZERO_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt")
_SHARDED_WEIGHTS_FILE = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
SHARDED_WEIGHTS = (
    "another framework saved it with ZeRO-3, in shards that this program does not read: convert it with "
    "DeepSpeed's own ds_to_universal.py"
)
# A checkpoint of DeepSpeed has one of these files: the first without ZeRO-3, the second with it.
FIRST_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_MODEL_FILE = re.compile(r"mp_rank_(?P<model>\d+)_model_states\.pt")
_LAYER_FILE = re.compile(r"layer_(?P<layer>\d{1,9})-model_\d+-model_states\.pt")
# Tied parameters are saved with the first layer that holds them.
_TIED_LAYER = 1
# With some settings DeepSpeed's names of optimizer files begin with this prefix.
_OPTIONAL_PREFIX = "bf16_"
# Of the index in `run.json`. An index of another version is not used.
INDEX_VERSION = 1
# Where a file holds a parameter: number of the group of parameters, first element in it, number of elements.
Place = tuple[int, int, int]


@dataclass(frozen=True)
class _Fragment:
    """Elements start to start + length - 1 of an optimizer group's partition in one file."""

    path: Path
    read_state: Callable[[], dict]
    group: int
    start: int
    length: int

    @property
    def state(self) -> dict:
        return self.read_state()

    @property
    def master(self) -> Tensor:
        return self.state["single_partition_of_fp32_groups"][self.group]

    @property
    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state of the group: moments as long as the partition, and the step."""
        return self.state["base_optimizer_state"]["state"].get(self.group, {})

    def is_moment(self, value: Any) -> bool:
        """Returns whether an entry of `optimizer_state` is a moment. On the last rank, DeepSpeed's ZeRO-1 and
        2 save moments with the padding of the partition, and fp32 values without it."""
        paddings: Any = self.state.get("group_paddings")
        known = isinstance(paddings, (list, tuple)) and self.group < len(paddings)
        padding = paddings[self.group] if known else 0
        numel = self.master.numel()
        lengths = [numel, *([numel + padding] if type(padding) is int else [])]
        return is_tensor(value) and value.dim() == 1 and value.numel() in lengths

    def piece(self, key: str) -> Tensor:
        tensor = self.master if key == VALUES else self.optimizer_state[key]
        if not is_tensor(tensor) or not tensor.is_contiguous():
            raise UserError(f"the optimizer's files hold no tensor {key}: the checkpoint is damaged")
        start, length, total = self.start, self.length, tensor.numel()
        if not (type(start) is type(length) is int and 0 <= start <= start + length <= total):
            raise UserError(
                f"checkpoint file {self.path} names {one_line(length)} elements from {one_line(start)} on in "
                f"a tensor of {total:,} elements: it is damaged"
            )
        return tensor.view(-1)[start : start + length]


class FlatShard:
    """A TP rank's flat shard of a parameter or moment, in consecutive memory-mapped pieces, one per file. A
    file is opened when one of its elements is read."""

    def __init__(self, fragments: Sequence[_Fragment], key: str, lacks: str) -> None:
        """key: VALUES or a moment. lacks: the error if a file has no such tensor."""
        self._fragments, self._key, self._lacks = fragments, key, lacks
        self.numel = sum(fragment.length for fragment in fragments)
        # First element, and the one after the last, that were returned since `release`.
        self._returned = (self.numel, 0)

    def _piece(self, fragment: _Fragment) -> Tensor:
        try:
            return fragment.piece(self._key)
        except KeyError:
            raise UserError(self._lacks) from None

    @property
    def dtypes(self) -> set[str]:
        """The dtypes in the files. Opens all files."""
        return {str(piece.dtype).removeprefix("torch.") for piece in map(self._piece, self._fragments)}

    def elements(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Returns elements start to stop - 1. They share memory with the file if it holds all of them, unless
        `out` is given, which gets them."""
        import torch

        self._returned = min(self._returned[0], start), max(self._returned[1], stop)
        parts = self._parts(start, stop)
        if out is not None:
            for part, target in zip(parts, out.split([part.numel() for part in parts]), strict=True):
                target.copy_(part)
            return out
        return torch.cat(parts) if len(parts) > 1 else (parts or [torch.empty(0)])[0]

    def _parts(self, start: int, stop: int) -> list[Tensor]:
        """Returns elements start to stop - 1 as they are in the files, one tensor per file."""
        parts, first = [], 0
        for fragment in self._fragments:
            begin, end = max(start - first, 0), min(stop - first, fragment.length)
            parts += [self._piece(fragment)[begin:end]] if begin < end else []
            first += fragment.length
        return parts

    def release(self) -> None:
        """Removes the pages that were read since the last call from the resident memory of the process. The
        time does not depend on the size of the shard."""
        for part in self._parts(*self._returned):
            release_pages(part.data_ptr(), part.nbytes)
        self._returned = (self.numel, 0)


class OptimizerFiles:
    """The optimizer state of all parameters. `stage`: 0 for ZeRO-0, 1 for all other ZeRO stages.

    With the index of `run.json` a file is read when something in it is needed, and files that are not needed
    may be missing; without it all files are read.
    """

    def __init__(
        self,
        folder: Path,
        tp_size: int,
        index: Mapping[str, Any] | None = None,
        names: Collection[str] | None = None,
        present: Collection[str] | None = None,
    ) -> None:
        """tp_size: tensor-parallel size of the run that saved. index: see `file_index`. names: the files of
        the checkpoint; None to list the folder. present: those that are in the folder; None if all are.
        Raises UserError for a file that is damaged or has an unknown layout."""
        self.folder = folder
        self.tp_size = tp_size
        self._fragments: list[dict[str, list[_Fragment]]] = [{} for _ in range(tp_size)]
        self._states: dict[Path, dict] = {}
        self._index = _read_index(index, folder) if index is not None else None
        files = optimizer_files(folder, names)
        if not files:
            raise UserError(f"checkpoint {folder} holds no optimizer state: use another checkpoint")

        def is_present(path: Path) -> bool:
            return present is None or path.name in present

        _, self.first_path, key = next((file for file in files if is_present(file[1])), files[0])
        self.stage = int(key == "optimizer_state_dict")
        # A tied parameter is in the files of two stages: the files of the first stage that are all present.
        holders: dict[tuple[int, str], dict[int, list[_Fragment]]] = {}
        for model_rank, path, key in files:
            read = partial(self._read_state, path, key)
            for name, place in self._places(path, read).items():
                of_ranks = holders.setdefault((model_rank % tp_size, name), {})
                of_ranks.setdefault(model_rank, []).append(_Fragment(path, read, *place))
        for (tp_rank, name), of_ranks in holders.items():
            complete = (one for one in of_ranks.values() if all(is_present(part.path) for part in one))
            self._fragments[tp_rank][name] = next(complete, next(iter(of_ranks.values())))

    def paths(self, tp_rank: int, name: str, start: int = 0, stop: int | None = None) -> set[Path]:
        """Returns the files that hold elements start to stop - 1 of a TP rank's shard of a parameter."""
        paths, first = set(), 0
        for fragment in self._fragments[tp_rank][name]:
            if start < first + fragment.length and (stop is None or first < stop):
                paths.add(fragment.path)
            first += fragment.length
        return paths

    def _places(self, path: Path, read: Callable[[], dict]) -> dict[str, Place]:
        """Returns the place of each parameter in a file, from the index if there is one."""
        if self._index is None:
            return places_in(read(), path)
        if path.name not in self._index:
            raise UserError(f"checkpoint {self.folder}: the index in run.json lacks {path.name}")
        return self._index[path.name]

    def _read_state(self, path: Path, key: str) -> dict:
        if path not in self._states:
            state = _optimizer_state(path, key)
            if self._index is not None and places_in(state, path) != self._places(path, lambda: state):
                raise UserError(
                    f"checkpoint file {path} holds other parameters than the index in run.json says: the "
                    "files are from different checkpoints"
                )
            self._states[path] = state
        return self._states[path]

    @property
    def common(self) -> dict:
        """The state in the first file, for entries that are equal in all files (clipping, loss scale)."""
        key = "optimizer_state_dict" if self.stage else "optimizer"
        return self._read_state(self.first_path, key)

    def _any_fragment(self, name: str) -> _Fragment:
        """Returns a fragment of a parameter, in a file that has been read if there is one."""
        found = [fragment for of_rank in self._fragments for fragment in of_rank.get(name, [])]
        return next((fragment for fragment in found if fragment.path in self._states), found[0])

    @property
    def names(self) -> Collection[str]:
        """All parameters, by global name."""
        return self._fragments[0].keys()

    def moments(self, name: str) -> list[str]:
        """Returns the optimizer's names of the moments of a parameter."""
        one = self._any_fragment(name)
        return [key for key, value in one.optimizer_state.items() if one.is_moment(value)]

    def scalars(self, name: str) -> dict[str, Any]:
        """Returns the optimizer's state of a parameter except its moments: the step."""
        one = self._any_fragment(name)
        return {key: value for key, value in one.optimizer_state.items() if not one.is_moment(value)}

    def shard(self, tp_rank: int, name: str, key: str) -> FlatShard:
        """Returns a TP rank's shard. key: VALUES or a moment. Raises UserError if this rank has none."""
        lacks = (
            f"checkpoint {self.folder}: the files of TP rank {tp_rank} lack {key} of {name}, "
            "which others have: they are from different checkpoints"
        )
        if name not in self._fragments[tp_rank]:
            raise UserError(lacks)
        return FlatShard(self._fragments[tp_rank][name], key, lacks)


def layer_file(layer: int, tp_rank: int) -> str:
    """Returns the name of the file with a tensor-parallel rank's weights of a layer."""
    return f"layer_{layer:02d}-model_{tp_rank:02d}-model_states.pt"


def model_file(model_rank: int) -> str:
    """Returns the name of the file of a (stage, tensor-parallel rank) pair."""
    return f"mp_rank_{model_rank:02d}_model_states.pt"


def optimizer_file(model_rank: int, dp_rank: int = 0) -> str:
    """Returns the name of the file with the optimizer state of one rank."""
    return f"zero_pp_rank_{dp_rank}_mp_rank_{model_rank:02d}_optim_states.pt"


def optimizer_files(folder: Path, names: Collection[str] | None = None) -> list[tuple[int, Path, str]]:
    """Returns (model-parallel rank, path, key of the optimizer's state) of each file, in the order of the
    data-parallel ranks. Without ZeRO, the mp_rank files hold the optimizer. names: the files in the folder,
    if they are known; None to list the folder."""
    if names is None:
        names = [path.name for path in folder.iterdir()]
    zero = [(match, folder / name) for name in names if (match := _ZERO_FILE.fullmatch(name))]
    found = sorted((int(match["data"]), int(match["model"]), path) for match, path in zero)
    if found:
        return [(model, path, "optimizer_state_dict") for _, model, path in found]
    plain = [(match, folder / name) for name in names if (match := _MODEL_FILE.fullmatch(name))]
    return sorted((int(match["model"]), path, "optimizer") for match, path in plain)


def sharded_weight_files(folder: Path) -> list[Path]:
    """Returns the weight files that DeepSpeed's ZeRO-3 writes, one per rank. This program writes none."""
    return [path for path in folder.glob("zero_pp_rank_*") if _SHARDED_WEIGHTS_FILE.fullmatch(path.name)]


def model_files(folder: Path) -> list[Path]:
    """Returns the mp_rank files, one per (stage, TP rank) pair, in the order of their ranks."""
    paths = [path for path in folder.glob("mp_rank_*_model_states.pt") if _MODEL_FILE.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (len(path.name), path.name))


def layer_files(folder: Path) -> dict[int, list[Path]]:
    """Returns layer number -> weight files, in the order of the TP ranks. Layer numbers do not depend on the
    pipeline stages."""
    paths: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("layer_*-model_states.pt")):
        if match := _LAYER_FILE.fullmatch(path.name):
            paths.setdefault(int(match["layer"]), []).append(path)
    return paths


def missing_files(files: Collection[str], run: Mapping[str, Any]) -> list[str]:
    """Returns the files that the layout and parameters in `run` require and `files` lacks, in order.

    run: the content of `run.json`. Returns [] if it has no layout. Raises ValueError, KeyError, TypeError or
    AttributeError if it is malformed.
    """
    if "layout" not in run:
        return []
    plain = {name.removeprefix(_OPTIONAL_PREFIX) for name in files}
    layout = run["layout"]
    tensor, pipeline, data = (
        int(layout[f"{kind}_parallel_size"]) for kind in ("tensor_model", "pipeline_model", "data")
    )
    # A layout of a program without context parallelism does not have the size.
    data *= int(layout.get("context_parallel_size", 1))
    replicas = data if int(layout["zero_stage"]) > 0 else 0
    # A malformed layout of a billion ranks is rejected before its file names are listed.
    if tensor * pipeline * max(replicas, 1) > len(plain):
        return [f"files for TP x PP x replicas = {tensor} x {pipeline} x {data}"]
    expected = _expected_files(tensor, pipeline, replicas, run.get("parameters", {}))
    return [name for name in expected if name not in plain]


def unneeded_files(run: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of files in `run` that a resume does not read and does not need.

    With ZeRO these are the mp_rank files, the states of DeepSpeed's engine: the zero_pp_rank files hold
    weights and optimizer state, and `run.json` the rest. Without ZeRO the mp_rank files hold the optimizer.
    """
    if int(run.get("layout", {}).get("zero_stage", 0)) < 1:
        return frozenset()
    return frozenset(name for name in run["files"] if _MODEL_FILE.fullmatch(name))


def _expected_files(tensor: int, pipeline: int, replicas: int, parameters: Collection[str]) -> Iterator[str]:
    """Yields the names of all files. replicas: number of data-parallel ranks that write files (ZeRO)."""
    for layer, rank in product(sorted({layer_of(name) for name in parameters}), range(tensor)):
        yield layer_file(layer, rank)
    for rank in range(tensor * pipeline):
        yield model_file(rank)
        for replica in range(replicas):
            yield optimizer_file(rank, replica)


def layer_of(parameter: str) -> int:
    """Returns the number of the layer whose file holds a parameter."""
    match = re.match(r"([0-9]{1,6})\.", parameter)
    return int(match[1]) if match else _TIED_LAYER


def places_in(state: dict, path: Path) -> dict[str, Place]:
    """Returns the place of each parameter in the optimizer's state of a file. Checks DeepSpeed's layout."""
    places = {}
    with expect_layout(path, "the optimizer's state by parameter"):
        masters, states = state["single_partition_of_fp32_groups"], state["base_optimizer_state"]["state"]
        for group, addresses in enumerate(state["param_slice_mappings"]):
            for name, address in addresses.items():
                if not is_tensor(masters[group]) or type(states.get(group, {})) is not dict:
                    raise TypeError(f"group {group} of parameters has no values")
                check_parameter(name, path)
                start, length = address.start, address.numel
                if not (type(start) is type(length) is int and 0 <= start <= start + length):
                    raise TypeError(f"the elements of {name} have no place")
                if start + length > masters[group].numel():
                    raise ValueError(f"the elements of {name} are beyond the end")
                places[name] = (group, start, length)
    return places


def file_index(places: Mapping[str, Mapping[str, Place]], parameters: Collection[str]) -> dict[str, Any]:
    """Returns the index for `run.json`: for each file of the optimizer's state a text per group of
    parameters, with the number of each parameter, in the order of names, and its number of elements.

    places: file name -> parameter -> place. parameters: the names of all parameters. The index of 384 ranks
    has about a megabyte.
    """
    numbers = {name: number for number, name in enumerate(sorted(parameters))}
    files: dict[str, list[str]] = {}
    for file in sorted(places):
        groups: dict[int, list[int]] = {}
        for name, (group, _, length) in places[file].items():
            groups.setdefault(group, []).extend((numbers[name], length))
        last = max(groups, default=-1)
        files[file] = [" ".join(map(str, groups.get(group, []))) for group in range(last + 1)]
    return {"version": INDEX_VERSION, "names": sorted(parameters), "files": files}


def has_index(run: Mapping[str, Any]) -> bool:
    """Returns whether `run.json` has an index that can be used."""
    return run.get("index", {}).get("version") == INDEX_VERSION


def _read_index(index: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Place]] | None:
    """Returns the places of the parameters in each file; None for an index of another version."""
    with expect_layout(folder / "run.json", "an index of the optimizer's files"):
        if index["version"] != INDEX_VERSION:
            return None
        names = [check_parameter(name, folder / "run.json") for name in index["names"]]
        found: dict[str, dict[str, Place]] = {}
        for file, groups in index["files"].items():
            places = found.setdefault(check_plain(file, folder / "run.json"), {})
            for group, text in enumerate(groups):
                numbers = [int(word) for word in text.split()]
                start = 0
                for number, length in zip(numbers[::2], numbers[1::2], strict=True):
                    places[names[number]] = (group, start, length)
                    start += length
        return found


def is_tensor(value: Any) -> bool:
    from torch import Tensor

    return isinstance(value, Tensor)


def _optimizer_state(path: Path, key: str) -> dict:
    content = read_file(path)
    state = content.get(key) if isinstance(content, dict) else None
    if not isinstance(state, dict) or "param_slice_mappings" not in state:
        raise UserError(
            f"checkpoint file {path} holds no optimizer state by parameter ({key}, param_slice_mappings): "
            "expected the position of each parameter, as DeepSpeed writes it with ZeRO 0 and 1"
        )
    return state
