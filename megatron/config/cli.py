"""The command line: flags that are generated from the config sections, and the errors of what a user
typed."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.config.checkpoint_args import (
    ReadSavedConfig,
    add_branch_settings,
    add_checkpoint_args,
    check_branch_flags,
)
from megatron.config.config import SECTIONS, Config
from megatron.config.data import SPLIT_NAMES, read_data_args, read_groups_file, read_per_split_data_args
from megatron.config.fields import (
    COMMON_FLAGS,
    Flag,
    InvalidSettings,
    flag_of,
    option_name,
    setting_option,
    value_text,
)
from megatron.config.mistakes import Mistakes
from megatron.config.peer_flags import IGNORED_FLAGS, REWRITTEN_FLAGS, IgnoredFlag, rewrite, unsupported
from megatron.config.rules import risk_notes, unused_setting_notes
from megatron.config.sections.checkpoint import CheckpointConfig
from megatron.config.tool_parser import FLAG, CollectingParser, nearest_flag, typed_name
from megatron.config.validate import mistakes_of
from megatron.errors import ConfigError, one_line

# The groups of --help: the common flags, then Megatron-LM's groups in its order, and 'stability'.
HELP_GROUPS = (
    COMMON_FLAGS,
    "network size",
    "rotary embeddings",
    "regularization",
    "training",
    "stability",
    "initialization",
    "learning rate",
    "checkpointing",
    "mixed precision",
    "distributed",
    "validation",
    "data and dataloader",
    "logging",
)


@dataclass(frozen=True)
class CommandLine:
    """A parsed and validated command line. notes: sentences to log once."""

    config: Config
    notes: tuple[str, ...]


# Reads the file of --deepspeed_config and adds its mistakes: returns the config with its settings, and notes.
ReadDeepSpeedConfig = Callable[[Config, Mistakes], tuple[Config, tuple[str, ...]]]


def read_command_line(
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] = os.environ,
    read_saved_config: ReadSavedConfig | None = None,
    read_deepspeed_config: ReadDeepSpeedConfig | None = None,
    mistakes: Mistakes | None = None,
) -> CommandLine:
    """Parses and validates argv (None: sys.argv[1:]). Raises a ConfigError with all mistakes, if there are
    any.

    read_saved_config: reads the configuration of a checkpoint, for --use-checkpoint-args and --branch-at.
    mistakes: found before.
    """
    mistakes = mistakes or Mistakes()
    given = _parse(sys.argv[1:] if argv is None else argv, mistakes)
    settings, typed = given.settings, set(given.settings)
    _apply_launcher_env(settings, env, mistakes)
    _read_data_files(settings, mistakes)
    with mistakes.collect():
        _use_hugging_face(settings)
    notes = [*given.notes]
    of_model = [option_name(field.name) for field in dataclasses.fields(SECTIONS["model"])]
    with mistakes.collect(of_model):
        notes += _use_checkpoint_args(settings, read_saved_config)
    with mistakes.collect(["--train-iters", "--train-samples", "--lr"]):
        notes += _use_branch_point(settings, read_saved_config)
    _fill_in_required(settings, mistakes)
    sections = {name: _section(name, settings, mistakes) for name in SECTIONS}
    parallel = sections["parallel"]
    if not mistakes.unknown.isdisjoint(_LAYOUT):  # checked as if there was one replica
        sections["parallel"] = dataclasses.replace(parallel, world_size=parallel.ranks_per_replica)
    flags = config = Config(**sections)
    if read_deepspeed_config is not None:
        config, more = read_deepspeed_config(config, mistakes)
        notes += more
    mistakes.extend(mistakes_of(config))
    mistakes.raise_all()
    return CommandLine(config, (*notes, *unused_setting_notes(flags, typed), *risk_notes(flags)))


_LAYOUT = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
    "--world-size",
)


def _section(name: str, settings: Mapping[str, Any], mistakes: Mistakes) -> Any:
    """Returns a section. A setting with an invalid value has its default, or the smallest valid value."""
    kind, values = SECTIONS[name], _section_settings(settings, name)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    while True:
        unknown = [field for field in fields.values() if option_name(field.name) in mistakes.unknown]
        if any(flag_of(field).choices is None for field in unknown):  # what is derived from it is unknown
            derived = {field.name for field in fields.values() if flag_of(field).derived} - values.keys()
            mistakes.unknown |= set(map(option_name, derived))
        try:
            return kind(**values)
        except InvalidSettings as error:
            for field_name, sentence in error.mistakes.items():
                mistakes.add(sentence, [option_name(field_name)])
                field = fields[field_name]
                if values.pop(field_name, None) is None or field.default is dataclasses.MISSING:
                    values[field_name] = _smallest(field)


def _smallest(field: dataclasses.Field[Any]) -> Any:
    return flag_of(field).at_least or 1


def parse_args(argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> Config:
    """Returns the config of `read_command_line`, without the notes."""
    return read_command_line(argv, env).config


def complete_command_line() -> None:
    """Answers a shell that asks for completions (Tab), and exits. Does nothing without argcomplete."""
    if "_ARGCOMPLETE" in os.environ:
        with suppress(ImportError):
            import argcomplete

            argcomplete.autocomplete(make_parser())


def make_parser() -> CollectingParser:
    """Returns the parser. It stores each given flag under 'section.field' or '--ignored-flag'."""
    parser = _Parser(
        prog=typed_name("pretrain_gpt.py"),
        usage="%(prog)s FLAGS",
        description="Trains a GPT with tensor, pipeline and data parallelism. Documentation: docs/README.md.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
    )
    groups = {title: parser.add_argument_group(title) for title in HELP_GROUPS}
    for section, kind in SECTIONS.items():
        types = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            group = groups[flag_of(field).group or kind.group]
            _add_field(group, f"{section}.{field.name}", field, types[field.name])
    _add_ignored_flags(parser)
    return parser


class _Parser(CollectingParser):
    """Understands flags of other frameworks."""

    def rejection(self, message: str) -> str:
        names, colon, complaint = message.removeprefix("argument ").partition(": ")
        option = names.split("/")[0]
        if complaint.startswith(option):  # of a `_Converter`
            return complaint
        return f"{option}: {complaint}; see --help" if colon else f"{message}: see --help"

    def unknown_flag(self, name: str) -> str:
        if (stands_for := REWRITTEN_FLAGS.get(name)) is not None:
            return f"{name} takes no value; it is read as {' '.join(stands_for)}"
        if instead := unsupported(name):
            return f"{name} is not supported: {instead}"
        return nearest_flag(name, self._option_string_actions.keys() - {flag.name for flag in IGNORED_FLAGS})

    def collect(self, words: Sequence[str], mistakes: Mistakes) -> argparse.Namespace:
        words, notes = rewrite(_join_checked_values(words))
        namespace = super().collect(words, mistakes)
        if notes:
            setattr(namespace, _NOTES, (*getattr(namespace, _NOTES, ()), *notes))
        return namespace


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _split_lines(self, text: str, width: int) -> list[str]:
        wrap = partial(textwrap.wrap, width=width, break_on_hyphens=False)  # flags stay on one line
        text, *choices = text.splitlines()
        return [*wrap(text), *(line for choice in choices for line in wrap(choice, subsequent_indent="    "))]

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = partial(textwrap.wrap, width=width, break_on_hyphens=False, initial_indent=indent)
        lines = (wrap(line, subsequent_indent=f"{indent}    ") for line in text.splitlines())
        return "\n".join("\n".join(line) for line in lines)


@dataclass(frozen=True)
class _Given:
    """The given flags. settings: by 'section.field'. notes: on repeated flags and flags of other
    frameworks."""

    settings: dict[str, Any]
    notes: tuple[str, ...]


def _parse(argv: Sequence[str], mistakes: Mistakes) -> _Given:
    values = vars(make_parser().collect(argv, mistakes))
    notes = values.pop(_NOTES, ())
    ignored = {flag.name: flag for flag in IGNORED_FLAGS if flag.name in values}
    settings = {name: value for name, value in values.items() if name not in ignored}
    mistakes.extend(_rejected_values(ignored.values(), values))
    for flag in ignored.values():
        if flag.only_in_plans and not settings.get("training.dry_run"):
            mistakes.add(f"{flag.name} is not supported: {flag.reason}")
        if flag.not_with in settings:
            mistakes.add(
                f"{flag.name} is not supported with {setting_option(flag.not_with)}: remove one of them"
            )
    return _Given(settings, (*(flag.note for flag in ignored.values()), *notes))


def _join_checked_values(argv: Sequence[str]) -> list[str]:
    """Joins each ignored flag that accepts only certain values with all words up to the next flag: '--flag=a
    b'. Surplus values are then part of this flag's error."""
    checked = {flag.name for flag in IGNORED_FLAGS if flag.values is not None}
    words: list[str] = []
    for word in argv:
        if words and not FLAG.match(word) and words[-1].partition("=")[0] in checked:
            words[-1] += (" " if "=" in words[-1] else "=") + word
        else:
            words.append(word)
    return words


def _rejected_values(flags: Iterable[IgnoredFlag], values: Mapping[str, Any]) -> Iterator[str]:
    """Yields the errors for values that ignored flags do not accept."""
    for flag in flags:
        if flag.values is not None and values[flag.name] not in flag.values:
            instead = f"; {flag.otherwise}" if flag.otherwise else ""
            yield f"{flag.name} is '{values[flag.name]}': expected {' or '.join(flag.values)}{instead}"


_NOTES = "(notes)"


class _Store(argparse.Action):
    """Stores the converted value. The last value of a repeated flag is used, with a note."""

    def __init__(self, *, convert: _Converter, choices: Iterable[str] | None = None, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.convert = convert
        if choices is not None:
            self.completer = lambda **_: choices  # argcomplete reads it; argparse would check `self.choices`

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        try:
            value = self.convert(values)
        except ConfigError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        before = getattr(namespace, self.dest, value)
        if before != value:
            notes = getattr(namespace, _NOTES, ())
            note = f"{option} is given more than once: the last value, {value_text(value)}, is used"
            setattr(namespace, _NOTES, (*notes, note))
        setattr(namespace, self.dest, value)


@dataclass(frozen=True)
class _Converter:
    """Converts the words of the command line to the value of one field."""

    option: str
    kind: type[Any]
    strip_quotes: bool

    def __call__(self, words: str | Sequence[str]) -> Any:
        if isinstance(words, str):
            return self._one(words)
        return tuple(self._one(word) for word in words)

    def _one(self, word: str) -> Any:
        if self.strip_quotes:
            word = word.strip("'\"")
        if not word:
            raise ConfigError(f"{self.option} is empty: give a value (is a shell variable unset?)")
        if self.kind is str:
            return word
        try:
            return self.kind(word)
        except ValueError:
            expected = "an integer" if self.kind is int else "a number"
            raise ConfigError(f"{self.option} is '{word}': expected {expected}") from None


def _switch(option: str, word: str) -> bool:
    """Returns True for a switch that old scripts give with the value 1."""
    if word.lower() not in ("1", "true"):
        raise ConfigError(f"{option} is '{word}': expected no value, or 1; remove the flag to turn it off")
    return True


def _add_field(group: Any, dest: str, field: dataclasses.Field[Any], annotation: Any) -> None:
    description = flag_of(field)
    names = (option_name(field.name), *description.aliases)
    text = _help_text(field, description)
    kind = value_type(annotation)
    if kind is bool and description.metavar is not None:
        group.add_argument(
            *names,
            dest=dest,
            action=_Store,
            convert=partial(_switch, names[0]),
            nargs="?",
            const="1",
            metavar=description.metavar,
            help=text,
        )
        return
    if kind is bool:
        group.add_argument(*names, dest=dest, action="store_true", default=argparse.SUPPRESS, help=text)
        return
    metavar = description.metavar or (
        "{" + ",".join(description.choices) + "}" if description.choices else None
    )
    group.add_argument(
        *names,
        dest=dest,
        action=_Store,
        convert=_Converter(names[0], kind, description.strip_quotes),
        choices=() if kind in (int, float) else description.choices,
        nargs=description.nargs,
        metavar=metavar or {int: "N", float: "X", str: "TEXT"}[kind],
        help=text,
    )


def value_type(annotation: Any) -> type[Any]:
    """Returns the type of a single value: int for `int | None` and for `tuple[int, int, int] | None`."""
    arguments = [part for part in typing.get_args(annotation) if part not in (type(None), Ellipsis)]
    return value_type(arguments[0]) if arguments else annotation


def _help_text(field: dataclasses.Field[Any], description: Flag) -> str:
    text, *choices = description.help.split("\n")
    if description.registry is not None:
        choices = description.registry.describe()
    default = default_text(field)
    if default:
        text += f" ({default})" if default == "required" else f" (default: {default})"
    return "\n  ".join([text, *choices]).replace("%", "%%")


def default_text(field: dataclasses.Field[Any]) -> str:
    """Returns the default of a flag as shown to users: "required", or "" for a flag that is off."""
    if (derived := flag_of(field).derived) is not None:
        return derived
    if field.default is dataclasses.MISSING:
        return "required"
    is_off = field.default is None or field.default is False or field.default == ()
    return "" if is_off else value_text(field.default)


def _add_ignored_flags(parser: argparse.ArgumentParser) -> None:
    by_reason: dict[str, list[str]] = {}
    for flag in IGNORED_FLAGS:
        word = flag.name + (
            " {" + ",".join(flag.values) + "}" if flag.values else " VALUE" * (flag.nargs != 0)
        )
        by_reason.setdefault(flag.reason, []).append(word)
    lines = "\n".join(f"{', '.join(words)}: {reason}" for reason, words in by_reason.items())
    group = parser.add_argument_group("flags of other frameworks (accepted and ignored)", lines)
    for flag in IGNORED_FLAGS:
        how: dict[str, Any] = {"nargs": flag.nargs} if flag.nargs != 0 else {"action": "store_true"}
        group.add_argument(flag.name, dest=flag.name, help=argparse.SUPPRESS, **how)


def _apply_launcher_env(settings: dict[str, Any], env: Mapping[str, str], mistakes: Mistakes) -> None:
    """Sets world size and local rank from the launcher's environment variables."""
    with mistakes.collect(["--local-rank"]):
        if "parallel.local_rank" not in settings and "LOCAL_RANK" in env:
            settings["parallel.local_rank"] = _launcher_number(env, "LOCAL_RANK")
    started = 1
    with mistakes.collect(["--world-size"]):
        started = _launcher_number(env, "WORLD_SIZE") if "WORLD_SIZE" in env else 1
    planned = settings.setdefault("parallel.world_size", started)
    if planned != started and not settings.get("training.dry_run"):
        mistakes.add(
            f"--world-size {planned} does not match the {started} started process(es) (WORLD_SIZE): "
            "remove --world-size, or add --dry-run to plan for another number",
            ["--world-size"],
        )


