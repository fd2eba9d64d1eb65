"""Native checkpoints with DeepSpeed's file names, written file by file without processes and without an
engine."""

from __future__ import annotations

import json
import struct
import zipfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.digests import fragment_digests
from megatron.checkpoint.files import add_checksum, describe_file
from megatron.checkpoint.formats.registry import format_of
from megatron.checkpoint.formats.universal_info import spec_record
from megatron.checkpoint.record import TrainingState
from megatron.checkpoint.saving.run_record import layout_record
from megatron.commands import convert_checkpoint
from megatron.config import Config, padded_vocab_size
from megatron.model.inference.single_process import model_specs
from megatron.mpu.mesh import Axis
from tests.reference.shards import shard_of
from tests.support.layouts import EOD, VOCAB

EMBED = "tied_modules.embed."
PADDING = 7.0
"""Value of the vocabulary's padding. A reader that takes padding for a weight gets wrong results."""


def random_wholes(config: Config, seed: int = 11) -> dict[str, torch.Tensor]:
    """Returns random values for all parameters, without padding. No parameter is constant, which would hide
    errors."""
    generator = torch.Generator().manual_seed(seed)
    wholes = {}
    for name, spec in model_specs(config, VOCAB, EOD).items():
        shape = (spec.num_valid_rows or spec.global_shape[0], *spec.global_shape[1:])
        wholes[name] = spec.init_value + 0.15 * torch.randn(shape, generator=generator)
    return wholes


def optimizer_states(
    shards: dict[str, torch.Tensor], replicas: int, without_gradient: frozenset[str] = frozenset()
) -> list[dict]:
    """Returns the optimizer state that one model-parallel rank saves: one group, sharded evenly over the
    replicas. The first moments are an eighth of the values, the second moments their squares. Both are zeros
    for parameters without a gradient."""
    flat = torch.cat([shard.reshape(-1) for shard in shards.values()] or [torch.zeros(0)])
    updated = [torch.full((shard.numel(),), name not in without_gradient) for name, shard in shards.items()]
    changes = flat * torch.cat(updated or [torch.zeros(0)])
    states = []
    for part in range(replicas):
        first, last = (flat.numel() * edge // replicas for edge in (part, part + 1))
        addresses, begin = {}, 0
        for name, shard in shards.items():
            start, stop = max(begin, first), min(begin + shard.numel(), last)
            if start < stop:
                addresses[name] = Namespace(start=start - first, numel=stop - start)
            begin += shard.numel()
        values, moments = flat[first:last].clone(), changes[first:last].clone()
        states.append(
            {
                "param_slice_mappings": [addresses],
                "single_partition_of_fp32_groups": [values],
                "base_optimizer_state": {
                    "state": {0: {"exp_avg": moments / 8, "exp_avg_sq": moments**2, "step": 5.0}},
                    "param_groups": [{}],
                },
                "loss_scaler": None,
            }
        )
    return states


def write_native(
    folder: Path, config: Config, wholes: dict[str, torch.Tensor], step: int = 5, eod: int | None = EOD
) -> Path:
    """Writes `global_step<step>` in `folder` as a run of `config` does, and names it in `latest`. The
    optimizer's files of the first stage contain all parameters."""
    path = folder / f"global_step{step}"
    path.mkdir(parents=True)
    parallel = config.parallel
    tp_size = parallel.tensor_model_parallel_size
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[config.precision.name]
    layers: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    records: dict[str, dict] = {}
    masters: list[dict[str, torch.Tensor]] = [{} for _ in range(tp_size)]
    specs = model_specs(config, VOCAB, EOD)
    without_gradient = frozenset(name for name, spec in specs.items() if not spec.has_gradient)
    for name, spec in specs.items():
        whole = wholes[name]
        if spec.num_valid_rows is not None:
            padding = padded_vocab_size(VOCAB, config.model, tp_size) - VOCAB
            whole = torch.nn.functional.pad(whole, (0, 0, 0, padding), value=PADDING)
            spec = replace(spec, global_shape=tuple(whole.shape))
        records[name] = spec_record(spec)
        layer, short = (1, name.removeprefix(EMBED)) if name.startswith(EMBED) else name.split(".", 1)
        for rank in range(tp_size):
            shard = shard_of(spec, whole, [Axis("tp", rank, tp_size)])
            masters[rank][name] = shard
            stored = shard.to(dtype if spec.has_gradient else torch.float32)
            layers.setdefault((int(layer), rank), {})[short] = stored.clone()
    for (layer, rank), state in layers.items():
        torch.save(state, path / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    for rank in range(tp_size * parallel.pipeline_model_parallel_size):
        replicas = parallel.dp_cp_size if parallel.zero_stage else 1
        states = optimizer_states(masters[rank] if rank < tp_size else {}, replicas, without_gradient)
        zero = parallel.zero_stage > 0
        torch.save({} if zero else {"optimizer": states[0]}, path / f"mp_rank_{rank:02d}_model_states.pt")
        for replica, state in enumerate(states if zero else []):
            file = path / f"zero_pp_rank_{replica}_mp_rank_{rank:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": state}, file)
    digests = {
        name: f"{fragment_digests(specs[name], (), 0, {'': whole.reshape(-1)})['']:016x}"
        for name, whole in wholes.items()
    }
    run = {
        "state": asdict(TrainingState(step, 8 * step, 256 * step)),
        "config": config.to_dict(),
        "layout": layout_record(config),
        "stages": {"partition_method": "type:transformer", "pipeline_schedule": "1f1b", "bounds": [0, 10]},
        "vocab_size": VOCAB,
        "eod": eod,
        "data": {"paths": [], "seed": 1234},
        "parameters": records,
        "certificate": {"digests": {"fp32": digests}, "updates": None, "probe": None},
        "files": {file.name: describe_file(file) for file in path.iterdir()},
    }
    (path / "run.json").write_text(json.dumps(add_checksum(run)))
    (folder / "latest").write_text(path.name)
    return path


def convert(source: Path, target: Path, name: str, *flags: str) -> Path:
    """Runs tools/convert_checkpoint.py. name: the format."""
    convert_checkpoint.run(["--from", str(source), "--to", str(target), "--format", name, *flags])
    assert format_of(target) == name
    return target


def change_run(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes `run.json` and corrects its checksum, as an attacker would."""
    path = folder / "run.json"
    run = json.loads(path.read_text())
    change(run)
    path.write_text(json.dumps(add_checksum(run)))


def flip_a_byte(path: Path) -> None:
    """Changes the largest member of a file of torch.save. The zip's directory and the other members stay
    unchanged."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda info: ("/data/" in info.filename, info.file_size))
    content = bytearray(path.read_bytes())
    # A member's header has 30 bytes, then its name and extra field, whose lengths are the last two numbers.
    lengths = struct.unpack_from("<HH", content, largest.header_offset + 26)
    content[largest.header_offset + 30 + sum(lengths) + largest.file_size // 2] ^= 1
    path.write_bytes(content)
