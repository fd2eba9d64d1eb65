"""Native checkpoints written file by file, in DeepSpeed's names, without processes and without an engine."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch

from megatron.checkpoint.manifest import seal
from megatron.checkpoint.native import TrainingState, layout_record
from megatron.config import Config, padded_vocab_size
from megatron.model.single_process import model_specs
from megatron.mpu.layout import TensorGroup
from megatron.mpu.parameters import shard_of
from tests.distributed.layouts import EOD, VOCAB

EMBED = "tied_modules.embed."
PADDING = 7.0
"""In the vocabulary's padding: whoever takes it for a weight is found out."""


def random_wholes(config: Config, seed: int = 11) -> dict[str, torch.Tensor]:
    """Values for all parameters, without padding, none at its mean, which would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    wholes = {}
    for name, spec in model_specs(config, VOCAB, EOD).items():
        shape = (spec.used_rows or spec.whole_shape[0], *spec.whole_shape[1:])
        wholes[name] = spec.init_value + 0.15 * torch.randn(shape, generator=generator)
    return wholes


def write_native(
    folder: Path, config: Config, wholes: dict[str, torch.Tensor], step: int = 5, eod: int | None = EOD
) -> Path:
    """`global_step<step>` in `folder` as a run of `config` writes it, its optimizer's files empty; `latest`
    names it."""
    path = folder / f"global_step{step}"
    path.mkdir(parents=True)
    parallel = config.parallel
    tensor = parallel.tensor_model_parallel_size
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[config.precision.name]
    layers: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for name, spec in model_specs(config, VOCAB, EOD).items():
        whole = wholes[name]
        if spec.used_rows is not None:
            padding = padded_vocab_size(VOCAB, config.model, tensor) - VOCAB
            whole = torch.nn.functional.pad(whole, (0, 0, 0, padding), value=PADDING)
            spec = replace(spec, whole_shape=tuple(whole.shape))
        layer, short = (1, name.removeprefix(EMBED)) if name.startswith(EMBED) else name.split(".", 1)
        for rank in range(tensor):
            shard = shard_of(spec, whole, TensorGroup(rank, tensor)).to(dtype).clone()
            layers.setdefault((int(layer), rank), {})[short] = shard
    for (layer, rank), state in layers.items():
        torch.save(state, path / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    for rank in range(tensor * parallel.pipeline_model_parallel_size):
        torch.save({}, path / f"mp_rank_{rank:02d}_model_states.pt")
        for replica in range(parallel.data_parallel_size if parallel.zero_stage else 0):
            torch.save({}, path / f"zero_pp_rank_{replica}_mp_rank_{rank:02d}_optim_states.pt")
    run = {
        "state": asdict(TrainingState(step, 8 * step, 256 * step)),
        "config": config.to_dict(),
        "layout": layout_record(config),
        "stages": {"partition_method": "type:transformer", "pipeline_schedule": "1f1b", "bounds": [0, 10]},
        "vocab_size": VOCAB,
        "eod": eod,
        "data": {"paths": [], "seed": 1234},
        "files": {file.name: {"bytes": file.stat().st_size, "sha256": ""} for file in path.iterdir()},
    }
    (path / "run.json").write_text(json.dumps(seal(run)))
    (folder / "latest").write_text(path.name)
    return path