def _read_data_files(settings: dict[str, Any], mistakes: Mistakes) -> None:
    """Reads the prefixes and weights from the files that name them, which may be missing in a dry run."""
    words: dict[str, Any] = {}
    for name in ("data_path", *(f"{split}_weighted_split_paths" for split in SPLIT_NAMES)):
        field = "data_args_path" if name == "data_path" else f"{name}_path"
        read = read_data_args if name == "data_path" else read_groups_file
        with mistakes.collect([option_name(name), option_name(field)]):
            if file := _file_to_read(settings, field, (name,)):
                words[f"data.{name}"] = read(option_name(field), file)
    per_split = "per_split_data_args_path"
    replaced = tuple(f"{split}_data_path" for split in SPLIT_NAMES)
    with mistakes.collect(map(option_name, (per_split, *replaced))):
        if file := _file_to_read(settings, per_split, replaced):
            found = read_per_split_data_args(option_name(per_split), file)
            words |= {f"data.{split}_data_path": value for split, value in found.items()}
    settings |= words


def _file_to_read(settings: dict[str, Any], field: str, replaced: tuple[str, ...]) -> str | None:
    """Returns the file that a flag of the data names, if it is to be read. replaced: fields of the words in
    the file."""
    file: str | None = settings.get(f"data.{field}")
    if file is None:
        return None
    for name in replaced:
        if f"data.{name}" in settings:
            raise ConfigError(
                f"{option_name(field)} {file} and {option_name(name)} are both given: remove one"
            )
    return file if os.path.exists(file) or not settings.get("training.dry_run") else None


