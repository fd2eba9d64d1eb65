"""Writes the model of a running job as a Hugging Face folder (--save-hf-interval, --save-hf-at-end).

All ranks write weight files at the same time, and no rank holds the whole model. The first tensor-parallel
rank of one replica of each pipeline stage writes the stage's layers; it receives the other ranks' shards one
by one. Rank 0 adds the index, the configuration, the tokenizer and the digests.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.writing import check_space
from megatron.checkpoint.huggingface.exporter import HuggingFaceWriter, weights_bytes
from megatron.checkpoint.huggingface.family import family_of
from megatron.checkpoint.ranks import errors_of_rank_0, first_problem_of_ranks
from megatron.checkpoint.record import REPLACED
from megatron.config import Config
from megatron.config.sections.data import fitting_tokenizer_types
from megatron.engine.pipeline_engine import GPTEngine
from megatron.errors import UserError, one_line
from megatron.files import rename_synced, sync_tree
from megatron.mpu.mesh import Mesh
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import spec_of
from megatron.mpu.pieces import Piece
from megatron.mpu.world import gather_from_all_ranks
from megatron.tokenizer.hugging_face import EXPORTED_TYPES

_LOG = logging.getLogger(__name__)

# Suffix of the folder's name while it is written.
_UNFINISHED = ".tmp"


@dataclass(frozen=True)
class Exported:
    """A folder that was written. architecture: transformers' class. num_bytes: size of the weights in
    bytes."""

    folder: Path
    architecture: str
    num_bytes: int


def check_export(config: Config) -> None:
    """Raises UserError if a flag asks for Hugging Face folders and no family can express the model."""
    if config.checkpoint.save_hf_interval or config.checkpoint.save_hf_at_end:
        flag = "--save-hf-interval" if config.checkpoint.save_hf_interval else "--save-hf-at-end"
        try:
            family_of(config.model)
        except UserError as error:
            raise UserError(f"{flag}: {error}; remove the flag, or change the model") from error


def export_model(
    engine: GPTEngine,
    folder: Path,
    heartbeat: Callable[[], None],
    check_owner: Callable[[], None] = lambda: None,
) -> Exported:
    """Writes the model in the precision of the run to `folder`, and replaces an existing folder of that name
    once the new one is complete. Collective.

    heartbeat: called after each layer. check_owner: called on rank 0; raises an error if another job has
    taken over --save. If the folder cannot be written, raises UserError on every rank, and leaves nothing
    behind.
    """
    config = engine.run.config
    prefix = f"rank-{engine.global_rank}-part"
    temporary = folder.with_name(folder.name + _UNFINISHED)
    types = fitting_tokenizer_types(config.data)
    tokenizer = config.data if not EXPORTED_TYPES.isdisjoint(types) else None
    writer = HuggingFaceWriter(temporary, config=config, tokenizer=tokenizer, prefix=prefix)
    with errors_of_rank_0(str(folder)):
        if dist.get_rank() == 0:
            check_owner()
            _begin(writer, engine)
            if types and tokenizer is None:
                _LOG.warning("a %s has no Hugging Face equivalent: only the model is exported", types[0])
    problem = _write_layers(engine, writer, heartbeat) or _problem_of(writer.close)
    found = first_problem_of_ranks(problem)
    tables = gather_from_all_ranks(writer.files)
    with errors_of_rank_0(str(folder)):
        if dist.get_rank() == 0:
            try:
                if found is not None:
                    raise UserError(f"{folder} cannot be written: rank {found[0]}: {found[1]}")
                writer.finish({}, tables)
                sync_tree(temporary)
                check_owner()
                _replace(temporary, folder)
            except (OSError, UserError):
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    _, family = family_of(config.model)
    num_bytes = sum(file.num_bytes for table in tables for file in table)
    return Exported(folder, family.architecture, num_bytes)


def _begin(writer: HuggingFaceWriter, engine: GPTEngine) -> None:
    """Creates the folder with all files except the weights."""
    config, vocab, temporary = engine.run.config, engine.run.vocab, writer.folder
    if temporary.exists():  # of a killed job of this run, which owns --save
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    specs = (spec_of(parameter) for parameter in engine.module.parameters())
    stages = config.parallel.pipeline_model_parallel_size
    check_space(temporary, stages * weights_bytes(specs, config), "--save")
    try:
        writer.begin(vocab.size, vocab.eod)
    except (OSError, UserError):
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    except Exception as error:  # transformers raises errors of many types, and the other ranks wait
        raise UserError(f"{temporary}: transformers cannot write the model ({one_line(error)})") from error


def _write_layers(engine: GPTEngine, writer: HuggingFaceWriter, heartbeat: Callable[[], None]) -> str | None:
    """Writes this rank's share of the weights. Returns the first problem; None if there is none. A rank with
    a problem still takes part in the collectives."""
    mesh, module = engine.mesh, engine.module
    names = {parameter: name for name, parameter in module.named_parameters()}
    own = (mesh.pp.rank, sorted(names.values()))
    stage_of: dict[str, int] = {}
    for stage, held in sorted(gather_from_all_ranks(own)):
        for name in held:
            stage_of.setdefault(name, stage)  # the first of its stages writes a tied embedding
    writers = engine.layer_writers
    written: set[str] = set()
    problem: str | None = None
    for index, layer in module.layers.items():
        with engine.optimizer.gathered_params(layer):
            for parameter in layer.parameters():
                name, spec = names[parameter], spec_of(parameter)
                replica = mesh.reduced_over(spec)
                if replica.rank != writers[index] % replica.size:
                    continue
                if stage_of[name] != mesh.pp.rank or name in written:
                    continue
                written.add(name)
                pieces = _pieces(name, parameter.detach(), spec, mesh)
                if pieces and problem is None:
                    problem = _problem_of(partial(writer.write_parameter, name, iter(pieces)))
        heartbeat()
    return problem


def _pieces(name: str, shard: Tensor, spec: ParameterSpec, mesh: Mesh) -> list[Piece]:
    """Returns the pieces of the full parameter in host memory, on the first of the ranks that hold its shards
    or replicas in one data-parallel rank. Returns [] on all other ranks. Collective in the groups that shard
    the parameter."""
    own = Piece.of_shard(name, spec, mesh.axes_of(spec))
    pieces = [replace(own, values={VALUES: shard.reshape(-1)})]
    axes = [axis for axis in map(mesh.axis, spec.axis_names) if axis.group is not None]
    for axis in axes:
        received = []
        for rank, source in enumerate(dist.get_process_group_ranks(axis.group)):
            for piece in pieces:
                values = piece.values[VALUES]
                buffer = values.contiguous() if rank == axis.rank else torch.empty_like(values)
                dist.broadcast(buffer, source, group=axis.group)
                place = tuple(replace(a, rank=rank) if a.name == axis.name else a for a in piece.axes)
                if axis.rank == 0:
                    # The tensor stays on the device if it is then sent along another axis.
                    kept = buffer if axis is not axes[-1] else buffer.cpu()
                    received.append(replace(piece, axes=place, values={VALUES: kept}))
        if axis.rank != 0:
            return []
        pieces = received
    if not mesh.counts(spec):
        return []
    # A copy even in host memory: ZeRO-3 frees the gathered weights before they are written to a file.
    return pieces if axes else [replace(own, values={VALUES: shard.reshape(-1).to("cpu", copy=True)})]


def _problem_of(write: Callable[[], object]) -> str | None:
    try:
        write()
    except (OSError, UserError, SafetensorError, RuntimeError, MemoryError) as error:
        return str(error)
    return None


def _replace(temporary: Path, folder: Path) -> None:
    replaced = folder.with_name(folder.name + REPLACED)
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    rename_synced(temporary, folder)
    shutil.rmtree(replaced, ignore_errors=True)
