"""Checkpoints of hundreds of ranks without processes: one optimizer at a time writes or reads its part.

The value of every element of the model is its own number, so the values that a rank has read show where they
came from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron.checkpoint.files import add_checksum, describe_file
from megatron.checkpoint.formats.deepspeed_files import Place, file_index
from megatron.checkpoint.formats.native_writer import state_of
from megatron.checkpoint.formats.universal_info import spec_record
from megatron.checkpoint.record import TrainingState
from megatron.checkpoint.saving.run_record import layout_record
from megatron.config import Config, padded_vocab_size
from megatron.model.inference.single_process import model_specs
from megatron.mpu.mesh import Axis, Mesh
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import new_parameter
from megatron.optimizer.loss_scale import LossScaler
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.optimizer.overlap import ZeroConfig
from megatron.optimizer.parameter_groups import make_optimizer, parameter_groups
from megatron.pipeline.stages import plan_stages
from tests.support.layouts import EOD, VOCAB

if TYPE_CHECKING:
    pass

EMBED = "tied_modules.embed."
TIED = f"{EMBED}word_embeddings.weight"
FACTORS = {"fp32": 1.0, "exp_avg": 0.5, "exp_avg_sq": 2.0}
"""State -> factor by which an element's number is multiplied."""


class ManyRanks:
    """The ranks of a layout. numbers: parameter -> the number of each element, without padding."""

    def __init__(
        self, config: Config, shard_of: Callable[[ParameterSpec, torch.Tensor, Sequence[Axis]], torch.Tensor]
    ) -> None:
        """Numbers the elements of all parameters. shard_of: a function that returns a TP rank's shard of an
        unsharded parameter, independently of the program's code."""
        self.config = config
        self._shard_of = shard_of
        self.specs = model_specs(config, VOCAB, EOD)
        parallel = config.parallel
        rows = padded_vocab_size(VOCAB, config.model, parallel.tensor_model_parallel_size)
        self.padded = {
            name: replace(spec, global_shape=(rows, *spec.global_shape[1:])) if spec.num_valid_rows else spec
            for name, spec in self.specs.items()
        }
        self.numbers: dict[str, torch.Tensor] = {}
        first = 1  # 0 is padding
        for name, spec in self.specs.items():
            shape = spec.valid_shape
            count = torch.Size(shape).numel()
            self.numbers[name] = torch.arange(first, first + count, dtype=torch.float32).view(shape)
            first += count
        self.num_elements = first
        self.bounds = plan_stages(config, VOCAB).bounds

    def mesh(self, rank: int) -> Mesh:
        return Mesh.from_config(self.config.parallel, rank)

    def names_of_stage(self, stage: int) -> list[str]:
        low, high = self.bounds[stage], self.bounds[stage + 1]
        names = [name for name in self.specs if low <= _layer_of(name) < high]
        last = stage == len(self.bounds) - 2
        return [*names, *([TIED] if last and TIED not in names else [])]

    def shard(self, name: str, tp_rank: int) -> torch.Tensor:
        """Returns the numbers of a TP rank's shard. Padded rows are 0."""
        spec: ParameterSpec = self.padded[name]
        numbers = self.numbers[name]
        padding = spec.global_shape[0] - numbers.shape[0]
        if padding:
            numbers = torch.cat([numbers, torch.zeros(padding, *numbers.shape[1:])])
        tp_group = Axis("tp", tp_rank, self.config.parallel.tensor_model_parallel_size)
        return self._shard_of(spec, numbers, [tp_group])

    def optimizer(self, rank: int) -> MixedPrecisionOptimizer:
        """Returns the optimizer of a rank. All its values are -1, which is not the number of an element."""
        mesh = self.mesh(rank)
        parameters = {
            name: torch.nn.init.constant_(new_parameter(self.padded[name], mesh.tp, dtype=torch.bfloat16), -1)
            for name in self.names_of_stage(mesh.pp.rank)
        }
        tied = [parameters[TIED]] if TIED in parameters and mesh.pp_size > 1 else []
        groups = parameter_groups(parameters.items(), weight_decay=0.1, tied=tied)
        return MixedPrecisionOptimizer(
            make_optimizer(groups, self.config.optimizer),
            {parameter: name for name, parameter in parameters.items()},
            mesh,
            [],
            LossScaler(self.config.precision),
            ZeroConfig(self.config.parallel.zero_stage),
            clip_grad=1.0,
        )

    def save(self, folder: Path) -> list[str | None]:
        """Writes `global_step1` into the folder. Returns for each number the file from which it is read: the
        first one, if several files have it."""
        path = folder / "global_step1"
        path.mkdir(parents=True)
        places: dict[str, dict[str, Place]] = {}
        file_of: list[str | None] = [None] * self.num_elements
        for file, optimizer in reversed(list(self._optimizer_files())):
            state, _, places[file] = state_of(optimizer)
            key = "optimizer_state_dict" if self.config.parallel.zero_stage else "optimizer"
            torch.save({key: state}, path / file)
            for values in state["single_partition_of_fp32_groups"]:
                for number in values.int().tolist():
                    file_of[number] = file
        self._save_others(path)
        run = {
            "state": asdict(TrainingState(1, 8, 256)),
            "config": self.config.to_dict(),
            "layout": layout_record(self.config),
            "vocab_size": VOCAB,
            "eod": EOD,
            "data": {"paths": [], "seed": 1234},
            "parameters": {name: spec_record(spec) for name, spec in self.padded.items()},
            "files": {file.name: describe_file(file) for file in path.iterdir()},
            "index": file_index(places, self.specs),
        }
        (path / "run.json").write_text(json.dumps(add_checksum(run)))
        (folder / "latest").write_text(path.name)
        return file_of

    def _optimizer_files(self) -> Iterator[tuple[str, MixedPrecisionOptimizer]]:
        """Yields the name and the optimizer of each file of the optimizer's state, in order."""
        ranks = [self.mesh(rank) for rank in range(self.config.parallel.world_size)]
        for mesh in sorted(ranks, key=lambda mesh: (mesh.dp.rank, mesh.pp.rank)):
            model_rank = mesh.pp.rank * mesh.tp_size + mesh.tp.rank
            if self.config.parallel.zero_stage:
                file = f"zero_pp_rank_{mesh.dp.rank}_mp_rank_{model_rank:02d}_optim_states.pt"
            elif mesh.dp.rank == 0:
                file = f"mp_rank_{model_rank:02d}_model_states.pt"
            else:
                continue
            optimizer = self.optimizer(mesh.rank)
            for flat in optimizer.flat:
                for parameter, start, length in flat.fragments():
                    first = flat.first_element(parameter)
                    shard = self.shard(optimizer.names[parameter], mesh.tp.rank).reshape(-1)
                    flat.master.data[start : start + length] = shard[first : first + length]
                moments = {key: flat.master.detach() * FACTORS[key] for key in FACTORS if key != "fp32"}
                optimizer.optimizer.state[flat.master] = {"step": torch.tensor(1.0), **moments}
            yield file, optimizer

    def _save_others(self, path: Path) -> None:
        """Writes the layer files, and with ZeRO the states of DeepSpeed's engine."""
        parallel = self.config.parallel
        for rank in range(parallel.tensor_model_parallel_size):
            for layer in {_layer_of(name) for name in self.specs}:
                weights = {n: self.shard(n, rank) for n in self.specs if _layer_of(n) == layer}
                torch.save(weights, path / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
        if parallel.zero_stage:
            for rank in range(parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size):
                torch.save({}, path / f"mp_rank_{rank:02d}_model_states.pt")


def _layer_of(name: str) -> int:
    return 1 if name.startswith(EMBED) else int(name.partition(".")[0])