def _use_hugging_face(settings: dict[str, Any]) -> None:
    """Sets the flags that --load-huggingface implies."""
    folder = settings.get("checkpoint.load_huggingface")
    if folder is None:
        return
    if settings.get("checkpoint.load", folder) != folder:
        raise ConfigError(
            f"--load-huggingface {folder} with --load {settings['checkpoint.load']}: a run starts from one "
            "folder; remove one of the flags"
        )
    # A run that has saved checkpoints resumes from --save, even if the folder no longer exists.
    if "checkpoint.save" not in settings and not os.path.isfile(os.path.join(folder, "config.json")):
        raise ConfigError(
            f"--load-huggingface {folder} has no config.json: expected the folder of a Hugging Face model"
        )
    settings["checkpoint.load"] = folder
    settings["checkpoint.use_checkpoint_args"] = True
    if not settings.get("training.no_train"):
        settings["checkpoint.finetune"] = True


def _use_checkpoint_args(settings: dict[str, Any], read: ReadSavedConfig | None) -> list[str]:
    """Adds the checkpoint's flags with --use-checkpoint-args. Returns notes for the log."""
    if not settings.get("checkpoint.use_checkpoint_args"):
        return []
    if "checkpoint.load" not in settings:
        raise ConfigError("--use-checkpoint-args without --load: set --load to the folder of the checkpoint")
    if read is None:
        raise ConfigError("--use-checkpoint-args acts in pretrain_gpt.py only: give the flags of the model")
    saved = read(CheckpointConfig(**_section_settings(settings, "checkpoint")))
    return [add_checkpoint_args(settings, saved)]


