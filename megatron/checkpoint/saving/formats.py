"""The formats in which a run saves: `SaveFormat`, and the native format, DeepSpeed's files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import Tensor

from megatron.checkpoint.files import Files
from megatron.checkpoint.formats.deepspeed_files import VALUES, Place, file_index, missing_files, places_in
from megatron.checkpoint.formats.staged_archive import save_archive
from megatron.checkpoint.formats.universal_info import INFO_KEY, client_state
from megatron.checkpoint.saving.files import Content, RankFiles
from megatron.checkpoint.saving.run_record import within_limit
from megatron.engine.pipeline_engine import GPTEngine
from megatron.optimizer.zero import LocalParamState

# The keys under which DeepSpeed stores the optimizer's state, with ZeRO and without.
_OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer")


class SaveFormat(ABC):
    """Makes the files of a checkpoint from the state of a run, in one format.

    A table is what a rank says of the content of its files. `missing` and `finish` get the tables of all
    ranks, by rank.
    """

    @abstractmethod
    def write(self, engine: GPTEngine, folder: Path, run: dict[str, Any], files: RankFiles) -> Any:
        """Writes this rank's files into a folder. Returns this rank's table. Collective.

        run: the content of `run.json` so far, see `run_record`.
        """

    @abstractmethod
    def missing(self, run: dict[str, Any], files: Files, tables: Sequence[Any]) -> list[str]:
        """Returns what no rank has written. files: the files of all ranks. run: with the integrity record."""

    @abstractmethod
    def finish(self, folder: Path, run: dict[str, Any], tables: Sequence[Any]) -> dict[str, Any]:
        """Returns the complete content of `run.json`, except for its checksum, on rank 0. run: with the
        files of all ranks. Raises OSError for a file that cannot be written."""


class NativeFormat(SaveFormat):
    """DeepSpeed's files. A table has the places of the parameters in each file of the optimizer's state."""

    def write(self, engine: GPTEngine, folder: Path, run: dict[str, Any], files: RankFiles) -> Any:
        """See `SaveFormat`. DeepSpeed names the files and makes their content."""
        optimizer = engine.optimizer
        parts = {part.name: part for part in optimizer.local_param_states(with_values=False)}
        adapter = _DeepSpeedFiles(files, parts)
        extra = client_state(run[INFO_KEY], engine.run_config, run["state"])
        engine.save_files(str(folder.parent), folder.name, extra, adapter)

        def own_state() -> Iterator[Content]:
            state = optimizer.state_dict()
            yield Content(partial(save_archive, state), list(_parts_in(state, parts)))

        if not adapter.places:  # without ZeRO only the first replica writes the optimizer's state
            files.write(None, own_state())
        return adapter.places

    def missing(self, run: dict[str, Any], files: Files, tables: Sequence[Any]) -> list[str]:
        return missing_files(files, run)

    def finish(self, folder: Path, run: dict[str, Any], tables: Sequence[Any]) -> dict[str, Any]:
        """See `SaveFormat`. Adds the index of the files, if it is not too large."""
        places = {name: place for table in tables for name, place in table.items()}
        return within_limit({**run, "index": file_index(places, run["parameters"])}, run)


class _DeepSpeedFiles(TorchCheckpointEngine):
    """Writes what DeepSpeed saves. places: where each file of the optimizer's state holds a parameter."""

    def __init__(self, files: RankFiles, parts: Mapping[str, LocalParamState]) -> None:
        """parts: this rank's part of each parameter, without tensors."""
        self.places: dict[str, dict[str, Place]] = {}
        self._files, self._parts = files, parts

    def create(self, info: CheckpointCommitInfo) -> None:
        """Does nothing: DeepSpeed's class logs."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Creates a folder; called by DeepSpeed."""
        self._files.make_folder(Path(path))

    def save(self, state_dict: Any, path: str) -> None:
        """Writes a file; called by DeepSpeed."""
        file = Path(path)
        states = [state_dict[key] for key in _OPTIMIZER_KEYS if state_dict.get(key) is not None]
        for state in states:
            self.places[file.name] = places_in(state, file)
        parts = [part for state in states for part in _parts_in(state, self._parts)]
        self._files.write(file, [Content(partial(save_archive, state_dict), parts)])


def _parts_in(state: Mapping[str, Any], parts: Mapping[str, LocalParamState]) -> Iterator[LocalParamState]:
    """Yields the parts of parameters in the optimizer's state of a rank, with its tensors."""
    masters, states = state["single_partition_of_fp32_groups"], state["base_optimizer_state"]["state"]
    for group, addresses in enumerate(state["param_slice_mappings"]):
        tensors = {VALUES: masters[group], **_moments(states.get(group, {}), masters[group])}
        for name, address in addresses.items():
            span = slice(address.start, address.start + address.numel)
            values = {state_name: tensor.view(-1)[span] for state_name, tensor in tensors.items()}
            yield replace(parts[name], values=values)


def _moments(group_state: Mapping[str, Any], master: Tensor) -> dict[str, Tensor]:
    """Returns the moments in the optimizer's state of a group: flat tensors as long as its fp32 values."""
    return {
        key: value
        for key, value in group_state.items()
        if isinstance(value, Tensor) and value.shape == master.shape
    }
