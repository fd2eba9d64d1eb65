"""Checks that the settings of a run do not contradict each other. They run before any process group is
created.

Each check is a generator of sentences, so that one error can report all mistakes. Rules between two flags are
part of their fields, see `config.rules`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from shutil import which

from megatron.arguments.data_checks import (
    data_mistakes,
    evaluation_mistakes,
    harness_mistakes,
    harness_package_mistakes,
    missing_file_mistakes,
    tokenizer_mistakes,
)
from megatron.arguments.fp8_checks import fp8_mistakes
from megatron.arguments.schedule_checks import length_mistakes, schedule_mistakes
from megatron.config.config import Config
from megatron.config.fields import option_name
from megatron.config.mistakes import indivisible, raise_first
from megatron.config.model import check_vocab_divides, padded_vocab_size
from megatron.config.rules import rule_mistakes
from megatron.config.sections.curriculum import SOURCE
from megatron.config.sections.layer_pattern import DENSE, ROTARY, WINDOW
from megatron.config.sections.model import ModelConfig
from megatron.errors import ConfigError
from megatron.object_store.store import is_url
from megatron.optimizer.batch_schedule import batch_mistakes
from megatron.pipeline.partition_method import parse_partition_method
from megatron.text_table import counted

_MOST_STAGES = 200_000
_TP = "--tensor-model-parallel-size"


def validate(config: Config) -> None:
    """Raises ConfigError for the first combination of settings that cannot be run."""
    raise_first(mistakes_of(config))


def mistakes_of(config: Config) -> Iterator[str]:
    """Yields a sentence for each combination of settings that cannot be run."""
    checks: list[Callable[[Config], Iterator[str]]] = [
        *(rule_mistakes, layout_mistakes, model_mistakes, expert_mistakes, pipeline_mistakes, batch_mistakes),
        *(length_mistakes, schedule_mistakes, optimizer_mistakes, precision_mistakes, fp8_mistakes),
        *(
            finetuning_mistakes,
            stability_mistakes,
            local_save_mistakes,
            object_store_mistakes,
            curriculum_mistakes,
        ),
        *(harness_mistakes, tokenizer_mistakes, data_mistakes, evaluation_mistakes),
        *(recomputation_mistakes, profile_mistakes),
    ]
    if not config.training.dry_run:
        checks += [missing_file_mistakes, dependency_mistakes, harness_package_mistakes]
    for check in checks:
        try:
            yield from check(config)
        except ConfigError as error:  # a value that cannot be parsed
            yield str(error)


def layout_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for each size that a parallel size does not divide, and for a ZeRO stage that
    pipelines do not support."""
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
    if parallel.sequence_parallel:
        yield from indivisible("--sequence-parallel: --seq-length", config.model.seq_length, _TP, tensor)
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
    """Yields a sentence for pipeline schedules that cannot be run. Raises ConfigError for an invalid
    partition method."""
    parallel = config.parallel
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
    parse_partition_method(parallel.partition_method)


def optimizer_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for an optimizer of whole matrices whose state is kept in host memory, and for
    --qk-clip with norms after the weights that it scales."""
    if config.optimizer.qk_clip and config.model.qk_layernorm and not config.model.multi_latent_attention:
        yield (
            "--qk-clip with --qk-layernorm: norms after the weights of queries and keys undo their scaling. "
            "Remove --qk-clip, or remove --qk-layernorm."
        )
    if config.optimizer.updates_matrices and config.parallel.cpu_offload:
        yield (
            f"--optimizer {config.optimizer.optimizer} with --cpu-offload: matrices are updated on the "
            "device. Remove --cpu-offload, or set --optimizer adam."
        )


def precision_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for --fp32-residual-connection in an fp32 run, and for contradictory loss scales."""
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


