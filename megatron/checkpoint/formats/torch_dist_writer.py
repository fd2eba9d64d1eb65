"""Writes checkpoints of Megatron-Core's format `torch_dist`.

All optimizers of Megatron-Core resume from them. The distributed optimizer reads them like its format
`fully_reshardable`. For a 16-bit run the weights have the precision of the run, and the fp32 values are
stored beside them, under the names of both kinds of optimizers.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.files import Files, describe_file
from megatron.checkpoint.foreign_arguments import MEGATRON_CORE, TRAINING_ARGUMENTS
from megatron.checkpoint.formats.archive_writer import save_archive
from megatron.checkpoint.formats.dcp_writer import CHUNK_BYTES, DcpFiles, DcpTable
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.state import StateReader, padded_spec
from megatron.checkpoint.formats.torch_dist import (
    COMMON_FILE,
    DISTRIBUTED_PARAM,
    FP32_PARAM,
    OPTIMIZER_KEY,
    gate_dim,
    has_stacked_layers,
    name_in_layer,
    stored_halves,
    stored_name,
)
from megatron.checkpoint.formats.writing import (
    CheckpointWriter,
    has_all_digests,
    in_rows,
)
from megatron.checkpoint.hybrid_layers import hybrid_arguments
from megatron.errors import UserError
from megatron.files import write_json
from megatron.model.layer_list import PARAMETER_DTYPES
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import own_storage
from megatron.mpu.pieces import Piece

# How the distributed optimizer's state is stored: under the names and in the shapes of the weights.
FULLY_RESHARDABLE = "fully_reshardable"
# The file that holds the name of the format.
CONFIG_FILE = "metadata.json"
# Modules of a layer for which Megatron-Core also stores an object; it is None without Transformer Engine.
_ATTENTION = {"query_key_value": "qkv", "dense": "proj"}
_LINEAR = ("linear_fc1", "linear_fc2")


class TorchDistWriter(CheckpointWriter):
    """Writes a checkpoint of Megatron-Core, with `run.json` beside it."""

    def __init__(self, folder: Path, source: StateReader, hybrid_model: bool = False) -> None:
        """hybrid_model: whether to write a HybridModel instead of a GPTModel."""
        super().__init__(folder, source)
        reader = source
        self._config = reader.checkpoint.config
        self._model = self._config.model
        args = MEGATRON_CORE.arguments(self._config.model)  # rejects other models before anything is written
        self._args, self._is_hybrid = hybrid_arguments(args) if hybrid_model else args, hybrid_model
        self._recorded = reader.checkpoint.run.get(OPTIMIZER_KEY) or {}
        # The integrity record has no digests of the weights of a 16-bit run, only of the fp32 values.
        has_digests = self._config.precision.name == "fp32" and has_all_digests(reader)
        self._files = DcpFiles(folder, hashed=not has_digests)
        # Name of a tensor -> (shape, dtype).
        self._tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._names = list(reader.specs)
        for name in self._names:
            stored_name(name, self._model, self._is_hybrid)  # also rejects other models
            moments = sorted(set(reader.state_names(name)) - {VALUES})
            if moments not in ([], ["exp_avg", "exp_avg_sq"]):
                raise UserError(
                    f"checkpoint {reader.folder}: {name} has {' and '.join(moments)}: only Adam's moments "
                    "(exp_avg, exp_avg_sq) can be written for Megatron-Core: use --format dcp"
                )
        steps = {reader.step_of(name) for name in self._names}
        if len(steps) > 1:
            raise UserError(
                f"checkpoint {reader.folder} has several steps of the optimizer ({len(steps)}), and "
                "Megatron-Core stores only one: use --format dcp"
            )
        self._step = steps.pop()

    def write_parameter(self, name: str, pieces: Iterator[Piece]) -> None:
        spec = self.reader.specs[name]
        key, layer = stored_name(name, self._model, self._is_hybrid)
        shape, num_valid = self._padded(spec), spec.valid_shape[0]
        zeros = (0,) * (len(shape) - 1)
        gated = bool(self._model.glu_activation) and ".dense_h_to_4h." in name
        with self._files.append() as (archives, file):
            for piece in in_rows(pieces, CHUNK_BYTES):
                ((state_name, values),) = piece.values.items()
                first, rows = piece.start // prod(shape[1:]), values.view(-1, *shape[1:])
                parts = [(first, rows)]
                if gated and gate_dim(name) == 0:
                    spans = stored_halves(shape[0], (first, first + len(rows)))
                    halves = rows.split([stop - start for start, stop in spans])
                    parts = [(start, half) for (start, _), half in zip(spans, halves, strict=True)]
                elif gated:
                    parts = [(first, torch.cat(rows.chunk(2, 1)[::-1], 1))]
                if first + len(rows) == num_valid < shape[0]:
                    parts.append((num_valid, torch.zeros(shape[0] - num_valid, *shape[1:])))
                for stored, dtype in self._keys(key, state_name, spec):
                    stacked = shape if layer is None else (self._model.num_layers, *shape)
                    self._tensors[stored] = (stacked, dtype)
                    for row, part in parts:
                        content, offsets = own_storage(part.to(dtype)), (row, *zeros)
                        if layer is not None:
                            content, offsets = content[None], (layer, *offsets)
                        self._files.chunks.append((stored, archives.append(file, content, offsets)))

    def _keys(self, key: str, state_name: str, spec: ParameterSpec) -> list[tuple[str, torch.dtype]]:
        """Returns (name, dtype) of each tensor that stores a state. key: the name of the weights' tensor."""
        dtype = PARAMETER_DTYPES[self._config.precision.name]
        if not spec.has_gradient:  # the state is a buffer in Megatron-Core
            return [(key, torch.float32)] if state_name == VALUES else []
        if state_name != VALUES:
            return [(f"optimizer.state.{state_name}.{key}", torch.float32)]
        if dtype == torch.float32:
            return [(key, dtype)]
        return [(FP32_PARAM + key, torch.float32), (key, dtype)]

    def _padded(self, spec: ParameterSpec) -> tuple[int, ...]:
        """Returns the shape of a parameter with the padding that the run's tensor-parallel size requires."""
        size = self._config.parallel.tensor_model_parallel_size
        return padded_spec(spec, self.reader.checkpoint, size).global_shape

    def close(self) -> tuple[Files, Any]:
        table = DcpTable()
        for key, chunk in self._files.chunks:
            table.add(key, chunk, *self._tensors[key])
        is_fp32 = self._config.precision.name == "fp32"
        trained = (name for name in self._names if self.reader.specs[name].has_gradient)
        for key in {stored_name(name, self._model, self._is_hybrid)[0] for name in trained}:
            table.add_name(DISTRIBUTED_PARAM + key, key if is_fp32 else FP32_PARAM + key)
        with self._files.append() as (archives, file):
            for name in self._extra_states():
                table.add_object(name, archives.append(file, [None]))
        with open(self.folder / COMMON_FILE, "wb") as common:
            save_archive(self._common(), common)
        backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
        versions = {f"{name}_version": 1 for name in backends}
        write_json(self.folder / CONFIG_FILE, backends | versions)
        files = {name: describe_file(self.folder / name) for name in (COMMON_FILE, CONFIG_FILE)}
        return files | self._files.close() | table.write(self.folder), None

    def _extra_states(self) -> Iterator[str]:
        """Yields the names of the objects that Megatron-Core stores beside linear layers."""
        model, stacked = self._model, has_stacked_layers(self._model, self._is_hybrid)
        later = range(model.num_layers, model.num_layers + (model.mtp_num_layers or 0))
        yield from (_extra_state(f"mtp.layers.{index}.eh_proj", [0], [1]) for index in range(len(later)))
        for number in range(model.num_layers + len(later)):
            layer, is_stacked = min(number, model.num_layers - 1), stacked and number not in later
            offsets, shape = ([layer], [model.num_layers]) if is_stacked else ([], [])
            has_experts = model.has_experts(layer)
            matrices = model.attention_matrices
            modules = [f"self_attention.linear_{_ATTENTION.get(name, name)}" for name in matrices]
            modules += ["self_attention.core_attention"] * (model.softmax_type == "learnable")
            if not has_experts:
                modules += [f"mlp.{linear}" for linear in _LINEAR]
            elif model.moe_shared_expert_intermediate_size:
                modules += [f"mlp.shared_experts.{linear}" for linear in _LINEAR]
            for module in modules:
                yield _extra_state(self._name(number, module), offsets or [0], shape or [1])
            for expert in range(model.num_experts or 0) if has_experts else ():
                for linear in _LINEAR:
                    module = self._name(number, f"mlp.experts.experts.{linear}")
                    yield _extra_state(module, [*offsets, expert], [*shape, model.num_experts or 0])
        if self._is_hybrid:
            yield _extra_state("output_layer", [0], [1])

    def _name(self, layer: int, module: str) -> str:
        later = layer - self._model.num_layers
        if later >= 0:
            return f"mtp.layers.{later}.transformer_layer.{module}"
        return name_in_layer(layer, module, self._model, self._is_hybrid)

    def abandon(self) -> None:
        self._files.abandon()

    def finish(self, run: dict[str, Any], tables: Sequence[Any]) -> dict[str, Any]:
        return {**run, "loss_scaler": self.reader.loss_scaler}

    def _common(self) -> dict[str, Any]:
        checkpoint, optimizer = self.reader.checkpoint, self._config.optimizer
        words = next(spec for spec in self.reader.specs.values() if spec.num_valid_rows is not None)
        lr, min_lr = self._config.schedule.lr, self._config.schedule.min_lr
        betas = (optimizer.adam_beta1, optimizer.adam_beta2)
        adam = torch.optim.AdamW([torch.empty(1)], lr, betas, optimizer.adam_eps)
        group = {**adam.defaults, "max_lr": lr, "min_lr": min_lr, "default_config": True}
        # Megatron-Core finds its groups by these entries. It applies no weight decay to norms and biases.
        keys = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
        groups = [
            {**group, **keys, "wd_mult": factor, "weight_decay": factor * optimizer.weight_decay}
            for factor in (1.0, 0.0)
        ]
        if recorded := self._recorded.get("groups"):  # what Megatron-Core itself saved, with the schedule
            groups = [
                {**group, **entry, "betas": tuple(entry.get("betas", group["betas"]))} for entry in recorded
            ]
        state: dict[str, Any] = {}
        if self._step is not None:
            state["common_step"] = torch.tensor(self._step)
            for group in groups:
                group["step"] = self._step  # the distributed optimizer reads the step from the group
        # Megatron-Core has one optimizer for dense parameters and one for experts.
        of_experts = [{**group, "is_expert_parallel": True} for group in groups]
        optimizers = [_optimizer(state, kind) for kind in (groups, of_experts)]
        return {
            "optimizer": dict(enumerate(optimizers)) if self._model.num_experts else optimizers[0],
            "args": Namespace(
                **self._args,
                **{
                    name: getattr(getattr(self._config, section), name)
                    for section, names in TRAINING_ARGUMENTS.items()
                    for name in names
                },
                micro_batch_size=self._config.batch.micro_batch_size,
                tensor_model_parallel_size=self._config.parallel.tensor_model_parallel_size,
                pipeline_model_parallel_size=self._config.parallel.pipeline_model_parallel_size,
                hidden_dropout=self._model.hidden_dropout,
                attention_dropout=self._model.attention_dropout,
                tokenizer_type=self._config.data.tokenizer_type,
                squared_relu=False,
                apply_query_key_layer_scaling=False,
                ckpt_format="torch_dist",
                iteration=checkpoint.state.iteration,
                consumed_train_samples=checkpoint.state.consumed_samples,
                padded_vocab_size=self._padded(words)[0],
                no_save_rng=True,  # so that Megatron-LM does not look for random states
            ),
            "opt_param_scheduler": self._recorded.get("scheduler") or self._scheduler(),
            # Megatron-LM reads from this entry under which names its distributed optimizer is stored.
            "content_metadata": {
                "distrib_optim_sharding_type": FULLY_RESHARDABLE,
                "chained_optim_avoid_prefix": True,  # the names do not begin with the optimizer's number
            },
            "checkpoint_version": 3.0,
            "iteration": checkpoint.state.iteration,
        }

    def _scheduler(self) -> dict[str, Any]:
        """Returns the state of Megatron-Core's scheduler, which counts samples. Megatron-LM rejects a
        schedule that differs from its flags, unless a flag allows it to override one of the two."""
        config, state = self._config, self.reader.checkpoint.state
        schedule, training, batch = config.schedule, config.training, config.batch.global_batch_size
        iterations = schedule.lr_decay_iters or training.train_iters or state.iteration
        decay_steps = schedule.lr_decay_samples or training.train_samples or iterations * batch
        warmup_steps = schedule.lr_warmup_samples or schedule.lr_warmup_iters * batch
        decay = config.optimizer.weight_decay
        return {
            "max_lr": schedule.lr,
            "min_lr": schedule.min_lr,
            "lr_warmup_steps": int((schedule.lr_warmup_fraction or 0) * decay_steps) or warmup_steps,
            "num_steps": state.consumed_samples,
            "lr_decay_style": schedule.lr_decay_style,
            "lr_decay_steps": decay_steps,
            "start_wd": decay,
            "end_wd": decay,
            "wd_incr_style": "constant",
            "wd_incr_steps": training.train_samples or (training.train_iters or state.iteration) * batch,
        }


def _optimizer(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    inner = {"state": state, "param_groups": groups}
    # The fp32 optimizer saves torch's entries only; all other optimizers nest them.
    return inner | {"param_state_sharding_type": FULLY_RESHARDABLE, "optimizer": inner}


def _extra_state(module: str, offsets: Sequence[int], shape: Sequence[int]) -> str:
    place = "_".join(".".join(map(str, numbers)) for numbers in (offsets, shape))
    return f"{module}._extra_state/shard_{place}"
