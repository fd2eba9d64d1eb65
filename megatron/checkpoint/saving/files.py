"""Writes the files of a save: DeepSpeed names them and makes their content, one of two classes writes them.

`DirectFiles` writes while training waits, `BackgroundFiles` hands the content to the rank's writer process.
Both compute the SHA-256 of a file while they write it. The archives have no CRC-32 of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import Tensor
from torch.utils.serialization import config as serialization

from megatron.checkpoint.digests import fragment_digests
from megatron.checkpoint.files import Files, HashedFile
from megatron.checkpoint.formats.deepspeed_files import VALUES, Place, places_in
from megatron.checkpoint.saving.writer import BackgroundWriter, StoredFragment
from megatron.optimizer.zero import LocalParamState

# The keys under which DeepSpeed stores the optimizer's state, with ZeRO and without.
_OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer")


class SavedFiles(TorchCheckpointEngine, ABC):
    """Writes what DeepSpeed saves. places: where each file of the optimizer's state holds a parameter."""

    def __init__(self) -> None:
        self.places: dict[str, dict[str, Place]] = {}

    def create(self, info: CheckpointCommitInfo) -> None:
        """Does nothing: DeepSpeed's class logs."""

    def save(self, state_dict: Any, path: str) -> None:
        """Writes a file; called by DeepSpeed."""
        file = Path(path)
        states = [state_dict[key] for key in _OPTIMIZER_KEYS if state_dict.get(key) is not None]
        for state in states:
            self.places[file.name] = places_in(state, file)
        self.write(file, state_dict, states)

    @abstractmethod
    def write(self, file: Path, content: Any, optimizer_states: Sequence[dict[str, Any]]) -> None:
        """Writes the content of a file. optimizer_states: the states of the optimizer in it, at most one."""


class DirectFiles(SavedFiles):
    """Writes each file at once and syncs it to the disk. files: the files written so far, by name."""

    def __init__(self, heartbeat: Callable[[], None]) -> None:
        """heartbeat: called after each file."""
        super().__init__()
        self.files: Files = {}
        self._heartbeat = heartbeat

    def write(self, file: Path, content: Any, optimizer_states: Sequence[dict[str, Any]]) -> None:
        """See `SavedFiles`."""
        hashed = HashedFile(file)
        _save(content, hashed)
        self.files[file.name] = hashed.close()
        self._heartbeat()


class BackgroundFiles(SavedFiles):
    """Hands each file to the writer process. digests: digests of the tensors that are not in host memory,
    which are computed at once, by parameter and state."""

    def __init__(
        self, writer: BackgroundWriter | None, parts: Mapping[str, LocalParamState], problem: str
    ) -> None:
        """parts: this rank's part of each parameter. problem: why there is no writer; "" if there is one."""
        super().__init__()
        self.digests: dict[str, dict[str, int]] = {}
        self._writer, self._parts = writer, parts
        self._has_optimizer_state = False
        self._problem = problem

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Creates a folder; called by DeepSpeed."""
        try:
            super().makedirs(path, exist_ok)
        except OSError as error:
            self._problem = self._problem or str(error)

    def write(self, file: Path, content: Any, optimizer_states: Sequence[dict[str, Any]]) -> None:
        """See `SavedFiles`. Returns once the content is copied."""
        fragments = [fragment for state in optimizer_states for fragment in self._fragments(state)]
        self._write(file, fragments, content)

    def _write(self, path: Path | None, fragments: Sequence[StoredFragment], state: Any) -> None:
        """After a failure it does nothing: this rank still takes part in the collectives of the save."""
        try:
            if not self._problem and self._writer is not None:
                self._writer.write_file(path, fragments, lambda file: _save(state, file))
        except OSError as error:
            self._problem = str(error)

    def end(self, optimizer_state: Callable[[], dict[str, Any]]) -> str:
        """Ends the files of the save. Returns why this rank's part has failed; "" if it has not so far.

        optimizer_state: returns the state of this rank, of which only the digests are computed if this rank
        has not written it. Without ZeRO only the first replica writes, and all replicas are compared.
        """
        if not self._has_optimizer_state:
            state = optimizer_state()
            if fragments := self._fragments(state):  # none on a device: the digests are computed already
                self._write(None, fragments, state)
        try:
            if not self._problem and self._writer is not None:
                self._writer.end_save()
        except OSError as error:
            self._problem = str(error)
        return self._problem

    def _fragments(self, state: dict[str, Any]) -> list[StoredFragment]:
        """Returns the fragments in host memory. Computes the digests of fragments on a device."""
        self._has_optimizer_state = True
        fragments = []
        masters, states = state["single_partition_of_fp32_groups"], state["base_optimizer_state"]["state"]
        for group, addresses in enumerate(state["param_slice_mappings"]):
            tensors = {VALUES: masters[group], **_moments(states.get(group, {}), masters[group])}
            on_host = masters[group].device.type == "cpu"
            for name, address in addresses.items():
                part = self._parts[name]
                span = slice(address.start, address.start + address.numel)
                values = {state_name: tensor.view(-1)[span] for state_name, tensor in tensors.items()}
                if not on_host:
                    found = fragment_digests(part.spec, part.tp_group, part.start, values)
                    self.digests.setdefault(name, {}).update(found)
                    continue
                for state_name, tensor in values.items():
                    place = (part.spec, part.tp_group, part.start, tensor.data_ptr(), tensor.numel())
                    fragments.append(StoredFragment(name, state_name, *place))
        return fragments


def _moments(group_state: Mapping[str, Any], master: Tensor) -> dict[str, Tensor]:
    """Returns the moments in the optimizer's state of a group: flat tensors as long as its fp32 values."""
    return {
        key: value
        for key, value in group_state.items()
        if isinstance(value, Tensor) and value.shape == master.shape
    }


def _save(state: Any, file: Any) -> None:
    """torch.save without a second checksum; tensors of a device are copied through pinned memory."""
    settings = {"save.compute_crc32": False, "save.use_pinned_memory_for_d2h": True}
    with serialization.patch(settings):  # type: ignore[attr-defined]
        torch.save(state, file)
