"""Writes the model of a running job as a Hugging Face folder (--save-hf-interval, --save-hf-at-end).

The ranks write files of weights at once, and no rank holds the model: each layer is written by the
first tensor-parallel rank of one replica of its stage, which receives the other ranks' shards one by one.
Rank 0 adds the index, the configuration, the tokenizer and the digests.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from megatron.checkpoint.conversion.output_folder import check_space
from megatron.checkpoint.huggingface.exporter import (
    HuggingFaceWriter,
    weights_bytes,
)
from megatron.checkpoint.huggingface.family import family_of
from megatron.checkpoint.ranks import errors_of_rank_0, first_problem_of_ranks
from megatron.checkpoint.record import REPLACED
from megatron.config import Config
from megatron.config.sections.data import fitting_tokenizer_types
from megatron.engine.pipeline_engine import GPTEngine
from megatron.errors import UserError, one_line
from megatron.files import rename_synced
from megatron.mpu.mesh import Mesh
from megatron.mpu.parameter_spec import ParameterSpec, Shard
from megatron.mpu.parameters import merge_shards, spec_of
from megatron.mpu.world import gather_from_all_ranks
from megatron.tokenizer.hugging_face import EXPORTED_TYPES

_LOG = logging.getLogger(__name__)

# Suffix of the folder while it is written.
_UNFINISHED = ".tmp"


@dataclass(frozen=True)
class Exported:
    """A folder that was written. architecture: transformers' class. num_bytes: size of the weights."""

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
    vocab_size: int,
    eod: int | None,
    heartbeat: Callable[[], None],
    check_owner: Callable[[], None] = lambda: None,
) -> Exported:
    """Writes the model in the precision of the run to `folder`, which then replaces an existing folder of
    that name. Collective.

    vocab_size: without padding. heartbeat: called after each layer. check_owner: called on rank 0; raises an
    error if another job has taken over --save. Raises UserError on every rank, and leaves nothing behind, if
    the folder cannot be written.
    """
    prefix = f"stage-{engine.mesh.pp.rank}-replica-{engine.mesh.dp_cp.rank}-part"
    temporary = folder.with_name(folder.name + _UNFINISHED)
    writer = HuggingFaceWriter(temporary, engine.run_config, prefix=prefix)
    with errors_of_rank_0(str(folder)):
        if dist.get_rank() == 0:
            check_owner()
            _begin(writer, engine, vocab_size, eod)
    problem = _write_layers(engine, writer, heartbeat) or _problem_of(writer.write_pending)
    found = first_problem_of_ranks(problem)
    files = [file for own in gather_from_all_ranks(writer.files) for file in own]
    with errors_of_rank_0(str(folder)):
        if dist.get_rank() == 0:
            try:
                if found is not None:
                    raise UserError(f"{folder} cannot be written: rank {found[0]}: {found[1]}")
                writer.finish(files)
                check_owner()
                _replace(temporary, folder)
            except (OSError, UserError):
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    _, family = family_of(engine.run_config.model)
    return Exported(folder, family.architecture, sum(file.num_bytes for file in files))


def _begin(writer: HuggingFaceWriter, engine: GPTEngine, vocab_size: int, eod: int | None) -> None:
    """Creates the folder with all files except the weights."""
    config, temporary = engine.run_config, writer.folder
    if temporary.exists():  # of a killed job: --save belongs to this run
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    specs = (spec_of(parameter) for parameter in engine.module.parameters())
    stages = config.parallel.pipeline_model_parallel_size
    check_space(temporary, stages * weights_bytes(specs, config), "--save")
    types = fitting_tokenizer_types(config.data)
    is_exported = not EXPORTED_TYPES.isdisjoint(types)
    try:
        writer.begin(vocab_size, eod, config.data if is_exported else None)
    except (OSError, UserError):
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    except Exception as error:  # transformers raises many kinds, and the other ranks wait
        raise UserError(f"{temporary}: transformers cannot write the model ({one_line(error)})") from error
    if types and not is_exported:
        _LOG.warning("a %s has no Hugging Face equivalent: only the model is exported", types[0])


def _write_layers(engine: GPTEngine, writer: HuggingFaceWriter, heartbeat: Callable[[], None]) -> str | None:
    """Writes this rank's share of the weights. Returns the first problem. A rank with a problem still takes
    part in the collectives."""
    mesh, module = engine.mesh, engine.module
    names = {parameter: name for name, parameter in module.named_parameters()}
    own = (mesh.pp.rank, sorted(names.values()))
    stage_of: dict[str, int] = {}
    for stage, held in sorted(gather_from_all_ranks(own)):
        for name in held:
            stage_of.setdefault(name, stage)  # a tied embedding is written by its first stage
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
                values = _collect(parameter.detach(), spec, mesh)
                if values is not None and problem is None:
                    valid = iter([values[: spec.num_valid_rows]])
                    problem = _problem_of(partial(writer.write_parameter, name, valid))
        heartbeat()
    return problem


def _collect(shard: Tensor, spec: ParameterSpec, mesh: Mesh) -> Tensor | None:
    """Returns the global parameter in host memory on the first of the ranks that hold its shards or replicas
    of one data-parallel rank, None on the others. Collective in the groups that shard the parameter."""
    gathered = [shard for shard in spec.sharding if mesh.axis(shard.axis).size > 1]
    for index, (dim, name, parts) in enumerate(gathered):
        axis = mesh.axis(name)
        assert axis.group is not None
        shards = []
        for rank, source in enumerate(dist.get_process_group_ranks(axis.group)):
            buffer = shard.contiguous() if rank == axis.rank else torch.empty_like(shard)
            dist.broadcast(buffer, source, group=axis.group)
            if axis.rank == 0:
                # The result stays on the device if it is sent along another axis.
                shards.append(buffer if index + 1 < len(gathered) else buffer.cpu())
        if axis.rank != 0:
            return None
        shard = merge_shards(ParameterSpec((), (Shard(dim, name, parts),)), shards)
    if not mesh.counts(spec):
        return None
    # A copy in host memory too: ZeRO-3 frees the gathered weights before they are in a file.
    return shard if gathered else shard.to("cpu", copy=True)


def _problem_of(write: Callable[[], None]) -> str | None:
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
