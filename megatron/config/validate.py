"""Checks of settings against each other, before any process group is created.

Each check is a generator of sentences, so that one error can report all mistakes. Rules between two flags are
part of their fields, see `rules`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from megatron.config.batch import batch_mistakes, curriculum_mistakes, length_mistakes
from megatron.config.config import Config
from megatron.config.data import (
    NO_EVALUATION_DATA,
    available_eval_splits,
    data_mistakes,
    missing_file_mistakes,
    tokenizer_mistakes,
)
from megatron.config.mistakes import raise_first
from megatron.config.model import model_mistakes
from megatron.config.partition_method import parse_partition_method
from megatron.config.rules import rule_mistakes
from megatron.config.sections.data import fitting_tokenizer_types
from megatron.config.sections.parallel import ParallelConfig
from megatron.config.tool_parser import check_folder
from megatron.errors import ConfigError
from megatron.object_urls import is_url
from megatron.text_table import counted

_MOST_STAGES = 200_000
WSD_BY_TOKENS = (
    "--lr-decay-style WSD with a decay that ends by tokens (--lr-decay-tokens or --train-tokens): "
    "WSD counts in iterations or samples; set --lr-decay-iters or --lr-decay-samples instead"
)


def validate(config: Config) -> None:
    """Raises ConfigError for the first combination of settings that cannot be run."""
    raise_first(mistakes_of(config))


def mistakes_of(config: Config) -> Iterator[str]:
    """Yields a sentence for each combination of settings that cannot be run."""
    checks: list[Callable[[Config], Iterator[str]]] = [
        *(rule_mistakes, layout_mistakes, model_mistakes, pipeline_mistakes, batch_mistakes, length_mistakes),
        *(schedule_mistakes, optimizer_mistakes, precision_mistakes, finetuning_mistakes, stability_mistakes),
        *(
            local_save_mistakes,
            object_store_mistakes,
            curriculum_mistakes,
            harness_mistakes,
            tokenizer_mistakes,
        ),
        *(data_mistakes, evaluation_mistakes),
    ]
    if not config.training.dry_run:
        checks += [missing_file_mistakes, dependency_mistakes, harness_package_mistakes]
    for check in checks:
        try:
            yield from check(config)
        except ConfigError as error:  # of a value that cannot be parsed
            yield str(error)


def layout_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for sizes that the parallel sizes do not divide, and for ZeRO with pipelines."""
    parallel = config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context = parallel.context_parallel_size
    if parallel.world_size % parallel.ranks_per_replica:
        by_context = f"--context-parallel-size {context} x " if context > 1 else ""
        number = "three" if context > 1 else "two"
        yield (
            f"{counted(parallel.world_size, 'process')} cannot be divided by --tensor-model-parallel-size "
            f"{tensor} x {by_context}--pipeline-model-parallel-size {pipeline} = "
            f"{parallel.ranks_per_replica}: start a multiple of that (--world-size with --dry-run), or "
            f"change one of the {number}"
        )
    if context > 1 and config.model.seq_length % parallel.length_multiple:
        yield (
            f"--context-parallel-size {context}: --seq-length {config.model.seq_length} is not divisible by "
            f"{parallel.length_multiple} ({parallel.length_multiple_terms}): change one of them"
        )
    if parallel.sequence_parallel and config.model.seq_length % tensor:
        yield (
            f"--sequence-parallel: --seq-length {config.model.seq_length} is not divisible by "
            f"--tensor-model-parallel-size {tensor}: change one of them"
        )
    if parallel.tp_comm_overlap and parallel.schedule.splits_backward:
        yield (
            f"--tp-comm-overlap with --pipeline-schedule {parallel.pipeline_schedule}: weight "
            "gradients have separate passes, which do not divide the sequence; remove one of the two flags"
        )
    elements = config.batch.micro_batch_size * config.seq_length_per_rank * config.model.hidden_size
    if config.training.partition_activations and elements % tensor:
        length = "--seq-length / --context-parallel-size" if context > 1 else "--seq-length"
        yield (
            f"--partition-activations: the {elements} elements of a layer's input (--micro-batch-size x "
            f"{length} x --hidden-size) are not divisible by --tensor-model-parallel-size {tensor}: "
            "change one of them"
        )
    if parallel.zero_stage >= 2 and pipeline > 1:
        yield (
            f"--zero-stage {parallel.zero_stage} with --pipeline-model-parallel-size {pipeline}: pipeline "
            "parallelism accumulates gradients over micro-batches and cannot shard them; use --zero-stage 1"
        )


