"""Sentences for the log about settings that have no effect, and about combinations of settings that have
failed."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megatron.config.config import SETTINGS, Config
from megatron.config.fields import setting_option
from megatron.config.rules import is_default, unused_by_choices, unused_by_rules
from megatron.data.flags import available_eval_splits


def unused_setting_notes(config: Config, typed: Collection[str] = ()) -> tuple[str, ...]:
    """Returns a sentence for each setting that has no effect with the other settings, and that was typed or
    is not at its default. typed: 'section.field' of the flags on the command line."""
    reasons: dict[str, str] = {}
    for setting, reason in (*unused_by_rules(config), *unused_by_choices(config), *_by_several(config)):
        is_derived = SETTINGS[setting].flag.derived is not None
        if setting in typed or not (is_derived or is_default(config, setting)):
            reasons.setdefault(setting, reason)
    return tuple(f"{setting_option(setting)} has no effect {reason}" for setting, reason in reasons.items())


def risk_notes(config: Config) -> tuple[str, ...]:
    """Returns a sentence for each combination of settings with which published runs have failed."""
    model, notes = config.model, list[str]()
    if config.optimizer.use_bnb_optimizer and not model.embed_layernorm:
        notes.append(
            "--use-bnb-optimizer without --embed-layernorm: BigScience's 104B run stagnated with 8-bit Adam "
            "and no norm after the word embeddings; add --embed-layernorm to a new run"
        )
    is_balanced = model.has_balance_loss or model.moe_router_enable_expert_bias
    if model.num_experts is not None and not (
        is_balanced or model.moe_router_force_load_balancing or config.training.no_train
    ):
        notes.append(
            "nothing balances the load of the experts: set --moe-aux-loss-coeff, such as 1e-3, or "
            "--moe-router-enable-expert-bias"
        )
    if model.moe_router_force_load_balancing:
        notes.append(
            "--moe-router-force-load-balancing replaces the router's choice of experts: the run only "
            "measures speed, and its model is of no use"
        )
    return tuple(notes)


def _by_several(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (setting, reason) for each setting that has no effect because of several other settings."""
    training, parallel, precision = config.training, config.parallel, config.precision
    if training.gpu is None or not training.dry_run:
        for name in ("node_size", "intra_node_gbps", "inter_node_gbps", "host_us_per_kernel"):
            yield f"parallel.{name}", "without --dry-run and --gpu"
    if training.dry_run and training.gpu is None:
        yield "parallel.network_figures", "with --dry-run and without --gpu"
    elif not training.dry_run and (training.no_preflight or parallel.world_size == 1):
        reason = "with --no-preflight" if training.no_preflight else "with one process"
        yield "parallel.network_figures", reason
    if training.recomputes("core_attn") and config.model.attention_dropout == 0:
        only = training.recomputed_modules == ("core_attn",)
        yield (
            f"training.recompute_{'granularity' if only else 'modules'}",
            f"{'' if only else 'for core_attn '}with --attention-dropout 0: fused attention stores no "
            "attention scores to recompute (other --recompute-modules and full reduce memory)",
        )
    if config.model.moe_router_load_balancing_type != "none" and not config.model.moe_aux_loss_coeff:
        yield "model.moe_router_load_balancing_type", "without --moe-aux-loss-coeff"
    if precision.fp16 and precision.loss_scale is not None and training.deepspeed_config is None:
        for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
            yield f"precision.{name}", f"with the static --loss-scale {precision.loss_scale:g}"
    valid, test, reason = available_eval_splits(config.data)
    if not valid:
        yield "training.eval_interval", reason
        if not test:
            yield "training.eval_iters", reason
    yield from _unused_with_replicas(config)


def _unused_with_replicas(config: Config) -> Iterator[tuple[str, str]]:
    parallel = config.parallel
    if parallel.dp_cp_size == 1:
        yield "parallel.zero_stage", "with data-parallel size 1"
    replicas = "and a data-parallel size above 1"
    stage = parallel.zero_stage if parallel.dp_cp_size > 1 else 0
    if stage != 1:
        yield "parallel.ddp_bucket_size", f"without --zero-stage 1 {replicas}"
    if stage not in (1, 3):
        yield "parallel.no_overlap_param_gather", f"without --zero-stage 1 or 3 {replicas}"
    if stage == 0:
        yield "parallel.no_overlap_grad_reduce", f"without --zero-stage 1 to 3 {replicas}"
    if stage == 1 and config.training.uses_cuda_graph:
        for name in ("param_gather", "grad_reduce"):
            yield f"parallel.no_overlap_{name}", "with --cuda-graph-impl local, which overlaps neither"
