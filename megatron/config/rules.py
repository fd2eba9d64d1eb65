"""The rules of each flag (`config.fields.Flag`): what it needs, what it excludes, and when it has no
effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megatron.config.config import SECTIONS, SETTINGS, Config
from megatron.config.fields import setting_option, value_text
from megatron.config.registries import ROPE_SCALINGS


def rule_mistakes(config: Config, sections: Collection[str] = SECTIONS) -> Iterator[str]:
    """Yields a sentence for each flag that lacks a flag that it needs, or that is given together with a flag
    that it excludes."""
    for setting, entry in SETTINGS.items():
        if setting.partition(".")[0] not in sections or not _is_given(config, setting):
            continue
        for other, reason in entry.flag.needs.items():
            if not _is_given(config, other):
                verb = "add" if SETTINGS[_setting_of(other)].kind is bool else "set"
                remedy = f"{verb} {_required(other)}, or remove {entry.option}"
                yield f"{_flag_text(config, setting)} without {_required(other)}: {_ending(reason, remedy)}"
        for other, reason in entry.flag.excludes.items():
            if _is_given(config, other):
                flags = f"{_flag_text(config, setting)} with {_flag_text(config, other)}"
                yield f"{flags}: {_ending(reason, 'remove one of the two')}"


def _ending(reason: str, remedy: str) -> str:
    """Returns the end of an error: the reason, and the remedy unless the reason says what to remove."""
    return reason if "remove" in reason else "; ".join(filter(None, (reason, remedy)))


def is_default(config: Config, setting: str) -> bool:
    """Returns whether a setting has its default. setting: 'section.field'."""
    return bool(config.value(setting) == SETTINGS[setting].default)


def _is_given(config: Config, condition: str) -> bool:
    """Returns whether a condition of `Flag` holds, or at least one of several with '|' between them."""
    return any(getattr(config, one.partition(".")[0]).holds(one) for one in condition.split("|"))


def _flag_text(config: Config, condition: str) -> str:
    """Returns the flag and its value, for an error."""
    setting = _setting_of(condition)
    value = config.value(setting)
    if isinstance(value, bool):
        return setting_option(setting)
    text = f"{value:g}" if isinstance(value, float) else value_text(value)
    return f"{setting_option(setting)} {text}"


def _setting_of(condition: str) -> str:
    """Returns the 'section.field' of a condition, or of the first of several conditions."""
    return condition.partition("|")[0].partition("=")[0]


def _required(condition: str) -> str:
    setting, _, value = condition.partition("|")[0].partition("=")
    return f"{setting_option(setting)} {value}".rstrip()


def unused_by_rules(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (setting, reason) for each setting that has no effect according to the rules of its flag."""
    for setting, entry in SETTINGS.items():
        needed = entry.flag.used_with
        for condition in entry.flag.unused_with:
            if _is_given(config, condition):
                yield setting, f"with {_flag_text(config, condition)}"
        if needed and not any(_is_given(config, condition) for condition in needed):
            yield setting, f"without {' and '.join(map(_required, needed))}"


def unused_by_choices(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (setting, reason) for each setting that only choices use that are not chosen."""
    for section in SECTIONS:
        for registry, choice in getattr(config, section).choices_made():
            for name in registry.unused_settings(choice):
                if name != "max_position_embeddings":  # it limits --seq-length with every choice
                    yield f"{section}.{name}", f"with {registry.option} {choice}"
    if config.model.rope_scaling_type is None:
        for name in ROPE_SCALINGS.settings():
            yield f"model.{name}", "without --rope-scaling-type"
