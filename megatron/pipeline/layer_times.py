"""Measures the time of each kind of layer with the run's shapes, for `--partition-method profile`.

The tensor-parallel group of the first stage and first replica measures. With expert parallelism all replicas
of the first stage measure, since they exchange tokens. The times are broadcast, so that all ranks compute the
same partition. `--partition-profile FILE` stores the times. Later runs with the same shapes read the file
instead of measuring, and a dry run can use it to compute the partition.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor

from megatron.config import Config, ConfigError
from megatron.config.config import SETTINGS, settings_of_section
from megatron.config.model import padded_vocab_size
from megatron.files import HostileFileError, read_json, write_json
from megatron.model.flops import recomputes_scores
from megatron.model.gpt_model import pipeline_layers
from megatron.model.layer_context import LayerContext, join_layer_io, split_layer_io
from megatron.model.layer_kinds import Role
from megatron.model.layer_list import PARAMETER_DTYPES
from megatron.model.loss import CrossEntropy
from megatron.model.pipeline_module import compile_transformer_layer, describe, recompute
from megatron.mpu.mesh import Mesh
from megatron.mpu.products import Fp8
from megatron.mpu.random import DropoutRNG
from megatron.mpu.world import broadcast_from_rank_0
from megatron.pipeline.partition_method import parse_partition_method

WARM_UP, REPEATS = 2, 7


def needs_profiling(config: Config) -> bool:
    """Returns whether `plan_stages` needs the times of the layers."""
    return parse_partition_method(config.parallel.partition_method).kind == "profile"


def find_layer_times(config: Config, mesh: Mesh, vocab_size: int, eod: int | None) -> dict[str, float]:
    """Returns the seconds of a micro-batch in each layer by `LayerDescription.time_name`, equal on all ranks.
    It is a collective.

    It reads --partition-profile if the file exists on rank 0. Otherwise it measures, and writes the file.
    """
    found = broadcast_from_rank_0(read_layer_times(config, vocab_size) if mesh.rank == 0 else None)
    if found is not None:
        return found
    seconds: dict[str, float] = {}
    if mesh.pp.rank == 0 and (mesh.dp.rank == 0 or mesh.ep.size > 1):
        seconds = _measure(config, mesh, vocab_size, eod)
    seconds = broadcast_from_rank_0(seconds)
    path = config.parallel.partition_profile
    if path is not None and mesh.rank == 0:
        write_json(Path(path), {"measured_for": _shapes(config, vocab_size), "seconds": seconds})
    return seconds


def read_layer_times(config: Config, vocab_size: int) -> dict[str, float] | None:
    """Returns the seconds per kind of layer from --partition-profile, or None if the file does not exist.

    Raises ConfigError if the file is damaged or was measured with different shapes.
    """
    path = config.parallel.partition_profile
    if path is None or not Path(path).exists():
        return None
    try:
        profile = read_json(Path(path))
        # Settings that did not exist when the file was written had their defaults.
        defaults = {
            setting.field: setting.default for setting in SETTINGS.values() if not setting.is_required
        }
        measured_for = {**defaults, "fp8_min_size": 0, "recompute_modules": [], **profile["measured_for"]}
        seconds = dict(profile["seconds"])
        if not all(type(value) in (int, float) and 0 <= value < math.inf for value in seconds.values()):
            raise ValueError("expected times of 0 seconds or more")
        if not any(seconds.values()):
            raise ValueError("all times are 0")
        now = _shapes(config, vocab_size)
        if missing := now.keys() - measured_for.keys():
            raise ValueError(f"it lacks the settings {', '.join(sorted(missing))}")
    except (OSError, ValueError, KeyError, TypeError, HostileFileError) as error:
        raise ConfigError(
            f"--partition-profile {path} cannot be read ({error}): delete the file; the next run measures "
            "again and writes it"
        ) from error
    if config.training.dry_run:
        del now["device"]  # a plan for a cluster may be made on a laptop
    differing = [
        f"{key} was {measured_for.get(key)}, is {now[key]}"
        for key in now
        if measured_for.get(key) != now[key]
    ]
    if differing:
        raise ConfigError(
            f"--partition-profile {path} was measured with other settings ({'; '.join(differing)}): set "
            "a new file name, to which the run writes its own measurement"
        )
    return seconds


def _shapes(config: Config, vocab_size: int) -> dict[str, Any]:
    """Returns the settings that the times depend on. The numbers of layers and stages are not among them."""
    tensor_size = config.parallel.tensor_model_parallel_size
    device = get_accelerator().device_name()
    unused, of_experts = config.model.unused_fields(), dict[str, Any]()
    if config.model.num_experts is not None:
        names = ("expert_model_parallel_size", "moe_token_dispatcher_type")
        of_experts = {name: getattr(config.parallel, name) for name in names}
    return {
        **{
            setting.field: getattr(config.model, setting.field)
            for setting in settings_of_section("model")
            if setting.flag.changes_layer_time and setting.field not in unused
        },
        **of_experts,
        "reset_position_ids": config.data.reset_position_ids,
        "reset_attention_mask": config.data.reset_attention_mask,
        "use_apex": config.optimizer.use_apex,
        "padded_vocab_size": padded_vocab_size(vocab_size, config.model, tensor_size),
        "micro_batch_size": config.batch.micro_batch_size,
        "tensor_model_parallel_size": tensor_size,
        "context_parallel_size": config.parallel.context_parallel_size,
        "precision": config.precision.name,
        "fp8_format": config.precision.fp8_format,
        "fp8_recipe": config.precision.fp8_recipe,
        "fp8_min_size": config.precision.fp8_min_size if config.precision.fp8_recipe else 0,
        "fp32_residual_connection": config.precision.fp32_residual_connection,
        "sequence_parallel": config.parallel.sequence_parallel,
        "compile": config.training.compile,
        "recomputes_layers": config.training.recomputes_layers,
        "recomputes_scores": recomputes_scores(config),
        "recompute_modules": [name for name in config.training.recomputed_modules if name != "core_attn"],
        "loss_implementation": config.training.loss_implementation,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }


def _measure(config: Config, mesh: Mesh, vocab_size: int, eod: int | None) -> dict[str, float]:
    dropout_rng = DropoutRNG(config.training.seed, range(config.batch.micro_batch_size))
    context = LayerContext(config, mesh, dropout_rng, fp8=Fp8.of(config, mesh))
    layers = pipeline_layers(context, vocab_size, eod)
    device = torch.device(get_accelerator().current_device_name())
    shape = (config.batch.micro_batch_size, config.model.seq_length)
    tokens = torch.randint(0, vocab_size, shape, device=device)
    seconds: dict[str, float] = {}
    layer_io: Any = tokens
    softcapping = config.model.final_logit_softcapping
    loss = CrossEntropy(mesh.tp, vocab_size, cp_group=mesh.cp, softcapping=softcapping)
    labels = (tokens, torch.ones(shape, device=device))
    fused, head = config.training.loss_implementation == "fused", ""
    head_io: Any = None
    document_ids: Tensor | None = None
    for layer in layers:
        description = describe(layer)
        name = description.time_name
        if name in seconds:
            continue  # already measured; its output is shaped like its input
        if description.role is Role.MULTI_TOKEN:
            words = _build_module(layers[1], config, device).word_embeddings
            function = _build(layer, config, device, partial(_predict, tokens, words))
            seconds[name], _ = _time(function, join_layer_io(head_io, document_ids))
            continue
        if head and (fused or description.role is not Role.FUNCTION):
            seconds[name] = 0.0  # not called, or included in the time of head and loss
            continue
        if description.role is Role.HEAD:
            head, head_io = name, layer_io
        if description.role is Role.TRANSFORMER:
            _, document_ids = split_layer_io(layer_io)
        if fused and head:
            function = _build(layer, config, device, lambda m, x: loss.from_hidden(x, m.head_weight, labels))
        else:
            function = _build(layer, config, device)
        seconds[name], layer_io = _time(function, layer_io)
    if not fused:
        seconds[head] += _time(lambda logits: loss(logits, labels), layer_io)[0]
    for name in {describe(layer).time_name for layer in layers if describe(layer).role is Role.MULTI_TOKEN}:
        seconds[name] += seconds[head]  # the layer runs head and loss, too
    return seconds


def _predict(tokens: Tensor, embedding: Callable, layer: Callable, layer_io: Any) -> Any:
    return layer(layer_io, tokens, embedding)


def _build(
    layer: LayerSpec | Callable, config: Config, device: torch.device, forward: Callable | None = None
) -> Callable:
    """Returns the layer as a function, with random weights, since their exact values do not change the time.

    forward: if given, a function of the layer's module and its input that replaces the layer's own forward
    pass.
    """
    if not isinstance(layer, LayerSpec):
        return layer
    module = _build_module(layer, config, device)
    if config.training.compile and describe(layer).has_transformer_layer:
        compile_transformer_layer(module)
    if forward is None and isinstance(layer, TiedLayerSpec):
        forward = layer.forward_fn
    function = partial(forward, module) if forward else module
    recomputes = config.training.recomputes_layers and describe(layer).has_transformer_layer
    return partial(recompute, function) if recomputes else function


def _build_module(layer: LayerSpec, config: Config, device: torch.device) -> Any:
    with device:  # so that FP8 copies of weights, which are not parameters, are on it, too
        module = layer.build().to(dtype=PARAMETER_DTYPES[config.precision.name])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=config.model.init_method_std)
    return module


def _time(function: Callable, layer_io: Any) -> tuple[float, Any]:
    """Returns the median seconds of a forward and backward pass, and the detached output of the function."""
    times = []
    for turn in range(WARM_UP + REPEATS):
        inputs = _detached(layer_io)
        get_accelerator().synchronize()
        start = time.perf_counter()
        outputs = function(inputs)
        hidden = outputs if isinstance(outputs, Tensor) else outputs[0]
        if hidden.requires_grad:
            hidden.backward(torch.ones_like(hidden))
        get_accelerator().synchronize()
        if turn >= WARM_UP:
            times.append(time.perf_counter() - start)
    return statistics.median(times), _detached(outputs)


def _detached(layer_io: Any) -> Any:
    if isinstance(layer_io, tuple):
        return tuple(_detached(part) for part in layer_io)
    return layer_io.detach().requires_grad_(layer_io.is_floating_point())