def pipeline_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for partition methods and pipeline schedules that cannot be run."""
    parallel = config.parallel
    yield from _stage_mistakes(parallel)
    method = parse_partition_method(parallel.partition_method)
    if parallel.partition_profile is not None and method.kind != "profile":
        yield (
            f"--partition-profile {parallel.partition_profile} with --partition-method {method.text}: only "
            "the method profile uses it; change the method or remove --partition-profile"
        )


def _stage_mistakes(parallel: ParallelConfig) -> Iterator[str]:
    virtual, name = parallel.virtual_pipeline_stages, parallel.pipeline_schedule
    if parallel.num_stages > _MOST_STAGES:
        yield (
            f"--virtual-pipeline-stages {virtual} x --pipeline-model-parallel-size "
            f"{parallel.pipeline_model_parallel_size} are {parallel.num_stages:,} stages: expected at most "
            f"{_MOST_STAGES:,}; reduce one of the two"
        )
    elif virtual > 1 and parallel.schedule.stages_per_rank > 0:
        yield (
            f"--virtual-pipeline-stages {virtual} with --pipeline-schedule {name}, which fixes the stages at "
            f"{parallel.stages_per_rank} per rank: remove --virtual-pipeline-stages, or set "
            "--pipeline-schedule interleaved"
        )
    elif virtual == 1 and parallel.schedule.stages_per_rank == 0:
        yield (
            f"--pipeline-schedule {name} with --virtual-pipeline-stages 1: expected 2 or more stages per "
            "pipeline rank, or the schedule 1f1b"
        )
    if name != "1f1b" and parallel.pipeline_model_parallel_size == 1:
        given = f"--virtual-pipeline-stages {virtual}" if virtual > 1 else f"--pipeline-schedule {name}"
        yield (
            f"{given} with --pipeline-model-parallel-size 1: expected 2 or more, or the schedule 1f1b "
            "with one stage per rank"
        )


def optimizer_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for an optimizer of whole matrices whose state is kept in host memory."""
    if config.optimizer.updates_matrices and config.parallel.cpu_offload:
        yield (
            f"--optimizer {config.optimizer.optimizer} with --cpu-offload: matrices are updated on the "
            "device. Remove --cpu-offload, or set --optimizer adam."
        )


def precision_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for fp32 residual connections in fp32, and for contradictory loss scales."""
    precision = config.precision
    if precision.fp32_residual_connection and precision.name == "fp32":
        yield (
            "--fp32-residual-connection without --fp16 or --bf16: the whole model is in fp32; remove "
            "--fp32-residual-connection"
        )
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield (
            f"--min-loss-scale {precision.min_loss_scale:g} is larger than --initial-loss-scale "
            f"{precision.initial_loss_scale:g}: reduce --min-loss-scale"
        )


def finetuning_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for a --save folder from which a repeated fine-tuning command could not resume."""
    checkpoint = config.checkpoint
    option = "--finetune" if checkpoint.finetune else "--no-load-optim"
    applies = (checkpoint.finetune or checkpoint.no_load_optim) and not config.training.no_train
    if applies and checkpoint.save_is_load_folder and not checkpoint.universal_checkpoint:
        yield (
            f"{option} with --load {checkpoint.load} and --save {checkpoint.save}: set another --save, or "
            f"remove {option} to resume. With one folder, each restart of the job would apply {option} again"
        )


def local_save_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence if --save-local is --save or lies inside it."""
    checkpoint = config.checkpoint
    if checkpoint.save is None or checkpoint.save_local is None:
        return
    save, local = Path(os.path.realpath(checkpoint.save)), Path(os.path.realpath(checkpoint.save_local))
    if save in (local, *local.parents):
        yield (
            f"--save-local {checkpoint.save_local} is {'' if local == save else 'inside '}--save "
            f"{checkpoint.save}: set a folder outside it, on the disk of each node"
        )


def object_store_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for a URL with credentials, which are not shown, and for flags that need --save or
    --load in a file system, if it is a URL."""
    checkpoint = config.checkpoint
    for option, url in (("--save", checkpoint.save), ("--load", checkpoint.load)):
        scheme, _, rest = (url or "").partition("://")
        if url and is_url(url) and "@" in rest and {":", "@"} & {*rest.partition("/")[0]}:
            shown = f"{scheme}://...@{rest.rpartition('@')[2]}"
            yield (
                f"{option} {shown}: expected a URL without credentials; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY in the environment"
            )
    needs = (
        ("--save-local", checkpoint.save_local, checkpoint.save),
        ("--save-local", checkpoint.save_local, checkpoint.load),
        ("--save-hf-interval", checkpoint.save_hf_interval, checkpoint.save),
        ("--save-hf-at-end", checkpoint.save_hf_at_end, checkpoint.save),
        ("--universal_checkpoint", checkpoint.universal_checkpoint, checkpoint.load),
    )
    for option, value, folder in needs:
        if value and folder and is_url(folder):
            yield (f"{option} with {folder}: expected a folder of a file system; set one, or remove {option}")


