"""Reads pickles as data: nothing is imported, and only functions that the caller passes are called.

Python's own unpicklers are not safe even with a list of allowed names. They allocate what a few bytes request
(`bytearray(n)`, a memo index), hash nested tuples without a limit, and build values that overflow the stack
of code that walks through them. This module executes the opcodes of a pickle itself, with these limits:

- work: `_MAX_STEPS` opcodes and elements passed to calls, which also limits memory;
- result: `_MAX_DEPTH` levels, no cycles, and `_MAX_NODES` values, with shared ones counted as often as they
  are reached, so that any walk through it ends.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

_MAX_STEPS = 1 << 20
_MAX_NODES = 1 << 22
_MAX_DEPTH = 64
# Random generators of torch and numpy have integers of 128 bits.
_MAX_INT_BITS = 512
_MAX_KEY_LENGTH = 16


class PickleError(ValueError):
    """The pickle is damaged, or it holds more than data."""


class HostilePickle(PickleError):
    """The pickle requires more memory or time than a pickle of data."""


class Stub:
    """Stands for an object of a class that is not imported. origin: full name of the class. constructor_args:
    its arguments. Other attributes: those that were saved."""

    # Slots take precedence over attributes from the file.
    __slots__ = ("origin", "constructor_args", "__dict__", "__weakref__")

    def __init__(self, origin: str, constructor_args: tuple[Any, ...] = ()) -> None:
        self.origin, self.constructor_args = origin, constructor_args


class StubType:
    """A class that is not imported; its instances become `Stub`."""

    __slots__ = ("origin",)

    def __init__(self, origin: str) -> None:
        self.origin = origin


class Function:
    """A function that a pickle may call. It raises PickleError for unexpected arguments."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


_MARK = object()


def read_pickle(content: bytes, find: Callable[[str, str], Any], persistent: Callable[[Any], Any]) -> Any:
    """The value that was pickled.

    find: (module, name) -> a `Function`, a `StubType` or a value, or raises. persistent: persistent id ->
    value, or raises. Raises PickleError, or ValueError for a truncated opcode.
    """
    machine = _Machine(find, persistent)
    for steps, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name == "STOP":
            value = machine.pop()
            check_bounded(value)
            return value
        if steps > _MAX_STEPS:
            break
        machine.step(opcode.name, argument)
    raise HostilePickle(f"it has more than {_MAX_STEPS:,} instructions")


