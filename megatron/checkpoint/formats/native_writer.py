"""Writes native checkpoints, which consist of DeepSpeed's files, for runs and conversions.

In a run the data-parallel replicas share the layer files of their pipeline stage. The first replica of a
(stage, tensor-parallel rank) pair writes the pair's mp_rank file. With ZeRO every replica also writes a file
with its part of the optimizer's state; without ZeRO the mp_rank file contains the whole state.

A conversion writes the files of a run with the tensor and pipeline size in `run.json`, one data-parallel rank
and ZeRO 1. `--load` opens them on any layout, like all native checkpoints. The conversion first writes each
file without the bytes of its tensors, which are fake; then it writes every piece to its place in the files.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from deepspeed import __version__ as deepspeed_version
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.checkpoint.files import READ_THREADS, Files, describe_file
from megatron.checkpoint.formats.archive_writer import save_archive
from megatron.checkpoint.formats.deepspeed_files import (
    VALUES,
    Place,
    file_index,
    layer_file,
    layer_of,
    missing_files,
    model_file,
    optimizer_file,
)
from megatron.checkpoint.formats.native import parameter_prefix
from megatron.checkpoint.formats.state import StateReader, padded_spec
from megatron.checkpoint.formats.universal_info import (
    INFO_KEY,
    client_state,
    derive_info,
    spec_record,
)
from megatron.checkpoint.formats.writing import (
    CheckpointWriter,
    Content,
    RankFiles,
    in_rows,
)
from megatron.checkpoint.saving.run_record import within_limit
from megatron.errors import UserError
from megatron.model.layer_list import PARAMETER_DTYPES
from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import ParameterSpec, boxes
from megatron.mpu.parameters import narrowed, own_storage
from megatron.mpu.pieces import Piece

if TYPE_CHECKING:
    from megatron.engine.pipeline_engine import GPTEngine
    from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer

_STEP_BYTES = 1 << 24
# The key of the optimizer's state: in a file of its own (with ZeRO), and in the mp_rank file (without ZeRO).
_PARTITIONED, _WHOLE = "optimizer_state_dict", "optimizer"
Group = tuple[Mapping[str, Tensor], Sequence[Piece]]
"""The flat state of a group of parameters (state -> tensor), and the consecutive pieces in it."""


class _Target(NamedTuple):
    """Where a tensor-parallel rank's shard is in a file: the offset of its first byte, and its dtype."""

    path: Path
    start: int
    dtype: torch.dtype


