"""Notes on settings without effect, and on a combination that is known to fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from megatron.config.checks.data import what_is_evaluated
from megatron.config.config import SECTIONS, Config
from megatron.config.fields import Section, option_name
from megatron.config.registries import (
    LAYER_ARRANGEMENTS,
    LR_DECAY_STYLES,
    OPTIMIZERS,
    POSITION_EMBEDDINGS,
    ROPE_SCALINGS,
    TOKENIZERS,
)
from megatron.config.sections.model import ModelConfig


def unused_setting_notes(config: Config, typed: Collection[str] = ()) -> tuple[str, ...]:
    """One sentence for each setting that was typed, or is not at its default, and has no effect with the
    other settings. typed: 'section.field' of the flags on the command line."""
    found = []
    sections = {id(getattr(config, name)): name for name in SECTIONS}
    for section, names, reason in _unused_settings(config):
        defaults = {field.name: field.default for field in dataclasses.fields(section)}
        for name in names:
            is_typed = f"{sections[id(section)]}.{name}" in typed
            if is_typed or getattr(section, name) != defaults[name]:
                found.append(f"{option_name(name)} has no effect {reason}")
    return tuple(found)


def risk_notes(config: Config) -> tuple[str, ...]:
    """One sentence for a combination of settings with which published runs have failed."""
    if config.optimizer.use_bnb_optimizer and not config.model.embed_layernorm:
        return (
            "--use-bnb-optimizer without --embed-layernorm: BigScience's 104B run stagnated with 8-bit Adam "
            "and no norm after the word embeddings; add --embed-layernorm to a new run",
        )
    return ()


def _unused_settings(config: Config) -> Iterator[tuple[Section, tuple[str, ...], str]]:
    """(section, field names, reason) of the settings without effect."""
    model, training, schedule, optimizer = config.model, config.training, config.schedule, config.optimizer
    precision, data, logging, stability = config.precision, config.data, config.logging, config.stability
    names: tuple[str, ...]
    if not training.dry_run:
        yield training, ("gpu", "device_memory"), "without --dry-run"
    if training.gpu is None or not training.dry_run:
        names = ("node_size", "intra_node_gbps", "inter_node_gbps")
        yield config.parallel, names, "without --dry-run and --gpu"
    if training.dry_run and training.gpu is None:
        yield config.parallel, ("network_figures",), "with --dry-run and without --gpu"
    elif not training.dry_run and (training.no_preflight or config.parallel.world_size == 1):
        reason = "with --no-preflight" if training.no_preflight else "with one process"
        yield config.parallel, ("network_figures",), reason
    yield from _unused_model_settings(model)
    yield from _unused_parallel_settings(config)
    if training.recomputes_attention and model.attention_dropout == 0:
        reason = (
            "with --attention-dropout 0: fused attention stores no attention scores to recompute (full "
            "reduces memory)"
        )
        yield training, ("recompute_granularity",), reason
    style = schedule.lr_decay_style
    yield schedule, LR_DECAY_STYLES.unused_settings(style), f"with --lr-decay-style {style}"
    yield (
        optimizer,
        OPTIMIZERS.unused_settings(optimizer.optimizer),
        f"with --optimizer {optimizer.optimizer}",
    )
    dynamic_scale = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    if not precision.fp16:
        yield precision, dynamic_scale, "without --fp16"
    elif precision.loss_scale is not None and training.deepspeed_config is None:  # the file may override it
        yield precision, dynamic_scale, f"with the static --loss-scale {precision.loss_scale:g}"
    valid, test, reason = what_is_evaluated(data)
    if training.eval_iters == 0:
        yield training, ("eval_interval",), "with --eval-iters 0"
    elif not valid:
        names = ("eval_interval",) if test else ("eval_interval", "eval_iters")
        yield training, names, reason
    if data.tokenizer_type is not None:
        names = TOKENIZERS.unused_settings(data.tokenizer_type)
        yield data, names, f"with --tokenizer-type {data.tokenizer_type}"
    if config.checkpoint.save is None:
        yield config.checkpoint, ("keep_last", "overwrite_checkpoints"), "without --save"
    if config.checkpoint.keep_last is None:
        yield config.checkpoint, ("save_retain_interval",), "without --keep-last"
    if config.checkpoint.finetune:
        yield config.checkpoint, ("no_load_optim",), "with --finetune"
    if config.checkpoint.load is None:
        names = ("override_data", "allow_replica_mismatch", "no_load_optim")
        yield config.checkpoint, names, "without --load"
        yield schedule, ("override_lr_scheduler", "use_checkpoint_lr_scheduler"), "without --load"
    if stability.spike_policy is None:
        names = ("spike_loss_factor", "spike_grad_norm_factor", "spike_window", "max_rollbacks")
        yield stability, names, "without --spike-policy"
    elif stability.spike_policy != "rollback":
        yield stability, ("max_rollbacks",), f"with --spike-policy {stability.spike_policy}"
    if logging.tensorboard_dir is None:
        yield logging, ("tensorboard_queue_size",), "without --tensorboard-dir"
    if logging.wandb_project is None:
        yield logging, ("wandb_name",), "without --wandb-project"
    if logging.tensorboard_dir is None and logging.wandb_project is None:
        names = (
            "log_timers_to_tensorboard",
            "log_batch_size_to_tensorboard",
            "log_validation_ppl_to_tensorboard",
        )
        yield logging, names, "without --tensorboard-dir and --wandb-project"


def _unused_parallel_settings(config: Config) -> Iterator[tuple[Section, tuple[str, ...], str]]:
    parallel = config.parallel
    if parallel.tensor_model_parallel_size == 1:
        reason = "with --tensor-model-parallel-size 1"
        yield parallel, ("sequence_parallel", "tp_comm_overlap", "tp_comm_overlap_chunks"), reason
        yield config.training, ("partition_activations",), reason
        yield config.stability, ("sync_tp_duplicated_parameters",), reason
    elif not parallel.tp_comm_overlap:
        yield parallel, ("tp_comm_overlap_chunks",), "without --tp-comm-overlap"
    if parallel.data_parallel_size == 1:
        reason = "with data-parallel size 1"
        yield parallel, ("zero_stage",), reason
    replicas = "and a data-parallel size above 1"
    stage = parallel.zero_stage if parallel.data_parallel_size > 1 else 0
    if stage != 1:
        yield parallel, ("ddp_bucket_size",), f"without --zero-stage 1 {replicas}"
    if stage not in (1, 3):
        yield parallel, ("no_overlap_param_gather",), f"without --zero-stage 1 or 3 {replicas}"
    if stage == 0:
        yield parallel, ("no_overlap_grad_reduce",), f"without --zero-stage 1 to 3 {replicas}"


def _unused_model_settings(model: ModelConfig) -> Iterator[tuple[Section, tuple[str, ...], str]]:
    if model.pad_vocab_size_to is not None:
        yield model, ("make_vocab_size_divisible_by",), "with --pad-vocab-size-to"
    if model.glu_activation is not None:
        yield model, ("activation",), f"with --glu-activation {model.glu_activation}"
    arrangement = model.layer_arrangement
    yield model, LAYER_ARRANGEMENTS.unused_settings(arrangement), f"with --layer-arrangement {arrangement}"
    if not model.disable_bias_linear:
        yield model, ("add_qkv_bias",), "without --disable-bias-linear"
    if model.position_embedding_type != "rotary":
        names = POSITION_EMBEDDINGS["rotary"].settings
        yield model, names, f"with --position-embedding-type {model.position_embedding_type}"
    elif model.rope_scaling_type is None:
        names = ROPE_SCALINGS.settings()
        yield model, names, "without --rope-scaling-type"
    else:
        names = ROPE_SCALINGS.unused_settings(model.rope_scaling_type)
        yield model, names, f"with --rope-scaling-type {model.rope_scaling_type}"
    if not model.mup:
        names = ("mup_base_hidden_size", "mup_input_mult", "mup_output_mult", "mup_attn_mult")
        yield model, names, "without --mup"
