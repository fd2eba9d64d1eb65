"""The class of the tables in `registries`, and a choice of a setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

from megatron.errors import ConfigError


@dataclass(frozen=True)
class Choice:
    """One choice of a setting.

    implementation: "module:attribute", or "attribute" of the registry's module. settings: fields of the
    section that this choice uses. They have no effect with choices that do not list them.
    """

    description: str
    implementation: str
    settings: tuple[str, ...] = ()


def load_object(path: str) -> Any:
    """Imports and returns the object at "module:attribute"."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


_ChoiceT = TypeVar("_ChoiceT", bound=Choice)


class Registry(Mapping[str, _ChoiceT], Generic[_ChoiceT]):
    """The choices of the flag `option`: name -> choice. module: module of the implementations that name only
    an attribute."""

    def __init__(self, option: str, choices: Mapping[str, _ChoiceT], module: str = "") -> None:
        self.option = option
        self._choices = dict(choices)
        for name, choice in choices.items():
            if ":" not in choice.implementation:
                full = f"{module}:{choice.implementation}"
                self._choices[name] = dataclasses.replace(choice, implementation=full)

    def __getitem__(self, name: str) -> _ChoiceT:
        if name not in self._choices:
            raise ConfigError(f"{self.option} is '{name}': expected one of {', '.join(self._choices)}")
        return self._choices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)

    def __contains__(self, name: object) -> bool:
        return name in self._choices

    def load(self, name: str) -> Any:
        """Imports and returns the implementation of a choice. Raises ConfigError for an unknown name."""
        return load_object(self[name].implementation)

    def describe(self) -> list[str]:
        """Returns 'name: description' of each choice, for --help."""
        return [f"{name}: {choice.description}" for name, choice in self._choices.items()]

    def settings(self) -> tuple[str, ...]:
        """Returns the settings that at least one choice uses."""
        return tuple(dict.fromkeys(field for choice in self._choices.values() for field in choice.settings))

    def unused_settings(self, name: str) -> tuple[str, ...]:
        """Returns the settings that at least one choice uses, but not the choice `name`."""
        return tuple(field for field in self.settings() if field not in self[name].settings)
