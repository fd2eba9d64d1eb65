"""Checks across flags, before any process group is made: errors have the numbers and the flag to change."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from megatron.config.batch import BatchSchedule
from megatron.config.config import Config
from megatron.config.curriculum import check_curriculum
from megatron.config.data import TOKENIZER_FILES
from megatron.config.errors import ConfigError
from megatron.config.fields import Section, option_name
from megatron.config.optimizer import OptimizerConfig
from megatron.config.partition_method import parse_partition_method
from megatron.config.trouble import check_trouble
from megatron.config.validate_data import check_data, check_files, what_is_evaluated
from megatron.config.vocab import check_vocab_divides, padded_vocab_size


def validate(config: Config) -> None:
    """Raise ConfigError for the first combination of settings that cannot be run."""
    _check_layout(config)
    _check_model(config)
    _check_batches(config)
    _check_pipeline(config)
    _check_length(config)
    _check_recomputation(config)
    _check_schedule(config)
    _check_precision(config)
    _check_optimizer(config.optimizer)
    _check_output(config)
    check_trouble(config.trouble, config.checkpoint)
    if config.curriculum is not None:
        check_curriculum(config.curriculum, config.model, config.parallel, config.training)
    check_data(config)
    if not config.training.dry_run:
        check_files(config.data)
        if config.optimizer.use_apex:
            _check_apex()
        if config.optimizer.use_bnb_optimizer:
            _check_bitsandbytes()
        if config.training.compile:
            _check_compiler()


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
        yield config.checkpoint, ("keep_last", "overwrite_checkpoints"), "without --save"
    if config.checkpoint.keep_last is None:
        yield config.checkpoint, ("save_retain_interval",), "without --keep-last"
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


def _check_layout(config: Config) -> None:
    parallel = config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if parallel.world_size % (tensor * pipeline):
        raise ConfigError(
            f"{parallel.world_size} processes do not divide into replicas of --tensor-model-parallel-size "
            f"{tensor} x --pipeline-model-parallel-size {pipeline} = {tensor * pipeline}: start a multiple "
            "of that (--world-size with --dry-run), or change one of the two"
        )
    if parallel.sequence_parallel and config.model.seq_length % tensor:
        raise ConfigError(
            f"--sequence-parallel cuts the --seq-length {config.model.seq_length} over "
            f"--tensor-model-parallel-size {tensor} processes, which do not divide it: change one of them"
        )
    if parallel.zero_stage >= 2 and pipeline > 1:
        raise ConfigError(
            f"--zero-stage {parallel.zero_stage} with --pipeline-model-parallel-size {pipeline}: a pipeline "
            "sums its gradients over micro-batches and cannot share them out, use --zero-stage 1"
        )
    if parallel.cpu_offload and config.optimizer.use_apex:
        raise ConfigError(
            "--cpu-offload with --use-apex: apex's Adam runs on GPUs only, and the step would be the CPU's: "
            "drop one of the two"
        )


def _check_model(config: Config) -> None:
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    if config.training.z_loss_weight and config.training.loss_implementation == "plain":
        raise ConfigError(
            f"--z-loss-weight {config.training.z_loss_weight:g} with --loss-implementation plain: only the "
            "fused loss has it, drop one of the two"
        )
    for name in ("num_attention_heads", "ffn_hidden_size"):
        size = getattr(model, name)
        if size % tensor:
            raise ConfigError(
                f"{option_name(name)} {size} is not divisible by --tensor-model-parallel-size {tensor}: "
                "change one of them"
            )
    if model.mup and config.optimizer.optimizer == "sgd":
        raise ConfigError(
            "--mup with --optimizer sgd: its learning rates are those of Adam, use --optimizer adam or drop "
            "--mup"
        )
    if model.pad_vocab_size_to is not None:
        check_vocab_divides(model.pad_vocab_size_to, tensor)
    if model.vocab_size is not None:
        padded_vocab_size(model.vocab_size, model, tensor)
    if model.seq_length > model.max_position_embeddings:
        raise ConfigError(
            f"--seq-length {model.seq_length} is longer than --max-position-embeddings "
            f"{model.max_position_embeddings}: raise the latter, or shorten the sequences"
        )
    if model.position_embedding_type == "rotary" and model.kv_channels % 2:
        raise ConfigError(
            f"--position-embedding-type rotary turns pairs of channels, a head has {model.kv_channels}: "
            "make --kv-channels (hidden size / heads) even"
        )
    if model.position_embedding_type == "alibi" and config.data.reset_position_ids:
        raise ConfigError(
            "--reset-position-ids does nothing with --position-embedding-type alibi, whose positions are "
            "relative: drop it (--reset-attention-mask keeps documents apart)"
        )


def _check_pipeline(config: Config) -> None:
    parallel = config.parallel
    method = parse_partition_method(parallel.partition_method)
    if parallel.partition_profile is not None and method.kind != "profile":
        raise ConfigError(
            f"--partition-profile {parallel.partition_profile} with --partition-method {method.text}: only "
            "the method profile uses it, so change the method or drop the file"
        )
    if parallel.pipeline_schedule == "dualpipev":
        _check_dualpipev(config)


def _check_dualpipev(config: Config) -> None:
    stages = config.parallel.pipeline_model_parallel_size
    if stages == 1:
        raise ConfigError(
            "--pipeline-schedule dualpipev with --pipeline-model-parallel-size 1: there is nothing to order, "
            "use 2 or more, or the schedule 1f1b"
        )
    per_micro_step = config.batch.micro_batch_size * config.parallel.data_parallel_size
    for size in BatchSchedule.from_config(config.batch).sizes():
        if size // per_micro_step < 2 * stages:
            raise ConfigError(
                f"--pipeline-schedule dualpipev needs 2 x --pipeline-model-parallel-size = {2 * stages} "
                f"micro-batches per step and replica, and a batch of {size} has {size // per_micro_step}: "
                "raise --global-batch-size (or the ramp-up's START), or lower --micro-batch-size"
            )


def _check_batches(config: Config) -> None:
    micro, data = config.batch.micro_batch_size, config.parallel.data_parallel_size
    schedule = BatchSchedule.from_config(config.batch)
    for size in schedule.sizes():
        if size % (micro * data) == 0:
            continue
        product = f"--micro-batch-size {micro} x data-parallel size {data} = {micro * data}"
        if size == config.batch.global_batch_size:
            raise ConfigError(
                f"--global-batch-size {size} is not divisible by {product}: change one of the two sizes, or "
                "the number of processes"
            )
        ramp = " ".join(map(str, config.batch.rampup_batch_size or ()))
        raise ConfigError(
            f"--rampup-batch-size {ramp} comes to a batch of {size}, which is not divisible by {product}: "
            "change START or INCREMENT"
        )


def _check_length(config: Config) -> None:
    training = config.training
    if (training.train_iters is None) == (training.train_samples is None):
        found = (
            "neither of them"
            if training.train_iters is None
            else (f"{training.train_iters} and {training.train_samples}")
        )
        raise ConfigError(
            f"exactly one of --train-iters and --train-samples sets the length of the run: got {found}"
        )
    first_batch = BatchSchedule.from_config(config.batch).global_batch_size_at(0)
    if training.train_samples is not None and training.train_samples < first_batch:
        raise ConfigError(
            f"--train-samples {training.train_samples} is less than the first batch of {first_batch}: "
            "raise it, or lower --global-batch-size"
        )


def _check_recomputation(config: Config) -> None:
    training = config.training
    if training.checkpoint_activations and training.recomputes_attention:
        raise ConfigError(
            "--checkpoint-activations with --recompute-granularity selective: the first recomputes whole "
            "layers, the second attention only; drop one of them"
        )
    if not training.recomputes_layers:
        settings = {
            f"--checkpoint-num-layers {training.checkpoint_num_layers}": training.checkpoint_num_layers != 1,
            "--partition-activations": training.partition_activations,
            "--checkpoint-in-cpu": training.checkpoint_in_cpu,
        }
        for option, given in settings.items():
            if given:
                raise ConfigError(
                    f"{option} without --checkpoint-activations: no layer's input is kept to be recomputed "
                    "from; add the latter, or drop the former"
                )
    tensor = config.parallel.tensor_model_parallel_size
    elements = config.batch.micro_batch_size * config.model.seq_length * config.model.hidden_size
    if training.partition_activations and elements % tensor:
        raise ConfigError(
            f"--partition-activations cuts a layer's input of {elements} elements (--micro-batch-size x "
            f"--seq-length x --hidden-size) into --tensor-model-parallel-size {tensor} equal parts, which do "
            "not divide it: change one of them"
        )
    if training.partition_activations and config.parallel.sequence_parallel:
        raise ConfigError(
            "--partition-activations with --sequence-parallel: of a cut sequence each process has its own "
            "part already, drop the former"
        )


def _check_schedule(config: Config) -> None:
    schedule, training = config.schedule, config.training
    if schedule.override_lr_scheduler and schedule.use_checkpoint_lr_scheduler:
        raise ConfigError(
            "--override-lr-scheduler and --use-checkpoint-lr-scheduler contradict each other: the first "
            "takes the schedule of the flags, the second the checkpoint's; drop one"
        )
    by_iters = training.train_iters is not None
    decay_unit = "iters" if by_iters else "samples"
    # A decay by tokens counts its warm-up in samples, in a run of either kind.
    warmup_unit = "iters" if by_iters and schedule.lr_decay_tokens is None else "samples"
    misplaced = {
        f"--lr-decay-{_other(decay_unit)}": getattr(schedule, f"lr_decay_{_other(decay_unit)}"),
        f"--lr-warmup-{_other(warmup_unit)}": getattr(schedule, f"lr_warmup_{_other(warmup_unit)}"),
        "--rampup-batch-size": by_iters and " ".join(map(str, config.batch.rampup_batch_size or ())),
    }
    for option, value in misplaced.items():
        if value:
            length = f"--train-{decay_unit} {training.train_iters or training.train_samples}"
            raise ConfigError(
                f"{option} {value} does not go with {length}"
                + (" and --lr-decay-tokens" if warmup_unit != decay_unit else "")
                + ": count the whole run either in iterations or in samples"
            )
    decay = getattr(schedule, f"lr_decay_{decay_unit}")
    if decay is not None and schedule.lr_decay_tokens is not None:
        raise ConfigError(
            f"--lr-decay-{decay_unit} {decay} and --lr-decay-tokens {schedule.lr_decay_tokens} both say "
            "where the decay ends: give one of them"
        )
    warmup = getattr(schedule, f"lr_warmup_{warmup_unit}")
    if schedule.lr_warmup_fraction is not None and warmup:
        raise ConfigError(
            f"--lr-warmup-fraction {schedule.lr_warmup_fraction} and --lr-warmup-{warmup_unit} {warmup} both "
            "give the length of the warm-up: give one of them"
        )
    if schedule.min_lr > schedule.lr:
        raise ConfigError(f"--min-lr {schedule.min_lr} is larger than --lr {schedule.lr}: lower the former")
    if schedule.lr_decay_style != "constant":
        _check_warmup(config, warmup_unit, warmup)


def _other(unit: str) -> str:
    return "samples" if unit == "iters" else "iters"


def _check_warmup(config: Config, unit: str, warmup: int) -> None:
    schedule, training = config.schedule, config.training
    option, decay = f"--lr-decay-{unit}", getattr(schedule, f"lr_decay_{unit}")
    if schedule.lr_decay_tokens is not None:
        if training.deepspeed_config is not None:
            return  # its curriculum may have shorter samples: LearningRateSchedule counts their tokens
        # In whole samples: the warm-up has to end before the decay does.
        option, decay = "--lr-decay-tokens, in samples", schedule.lr_decay_tokens // config.model.seq_length
    elif decay is None:
        option, decay = f"--train-{unit}", getattr(training, f"train_{unit}")
    if warmup and warmup >= decay:
        raise ConfigError(
            f"--lr-warmup-{unit} {warmup} does not end before the decay does ({option}: {decay}): shorten "
            "the warm-up, or lengthen the decay"
        )


def _check_precision(config: Config) -> None:
    precision = config.precision
    if precision.fp16 and precision.bf16:
        raise ConfigError(
            "--fp16 and --bf16 are both given: the model computes in one of them, drop the other"
        )
    if precision.loss_scale is not None and not precision.fp16:
        raise ConfigError(
            f"--loss-scale {precision.loss_scale:g} without --fp16: {precision.name} needs no loss scale, "
            "drop it or add --fp16"
        )
    if precision.fp32_residual_connection and precision.name == "fp32":
        raise ConfigError(
            "--fp32-residual-connection without --fp16 or --bf16: all of the model is fp32 then, drop it"
        )
    if precision.min_loss_scale > precision.initial_loss_scale:
        raise ConfigError(
            f"--min-loss-scale {precision.min_loss_scale:g} is larger than --initial-loss-scale "
            f"{precision.initial_loss_scale:g}: lower the former"
        )


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if not optimizer.use_bnb_optimizer:
        return
    if optimizer.optimizer == "sgd":
        raise ConfigError(
            "--use-bnb-optimizer with --optimizer sgd: only Adam's moments are kept in 8 bits, use adam or "
            "adamw, or drop the flag"
        )
    if optimizer.use_apex:
        raise ConfigError(
            "--use-bnb-optimizer with --use-apex: both bring an Adam of their own, drop one of the two"
        )


def _check_output(config: Config) -> None:
    if config.checkpoint.universal_checkpoint and config.checkpoint.load is None:
        raise ConfigError("--universal_checkpoint without --load: give the folder that holds the checkpoint")
    checkpoint = config.checkpoint
    if checkpoint.save_interval is not None and checkpoint.save is None:
        raise ConfigError(
            f"--save-interval {checkpoint.save_interval} without --save: say where checkpoints go, or drop it"
        )


def _check_apex() -> None:
    spec = find_spec("apex")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    if not any(
        (folder / "optimizers").is_dir() and (folder / "normalization").is_dir() for folder in folders
    ):
        found = "another package of that name is" if spec else "it is not"
        raise ConfigError(
            f"--use-apex needs NVIDIA's apex, and {found} installed: install NVIDIA's, or drop the flag"
        )


def _check_bitsandbytes() -> None:
    # Looked for only: importing it takes seconds.
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "--use-bnb-optimizer needs bitsandbytes, which is not installed: pip install bitsandbytes, or "
            "drop the flag"
        )


def _check_compiler() -> None:
    compilers = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    if not any(which(name) for name in compilers):
        raise ConfigError(
            f"--compile needs a C++ compiler, and none of {', '.join(compilers)} is installed: install g++, "
            "or drop the flag"
        )
