"""The rules of each flag (`config.fields.Flag`): what it needs, what it excludes, and when it has no
effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from megatron.config.config import SECTIONS, Config
from megatron.config.data import available_eval_splits
from megatron.config.fields import Flag, flag_of, setting_option, value_text
from megatron.config.registries import ROPE_SCALINGS


def rule_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for a flag without another flag that it needs, or with one that it excludes."""
    for setting, flag in _flags():
        if not _is_given(config, setting):
            continue
        for other, end in flag.needs.items():
            if not _is_given(config, other):
                yield f"{_flag_text(config, setting)} without {_required(other)}: {end}"
        for other, end in flag.excludes.items():
            if _is_given(config, other):
                yield f"{_flag_text(config, setting)} with {_flag_text(config, other)}: {end}"


def unused_setting_notes(config: Config, typed: Collection[str] = ()) -> tuple[str, ...]:
    """Returns a sentence for each setting that has no effect with the other settings, and that was typed or
    is not at its default. typed: 'section.field' of the flags on the command line."""
    reasons: dict[str, str] = {}
    for setting, reason in (*_by_rules(config), *_by_choices(config), *_by_several(config)):
        if setting in typed or _value(config, setting) != _default(setting):
            reasons.setdefault(setting, reason)
    return tuple(f"{setting_option(setting)} has no effect {reason}" for setting, reason in reasons.items())


def risk_notes(config: Config) -> tuple[str, ...]:
    """Returns a sentence for each combination of settings with which published runs have failed."""
    if config.optimizer.use_bnb_optimizer and not config.model.embed_layernorm:
        return (
            "--use-bnb-optimizer without --embed-layernorm: BigScience's 104B run stagnated with 8-bit Adam "
            "and no norm after the word embeddings; add --embed-layernorm to a new run",
        )
    return ()


def _flags() -> Iterator[tuple[str, Flag]]:
    for section, kind in SECTIONS.items():
        for field in dataclasses.fields(kind):
            yield f"{section}.{field.name}", flag_of(field)


def _value(config: Config, setting: str) -> Any:
    section, _, name = setting.partition(".")
    return getattr(getattr(config, section), name)


def _default(setting: str) -> Any:
    section, _, name = setting.partition(".")
    return SECTIONS[section].__dataclass_fields__[name].default


def _is_given(config: Config, condition: str) -> bool:
    """Returns whether a condition of `Flag` holds. 'section.field': the value is neither the default nor off.
    'section.field=value': the setting has this value. 'condition|condition': one of them holds."""
    first, _, others = condition.partition("|")
    if others:
        return _is_given(config, first) or _is_given(config, others)
    setting, equals, wanted = condition.partition("=")
    value = _value(config, setting)
    if equals:
        return str(value) == wanted
    return value not in (None, False, (), _default(setting))


def _flag_text(config: Config, condition: str) -> str:
    """Returns the flag and its value, for an error."""
    setting = condition.partition("=")[0]
    value = _value(config, setting)
    if isinstance(value, bool):
        return setting_option(setting)
    text = f"{value:g}" if isinstance(value, float) else value_text(value)
    return f"{setting_option(setting)} {text}"


def _required(condition: str) -> str:
    setting, _, value = condition.partition("|")[0].partition("=")
    return f"{setting_option(setting)} {value}".rstrip()


def _by_rules(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (setting, reason) of settings that are unused by the rules of their flags."""
    for setting, flag in _flags():
        for condition in flag.unused_with:
            if _is_given(config, condition):
                yield setting, f"with {_flag_text(config, condition)}"
        if flag.used_with and not any(_is_given(config, condition) for condition in flag.used_with):
            yield setting, f"without {' and '.join(map(_required, flag.used_with))}"


def _by_choices(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (setting, reason) of settings that only other choices of a setting use."""
    for section in SECTIONS:
        for registry, choice in getattr(config, section).choices_made():
            for name in registry.unused_settings(choice):
                if name != "max_position_embeddings":  # it limits --seq-length with every choice
                    yield f"{section}.{name}", f"with {registry.option} {choice}"
    if config.model.rope_scaling_type is None:
        for name in ROPE_SCALINGS.settings():
            yield f"model.{name}", "without --rope-scaling-type"


def _by_several(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (setting, reason) of settings whose use depends on several other settings."""
    training, parallel, precision = config.training, config.parallel, config.precision
    if training.gpu is None or not training.dry_run:
        for name in ("node_size", "intra_node_gbps", "inter_node_gbps", "host_us_per_kernel"):
            yield f"parallel.{name}", "without --dry-run and --gpu"
    if training.dry_run and training.gpu is None:
        yield "parallel.network_figures", "with --dry-run and without --gpu"
    elif not training.dry_run and (training.no_preflight or parallel.world_size == 1):
        reason = "with --no-preflight" if training.no_preflight else "with one process"
        yield "parallel.network_figures", reason
    if training.recomputes_attention and config.model.attention_dropout == 0:
        yield (
            "training.recompute_granularity",
            "with --attention-dropout 0: fused attention stores no attention scores to recompute (full "
            "reduces memory)",
        )
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
