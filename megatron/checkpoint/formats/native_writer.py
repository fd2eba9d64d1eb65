"""Writes native checkpoints from a checkpoint of another format: DeepSpeed's files, without a model.

The files have the tensor and pipeline size in `run.json`, and one data-parallel rank with ZeRO 1. `--load`
opens them on any layout, as it opens all native checkpoints. Each file is first written without the bytes of
its tensors (`torch.serialization.skip_data`); every parameter is then written to its place in the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from megatron.checkpoint.files import READ_THREADS, Files, describe_file
from megatron.checkpoint.formats.deepspeed_files import (
    VALUES,
    Place,
    file_index,
    layer_file,
    layer_of,
    model_file,
    optimizer_file,
    places_in,
)
from megatron.checkpoint.formats.native import parameter_prefix
from megatron.checkpoint.formats.staged_archive import without_checksums
from megatron.checkpoint.formats.state import StateBlocks, StateReader, padded_spec
from megatron.checkpoint.formats.universal_info import INFO_KEY, client_state, derive_info, spec_record
from megatron.checkpoint.formats.writing import ParameterWriter, rows_of, save_object, step_of_optimizer
from megatron.model.layer_list import PARAMETER_DTYPES
from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import Box, ParameterSpec, boxes
from megatron.optimizer.zero import deepspeed_state

_STEP_BYTES = 1 << 24


@dataclass(frozen=True)
class _Place:
    """Where a TP rank's shard of one state begins in a file, in bytes, and its dtype in the file."""

    path: Path
    start: int
    dtype: torch.dtype