def stability_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for rollbacks without checkpoints. Raises ConfigError for invalid ranges of
    iterations."""
    stability, checkpoint = config.stability, config.checkpoint
    if stability.spike_policy == "rollback" and (checkpoint.save is None or checkpoint.save_interval is None):
        yield (
            "--spike-policy rollback without --save and --save-interval: there is no checkpoint to roll back "
            "to; set both, or set --spike-policy skip"
        )
    _ = stability.skipped_ranges


def schedule_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for a warm-up and decay that contradict each other or the length of the run."""
    schedule, training = config.schedule, config.training
    if schedule.min_lr > schedule.lr:
        yield f"--min-lr {schedule.min_lr} is larger than --lr {schedule.lr}: reduce --min-lr"
    style, decays_by_tokens = schedule.lr_decay_style, schedule.lr_decay_tokens is not None
    if style == "inverse-square-root" and not (
        schedule.lr_warmup_iters or schedule.lr_warmup_samples or schedule.lr_warmup_fraction
    ):
        unit = "samples" if training.train_iters is None or decays_by_tokens else "iters"
        yield (
            "--lr-decay-style inverse-square-root without a warm-up: the learning rate is --lr x "
            f"sqrt(warm-up / progress); set --lr-warmup-{unit} or --lr-warmup-fraction"
        )
    if style == "WSD" and decays_by_tokens:
        yield WSD_BY_TOKENS
    elif style == "WSD":
        unit = "samples" if training.train_iters is None else "iters"
        length, misplaced = (getattr(schedule, f"lr_wsd_decay_{u}") for u in (unit, _other_unit(unit)))
        if length is None and not misplaced:
            yield f"--lr-decay-style WSD without --lr-wsd-decay-{unit}: set it to the length of the decay"
    for unit in ("iters", "samples"):
        decay, warmup = (getattr(schedule, f"lr_{part}_{unit}") for part in ("decay", "warmup"))
        if decay is not None and decays_by_tokens:
            yield (
                f"--lr-decay-{unit} {decay} and --lr-decay-tokens {schedule.lr_decay_tokens} both set "
                "the end of the decay: remove one of them"
            )
        if warmup and schedule.lr_warmup_fraction is not None:
            yield (
                f"--lr-warmup-fraction {schedule.lr_warmup_fraction} and --lr-warmup-{unit} {warmup} both "
                "set the length of the warm-up: remove one of them"
            )
    if training.has_length:
        yield from _unit_mistakes(config)


def _unit_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for parts of the schedule in another unit than the run's length, or beyond it."""
    schedule, training = config.schedule, config.training
    by_iters = training.train_iters is not None
    decay_unit = "iters" if by_iters else "samples"
    # With a decay in tokens, the warm-up is in samples even if the run has --train-iters.
    warmup_unit = "iters" if by_iters and schedule.lr_decay_tokens is None else "samples"
    misplaced = {
        f"--lr-decay-{_other_unit(decay_unit)}": getattr(schedule, f"lr_decay_{_other_unit(decay_unit)}"),
        f"--lr-wsd-decay-{_other_unit(decay_unit)}": getattr(
            schedule, f"lr_wsd_decay_{_other_unit(decay_unit)}"
        ),
        f"--lr-warmup-{_other_unit(warmup_unit)}": getattr(schedule, f"lr_warmup_{_other_unit(warmup_unit)}"),
        "--rampup-batch-size": by_iters and " ".join(map(str, config.batch.rampup_batch_size or ())),
    }
    for option, value in misplaced.items():
        if value:
            length = f"--train-{decay_unit} {training.train_iters or training.train_samples}"
            yield (
                f"{option} {value} cannot be combined with {length}"
                + (" and --lr-decay-tokens" if warmup_unit != decay_unit else "")
                + ": use either iterations or samples for the whole run"
            )
    if schedule.lr_decay_style != "constant":
        yield from _warmup_mistakes(config, warmup_unit)


