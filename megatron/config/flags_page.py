"""Prints docs/flags.md, the reference of all flags: python -m megatron.config.flags_page > docs/flags.md

With --other-frameworks it prints the tables of docs/migration.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from megatron.config.config import SETTINGS, Setting
from megatron.config.fields import bounds_of
from megatron.config.flag_parser import HELP_GROUPS, default_text
from megatron.config.foreign_flags import IgnoredFlag, foreign_flags

_FLAGS_PER_ROW = 6
_HEAD = """# Flags

All flags of `pretrain_gpt.py`, grouped as in `--help`. The page is generated from `megatron/config`:

```bash
.venv/bin/python -m megatron.config.flags_page > docs/flags.md
```"""


def flags_page() -> str:
    """Returns the Markdown page."""
    groups: dict[str, list[str]] = {title: [] for title in HELP_GROUPS}
    for setting in SETTINGS.values():
        groups[setting.group].append(_row(setting))
    parts = [_HEAD]
    for title, rows in groups.items():
        table = "\n".join(["| flag | value | default | meaning |", "|---|---|---|---|", *rows])
        parts.append(f"## {title[0].upper()}{title[1:]}\n\n{table}")
    parts.append("Flags of other frameworks: [migration.md](migration.md).")
    return "\n\n".join(parts) + "\n"


def other_frameworks_tables() -> str:
    """Returns the tables of docs/migration.md: flags of other frameworks, and how they are treated."""
    flags = foreign_flags()
    ignored = _rows_by_answer(
        (f"{_code(flag.name)} {', '.join(map(_code, flag.values or ()))}".rstrip(), _reason(flag))
        for flag in flags.ignored.values()
    )
    rewritten = [f"| {_code(name)} | {_code(' '.join(words))} |" for name, words in flags.rewritten.items()]
    rewritten += [
        f"| {_code(f'{setting.option} {value}')} | {_code(f'{setting.option} {instead}')} |"
        for setting in SETTINGS.values()
        for value, instead in setting.flag.spellings.items()
    ]
    rejected = [
        (_code(f"{setting.option} {value}"), answer)
        for setting in SETTINGS.values()
        for value, answer in setting.flag.rejected.items()
    ]
    unsupported = [(_code(name), answer) for name, answer in flags.unsupported.items()]
    of_families = [pair for pair in unsupported if pair[0].endswith("*`")]
    rejected += [pair for pair in unsupported if pair not in of_families]
    tables = (
        ("### Renamed: read as flags of this program", "is read as", rewritten),
        ("### Automatic: accepted and ignored", "why it has no effect", ignored),
        ("### Not supported, and what to do instead", "instead", _rows_by_answer(rejected)),
        (
            "Flags that begin with one of these words are not supported, unless a table above or flags.md "
            "lists them:",
            "instead",
            _rows_by_answer(of_families),
        ),
    )
    return "\n\n".join(
        "\n".join([title, "", f"| flag | {column} |", "|---|---|", *rows]) for title, column, rows in tables
    )


def _rows_by_answer(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Returns the rows of a table: flags with one answer are in one row, up to `_FLAGS_PER_ROW` of them.

    pairs: (flag in Markdown, answer).
    """
    flags: dict[str, list[str]] = {}
    for flag, answer in pairs:
        flags.setdefault(answer, []).append(flag)
    return [
        f"| {', '.join(names[i : i + _FLAGS_PER_ROW])} | {_escaped(answer)} |"
        for answer, names in flags.items()
        for i in range(0, len(names), _FLAGS_PER_ROW)
    ]


def _reason(flag: IgnoredFlag) -> str:
    return f"{flag.reason}; with experts: {flag.otherwise}" if flag.only_without_experts else flag.reason


def _row(setting: Setting) -> str:
    flag, names = setting.flag, ", ".join(map(_code, setting.options))
    help = _escaped(flag.help).replace("\n", "<br>")
    if flag.registry is not None:
        choices = (f"{_code(name)}: {_escaped(c.description)}" for name, c in flag.registry.items())
        help = f"{help}<br>{'<br>'.join(choices)}"
    return f"| {names} | {_value(setting)} | {_default(setting)} | {help} |"


def _value(setting: Setting) -> str:
    flag, kind = setting.flag, setting.kind
    if flag.choices is not None:
        return ", ".join(map(_code, flag.choices))
    if kind is bool:
        return ""
    text = {int: "integer", float: "number", str: "text"}[kind]
    if isinstance(flag.metavar, str):
        text = _code(flag.metavar)
    elif flag.metavar is not None:
        text = _code(" ".join(flag.metavar))
    many = {"+": ", one or more", "*": ", any number"}.get(str(flag.nargs), "")
    bounds = ", ".join(f"{sign} {bound}" for _, sign, bound, _ in bounds_of(flag))
    return f"{text}{many} {bounds}".strip()


def _default(setting: Setting) -> str:
    default = default_text(setting)
    is_value = setting.flag.derived is None and not setting.is_required
    return _code(default) if is_value and default else _escaped(default)


def _code(text: str) -> str:
    return f"`{_escaped(text)}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints docs/flags.md.")
    parser.add_argument(
        "--other-frameworks", action="store_true", help="the tables of docs/migration.md instead"
    )
    print(f"{other_frameworks_tables()}\n" if parser.parse_args().other_frameworks else flags_page(), end="")


if __name__ == "__main__":
    main()
