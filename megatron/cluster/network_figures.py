"""What preflight has measured of a network, in the file of --network-figures.

A run writes the file (`megatron.cluster.preflight`), a dry run with --gpu reads it. The rates are what one
all-reduce reaches, so a plan takes nothing off them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.errors import UserError
from megatron.files import read_json, write_json

_KIND = "Megatron network figures"
_GB = 1e9


@dataclass(frozen=True)
class NetworkFigures:
    """Rates in bytes per second and direction, of the slowest node.

    node_size: processes of the smallest node. device: name of the devices. intra_bytes_per_s: per device,
    all-reduces within each node at once; None with one process per node. inter_bytes_per_s: per node, an
    all-reduce over all processes; None with one node.
    """

    nodes: int
    node_size: int
    device: str
    backend: str
    intra_bytes_per_s: float | None
    inter_bytes_per_s: float | None

    def __post_init__(self) -> None:
        for name in ("nodes", "node_size"):
            count = getattr(self, name)
            if type(count) is not int or count < 1:
                raise ValueError(f"{name} is {count!r}, expected a number of 1 or more")
        for name in ("device", "backend"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected a name")
        for name in ("intra_bytes_per_s", "inter_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not (type(rate) in (int, float) and 0 < rate < math.inf):
                raise ValueError(f"{name} is {rate!r}, expected bytes per second or null")

    def describe(self) -> str:
        """One line for the plan."""
        rates = {"per device within a node": self.intra_bytes_per_s, "per node": self.inter_bytes_per_s}
        shown = [f"{rate / _GB:.2f} GB/s {where}" for where, rate in rates.items() if rate is not None]
        return (
            f"{', '.join(shown) or 'nothing'}, measured with {self.backend} on {self.nodes} node(s) of "
            f"{self.node_size} x {self.device}"
        )


def write_network_figures(path: str, figures: NetworkFigures) -> None:
    """OSError if the file cannot be written."""
    write_json(Path(path), {"kind": _KIND, **dataclasses.asdict(figures)})


def read_network_figures(config: Config) -> NetworkFigures | None:
    """The figures of --network-figures; None without the flag. UserError for a file that does not exist,
    is damaged, or was not written by a run."""
    path = config.parallel.network_figures
    if path is None:
        return None
    try:
        value = read_json(Path(path))
        return _checked(value)
    except FileNotFoundError:
        raise UserError(
            f"--network-figures {path} does not exist: a run of several processes with this flag measures "
            "the network and writes it"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"--network-figures {path} cannot be read ({error}): give a file that a run with this flag has "
            "written"
        ) from error


def _checked(value: Any) -> NetworkFigures:
    if not isinstance(value, dict) or value.pop("kind", None) != _KIND:
        raise ValueError(f"it is not of the kind {_KIND!r}")
    expected = {field.name for field in dataclasses.fields(NetworkFigures)}
    if value.keys() != expected:
        raise ValueError(f"it has {', '.join(sorted(value)) or 'no figures'}; expected {sorted(expected)}")
    return NetworkFigures(**value)