def _warmup_mistakes(config: Config, unit: str) -> Iterator[str]:
    schedule, training = config.schedule, config.training
    warmup: float = getattr(schedule, f"lr_warmup_{unit}")
    option, decay = f"--lr-decay-{unit}", getattr(schedule, f"lr_decay_{unit}")
    if schedule.lr_decay_tokens is not None:
        if training.deepspeed_config is not None or config.checkpoint.load is not None:
            return  # LearningRateSchedule counts the tokens of a curriculum, and of a resumed run
        # Rounded down to whole samples, because the warm-up has to end before the decay.
        option, decay = "--lr-decay-tokens, in samples", schedule.lr_decay_tokens // config.model.seq_length
    elif decay is None:
        option, decay = f"--train-{unit}", getattr(training, f"train_{unit}")
    if warmup and warmup >= decay:
        yield (
            f"--lr-warmup-{unit} {warmup} does not end before the decay ({option}: {decay}): reduce the "
            "warm-up, or extend the decay"
        )
        return
    if schedule.lr_warmup_fraction is not None:
        warmup = schedule.lr_warmup_fraction * decay
    length = getattr(schedule, f"lr_wsd_decay_{unit}") or 0
    is_wsd = schedule.lr_decay_style == "WSD" and schedule.lr_decay_tokens is None
    if is_wsd and decay - length < warmup:
        steps = unit.replace("iters", "iterations")
        yield (
            f"--lr-wsd-decay-{unit} {length}: the decay has to end after {decay:,} {steps} and would begin "
            f"before the end of the warm-up ({warmup:,.0f} {steps}): shorten one of them, or raise "
            f"--lr-decay-{unit}"
        )


def _other_unit(unit: str) -> str:
    return "samples" if unit == "iters" else "iters"


def dependency_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence if a package or program that the flags need is not installed."""
    if config.optimizer.use_apex:
        yield from _apex_mistakes()
    if config.optimizer.use_bnb_optimizer:
        yield from _bitsandbytes_mistakes()
    if config.training.compile:
        yield from _compiler_mistakes()


def _apex_mistakes() -> Iterator[str]:
    spec = find_spec("apex")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    if not any(
        (folder / "optimizers").is_dir() and (folder / "normalization").is_dir() for folder in folders
    ):
        found = "another package with that name is" if spec else "it is not"
        yield (
            f"--use-apex needs NVIDIA apex, and {found} installed: install NVIDIA apex, or remove the flag"
        )


def _bitsandbytes_mistakes() -> Iterator[str]:
    # Not imported, because the import takes seconds.
    if find_spec("bitsandbytes") is None:
        yield (
            "--use-bnb-optimizer needs bitsandbytes, which is not installed: pip install bitsandbytes, or "
            "remove the flag"
        )


def _compiler_mistakes() -> Iterator[str]:
    compilers = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    if not any(which(name) for name in compilers):
        yield (
            f"--compile needs a C++ compiler: none of {', '.join(compilers)} is installed: install g++, "
            "or remove the flag"
        )


def harness_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for tasks in a run that does not train, or without a tokenizer."""
    training, data = config.training, config.data
    if not training.eval_harness_tasks:
        return
    tasks = " ".join(training.eval_harness_tasks)
    if training.no_train:
        yield (
            f"--eval-harness-tasks {tasks} with --eval-only, which trains nothing: remove "
            "--eval-harness-tasks; tools/evaluate.py --tasks runs tasks on a checkpoint"
        )
    elif not fitting_tokenizer_types(data):
        yield (
            f"--eval-harness-tasks {tasks} without a tokenizer: set --tokenizer-name-or-path, "
            "--tokenizer-model, or --vocab-file and --merge-file"
        )


def evaluation_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for an evaluation without a checkpoint, and for one that evaluates nothing."""
    if not config.training.no_train:
        return
    if config.training.eval_iters == 0:
        yield "--eval-only with --eval-iters 0, which evaluates nothing: set 1 or more batches"
    if config.checkpoint.load is None:
        yield "--eval-only without --load would evaluate the initial weights: set --load to the checkpoints"
    valid, test, reason = available_eval_splits(config.data)
    if not (valid or test):
        yield f"--eval-only {reason}: there are {NO_EVALUATION_DATA}"


def no_harness(option: str, reason: str) -> ConfigError:
    """Returns the error of a flag that needs the package lm_eval, which cannot be imported."""
    return ConfigError(
        f"{option} needs EleutherAI's lm-evaluation-harness ({reason}): install it with 'pip install lm_eval'"
    )


def harness_package_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence if the package lm_eval does not exist. Raises ConfigError if the folder of tasks does
    not exist."""
    training = config.training
    if not training.eval_harness_tasks:
        return
    if find_spec("lm_eval") is None:
        yield str(no_harness("--eval-harness-tasks", "there is no module lm_eval"))
    if training.eval_harness_tasks_path is not None:
        check_folder("--eval-harness-tasks-path", training.eval_harness_tasks_path)
