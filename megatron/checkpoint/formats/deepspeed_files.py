"""DeepSpeed's files: their names, and where each parameter's fp32 values and moments are in them.

Every (pipeline stage, tensor-parallel rank) pair writes a file of flat fp32 partitions and the position of
each parameter in them; with ZeRO, each data-parallel rank of the pair writes such a file. The pieces of a
parameter, in the order of the data-parallel ranks, form its tensor-parallel shard.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.formats.torch_archive import read_file
from megatron.checkpoint.names import check_parameter, check_plain
from megatron.errors import UserError, one_line
from megatron.files import expect_layout
from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.pieces import Piece

if TYPE_CHECKING:
    from torch import Tensor

# The state name of a parameter's fp32 values; its moments have the optimizer's names.
VALUES = "fp32"
_ZERO_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt")
_SHARDED_WEIGHTS_FILE = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
_SHARDED_WEIGHTS = (
    "another framework saved it with ZeRO-3, in shards that this program does not read: convert it with "
    "DeepSpeed's own ds_to_universal.py"
)
_EXPERTS = (
    "DeepSpeed's mixture of experts saved it, with a file for each expert, which this program does not read: "
    "use the program that saved it"
)
# A checkpoint of DeepSpeed has one of these files: the first without ZeRO-3, the second with ZeRO-3.
FIRST_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_MODEL_FILE = re.compile(r"mp_rank_(?P<model>\d+)_model_states\.pt")
_LAYER_FILE = re.compile(r"layer_(?P<layer>\d{1,9})-model_\d+-model_states\.pt")
# Tied parameters are saved in the file of the first layer that uses them.
_TIED_LAYER = 1
# Prefix that DeepSpeed puts before the names of optimizer files with some settings.
_OPTIONAL_PREFIX = "bf16_"
# Version of the index in `run.json`. An index of a different version is not used.
INDEX_VERSION = 1
# Where a parameter is in a file: (index of the group of parameters, first element in the group, number of
# elements).
Place = tuple[int, int, int]


@dataclass(frozen=True)
class FileState(Mapping[str, "Tensor"]):
    """The states of a piece in one file: VALUES or a moment's name -> elements, memory-mapped. The file is
    opened when a state is first read."""

    name: str
    tp_rank: int
    path: Path
    read_state: Callable[[], dict]
    place: Place

    @property
    def numel(self) -> int:
        """Number of elements of each state."""
        return self.place[2]

    @property
    def _entries(self) -> dict[str, Any]:
        """The fp32 values of the group, and the optimizer's state for it: moments and step."""
        state, group = self.read_state(), self.place[0]
        values = state["single_partition_of_fp32_groups"][group]
        return {**state["base_optimizer_state"]["state"].get(group, {}), VALUES: values}

    @property
    def scalars(self) -> dict[str, Any]:
        """The entries that are neither values nor moments: the step."""
        return {name: value for name, value in self._entries.items() if name not in set(self)}

    def __iter__(self) -> Iterator[str]:
        yield VALUES
        # On the last rank, DeepSpeed's ZeRO-1 and 2 save moments with the padding of the partition, but fp32
        # values without this padding.
        paddings, (group, _, _) = self.read_state().get("group_paddings"), self.place
        padding = paddings[group] if isinstance(paddings, (list, tuple)) and group < len(paddings) else 0
        entries = self._entries
        numel = entries.pop(VALUES).numel()
        lengths = [numel, *([numel + padding] if type(padding) is int else [])]
        for name, value in entries.items():
            if is_tensor(value) and value.dim() == 1 and value.numel() in lengths:
                yield name

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, state_name: str) -> Tensor:
        if (tensor := self._entries.get(state_name)) is None:
            raise lacks(self.path.parent, self.tp_rank, self.name, state_name)
        if not is_tensor(tensor) or not tensor.is_contiguous():
            raise UserError(f"the optimizer's files hold no tensor {state_name}: the checkpoint is damaged")
        (_, start, length), total = self.place, tensor.numel()
        if not (type(start) is type(length) is int and 0 <= start <= start + length <= total):
            raise UserError(
                f"checkpoint file {self.path} names {one_line(length)} elements from {one_line(start)} on in "
                f"a tensor of {total:,} elements: it is damaged"
            )
        if (dtype := str(tensor.dtype).removeprefix("torch.")) != "float32":
            raise UserError(
                f"checkpoint {self.path.parent}: TP rank {self.tp_rank} holds {self.name} in {dtype}, "
                "expected float32"
            )
        return tensor.view(-1)[start : start + length]


def lacks(folder: Path, tp_rank: int, name: str, state_name: str) -> UserError:
    """Returns the error for a parameter's state that is missing in the files of a tensor-parallel rank."""
    return UserError(
        f"checkpoint {folder}: the files of TP rank {tp_rank} lack {state_name} of {name}, which others "
        "have: they are from different checkpoints"
    )