def recomputation_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for modules of --recompute-modules that the model or the compiled layers lack."""
    training, model = config.training, config.model
    modules = training.recompute_modules
    if "layernorm" in modules and not model.normalizes_inputs:
        yield (
            f"--recompute-modules layernorm with --layer-arrangement {model.layer_arrangement}: attention "
            "and MLP read no norm; set mlp_act instead, or remove layernorm"
        )
    if "moe_act" in modules and model.num_experts is None:
        yield "--recompute-modules moe_act without --num-experts: set mlp_act instead, or remove moe_act"
    if "mlp_act" in modules and not model.has_dense_mlp:
        yield "--recompute-modules mlp_act: all MLPs are experts; set moe_act instead, or remove mlp_act"
    if training.compile and set(modules) - {"core_attn"}:
        yield (
            f"--recompute-modules {' '.join(modules)} with --compile: the compiler itself chooses which "
            "outputs of norms and activations it recomputes; remove --compile, or all modules but core_attn"
        )


def profile_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for iterations or ranks of --profile that do not exist."""
    logging, world, end = config.logging, config.parallel.world_size, config.training.train_iters
    if logging.profile and end is not None and end <= logging.profile_step_start:
        yield (
            f"--profile-step-start {logging.profile_step_start} with --train-iters {end}: the run ends "
            "before an iteration is profiled; set a smaller start, or remove --profile"
        )
    if logging.profile_step_start >= logging.profile_step_end:
        yield (
            f"--profile-step-start {logging.profile_step_start} with --profile-step-end "
            f"{logging.profile_step_end}: no iteration is between them; set a smaller start or a larger end"
        )
    if wrong := [rank for rank in logging.profile_ranks if rank >= world]:
        yield f"--profile-ranks {wrong[0]}: expected ranks below the number of processes, {world}; remove it"


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
    """Yields a sentence for a URL that contains credentials (which are not shown), and for each flag that
    requires --save or --load in a file system although it is a URL."""
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
            "--spike-policy rollback without --save and --save-interval: no checkpoint exists to roll back "
            "to; set both, or set --spike-policy skip"
        )
    _ = stability.skipped_ranges


def dependency_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence if a package or program that the flags need is not installed."""
    spec = find_spec("apex") if config.optimizer.use_apex else None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    if config.optimizer.use_apex and not any(
        (folder / "optimizers").is_dir() and (folder / "normalization").is_dir() for folder in folders
    ):
        found = "another package with that name is" if spec else "it is not"
        yield (
            f"--use-apex needs NVIDIA apex, and {found} installed: install NVIDIA apex, or remove the flag"
        )
    # The package is searched and not imported, because the import takes seconds.
    if config.optimizer.use_bnb_optimizer and find_spec("bitsandbytes") is None:
        yield (
            "--use-bnb-optimizer needs bitsandbytes, which is not installed: pip install bitsandbytes, or "
            "remove the flag"
        )
    compilers = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    if config.training.compile and not any(which(name) for name in compilers):
        yield (
            f"--compile needs a C++ compiler: none of {', '.join(compilers)} is installed: install g++, "
            "or remove the flag"
        )


def model_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for sizes that do not fit each other or the tensor-parallel size."""
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    if problem := model.heads_problem(tensor):
        yield problem
    if "ffn_hidden_size" not in model.unused_fields():
        yield from indivisible("--ffn-hidden-size", model.ffn_hidden_size, _TP, tensor)
    if model.window_pattern is not None and len(model.window_pattern) == 1:
        which, flags = (
            ("all", "") if model.window_pattern == (WINDOW,) else ("none of the", " and --window-size")
        )
        yield (
            f"--window-pattern gives {which} {model.num_layers} layers the window of --window-size: expected "
            f"layers with and without it; remove --window-pattern{flags}, or change the pattern"
        )
    if model.no_rope_freq == (ROTARY,):
        yield (
            f"--no-rope-freq gives all {model.num_layers} layers rotary embeddings, as without the flag: "
            "remove --no-rope-freq, or change the pattern"
        )
    if (model.mtp_num_layers or 0) >= model.seq_length:
        yield (
            f"--mtp-num-layers {model.mtp_num_layers} with --seq-length {model.seq_length}: the last layer "
            "has no token to predict; expected fewer layers than tokens"
        )
    if model.seq_length > model.max_position_embeddings:
        yield (
            f"--seq-length {model.seq_length} is larger than --max-position-embeddings "
            f"{model.max_position_embeddings}: increase --max-position-embeddings, or reduce --seq-length"
        )
    if model.position_embedding_type == "rotary":
        kinds = (_rotary_mistakes(model.of_kind(has_window), has_window) for has_window in (False, True))
        yield from dict.fromkeys(chain.from_iterable(kinds))
    if model.vocab_size is not None:
        padded_vocab_size(model.vocab_size, model, tensor)
    elif model.pad_vocab_size_to is not None:
        check_vocab_divides(model.pad_vocab_size_to, tensor)


