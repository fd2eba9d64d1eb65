"""Starts runs with --finetune from the weights of a model with fewer parameters; moments are not loaded.

Upcycling (--moe-use-upcycling): a run with experts starts from a dense model. Each expert of a layer gets the
weights of the layer's dense MLP (arXiv 2212.05055). If the router's weights have the sum 1, the model then
computes what the dense model computes. Likewise, a run with --mtp-num-layers starts from a model without
these layers. Parameters that the old model lacks, such as the router, get the initial values of a run from
scratch.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.state import ParameterState, StateReader, filled, lacks_mtp
from megatron.checkpoint.record import Checkpoint
from megatron.config import Config
from megatron.config.sections.experts import ExpertConfig
from megatron.errors import UserError
from megatron.mpu.parameters import initial_values
from megatron.mpu.pieces import Piece

if TYPE_CHECKING:  # importing it loads DeepSpeed, which tools that read checkpoints do not need
    from megatron.run import Run

_EXPERTS = re.compile(r"(\d+\.mlp\.)experts\.(dense_.+)")
_DENSE_MLP = re.compile(r"\d+\.mlp\.dense_.+")


def is_upcycled(checkpoint: Checkpoint, config: Config) -> bool:
    """Returns whether the run creates its experts from the dense model in the checkpoint. A run that resumes
    from its own checkpoint does not."""
    return config.checkpoint.moe_use_upcycling and checkpoint.weights_only


def became_experts(name: str) -> bool:
    """Returns whether upcycling turns this parameter of the dense model into parameters of experts."""
    return _DENSE_MLP.fullmatch(name) is not None


def dense_config(checkpoint: Checkpoint, config: Config) -> Config:
    """Returns the run's config with the dense model that upcycling starts from. Raises UserError if the
    checkpoint already has experts, or if --moe-ffn-hidden-size differs from --ffn-hidden-size."""
    model = config.model
    if not checkpoint.is_external and checkpoint.config.model.num_experts is not None:
        raise UserError(
            f"--moe-use-upcycling: checkpoint {checkpoint.folder} already has experts, expected a dense "
            "model: remove --moe-use-upcycling"
        )
    if model.moe_ffn_hidden_size != model.ffn_hidden_size:
        raise UserError(
            f"--moe-use-upcycling with --moe-ffn-hidden-size {model.moe_ffn_hidden_size} and "
            f"--ffn-hidden-size {model.ffn_hidden_size}: an expert gets the weights of a dense MLP, expected "
            "equal sizes: remove --moe-ffn-hidden-size"
        )
    defaults: dict[str, Any] = {field.name: field.default for field in fields(ExpertConfig)}
    return replace(config, model=replace(model, **defaults))


def source_config(reader: StateReader, config: Config) -> Config:
    """Returns the run's config with the model that the checkpoint must have: `config` itself if the run adds
    no experts and no layers for multi-token prediction. Raises UserError if the run creates experts from a
    checkpoint that already has experts, or experts whose size differs from the dense MLP's."""
    checkpoint, model = reader.checkpoint, config.model
    adds_mtp = checkpoint.weights_only and model.mtp_num_layers is not None and lacks_mtp(reader.stored_names)
    source = dense_config(checkpoint, config) if is_upcycled(checkpoint, config) else config
    return replace(source, model=replace(source.model, mtp_num_layers=None)) if adds_mtp else source


class Upcycling:
    """Reads the state of a run with experts, or with layers for multi-token prediction, from the checkpoint
    of a model without them."""

    def __init__(self, reader: StateReader, run: Run) -> None:
        # The import is late: this module builds a model, which needs DeepSpeed.
        from megatron.model.inference.single_process import model_specs

        self._reader, self._seed = reader, run.config.training.seed
        source = source_config(reader, run.config)
        self._specs = model_specs(source, run.vocab.size, run.vocab.eod)
        self._is_upcycled = is_upcycled(reader.checkpoint, run.config)

    def read_parameter(self, piece: Piece, out: Tensor | None = None) -> ParameterState:
        if piece.name in self._specs:
            return self._reader.read_parameter(piece, out)
        if (match := _EXPERTS.fullmatch(piece.name)) and self._is_upcycled:
            name = match[1] + match[2]
            dense = self._reader.read(name, VALUES, self._specs[name])
            experts = dense.expand(piece.spec.global_shape)
            values = filled(piece, lambda box: experts[box.slices])
        else:
            span = range(piece.start, piece.stop)
            shard = initial_values(piece.spec, self._seed, piece.name, piece.axes, span)
            values = shard.reshape(-1)[piece.start : piece.stop]
        return (values if out is None else out.copy_(values)), {}, {}
