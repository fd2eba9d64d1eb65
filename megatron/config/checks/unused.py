"""Notes on settings that have no effect beside the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron.config.checks.data import what_is_evaluated
from megatron.config.config import Config
from megatron.config.fields import Section, option_name
from megatron.config.sections.data import TOKENIZER_FILES


def remarks(config: Config) -> tuple[str, ...]:
    """One sentence for each setting that has no effect beside the others, for the log."""
    found = []
    for section, names, circumstance in _without_effect(config):
        defaults = {field.name: field.default for field in dataclasses.fields(section)}
        for name in names:
            if getattr(section, name) != defaults[name]:
                found.append(f"{option_name(name)} has no effect {circumstance}")
    return tuple(found)


def _without_effect(config: Config) -> Iterator[tuple[Section, tuple[str, ...], str]]:
    """(section, fields, why): these fields have no effect, if any of them is not at its default."""
    model, training, schedule, optimizer = config.model, config.training, config.schedule, config.optimizer
    precision, data, logging, trouble = config.precision, config.data, config.logging, config.trouble
    names: tuple[str, ...]
    if model.pad_vocab_size_to is not None:
        yield model, ("make_vocab_size_divisible_by",), "with --pad-vocab-size-to"
    if not model.mup:
        names = ("mup_base_hidden_size", "mup_input_mult", "mup_output_mult", "mup_attn_mult")
        yield model, names, "without --mup"
    if config.parallel.tensor_model_parallel_size == 1:
        circumstance = "with --tensor-model-parallel-size 1: there is nobody to share a sequence with"
        yield config.parallel, ("sequence_parallel",), circumstance
        circumstance = "with --tensor-model-parallel-size 1: there is nobody to share a layer's input with"
        yield training, ("partition_activations",), circumstance
    if config.parallel.data_parallel_size == 1:
        circumstance = "with one replica of the model: there is nobody to share its state with"
        yield config.parallel, ("zero_stage",), circumstance
    if training.recomputes_attention and model.attention_dropout == 0:
        circumstance = (
            "with --attention-dropout 0: the fused attention then in use keeps no scores, and only these "
            "does 'selective' recompute (full saves memory)"
        )
        yield training, ("recompute_granularity",), circumstance
    if schedule.lr_decay_style == "constant":
        names = ("min_lr", "lr_decay_iters", "lr_decay_samples", "lr_decay_tokens")
        yield schedule, names, "with --lr-decay-style constant"
    if optimizer.optimizer == "sgd":
        yield optimizer, ("adam_beta1", "adam_beta2", "adam_eps"), "with --optimizer sgd"
    else:
        yield optimizer, ("sgd_momentum",), f"with --optimizer {optimizer.optimizer}"
    dynamic_scale = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    if not precision.fp16:
        yield precision, dynamic_scale, "without --fp16"
    elif precision.loss_scale is not None and training.deepspeed_config is None:  # the file may overrule it
        yield precision, dynamic_scale, f"with the static --loss-scale {precision.loss_scale:g}"
    valid, test, circumstance = what_is_evaluated(data)
    if training.eval_iters == 0:
        yield training, ("eval_interval",), "with --eval-iters 0"
    elif not valid:
        names = ("eval_interval",) if test else ("eval_interval", "eval_iters")
        yield training, names, circumstance
    for kind, names in TOKENIZER_FILES.items():
        if data.tokenizer_type != kind:
            yield data, names, f"with --tokenizer-type {data.tokenizer_type}"
    if config.checkpoint.save is None:
        yield config.checkpoint, ("keep_last",), "without --save"
    if config.checkpoint.load is None:
        yield config.checkpoint, ("override_data", "allow_drift"), "without --load"
        yield schedule, ("override_lr_scheduler", "use_checkpoint_lr_scheduler"), "without --load"
    if trouble.spike_policy is None:
        names = ("spike_loss_factor", "spike_grad_norm_factor", "spike_window", "max_rollbacks")
        yield trouble, names, "without --spike-policy"
    elif trouble.spike_policy != "rollback":
        yield trouble, ("max_rollbacks",), f"with --spike-policy {trouble.spike_policy}"
    if config.parallel.tensor_model_parallel_size == 1:
        circumstance = "with --tensor-model-parallel-size 1: there are no duplicates"
        yield trouble, ("sync_tp_duplicated_parameters",), circumstance
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