class _Machine:
    """Executes a pickle: its stack and memo."""

    def __init__(self, find: Callable[[str, str], Any], persistent: Callable[[Any], Any]) -> None:
        self._find, self._persistent = find, persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._elements = 0

    def step(self, name: str, argument: Any) -> None:
        """Executes an opcode."""
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            if type(argument) is int and argument.bit_length() > _MAX_INT_BITS:
                raise HostilePickle(f"it holds a number of {argument.bit_length():,} bits")
            self._stack.append(argument)
        elif name in _EMPTY:
            self._stack.append(_EMPTY[name]())
        elif name in ("PROTO", "FRAME"):
            pass
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = self._top()
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            if argument not in self._memo:
                raise PickleError(f"memo {argument} is not set")
            self._stack.append(self._memo[argument])
        elif name == "GLOBAL":
            module, _, attribute = argument.partition(" ")
            self._stack.append(self._find(module, attribute))
        else:
            handler = _HANDLERS.get(name)
            if handler is None:
                raise PickleError(f"instruction {name}, which no checkpoint uses")
            handler(self)

    def pop(self) -> Any:
        """Removes and returns the value on top of the stack."""
        value = self._top()
        del self._stack[-1]
        return value

    def _top(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise PickleError("its stack is empty")
        return self._stack[-1]

    def _pop_to_mark(self) -> list[Any]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                values = self._stack[index + 1 :]
                del self._stack[index:]
                return values
        raise PickleError("its stack has no mark")

    def _mark(self) -> None:
        self._stack.append(_MARK)

    def _pop_any(self) -> None:
        if not self._stack:
            raise PickleError("its stack is empty")
        self._stack.pop()

    def _duplicate(self) -> None:
        self._stack.append(self._top())

    def _tuple(self, length: int) -> None:
        values = [self.pop() for _ in range(length)]
        self._stack.append(tuple(reversed(values)))

    def _dict(self) -> None:
        result: dict[Any, Any] = {}
        _set_items(result, self._pop_to_mark())
        self._stack.append(result)

    def _append(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            raise PickleError(f"it appends to a {type(target).__name__}")
        target.extend(values)

    def _set(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) not in (dict, OrderedDict):
            raise PickleError(f"it sets items of a {type(target).__name__}")
        _set_items(target, values)

    def _set_one(self) -> None:
        value, key = self.pop(), self.pop()
        self._set([key, value])

    def _add(self) -> None:
        values, target = self._pop_to_mark(), self._top()
        if type(target) is not set:
            raise PickleError(f"it adds to a {type(target).__name__}")
        target.update(map(check_key, values))

    def _global(self) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise PickleError("the name of a class is not text")
        self._stack.append(self._find(module, name))

    def _reduce(self) -> None:
        arguments, function = self.pop(), self.pop()
        if type(arguments) is not tuple:
            raise PickleError("it calls a function without a tuple of arguments")
        self._elements += sum(map(_cost, arguments))
        if self._elements > _MAX_STEPS:
            raise HostilePickle("the arguments of its functions exceed the limit")
        if isinstance(function, StubType):
            self._stack.append(Stub(function.origin, arguments))
        elif isinstance(function, Function):
            self._stack.append(function.call(*arguments))
        else:
            raise PickleError(f"it calls a {type(function).__name__}")

    def _new(self) -> None:
        if not isinstance(self._stack[-2] if len(self._stack) > 1 else None, StubType):
            raise PickleError("it creates an object without a class")
        self._reduce()

    def _build(self) -> None:
        state, target = self.pop(), self._top()
        if isinstance(target, Stub):
            # (attributes, slots) if the class has slots.
            parts = state if type(state) is tuple and len(state) == 2 else (state,)
            if all(part is None or _is_attributes(part) for part in parts):
                for part in parts:
                    target.__dict__.update(part or {})
            else:
                target.__dict__["state"] = state
        elif type(target) is not OrderedDict:  # torch's metadata of a module: not needed
            raise PickleError(f"it would change a {type(target).__name__}")

    def _persistent_id(self) -> None:
        self._stack.append(self._persistent(self.pop()))


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_LITERALS = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE "
    "BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8".split()
)
_HANDLERS: dict[str, Callable[[_Machine], None]] = {
    "MARK": _Machine._mark,
    "POP": _Machine._pop_any,
    "POP_MARK": lambda machine: machine._pop_to_mark() and None,
    "DUP": _Machine._duplicate,
    "LIST": lambda machine: machine._stack.append(machine._pop_to_mark()),
    "TUPLE": lambda machine: machine._stack.append(tuple(machine._pop_to_mark())),
    "TUPLE1": lambda machine: machine._tuple(1),
    "TUPLE2": lambda machine: machine._tuple(2),
    "TUPLE3": lambda machine: machine._tuple(3),
    "DICT": _Machine._dict,
    "APPEND": lambda machine: machine._append([machine.pop()]),
    "APPENDS": lambda machine: machine._append(machine._pop_to_mark()),
    "SETITEM": _Machine._set_one,
    "SETITEMS": lambda machine: machine._set(machine._pop_to_mark()),
    "ADDITEMS": _Machine._add,
    "FROZENSET": lambda machine: machine._stack.append(frozenset(map(check_key, machine._pop_to_mark()))),
    "STACK_GLOBAL": _Machine._global,
    "REDUCE": _Machine._reduce,
    "NEWOBJ": _Machine._new,
    "BUILD": _Machine._build,
    "BINPERSID": _Machine._persistent_id,
}


def _cost(argument: Any) -> int:
    """Cost of copying an argument, in list elements; text costs less per character."""
    if isinstance(argument, (str, bytes)):
        return len(argument) // 16
    return len(argument) if isinstance(argument, (list, tuple, dict, set, frozenset)) else 0


def check_key(key: Any) -> Any:
    """Returns the key of a dict or the element of a set if it can be hashed in bounded time and depth."""
    if type(key) is tuple and len(key) <= _MAX_KEY_LENGTH and not any(type(part) is tuple for part in key):
        for part in key:
            check_key(part)
    elif key is not None and type(key) not in (str, bytes, int, float, bool, Stub):
        raise PickleError(f"a {type(key).__name__} is the key of a dict or in a set")
    return key


def _set_items(target: dict[Any, Any], values: list[Any]) -> None:
    if len(values) % 2:
        raise PickleError("a key without a value")
    for key, value in zip(values[::2], values[1::2], strict=True):
        target[check_key(key)] = value


def _is_attributes(state: Any) -> bool:
    return isinstance(state, dict) and all(type(key) is str for key in state)


def check_bounded(value: Any) -> None:
    """Raises HostilePickle for a value that is too deep, has cycles, or is too large to walk through."""
    sizes: dict[int, int] = {}
    # The containers on the current path, outermost first: id, next children, size so far.
    path: list[tuple[int, Iterator[Any], list[int]]] = []

    def enter(container: Any) -> None:
        if len(path) == _MAX_DEPTH:
            raise HostilePickle(f"it is nested more than {_MAX_DEPTH} levels deep")
        path.append((id(container), _children(container), [1]))

    if _is_container(value):
        enter(value)
    while path:
        own, children, size = path[-1]
        for child in children:
            if not _is_container(child):
                size[0] += 1
            elif id(child) in sizes:
                size[0] += sizes[id(child)]
            elif any(id(child) == outer for outer, _, _ in path):
                raise HostilePickle("it contains itself")
            else:
                enter(child)
                break
        else:
            path.pop()
            sizes[own] = size[0]
            if path:
                path[-1][2][0] += size[0]
        if size[0] > _MAX_NODES:
            raise HostilePickle(f"it has more than {_MAX_NODES:,} values")


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict, set, frozenset, Stub))


def _children(container: Any) -> Iterator[Any]:
    if isinstance(container, dict):
        return (entry for pair in container.items() for entry in pair)
    if isinstance(container, Stub):
        return iter((container.constructor_args, container.__dict__))
    return iter(container)