class OptimizerFiles:
    """The optimizer state of all parameters. `stage`: 0 for ZeRO-0, 1 for all other ZeRO stages.

    With the index of `run.json` a file is read when something in it is needed, and files that are not needed
    may be missing. Without the index all files are read.
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
        the checkpoint; None to list the folder. present: the names of the files that are in the folder; None
        if all are. Raises UserError for a file that is damaged or has an unknown layout."""
        self.folder = folder
        self.tp_size = tp_size
        # Index: tensor-parallel rank. Parameter -> its states in each file, consecutive in the flat shard.
        self._shards: list[dict[str, list[FileState]]] = [{} for _ in range(tp_size)]
        self._states: dict[Path, dict] = {}
        self._index = _read_index(index, folder) if index is not None else None
        files = optimizer_files(folder, names)
        if not files:
            raise UserError(f"checkpoint {folder} holds no optimizer state: use another checkpoint")

        def is_present(path: Path) -> bool:
            return present is None or path.name in present

        _, self.first_path, key = next((file for file in files if is_present(file[1])), files[0])
        self.stage = int(key == "optimizer_state_dict")
        # A tied parameter is in the files of two stages. The first stage whose files are all present is used.
        holders: dict[tuple[int, str], dict[int, list[FileState]]] = {}
        for model_rank, path, key in files:
            read = partial(self._read_state, path, key)
            for name, place in self._places(path, read).items():
                tp_rank = model_rank % tp_size
                of_ranks = holders.setdefault((tp_rank, name), {})
                of_ranks.setdefault(model_rank, []).append(FileState(name, tp_rank, path, read, place))
        for (tp_rank, name), of_ranks in holders.items():
            complete = (one for one in of_ranks.values() if all(is_present(part.path) for part in one))
            self._shards[tp_rank][name] = next(complete, next(iter(of_ranks.values())))

    def pieces(
        self, tp_rank: int, name: str, spec: ParameterSpec | None = None, axes: tuple[Axis, ...] = ()
    ) -> list[Piece]:
        """Returns the pieces of a tensor-parallel rank's shard of a parameter, one per file; [] if the rank
        does not have the parameter. spec, axes: see `Piece`."""
        states = self._shards[tp_rank].get(name, [])
        starts = accumulate((state.numel for state in states), initial=0)
        spec = spec or ParameterSpec((sum(state.numel for state in states),))
        return [
            Piece(name, spec, axes, start, start + state.numel, state)
            for start, state in zip(starts, states, strict=False)
        ]

    def paths(self, tp_rank: int, name: str, start: int = 0, stop: int | None = None) -> set[Path]:
        """Returns the files that contain elements start to stop - 1 of a tensor-parallel rank's shard."""
        pieces, states = self.pieces(tp_rank, name), self._shards[tp_rank][name]
        return {
            state.path
            for piece, state in zip(pieces, states, strict=True)
            if start < piece.stop and (stop is None or piece.start < stop)
        }

    def _places(self, path: Path, read: Callable[[], dict]) -> dict[str, Place]:
        """Returns parameter -> place in a file, from the index if there is one."""
        if self._index is None:
            return places_in(read(), path)
        if path.name not in self._index:
            raise UserError(f"checkpoint {self.folder}: the index in run.json lacks {path.name}")
        return self._index[path.name]

    def _read_state(self, path: Path, key: str) -> dict:
        if path not in self._states:
            content = read_file(path)
            state = content.get(key) if isinstance(content, dict) else None
            if not isinstance(state, dict) or "param_slice_mappings" not in state:
                raise UserError(
                    f"checkpoint file {path} holds no optimizer state by parameter ({key}, "
                    "param_slice_mappings): expected the position of each parameter, as DeepSpeed writes it "
                    "with ZeRO 0 and 1"
                )
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

    @property
    def names(self) -> Collection[str]:
        """The global names of all parameters."""
        return self._shards[0].keys()

    def one_of(self, name: str) -> FileState:
        """Returns the states of a parameter in one of its files, preferably a file that was already read."""
        found = [state for shard in self._shards for state in shard.get(name, [])]
        return next((state for state in found if state.path in self._states), found[0])


def layer_file(layer: int, tp_rank: int) -> str:
    """Returns the name of the file with a layer's weights of one tensor-parallel rank."""
    return f"layer_{layer:02d}-model_{tp_rank:02d}-model_states.pt"


def model_file(model_rank: int) -> str:
    """Returns the name of the mp_rank file of a (pipeline stage, tensor-parallel rank) pair."""
    return f"mp_rank_{model_rank:02d}_model_states.pt"


def optimizer_file(model_rank: int, dp_rank: int = 0) -> str:
    """Returns the name of the file with the optimizer state of one rank."""
    return f"zero_pp_rank_{dp_rank}_mp_rank_{model_rank:02d}_optim_states.pt"


