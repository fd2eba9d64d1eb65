"""Checkpoints of Megatron-Core's format `torch_dist`: weights and Adam's state of a GPT.

    .metadata, __<rank>_<N>.distcp      torch.distributed.checkpoint
    common.pt                           iteration, arguments, the optimizer's step and groups; since version
                                        0.19 an object of torch.distributed.checkpoint instead of a file
    metadata.json                       the name of the format

The distributed optimizer also stores its state under Megatron-Core's names of the weights: in the weights'
shape (`fully_reshardable`), or flattened (`fully_sharded_model_space`, until version 0.13). A flattened
tensor of shape [X, Y] with shards of the shape [x, y] is stored as [X / x, Y / y, x * y].

Megatron-Core stacks the layers: `decoder.layers.mlp.linear_fc2.weight` is [layers, hidden, ffn]. If the
layers of a model differ (for example because only some have experts), each layer has a tensor,
`decoder.layers.<N>...`. Experts are stacked, too: `mlp.experts.experts.linear_fc1.weight` is [layers,
experts, ffn, hidden]. A gated MLP stacks (gate, value) in Megatron-Core, and (value, gate) in this program.
The bias of experts is a buffer without optimizer state.

A HybridModel has one tensor per layer, and two of its layers form a transformer layer: see `hybrid_layers`.

The layers for multi-token prediction are never stacked: `mtp.layers.<N>.transformer_layer...`.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from itertools import product
from math import prod
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.foreign_arguments import MEGATRON_CORE, Program, plain_arguments
from megatron.checkpoint.formats.dcp import DcpFolder, DcpReader
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.torch_archive import read_file
from megatron.checkpoint.hybrid_layers import hybrid_layer, transformer_arguments
from megatron.checkpoint.names import shown
from megatron.checkpoint.record import Checkpoint, TrainingState
from megatron.config import Config, ModelConfig
from megatron.config.sections.layer_pattern import EXPERTS
from megatron.errors import UserError
from megatron.files import expect_layout
from megatron.model.layer_list import (
    EMBEDDING,
    FIRST_TRANSFORMER_LAYER,
    WORD_EMBEDDINGS,
    final_norm_of,
    first_mtp_layer_of,
    layer_number,
)
from megatron.mpu.parameter_spec import Box, ParameterSpec
from megatron.mpu.parameters import narrowed, part_of_box

COMMON_FILE = "common.pt"
# Name of the object that replaces common.pt since version 0.19. It is a list that contains the dict.
_COMMON_OBJECT = "common_state/shard_0_1"
# Key of `run.json` in converted checkpoints: see `TorchDistReader.recorded_optimizer`.
OPTIMIZER_KEY = "megatron_core_optimizer"
_FINAL_NORM, _HYBRID_FINAL_NORM = "decoder.final_layernorm.", "decoder.final_norm."
# Names in Megatron-Core -> in this program, outside of the transformer layers. {final} and {head} are indices
# in the pipeline's layer list.
_OUTER = {
    "embedding.word_embeddings.weight": WORD_EMBEDDINGS,
    "embedding.position_embeddings.weight": f"{EMBEDDING}position_embeddings.weight",
    f"{_FINAL_NORM}weight": "{final}.weight",
    f"{_FINAL_NORM}bias": "{final}.bias",
    "output_layer.weight": "{head}.lm_head.weight",
}
# Modules of a transformer layer: name in Megatron-Core -> name in this program.
_MODULES = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "self_attention.q_layernorm.": "self_attention.q_layernorm.",
    "self_attention.k_layernorm.": "self_attention.k_layernorm.",
    # Latent attention. Transformer Engine's norms belong to the matrices after them.
    "input_layernorm.": "input_layernorm.",
    "self_attention.linear_q_proj.": "self_attention.q_proj.",
    "self_attention.linear_q_down_proj.": "self_attention.q_down_proj.",
    "self_attention.linear_q_up_proj.": "self_attention.q_up_proj.",
    "self_attention.linear_kv_down_proj.": "self_attention.kv_down_proj.",
    "self_attention.linear_kv_up_proj.": "self_attention.kv_up_proj.",
    "self_attention.kv_layernorm.": "self_attention.kv_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
    # Layers with experts.
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "mlp.experts.experts.linear_fc1.": "mlp.experts.dense_h_to_4h.",
    "mlp.experts.experts.linear_fc2.": "mlp.experts.dense_4h_to_h.",
    "mlp.shared_experts.linear_fc1.": "mlp.shared_expert.dense_h_to_4h.",
    "mlp.shared_experts.linear_fc2.": "mlp.shared_expert.dense_4h_to_h.",
}
# States without moments. Megatron-Core has only the bias, and reads only the states that it knows.
_ROUTER_STATE = ("mlp.router.expert_bias", "mlp.router.expert_load")
# Parameters of a transformer layer: name in Megatron-Core -> name in this program.
_INNER = {module + kind: own + kind for module, own in _MODULES.items() for kind in ("weight", "bias")}
_SINKS = "self_attention.core_attention.softmax_offset"
_INNER |= {name: name for name in ("mlp.router.weight", "mlp.router.bias", *_ROUTER_STATE, _SINKS)}
_INNER["mlp.shared_experts.gate_weight"] = "mlp.shared_expert_gate.weight"
_IN_LAYER = re.compile(r"decoder\.layers\.(?:(\d{1,6})\.)?(.+)")
# Names of the layers for multi-token prediction.
_MTP, _IN_MTP = "mtp.layers.", re.compile(r"mtp\.layers\.(\d{1,6})\.(.+)")
_NORMS_OF_MTP = ("enorm", "hnorm", "final_layernorm")
_INNER_MTP = {
    **{f"{norm}.{kind}": f"{norm}.{kind}" for norm in _NORMS_OF_MTP for kind in ("weight", "bias")},
    "eh_proj.weight": "eh_proj.weight",
    **{f"transformer_layer.{key}": f"transformer_layer.{own}" for key, own in _INNER.items()},
}
_FC1, _FC2 = ".dense_h_to_4h.", ".dense_4h_to_h."
# Older versions put the number of the optimizer (of dense parameters or of experts) before the name.
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?(optimizer\..+)")
# Prefixes of the optimizer's fp32 values: in 16-bit runs, and in the distributed optimizer since version
# 0.14.
FP32_PARAM, DISTRIBUTED_PARAM = "optimizer.state.fp32_param.", "optimizer.state.param."
_MOMENTS = ("exp_avg", "exp_avg_sq")


class TorchDistReader(DcpReader):
    """Reads a checkpoint of Megatron-Core on any layout."""

    @classmethod
    def open_external(cls, folder: Path) -> Checkpoint:
        common = read_common(folder)
        args = vars(common["args"]) if isinstance(common.get("args"), Namespace) else {}
        iteration, samples = common.get("iteration"), args.get("consumed_train_samples")
        if not (type(iteration) is type(samples) is int and iteration >= 0 and samples >= 0):
            raise UserError(
                f"checkpoint {folder} has no iteration, or no consumed_train_samples in its arguments, so "
                "the position in the data is not known"
            )
        sequence = args.get("seq_length")
        tokens = samples * sequence if type(sequence) is int and sequence > 0 else 0
        note = (
            "Megatron-Core wrote it. Its data, dropout and schedule were not compared with this run's; its "
            "model was compared only by the shapes of its tensors and its arguments"
        )
        state = TrainingState(iteration, samples, tokens)
        return Checkpoint(
            folder, state, {"args": plain_arguments(args), "vocab_size": None}, unverified_note=note
        )

    def external_differences(
        self, config: Config, specs: Mapping[str, ParameterSpec], vocab_size: int
    ) -> list[str]:
        """See `StateReader`. Compares the arguments of Megatron-Core, and the number of rows of the
        vocabulary."""
        differences, options = MEGATRON_CORE.differences(self._args, config), config.checkpoint
        needs_moments = not (options.finetune or options.no_load_optim or config.training.no_train)
        if needs_moments and config.optimizer.moments and not self.moments:
            raise UserError(
                f"checkpoint {self.folder} holds no moments by parameter: Megatron-Core saved none, "
                "or by bucket (dp_reshardable), where no file names the parameters. Save it with "
                "--dist-ckpt-optim-fully-reshardable; or start pretrain_gpt.py from it with --no-load-optim, "
                "which loads only the weights and saves a checkpoint that can be converted"
            )
        words = next(name for name, spec in specs.items() if spec.num_valid_rows is not None)
        rows = self.shape_of(words, VALUES)[0] if words in self.stored_names else vocab_size
        if rows < vocab_size:
            differences.append(f"the vocabulary had {rows} rows with padding, and has {vocab_size} tokens")
        return differences

    def recorded_model(self) -> tuple[dict[str, Any], int]:
        args = self._args
        lacking = [name for name in ("num_layers", "hidden_size", "num_attention_heads") if name not in args]
        if lacking:
            raise UserError(f"checkpoint {self.folder}: its arguments lack {lacking[0]}")
        fields = MEGATRON_CORE.settings(args, self.folder)
        return fields, self.stored.tensor("embedding.word_embeddings.weight").shape[0]

    def recorded_optimizer(self) -> dict[str, Any]:
        """See `StateReader`. Returns the state of the learning-rate scheduler and the optimizer's groups."""
        with expect_layout(self.folder, "the optimizer's state of Megatron-Core"):
            state = _first_optimizer(self._common.get("optimizer") or {})
            groups = state.get("param_groups") or []
            scheduler = self._common.get("opt_param_scheduler") or {}
            return {OPTIMIZER_KEY: {"groups": [*map(_scalars, groups)], "scheduler": _scalars(scheduler)}}

    @cached_property
    def _common(self) -> Mapping[str, Any]:
        return read_common(self.folder)

    @cached_property
    def _args(self) -> Mapping[str, Any]:
        """The arguments that Megatron-Core saved; for a HybridModel the arguments that the equal GPTModel
        would have."""
        try:
            return transformer_arguments(self.checkpoint.run["args"])
        except ValueError as error:
            raise UserError(f"checkpoint {self.folder}: {error}") from error

    @cached_property
    def _keys(self) -> dict[str, tuple[str, int | None]]:
        """Parameter -> (name of its tensor in Megatron-Core, its index in a tensor that stacks layers or
        None)."""
        return parameter_keys(self.stored)

    @property
    def program(self) -> Program:
        return MEGATRON_CORE

    @property
    def stored_names(self) -> Collection[str]:
        return self._keys.keys()

    def state_names(self, name: str) -> list[str]:
        weight = f"{name.rpartition('.')[0]}.weight" if name.endswith(_ROUTER_STATE) else name
        key, _ = self._keys[weight]
        states = (f"optimizer.state.{moment}.{key}" for moment in _MOMENTS)
        found = zip(_MOMENTS, states, strict=True)
        return [VALUES, *(moment for moment, state in found if state in self._optimizer_keys)]

    @cached_property
    def _optimizer_keys(self) -> dict[str, str]:
        """Name of an optimizer state without the number of the optimizer -> name of its tensor."""
        matches = map(_OPTIMIZER.fullmatch, self.stored.tensors)
        return {match[1]: match[0] for match in matches if match}

    def _key(self, name: str, state_name: str) -> tuple[str, int | None]:
        """Returns the name of the tensor that contains a state, and the index of the layer in the tensor."""
        if name not in self._keys:
            raise UserError(f"checkpoint {self.folder} holds no parameter {name}: is it of another model?")
        key, layer = self._keys[name]
        found = self._optimizer_keys
        if state_name != VALUES:
            return found[f"optimizer.state.{state_name}.{key}"], layer
        masters = (prefix + key for prefix in (FP32_PARAM, DISTRIBUTED_PARAM))
        return next((found[master] for master in masters if master in found), key), layer

    def shape_of(self, name: str, state_name: str) -> tuple[int, ...]:
        weight, layer = self._keys[name]
        shape = self.stored.tensor(weight).shape
        if not self._is_zero(name, state_name):
            self._shape_of_shards(self._key(name, state_name)[0], shape)
        return shape if layer is None else shape[1:]

    @staticmethod
    def _is_zero(name: str, state_name: str) -> bool:
        """Returns whether a state is a moment of the bias of experts. Such moments are 0 and not stored."""
        return state_name != VALUES and name.endswith(_ROUTER_STATE)

    def _shape_of_shards(self, key: str, shape: Sequence[int]) -> list[int]:
        """Returns the shape of the shards of a tensor that is stored flattened; [] if the tensor has the
        shape of its weight. Raises UserError for any other shape."""
        stored = self.stored.tensor(key).shape
        if stored == shape:
            return []
        counts = stored[:-1]
        if len(counts) == len(shape) and all(
            count and size % count == 0 for size, count in zip(shape, counts, strict=True)
        ):
            shard = [size // count for size, count in zip(shape, counts, strict=True)]
            if prod(shard) == stored[-1]:
                return shard
        raise UserError(
            f"checkpoint {self.folder} stores {key} with shape {stored}, expected {shape}, as its weight "
            "has: save it with --dist-ckpt-optim-fully-reshardable"
        )

    def _read(self, key: str, weight: str, box: Box) -> Tensor:
        """Returns a box of a tensor, which has the shape of `weight` or is stored flattened."""
        shard = self._shape_of_shards(key, self.stored.tensor(weight).shape)
        if not shard:
            return self.stored.read(key, box)
        result = torch.empty(box.sizes, dtype=self.stored.tensor(key).dtype)
        spans = zip(box.offsets, box.sizes, shard, strict=True)
        for index in product(*(range(o // size, -(-(o + n) // size)) for o, n, size in spans)):
            stored = Box(0, tuple(map(mul, index, shard)), tuple(shard))
            if (common := box.intersection(stored)) is not None:
                elements = partial(self._flat_elements, key, index)
                narrowed(result, common, box.offsets).copy_(part_of_box(stored, common, elements))
        return result

    def _flat_elements(self, key: str, index: tuple[int, ...], first: int, last: int) -> Tensor:
        """Returns elements first to last - 1 of one shard of a tensor that is stored flattened."""
        sizes = (*(1 for _ in index), last - first)
        return self.stored.read(key, Box(0, (*index, first), sizes))

    def read_box(self, name: str, state_name: str, box: Box | None) -> Tensor:
        shape = self.shape_of(name, state_name)
        box = box or Box(0, (0,) * len(shape), shape)
        if self._is_zero(name, state_name):
            return torch.zeros(box.sizes)
        key, layer = self._key(name, state_name)
        dim = gate_dim(name)
        rows = [(box.offsets[dim], box.offsets[dim] + box.sizes[dim])]
        if self._is_gated(name):
            rows = stored_halves(shape[dim], rows[0])
        in_layer, one = ((), ()) if layer is None else ((layer,), (1,))
        before, after = slice(0, dim), slice(dim + 1, None)
        parts = [
            Box(
                0,
                (*in_layer, *box.offsets[before], start, *box.offsets[after]),
                (*one, *box.sizes[before], stop - start, *box.sizes[after]),
            )
            for start, stop in rows
        ]
        read = [self._read(key, self._keys[name][0], part) for part in parts]
        full = torch.cat(read, dim=len(in_layer) + dim) if len(read) > 1 else read[0]
        return full if layer is None else full[0]

    def _is_gated(self, name: str) -> bool:
        """Returns whether a parameter is the weight or bias of the first matrix of a gated MLP."""
        module, first, _ = name.partition(_FC1)
        if not first:
            return False
        rows = self.shape_of(name, VALUES)[gate_dim(name)]
        return rows == 2 * self.shape_of(f"{module}{_FC2}weight", VALUES)[-1]

    def optimizer_scalars(self, name: str) -> dict[str, Any]:
        """See `StateReader`. Megatron-Core has one step for all parameters."""
        if len(self.state_names(name)) == 1:
            return {}
        with expect_layout(self.folder, "the optimizer's state of Megatron-Core"):
            state = _first_optimizer(self._common["optimizer"])
            step = state.get("state", {}).get("common_step")
            step = state["param_groups"][0]["step"] if step is None else step
            return {"step": torch.as_tensor(step, dtype=torch.float32).reshape(())}


def _first_optimizer(state: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Returns the state of the only optimizer, or in a model with experts the one of the dense parameters."""
    found: Mapping[str, Any] = state.get(0, state)
    return found.get("optimizer", found)


def _scalars(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that are numbers, texts or None, without the step, which is read elsewhere."""
    kept = {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in state.items()
        if name != "step"
    }
    plain = {name: value for name, value in kept.items() if isinstance(value, (str, int, float, type(None)))}
    return plain | ({"betas": [*map(float, state["betas"])]} if "betas" in state else {})


def read_common(folder: Path) -> Mapping[str, Any]:
    """Returns the content of common.pt, or of the object that replaces it. Raises UserError unless it is a
    dict."""
    if (folder / COMMON_FILE).exists():
        content = read_file(folder / COMMON_FILE)
    else:
        content = DcpFolder(folder).read_object(_COMMON_OBJECT)
        content = content[0] if isinstance(content, list) and content else None
    if not isinstance(content, dict):
        raise UserError(f"checkpoint {folder}: {COMMON_FILE} holds no dict: it is not of Megatron-Core")
    return content


def parameter_keys(stored: DcpFolder) -> dict[str, tuple[str, int | None]]:
    """Returns the parameters of a checkpoint of Megatron-Core: name in this program -> (name of the tensor,
    index of the layer in it; None if the tensor holds one parameter). Raises UserError for a tensor that no
    model of this program has."""
    keys: dict[str, tuple[str, int | None]] = {}
    is_hybrid = f"{_HYBRID_FINAL_NORM}weight" in stored.tensors
    outer, of_mtp, num_layers, outer_names = [], [], 0, _outer_names(0, is_hybrid)
    for key, tensor in stored.tensors.items():
        if _OPTIMIZER.fullmatch(key) or key.startswith("rng_state"):
            continue
        match, in_mtp = _IN_LAYER.fullmatch(key), _IN_MTP.fullmatch(key)
        number, inner = match.groups() if match else (None, "")
        layers = _layers_of(number, inner, tensor.shape[0], is_hybrid)
        if key in outer_names:
            outer.append(key)
        elif in_mtp and in_mtp[2] in _INNER_MTP and not is_hybrid:
            of_mtp.append((key, int(in_mtp[1]), _INNER_MTP[in_mtp[2]]))
        elif not layers:
            raise UserError(
                f"checkpoint {stored.folder} holds {shown(key)}, which no model of this program has"
            )
        for layer in layers:
            name = f"{FIRST_TRANSFORMER_LAYER + layer}.{_INNER[inner]}"
            keys[name] = (key, layer if number is None else None)
            num_layers = max(num_layers, layer + 1)
    names, first = _outer_names(num_layers, is_hybrid), first_mtp_layer_of(num_layers)
    keys |= {f"{first + layer}.{own}": (key, None) for key, layer, own in of_mtp}
    return keys | {names[key]: (key, None) for key in outer}


def _layers_of(number: str | None, name: str, rows: int, is_hybrid: bool) -> Sequence[int]:
    """Returns the transformer layers whose parameter a tensor holds; none if no model has such a tensor.

    number: the layer's number in the tensor's name; None if the tensor stacks `rows` layers. name: the rest
    of the tensor's name.
    """
    if name not in _INNER:
        return ()
    if number is None:
        return range(rows)
    layer = int(number) // 2 if is_hybrid else int(number)
    return (layer,) if not is_hybrid or hybrid_layer(layer, name) == int(number) else ()


def _outer_names(num_layers: int, is_hybrid: bool) -> dict[str, str]:
    """Returns name in Megatron-Core -> name in this program, for parameters outside of transformer layers."""
    final = final_norm_of(num_layers)
    names = {key: name.format(final=final, head=final + 1) for key, name in _OUTER.items()}
    return {key.replace(_FINAL_NORM, _HYBRID_FINAL_NORM) if is_hybrid else key: names[key] for key in names}


def stored_name(name: str, model: ModelConfig, is_hybrid: bool = False) -> tuple[str, int | None]:
    """Returns (name of a parameter's tensor in Megatron-Core, index of the layer in a tensor that stacks all
    layers; None if the tensor holds one parameter). Raises UserError if Megatron-Core has no such parameter.

    is_hybrid: whether to return the name in a HybridModel.
    """
    if name in (names := {own: key for key, own in _outer_names(model.num_layers, is_hybrid).items()}):
        return names[name], None
    index, _, inner = name.partition(".")
    mtp_layer = int(index) - first_mtp_layer_of(model.num_layers) if index.isdigit() else -1
    keys = [key for key, own in (_INNER if mtp_layer < 0 else _INNER_MTP).items() if own == inner]
    if not keys or not index.isdigit() or (is_hybrid and mtp_layer >= 0):
        raise UserError(f"{name} has no equivalent in Megatron-Core: use --format dcp")
    layer = layer_number(int(index), model.num_layers)
    # The norm before an MLP belongs to the MLP's first matrix; the norm before experts belongs to the layer.
    # With latent attention the norms of the attention have other names.
    of_attention = not inner.removeprefix("transformer_layer.").startswith(
        ("post_attention_layernorm.", "mlp.")
    )
    is_last = model.multi_latent_attention if of_attention else model.has_experts(layer)
    key = keys[-1] if is_last else keys[0]
    if mtp_layer >= 0:
        return f"{_MTP}{mtp_layer}.{key}", None
    stored = name_in_layer(layer, key, model, is_hybrid)
    return stored, layer if has_stacked_layers(model, is_hybrid) else None


def name_in_layer(layer: int, name: str, model: ModelConfig, is_hybrid: bool) -> str:
    """Returns the name in Megatron-Core of a part of a transformer layer. name: the name of this part."""
    if has_stacked_layers(model, is_hybrid):
        return f"decoder.layers.{name}"
    return f"decoder.layers.{hybrid_layer(layer, name) if is_hybrid else layer}.{name}"


def has_stacked_layers(model: ModelConfig, is_hybrid: bool) -> bool:
    """Returns whether Megatron-Core stacks the layers. It does in a GPTModel whose layers all have experts,
    or all have none."""
    return not is_hybrid and (model.num_experts is None or model.moe_layer_freq == (EXPERTS,))


def gate_dim(name: str) -> int:
    """Returns the dimension along which a gated MLP's parameter stacks values and gates."""
    return 1 if ".experts." in name else 0


def stored_halves(rows: int, span: tuple[int, int]) -> list[tuple[int, int]]:
    """Returns where rows of a tensor (value, gate) are in a tensor (gate, value), as ranges in their
    order."""
    half = rows // 2
    spans = (
        (max(span[0], start) + shift, min(span[1], stop) + shift)
        for start, stop, shift in ((0, half, half), (half, rows, -half))
    )
    return [(start, stop) for start, stop in spans if start < stop]