def expert_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for settings of expert layers that do not fit each other or the layout."""
    model, experts = config.model, config.model.num_experts
    if experts is None:
        return
    if model.moe_layer_freq == (DENSE,):
        yield (
            f"--moe-layer-freq gives none of the {model.num_layers} layers experts: remove --num-experts and "
            "--moe-layer-freq, or change the pattern"
        )
    yield from model.router_mistakes()
    weighs = model.moe_router_pre_softmax or model.moe_router_score_function != "softmax"
    if model.moe_router_topk == 1 and not weighs and not config.training.no_train:
        yield (
            "--moe-router-topk 1 without --moe-router-pre-softmax: the softmax over one chosen expert is "
            "always 1, so the router would not be trained; set --moe-router-pre-softmax, or "
            "--moe-router-score-function sigmoid"
        )
    parallel, shared = config.parallel, model.moe_shared_expert_intermediate_size
    tensor, ranks = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    yield from indivisible("--num-experts", experts, "--expert-model-parallel-size", ranks)
    if tensor > 1 and not parallel.sequence_parallel:
        yield (
            f"--num-experts {experts} with --tensor-model-parallel-size {tensor}: the ranks of a "
            "tensor-parallel group route different tokens; add --sequence-parallel"
        )
    yield from indivisible("--moe-shared-expert-intermediate-size", shared or 0, _TP, tensor)
    if config.checkpoint.save is not None and config.checkpoint.save_format == "native":
        yield (
            f"--save-format native with --num-experts {experts}: DeepSpeed's files have no place for "
            "experts; remove --save-format"
        )


def _rotary_mistakes(model: ModelConfig, has_window: bool) -> Iterator[str]:
    size, percent = (model.option_of(name, has_window) for name in ("kv_channels", "rotary_percent"))
    if model.multi_latent_attention:
        if model.qk_pos_emb_head_dim % 2:
            yield (
                f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim}: expected an even number, since pairs of "
                "elements are rotated; change it"
            )
    elif model.kv_channels % 2:
        default = "hidden size / heads" if size == "--kv-channels" else "--kv-channels"
        yield (
            f"--position-embedding-type rotary needs an even head dimension, but it is {model.kv_channels}: "
            f"change {size} (default: {default})"
        )
    elif model.rotary_dim % 2 or not model.rotary_dim:
        yield (
            f"{percent} {model.rotary_percent:g} rotates {model.rotary_dim} of {model.kv_channels} elements "
            f"of each head: expected an even number above 0; change {percent}"
        )
    for low, high in (
        ("rope_low_freq_factor", "rope_high_freq_factor"),
        ("rope_beta_slow", "rope_beta_fast"),
    ):
        if getattr(model, low) >= getattr(model, high):
            yield (
                f"{option_name(low)} {getattr(model, low):g} is not below {option_name(high)} "
                f"{getattr(model, high):g}: change one of them"
            )


def curriculum_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for sequence lengths of a curriculum that the run does not support."""
    curriculum, model, parallel = config.curriculum, config.model, config.parallel
    if curriculum is None:
        return
    if curriculum.max_length > model.seq_length:
        yield (
            f"{SOURCE} reaches {curriculum.max_length} tokens, --seq-length is {model.seq_length}: reduce "
            "max_difficulty, or increase --seq-length"
        )
    multiple = parallel.length_multiple
    if odd := [n for n in curriculum.all_lengths() if n % multiple]:
        yield (
            f"{SOURCE} has sequences of {odd[0]} tokens, which must be divisible by "
            f"{parallel.length_multiple_terms}: choose multiples of it (difficulty_step)"
        )
    if config.training.compile:
        yield (
            "--compile with a curriculum of sequence lengths: layers would be recompiled for each length; "
            "remove --compile until the curriculum is complete"
        )