def optimizer_files(folder: Path, names: Collection[str] | None = None) -> list[tuple[int, Path, str]]:
    """Returns (model-parallel rank, path, key of the optimizer's state) of each file, in the order of the
    data-parallel ranks. Without ZeRO, the mp_rank files contain the optimizer. names: the names of the files
    in the folder; None to list the folder."""
    if names is None:
        names = [path.name for path in folder.iterdir()]
    zero = [(match, folder / name) for name in names if (match := _ZERO_FILE.fullmatch(name))]
    found = sorted((int(match["data"]), int(match["model"]), path) for match, path in zero)
    if found:
        return [(model, path, "optimizer_state_dict") for _, model, path in found]
    plain = [(match, folder / name) for name in names if (match := _MODEL_FILE.fullmatch(name))]
    return sorted((int(match["model"]), path, "optimizer") for match, path in plain)


def why_unreadable(folder: Path) -> str:
    """Returns why a native checkpoint of DeepSpeed cannot be read, judged by the names of its files; "" if it
    can be read."""
    if sharded_weight_files(folder):
        return _SHARDED_WEIGHTS
    return _EXPERTS if any(folder.glob("layer_*_expert_*_model_states.pt")) else ""


def sharded_weight_files(folder: Path) -> list[Path]:
    """Returns the weight files that DeepSpeed's ZeRO-3 writes, one per rank. This program never writes
    them."""
    return [path for path in folder.glob("zero_pp_rank_*") if _SHARDED_WEIGHTS_FILE.fullmatch(path.name)]


def model_files(folder: Path) -> list[Path]:
    """Returns the mp_rank files, one per (pipeline stage, tensor-parallel rank) pair, in the order of
    ranks."""
    paths = [path for path in folder.glob("mp_rank_*_model_states.pt") if _MODEL_FILE.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (len(path.name), path.name))


def layer_files(folder: Path) -> dict[int, list[Path]]:
    """Returns layer number -> weight files, in the order of layers and tensor-parallel ranks. Layer numbers
    are the same for every pipeline partition."""
    paths: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("layer_*-model_states.pt")):
        if match := _LAYER_FILE.fullmatch(path.name):
            paths.setdefault(int(match["layer"]), []).append(path)
    return dict(sorted(paths.items()))


def missing_files(files: Collection[str], run: Mapping[str, Any]) -> list[str]:
    """Returns the files that the layout and parameters in `run` require and `files` lacks, in order.

    run: the content of `run.json`. Returns [] if `run` has no layout. Raises ValueError, KeyError, TypeError
    or AttributeError if `run` is malformed.
    """
    if "layout" not in run:
        return []
    plain = {name.removeprefix(_OPTIONAL_PREFIX) for name in files}
    layout = run["layout"]
    tensor, pipeline, data = (
        int(layout[f"{kind}_parallel_size"]) for kind in ("tensor_model", "pipeline_model", "data")
    )
    # Layouts of versions without context parallelism lack this size.
    data *= int(layout.get("context_parallel_size", 1))
    replicas = data if int(layout["zero_stage"]) > 0 else 0
    # A malformed layout of a billion ranks is rejected before its file names are listed.
    if tensor * pipeline * max(replicas, 1) > len(plain):
        return [f"files for TP x PP x replicas = {tensor} x {pipeline} x {data}"]
    layers = sorted({layer_of(name) for name in run.get("parameters", {})})
    expected = [layer_file(*pair) for pair in product(layers, range(tensor))]
    for rank in range(tensor * pipeline):
        expected += [model_file(rank), *(optimizer_file(rank, replica) for replica in range(replicas))]
    return [name for name in expected if name not in plain]


def unneeded_files(run: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of files in `run` that a resume does not read and does not need.

    With ZeRO these are the mp_rank files with the states of DeepSpeed's engine: the zero_pp_rank files hold
    weights and optimizer state, and `run.json` holds the rest. Without ZeRO the mp_rank files hold the
    optimizer.
    """
    if int(run.get("layout", {}).get("zero_stage", 0)) < 1:
        return frozenset()
    return frozenset(name for name in run["files"] if _MODEL_FILE.fullmatch(name))


def layer_of(parameter: str) -> int:
    """Returns the number of the layer whose file contains a parameter."""
    match = re.match(r"([0-9]{1,6})\.", parameter)
    return int(match[1]) if match else _TIED_LAYER


def places_in(state: dict, path: Path) -> dict[str, Place]:
    """Returns parameter -> place in the optimizer's state of a file. Checks DeepSpeed's layout."""
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
    """Returns the index for `run.json`: file -> one text per group of parameters. The text lists the index of
    each parameter in the sorted names, and its number of elements.

    places: file name -> parameter -> place. parameters: the names of all parameters. The index of 384 ranks
    takes about a megabyte.
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
    """Returns whether `run.json` has an index of the version that this program uses."""
    return run.get("index", {}).get("version") == INDEX_VERSION


def _read_index(index: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Place]] | None:
    """Returns file -> parameter -> place; None for an index of a different version."""
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