def _use_branch_point(settings: dict[str, Any], read: ReadSavedConfig | None) -> list[str]:
    """Adds the schedule of a branch with --branch-at. Returns notes for the log."""
    if "checkpoint.branch_at" not in settings:
        return []
    options = CheckpointConfig(**_section_settings(settings, "checkpoint"))
    check_branch_flags(options, settings)
    if read is None:
        raise ConfigError("--branch-at acts in pretrain_gpt.py only: give the checkpoint's folder to --load")
    return [add_branch_settings(settings, read(options))]


def _launcher_number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(
            f"the environment variable {name} is '{one_line(env[name], 40)}': expected the integer that the "
            "launcher sets"
        ) from None


def _fill_in_required(settings: dict[str, Any], mistakes: Mistakes) -> None:
    """Adds the missing required flags to the mistakes, and to the settings with the smallest values."""
    missing: dict[str, str] = {}
    for section, kind in SECTIONS.items():
        for field in dataclasses.fields(kind):
            name, option = f"{section}.{field.name}", option_name(field.name)
            if field.default is dataclasses.MISSING and name not in settings:
                settings[name] = _smallest(field)
                if option not in mistakes.unknown:
                    missing[name] = f"{option} ({flag_of(field).help.split(':')[0]})"
    if missing:
        of_model = any(name.startswith("model.") for name in missing)
        hint = "; --use-checkpoint-args takes those of the model from the checkpoint in --load"
        sentence = f"missing required flags: {', '.join(missing.values())}"
        mistakes.add(
            sentence + hint * (of_model and "checkpoint.load" in settings), map(setting_option, missing)
        )


def _section_settings(settings: dict[str, Any], section: str) -> dict[str, Any]:
    prefix = section + "."
    return {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}