class NativeWriter(CheckpointWriter):
    """Writes a native checkpoint. A table (see `CheckpointWriter`) has the places of the parameters in each
    file of the optimizer's state."""

    def __init__(self, folder: Path, source: StateReader | None = None) -> None:
        super().__init__(folder, source)
        # File of a conversion -> its open descriptor.
        self._open: dict[Path, int] = {}
        if source is not None:
            try:
                self._create_files(source)
            except BaseException:
                self.abandon()
                raise

    # --- a run ---

    @classmethod
    def check_sharding(cls, specs: Mapping[str, ParameterSpec]) -> None:
        """See `CheckpointWriter`. DeepSpeed's file names contain only the tensor-parallel rank, so a
        conversion writes all experts for each tensor-parallel rank."""
        for name, spec in specs.items():
            if spec.axis_names not in ((), ("tp",)):
                raise UserError(
                    f"{name} is sharded over {' and '.join(spec.axis_names)}, and DeepSpeed's files can hold "
                    "only parameters that are sharded over tp: use the format dcp"
                )

    def write(self, engine: GPTEngine, run: dict[str, Any], files: RankFiles) -> Any:
        files.make_folder(self.folder)
        _write_layers(engine, self.folder, files)
        optimizer, replica = engine.optimizer, engine.mesh.dp_cp.rank
        places: dict[str, dict[str, Place]] = {}

        def with_optimizer(file: str, key: str, content: dict[str, Any]) -> Iterator[Content]:
            state, pieces, places[file] = state_of(optimizer)
            yield Content(partial(save_archive, {**content, key: state}), pieces)

        model_rank = engine.mesh.model.rank
        shared, own = model_file(model_rank), optimizer_file(model_rank, replica)
        is_first = replica == 0
        content = _model_content(engine, run)
        if optimizer.is_partitioned:
            if is_first:
                files.write(self.folder / shared, [Content(partial(save_archive, content))])
            settings = {"ds_config": engine.config, "ds_version": deepspeed_version}
            files.write(self.folder / own, with_optimizer(own, _PARTITIONED, settings))
            return places
        files.write(self.folder / shared if is_first else None, with_optimizer(shared, _WHOLE, content))
        return places if is_first else {}

    def missing(self, run: dict[str, Any], files: Files, tables: Sequence[Any]) -> list[str]:
        return missing_files(files, run)

    def finish(self, run: dict[str, Any], tables: Sequence[Any]) -> dict[str, Any]:
        """See `CheckpointWriter`. Adds the index of the files to `run.json` unless it is too large."""
        if self._source is not None:
            sizes = {"data_parallel_size": 1, "context_parallel_size": 1, "zero_stage": 1}
            specs = {name: spec_record(spec) for name, spec in self._specs.items()}
            run = {**run, "layout": self.reader.checkpoint.run["layout"] | sizes, "parameters": specs}
        places = {name: place for table in tables for name, place in table.items()}
        return within_limit({**run, "index": file_index(places, run["parameters"])}, run)

    # --- a conversion ---

    def _create_files(self, reader: StateReader) -> None:
        """Creates all files without the bytes of their tensors."""
        self._config = reader.checkpoint.config
        tp_size = self._config.parallel.tensor_model_parallel_size
        NativeWriter.check_sharding({n: s for n, s in reader.specs.items() if s.axis_names != ("ep",)})
        self._specs = {
            name: padded_spec(spec, reader.checkpoint, tp_size) for name, spec in reader.specs.items()
        }
        self._ranks = [Axis("tp", rank, tp_size) for rank in range(tp_size)]
        self._places: dict[str, dict[str, Place]] = {}
        # (parameter, state, tensor-parallel rank) -> place. The weights in the layer files have the state "".
        self._targets: dict[tuple[str, str, int], _Target] = {}
        stages = self._stages()
        for axis in self._ranks:
            self._create_layer_files(axis)
            for stage, names in enumerate(stages):
                self._create_optimizer_file(stage * tp_size + axis.rank, axis, names)

    def _stages(self) -> list[list[str]]:
        """Returns the parameters in the files of each pipeline stage. They may differ from the stages of a
        run, because a reader finds parameters by name."""
        count = self._config.parallel.pipeline_model_parallel_size
        layers = sorted({layer_of(name) for name in self._specs})
        stage_of = {layer: index * count // len(layers) for index, layer in enumerate(layers)}
        return [[name for name in self._specs if stage_of[layer_of(name)] == stage] for stage in range(count)]

    def _create_layer_files(self, axis: Axis) -> None:
        dtype = PARAMETER_DTYPES[self._config.precision.name]
        layers: dict[int, list[str]] = {}
        for name in self._specs:
            layers.setdefault(layer_of(name), []).append(name)
        for layer, names in layers.items():
            keys = {name: name.removeprefix(parameter_prefix(layer)) for name in names}
            with FakeTensorMode():
                tensors = {
                    keys[name]: torch.empty(
                        self._specs[name].local_shape([axis]),
                        dtype=dtype if self._specs[name].has_gradient else torch.float32,
                    )
                    for name in names
                }
            target = self._create(layer_file(layer, axis.rank), tensors)
            self._targets |= {(name, "", axis.rank): target(tensors[keys[name]]) for name in names}

    def _create_optimizer_file(self, model_rank: int, axis: Axis, names: list[str]) -> None:
        """Creates the optimizer file of a (stage, tensor-parallel rank) pair, and the pair's mp_rank file."""
        # (state names, optimizer's step) -> the parameters that have these, as whole shards.
        kinds: dict[tuple[tuple[str, ...], float | None], list[Piece]] = {}
        for name in names:
            kind = tuple(self.reader.state_names(name)), self.reader.step_of(name)
            kinds.setdefault(kind, []).append(Piece.of_shard(name, self._specs[name], (axis,)))
        groups: list[Group] = []
        for (state_names, _), pieces in kinds.items():
            with FakeTensorMode():
                numel = sum(piece.stop for piece in pieces)
                groups.append(({state_name: torch.empty(numel) for state_name in state_names}, pieces))
        steps = (step for _, step in kinds)
        states = [{} if step is None else {"step": torch.tensor(step)} for step in steps]
        record = {
            "state": dict(enumerate(states)),
            "param_groups": [{"params": [index]} for index in range(len(groups))],
        }
        clip_grad, scaler = self._config.optimizer.clip_grad, self.reader.loss_scaler
        file = optimizer_file(model_rank)
        state, self._places[file] = optimizer_state(groups, record, [1] * len(groups), clip_grad, scaler)
        target = self._create(file, {_PARTITIONED: state})
        for flat, of_group in groups:
            first = 0
            for piece in of_group:
                for state_name, tensor in flat.items():
                    found = target(tensor)
                    place = found._replace(start=found.start + first * tensor.element_size())
                    self._targets[piece.name, state_name, axis.rank] = place
                first += piece.stop
        checkpoint = self.reader.checkpoint
        info = checkpoint.run.get(INFO_KEY) or derive_info(self._specs, checkpoint.vocab_size)
        self._create(model_file(model_rank), client_state(info, self._config, checkpoint.run["state"]))

    def _create(self, file: str, content: dict[str, Any]) -> Callable[[Tensor], _Target]:
        """Writes a file. Returns a function that maps a fake tensor in the content to its place in the
        file."""
        path = self.folder / file
        with open(path, "wb") as created:
            offset_of = save_archive(content, created)
        self._open[path] = os.open(path, os.O_WRONLY)
        return lambda tensor: _Target(path, offset_of(tensor), tensor.dtype)

    def write_parameter(self, name: str, pieces: Iterator[Piece]) -> None:
        """See `CheckpointWriter`. Writes pieces of whole rows into all files that contain these rows. For the
        layer files the fp32 values are rounded as the optimizer rounds them."""
        for piece in in_rows(pieces, _STEP_BYTES):
            self._write_piece(piece)

    def _write_piece(self, piece: Piece) -> None:
        ((state_name, _),) = piece.values.items()
        for given in piece.boxes():
            rows = piece.values_in(given, state_name)
            for axis in self._ranks:
                targets = [self._targets[piece.name, state_name, axis.rank]]
                if state_name == VALUES:
                    targets.append(self._targets[piece.name, "", axis.rank])
                for box in boxes(self._specs[piece.name], [axis]):
                    if (common := box.intersection(given)) is None:
                        continue
                    values = narrowed(rows, common, given.offsets)
                    first = box.first + (common[0].start - box.offsets[0]) * prod(box.sizes[1:])
                    for target in targets:
                        self._write(target, first, values)

    def _write(self, target: _Target, first: int, values: Tensor) -> None:
        values = values.to(target.dtype).contiguous()
        content = memoryview(values.view(-1).view(torch.uint8).numpy().data)
        start = target.start + first * values.element_size()
        while content:
            done = os.pwrite(self._open[target.path], content, start)
            content, start = content[done:], start + done

    def close(self) -> tuple[Files, Any]:
        """See `CheckpointWriter`. The padding of the vocabulary is not written and reads as zero: it is a
        hole in the files."""
        for descriptor in self._open.values():
            os.fsync(descriptor)
        self.abandon()
        paths = sorted(self.folder.iterdir())
        with ThreadPoolExecutor(READ_THREADS) as pool:
            records = pool.map(describe_file, paths)
            return dict(zip([p.name for p in paths], records, strict=True)), self._places

    def abandon(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def _write_layers(engine: GPTEngine, folder: Path, files: RankFiles) -> None:
    """Writes this rank's share of the layer files. With ZeRO-3 it all-gathers the weights of one layer at a
    time. Collective."""
    engine.optimizer.wait_for_params()
    writers, mesh = engine.layer_writers, engine.mesh
    for index, layer in engine.module.layers.items():
        with engine.optimizer.gathered_params(layer):
            if mesh.dp_cp.rank == writers[index]:
                state = {name: own_storage(value) for name, value in layer.state_dict().items()}
                path = folder / layer_file(index, mesh.tp.rank)
                files.write(path, [Content(partial(save_archive, state))])


def _model_content(engine: GPTEngine, run: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of a mp_rank file, with the keys of DeepSpeed's engine. The weights are in the
    layer files."""
    mesh = engine.mesh
    return {
        "module": None,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": _shapes_of_groups(engine) if engine.optimizer.is_partitioned else None,
        "frozen_param_shapes": None,
        "shared_params": {} if engine.optimizer.is_partitioned else None,
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": engine.skipped_steps,
        "dp_world_size": mesh.dp_cp.size,
        "mp_world_size": mesh.model.size,
        "checkpoint_parallel_dimensions": {"pp_degree": mesh.pp.size, "tp_degree": mesh.tp.size},
        "ds_config": engine.config,
        "ds_version": deepspeed_version,
        **client_state(run[INFO_KEY], engine.run.config, run["state"]),
    }


def _shapes_of_groups(engine: GPTEngine) -> list[dict[str, torch.Size]]:
    """Returns for each group of parameters: parameter name -> shape of this rank's shard."""
    names = engine.optimizer.names
    return [
        OrderedDict((names[parameter], parameter.shape) for parameter in flat.parameters)
        for flat in engine.optimizer.flat
    ]


def state_of(
    optimizer: MixedPrecisionOptimizer,
) -> tuple[dict[str, Any], list[Piece], dict[str, Place]]:
    """Returns an optimizer's state in the form of DeepSpeed's files, its pieces, and the parameters'
    places."""
    groups = list(optimizer.packed_groups())
    state, places = optimizer_state(
        groups,
        optimizer.optimizer_record(),
        [flat.partitions for flat in optimizer.flat],
        optimizer.clip_grad,
        optimizer.scaler.state_dict(),
    )
    return state, [piece for _, pieces in groups for piece in pieces], places


def optimizer_state(
    groups: Sequence[Group],
    record: dict[str, Any],
    partition_counts: Sequence[int],
    clip_grad: float,
    loss_scaler: dict[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, Place]]:
    """Returns a rank's optimizer state in the form of DeepSpeed's files, and the places of the parameters.

    groups: the state without padding, because DeepSpeed's tools expect a different padding. record: torch's
    state dict of the optimizer; the tensors of `groups` are put into its states.
    """
    mappings, places, states = [], dict[str, Place](), dict(record["state"])
    for index, (flat, pieces) in enumerate(groups):
        moments = {state_name: tensor for state_name, tensor in flat.items() if state_name != VALUES}
        if moments:
            states[index] = {**states.get(index, {}), **moments}
        mapping: OrderedDict[str, Any] = OrderedDict()
        first = 0
        for piece in pieces:
            numel = piece.stop - piece.start
            mapping[piece.name] = fragment_address(start=first, numel=numel)
            places[piece.name] = (index, first, numel)
            first += numel
        mappings.append(mapping)
    state = {
        "clip_grad": clip_grad,
        "base_optimizer_state": {**record, "state": states},
        "loss_scaler": loss_scaler,
        "single_partition_of_fp32_groups": [flat[VALUES] for flat, _ in groups],
        "group_paddings": [0] * len(groups),
        "partition_count": list(partition_counts),
        "ds_version": deepspeed_version,
        "param_slice_mappings": mappings,
    }
    return state, places
