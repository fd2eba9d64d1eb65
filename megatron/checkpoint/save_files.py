"""Writes the files of a save: DeepSpeed names them and makes their content, one of two classes writes them.

`DirectFiles` writes while training waits, `BackgroundFiles` hands the content to the rank's writer process.
Both compute the SHA-256 of a file while they write it. The archives have no CRC-32 of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import Tensor
from torch.utils.serialization import config as serialization

from megatron.checkpoint.background_writer import BackgroundWriter, StoredFragment
from megatron.checkpoint.digests import fragment_digests
from megatron.checkpoint.files import Files, HashedFile
from megatron.checkpoint.formats.deepspeed_files import VALUES, Place, places_in
from megatron.optimizer.zero import LocalParamState

# The keys under which DeepSpeed stores the optimizer's state, with ZeRO and without.
_OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer")


class DirectFiles(TorchCheckpointEngine):
    """Writes each file at once and syncs it to the disk. files: what was written so far, by name. places:
    where each file of the optimizer's state holds a parameter."""

    def __init__(self, heartbeat: Callable[[], None]) -> None:
        """heartbeat: called after each file."""
        self.files: Files = {}
        self.places: dict[str, dict[str, Place]] = {}
        self._heartbeat = heartbeat

    def create(self, info: CheckpointCommitInfo) -> None:
        """Does nothing: DeepSpeed's class logs."""

    def save(self, state_dict: Any, path: str) -> None:
        """Writes a file; called by DeepSpeed."""
        for state in _optimizer_states(state_dict):
            self.places[Path(path).name] = places_in(state, Path(path))
        file = HashedFile(Path(path))
        _save(state_dict, file)
        self.files[Path(path).name] = file.close()
        self._heartbeat()


class BackgroundFiles(TorchCheckpointEngine):
    """Hands each file to the writer process. digests: those of tensors that are not in host memory, which are
    computed at once, by parameter and kind. places: as `DirectFiles`."""

    def __init__(
        self, writer: BackgroundWriter | None, parts: Mapping[str, LocalParamState], problem: str
    ) -> None:
        """parts: this rank's part of each parameter. problem: why there is no writer; "" if there is one."""
        self.digests: dict[str, dict[str, int]] = {}
        self.places: dict[str, dict[str, Place]] = {}
        self._writer, self._parts = writer, parts
        self._has_optimizer_state = False
        self._problem = problem

    def create(self, info: CheckpointCommitInfo) -> None:
        """Does nothing: DeepSpeed's class logs."""

    def save(self, state_dict: Any, path: str) -> None:
        """Copies the content of a file for the writer; called by DeepSpeed."""
        fragments = []
        for state in _optimizer_states(state_dict):
            self.places[Path(path).name] = places_in(state, Path(path))
            fragments += self._fragments(state)
        self._write(Path(path), fragments, state_dict)

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
        """The fragments in the optimizer's state. Computes the digests of those on a device."""
        self._has_optimizer_state = True
        fragments = []
        masters, kept = state["single_partition_of_fp32_groups"], state["base_optimizer_state"]["state"]
        for group, addresses in enumerate(state["param_slice_mappings"]):
            tensors = {VALUES: masters[group], **_moments(kept.get(group, {}), masters[group])}
            for name, address in addresses.items():
                part = self._parts[name]
                for kind, tensor in tensors.items():
                    values = tensor.view(-1)[address.start : address.start + address.numel]
                    if tensor.device.type == "cpu":
                        place = (part.spec, part.tp_group, part.start, values.data_ptr(), values.numel())
                        fragments.append(StoredFragment(name, kind, *place))
                    else:
                        found = fragment_digests(part.spec, part.tp_group, part.start, {kind: values})
                        self.digests.setdefault(name, {}).update(found)
        return fragments


def _optimizer_states(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the optimizer's state in the content of a file, if there is one."""
    return [content[key] for key in _OPTIMIZER_KEYS if content.get(key) is not None]


def _moments(kept: Mapping[str, Any], master: Tensor) -> dict[str, Tensor]:
    """The moments in the optimizer's state of a group: flat tensors as long as its fp32 values."""
    return {
        key: value for key, value in kept.items() if isinstance(value, Tensor) and value.shape == master.shape
    }


def _save(state: Any, file: Any) -> None:
    """torch.save without a second checksum; tensors of a device are copied through pinned memory."""
    settings = {"save.compute_crc32": False, "save.use_pinned_memory_for_d2h": True}
    with serialization.patch(settings):  # type: ignore[attr-defined]
        torch.save(state, file)