class NativeWriter(ParameterWriter):
    """Writes a native checkpoint on the layout of its `run.json`."""

    def __init__(self, folder: Path, reader: StateReader) -> None:
        super().__init__(folder, reader)
        checkpoint = reader.checkpoint
        self._config = checkpoint.config
        self._tp_size = self._config.parallel.tensor_model_parallel_size
        specs = reader.specs.items()
        self._specs = {name: padded_spec(spec, checkpoint, self._tp_size) for name, spec in specs}
        # (parameter, state, TP rank) -> place; the weights in the layer files have the state "".
        self._places: dict[tuple[str, str, int], _Place] = {}
        # File -> descriptor.
        self._open: dict[Path, int] = {}
        self._index: dict[str, dict[str, Place]] = {}
        for rank in range(self._tp_size):
            self._create_layer_files(rank)
        for stage, names in enumerate(self._stages()):
            for rank in range(self._tp_size):
                self._create_optimizer_file(stage * self._tp_size + rank, rank, names)

    def _stages(self) -> list[list[str]]:
        """Returns the parameters in the files of each pipeline stage. They need not match the stages
        of a run: a reader finds parameters by name."""
        count, names = self._config.parallel.pipeline_model_parallel_size, self.reader.specs
        layers = sorted({layer_of(name) for name in names})
        stage_of = {layer: index * count // len(layers) for index, layer in enumerate(layers)}
        return [[name for name in names if stage_of[layer_of(name)] == stage] for stage in range(count)]

    def _shape(self, name: str, rank: int) -> tuple[int, ...]:
        return self._specs[name].local_shape([Axis("tp", rank, self._tp_size)])

    # --- the files, without the bytes of tensors ---

    def _create_layer_files(self, rank: int) -> None:
        dtype = PARAMETER_DTYPES[self._config.precision.name]
        layers: dict[int, list[str]] = {}
        for name in self.reader.specs:
            layers.setdefault(layer_of(name), []).append(name)
        for layer, names in layers.items():
            path = self.folder / layer_file(layer, rank)
            keys = {name: name.removeprefix(parameter_prefix(layer)) for name in names}
            with FakeTensorMode():
                tensors = {keys[name]: torch.empty(self._shape(name, rank), dtype=dtype) for name in names}
            saved = self._create(path, tensors)
            for name in names:
                self._places[name, "", rank] = _Place(path, _offset(saved[keys[name]]), dtype)

    def _create_optimizer_file(self, model_rank: int, rank: int, names: list[str]) -> None:
        """Creates the file of a (stage, tensor-parallel rank) pair, and its mp_rank file."""
        run = self.reader.checkpoint.run
        groups = self._groups(names)
        masters: list[Tensor] = []
        states: dict[int, dict[str, Any]] = {}
        lengths = [{name: prod(self._shape(name, rank)) for name in members} for members in groups.values()]
        for index, (moments, step) in enumerate(groups):
            numel = sum(lengths[index].values())
            with FakeTensorMode():
                masters.append(torch.empty(numel))
                states[index] = {moment: torch.empty(numel) for moment in moments}
                states[index] |= {} if step is None else {"step": torch.empty(())}
        param_groups = [{"params": [index]} for index in range(len(groups))]
        state = deepspeed_state(
            masters,
            lengths,
            partition_count=1,
            clip_grad=self._config.optimizer.clip_grad,
            base_optimizer_state={"state": states, "param_groups": param_groups},
            loss_scaler=self.reader.loss_scaler,
        )
        path = self.folder / optimizer_file(model_rank)
        saved = self._create(path, {"optimizer_state_dict": state})["optimizer_state_dict"]
        self._index[path.name] = places_in(saved, path)
        for index, (_, step) in enumerate(groups):
            if step is not None:
                step_place = _offset(saved["base_optimizer_state"]["state"][index]["step"])
                self._write(_Place(path, step_place, torch.float32), 0, torch.tensor([step]))
        for name, (index, start, _) in self._index[path.name].items():
            group = saved["base_optimizer_state"]["state"][index]
            flat = {VALUES: saved["single_partition_of_fp32_groups"][index], **group}
            for state_name in (VALUES, *self._moments(name)):
                offset = _offset(flat[state_name]) + 4 * start
                self._places[name, state_name, rank] = _Place(path, offset, torch.float32)
        info = run.get(INFO_KEY) or derive_info(self._specs, self.reader.checkpoint.vocab_size)
        extra = client_state(info, self._config, run["state"])
        save_object(self.folder / model_file(model_rank), extra)

    def _groups(self, names: list[str]) -> dict[tuple[tuple[str, ...], float | None], list[str]]:
        """Returns (moments, optimizer's step) -> the parameters that have them."""
        groups: dict[tuple[tuple[str, ...], float | None], list[str]] = {}
        for name in names:
            key = self._moments(name), step_of_optimizer(self.reader, name)
            groups.setdefault(key, []).append(name)
        return groups

    def _moments(self, name: str) -> tuple[str, ...]:
        return tuple(state for state in self.reader.state_names(name) if state != VALUES)

    def _create(self, path: Path, content: dict[str, Any]) -> dict[str, Any]:
        """Writes a file without the bytes of its fake tensors. Returns the content on the meta device."""
        with skip_data(materialize_fake_tensors=True), without_checksums():
            torch.save(content, path)
        self._open[path] = os.open(path, os.O_WRONLY)
        return torch.load(path, map_location="meta", weights_only=False)  # this process has just written it

    # --- the tensors ---

    def write_parameter(self, name: str, states: StateBlocks, step: float | None) -> None:
        """The fp32 values are rounded for the layer files, as the optimizer rounds them."""
        saved = self._specs[name]
        for state_name, blocks in states.items():
            for first, rows in rows_of(blocks, saved.valid_shape, _STEP_BYTES):
                for rank in range(self._tp_size):
                    axes = [Axis("tp", rank, self._tp_size)]
                    for element, part in _shard_of_rows(saved, axes, first, rows):
                        self._write(self._places[name, state_name, rank], element, part)
                        if state_name == VALUES:
                            self._write(self._places[name, "", rank], element, part)

    def _write(self, place: _Place, first: int, part: Tensor) -> None:
        """Writes consecutive elements of a shard, from index `first` on."""
        values = part.to(place.dtype).contiguous()
        content = memoryview(values.view(-1).view(torch.uint8).numpy().data)
        start = place.start + first * values.element_size()
        while content:
            done = os.pwrite(self._open[place.path], content, start)
            content, start = content[done:], start + done

    def finish(self) -> None:
        """See `ParameterWriter`. Padding of the vocabulary stays zero: its bytes are holes in the files."""
        for descriptor in self._open.values():
            os.fsync(descriptor)
            os.close(descriptor)
        run = self.reader.checkpoint.run
        paths = sorted(self.folder.iterdir())
        with ThreadPoolExecutor(READ_THREADS) as pool:
            files: Files = dict(zip([p.name for p in paths], pool.map(describe_file, paths), strict=True))
        self.write_run_file(
            files,
            layout=run["layout"] | {"data_parallel_size": 1, "context_parallel_size": 1, "zero_stage": 1},
            parameters={name: spec_record(spec) for name, spec in self._specs.items()},
            index=file_index(self._index, self._specs),
        )


def _offset(saved: Tensor) -> int:
    """Returns where the bytes of a tensor on the meta device begin in the file that it was loaded from."""
    offset: Any = saved.untyped_storage()._checkpoint_offset
    return int(offset)


def _shard_of_rows(
    spec: ParameterSpec, axes: Sequence[Axis], first: int, rows: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yields the parts of a rank's shard that are in rows `first` and following of a global tensor: the first
    element in the flattened shard, and the elements in its shape."""
    given = Box(0, (first, *(0 for _ in rows.shape[1:])), tuple(rows.shape))
    for box in boxes(spec, axes):
        if (common := box.intersection(given)) is not None:
            inside = tuple(slice(r.start - o, r.stop - o) for r, o in zip(common, given.offsets, strict=True))
            yield box.first + (common[0].start - box.offsets[0]) * prod(box.sizes[1:]), rows[inside]
