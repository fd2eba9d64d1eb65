"""The preflight checks that all nodes have equal versions, free memory and files, and times an all-reduce.

A run of several processes does this before its first step, in some seconds. If nodes differ, the run ends
with a table that names them. Otherwise the log has one sentence. With --network-figures an all-reduce within
each node is timed, too, and both rates are written to a file that a dry run with --gpu reads. Each rate is
measured without other traffic of the run, and a plan uses it as it is.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron.cluster.devices import TF32_VARIABLES
from megatron.cluster.exit_codes import SharedUserError
from megatron.cluster.launch import node_name, wait_until
from megatron.cluster.rank_reports import FOLDER_VARIABLE
from megatron.config import Config
from megatron.errors import UserError
from megatron.files import is_count, is_text, read_json, write_json
from megatron.kernels.selection import reason_against_kernels, use_pytorch
from megatron.model.attention.choice import flash_attention_remedy, use_flash_attention_3
from megatron.model.attention.self_test import AttentionCase, attention_cases, attention_problem, sdpa_backend
from megatron.mpu.world import broadcast_from_rank_0, gather_from_all_ranks
from megatron.object_store.store import is_url
from megatron.text_table import counted, format_table

# A network file system may show a new file to other nodes with a delay.
_MAX_WAIT_FOR_FILE_S = 10.0
# If a GPU has less free memory than this share of the GPU with the most free memory, another process uses it.
_FREE_MEMORY_SHARE = 0.9
_MESSAGE_BYTES = {"cpu": 2**22, "gpu": 2**27}
_TIMED_CALLS = 3


@dataclass(frozen=True)
class RankInfo:
    """What one rank reports to all ranks. versions: name -> version. data: fingerprint of the data as text.
    free_share: free share of the device's memory, None on a CPU. folder_problems: see `check_shared_folders`.
    all_reduce_bytes_per_s: see `_measure_all_reduce`. node_bytes_per_s: see `_measure_within_node`."""

    rank: int
    node: str
    versions: Mapping[str, str]
    data: str
    free_share: float | None
    folder_problems: Mapping[str, str] = field(default_factory=dict)
    all_reduce_bytes_per_s: float = 0.0
    node_bytes_per_s: float | None = None


def preflight(config: Config, fingerprint: Mapping[str, Any]) -> list[str]:
    """Runs the preflight, and returns sentences for the log. Does nothing with --no-preflight or for a single
    process. With --network-figures rank 0 writes the file of the rates.

    fingerprint: fingerprint of the data as this rank sees them. Collective, after `init_distributed`. Raises
    UserError on every rank, with a table of the differences, if nodes are inconsistent.
    """
    if config.training.no_preflight or dist.get_world_size() == 1:
        return []
    started = time.monotonic()
    own = RankInfo(
        dist.get_rank(),
        node_name(os.environ),
        _versions(),
        str(sorted(fingerprint.items())),
        _free_share(),
        check_shared_folders(
            _folders(config),
            dist.get_rank(),
            config.parallel.local_rank == 0,
            broadcast_from_rank_0(f"{os.getpid()}-{time.time_ns()}"),
            dist.barrier,
        ),
        _measure_all_reduce(),
        None if config.parallel.network_figures is None else _measure_within_node(),
    )
    infos = gather_from_all_ranks(own)
    if differences := find_differences(infos):
        raise UserError(
            "nodes are inconsistent (--no-preflight skips this check):\n" + differences_table(differences)
        )
    problems = _write_figures(config, infos)
    seconds = time.monotonic() - started
    return [f"{describe(infos)}; {seconds:.1f} s (--no-preflight)", *problems]


def check_kernels(required: bool, fp8: bool = False) -> list[str]:
    """Selects the kernels of all ranks, so that replicas stay equal: PyTorch's operations if one rank cannot
    run the Triton kernels on its device, and FlashAttention 3 if all ranks have it. Returns a sentence for
    the log about each selection. Collective, after `init_distributed`.

    required: --require-kernels. fp8: whether linear layers compute in FP8, which PyTorch's operations can
    only emulate on a GPU. In both cases, raises SharedUserError on every rank instead of selecting PyTorch's
    operations.
    """
    device = get_accelerator().device_name()
    _, who, reason = _first_problem("", reason_against_kernels(device))
    if reason is None:
        return use_flash_attention_3() if device == "cuda" else []
    if required:
        raise SharedUserError(f"--require-kernels: {who} cannot run the kernels: {reason}")
    if device == "cpu":
        return []
    if fp8:
        raise SharedUserError(
            f"FP8 needs the Triton kernels: {who} cannot run them: {reason}. Repair this, or remove "
            "--fp8-format and --fp8-recipe"
        )
    use_pytorch()
    return [
        f"all ranks compute with PyTorch's operations, which are slower than the Triton kernels: {who}: "
        f"{reason} (--require-kernels makes this an error)"
    ]


def check_attention(config: Config) -> list[str]:
    """Compares PyTorch's attention on each rank's GPU with fp32 operations, and returns sentences for the
    log. If the attention of one rank is wrong, all ranks stop using cuDNN. Collective, after
    `init_distributed`.

    Raises SharedUserError on every rank if attention is wrong without cuDNN too. Does nothing with
    --no-preflight.
    """
    if get_accelerator().device_name() != "cuda" or config.training.no_preflight:
        return []
    part = " within a chunk" if config.parallel.context_parallel_size > 1 else ""
    return [_check_case(case, part) for case in attention_cases(config)]


def _check_case(case: AttentionCase, part: str) -> str:
    """Returns the sentence of `check_attention` about one case. part: words for the part of a sequence that
    is compared."""
    kernel, who, problem = _attention_problem(case)
    if problem is None:
        feature = "causal attention" if case.window is None else "attention with a window"
        return f"{feature}{part} by PyTorch's {kernel} agrees with fp32 operations"
    if case.window is not None:
        raise SharedUserError(
            f"attention with a window is wrong by PyTorch's {kernel} on {who}: {problem}: "
            f"{flash_attention_remedy()}, or set MEGATRON_KERNELS=pytorch (slower; --no-preflight skips this "
            "check)"
        )
    torch.backends.cuda.enable_cudnn_sdp(False)
    other, where, remaining = _attention_problem(case)
    if remaining is not None:
        raise SharedUserError(
            f"causal attention is wrong by PyTorch's {other} on {where}: {remaining}: "
            f"{flash_attention_remedy()} (--no-preflight skips this check)"
        )
    return f"causal attention is wrong by PyTorch's {kernel} on {who}: {problem}; all ranks use {other}"


def _attention_problem(case: AttentionCase) -> tuple[str, str, str | None]:
    """Returns the back end of attention, and the rank and problem of `_first_problem`. Collective."""
    device = get_accelerator().current_device_name()
    return _first_problem(sdpa_backend(case, device), attention_problem(case, device))


def _first_problem(value: str, problem: str | None) -> tuple[str, str, str | None]:
    """Returns (value, rank and node, problem) of the first rank that has a problem; of rank 0, with the
    problem None, if no rank has one. Collective."""
    found = gather_from_all_ranks((value, node_name(os.environ), problem))
    rank = next((rank for rank, (_, _, problem) in enumerate(found) if problem is not None), 0)
    value, node, problem = found[rank]
    return value, f"rank {rank} on {node}", problem


def describe(infos: Sequence[RankInfo]) -> str:
    """Returns the sentence that the log has if the nodes are consistent."""
    nodes = {info.node for info in infos}
    versions = ", ".join(f"{name} {value}" for name, value in infos[0].versions.items())
    slowest = min(infos, key=lambda info: info.all_reduce_bytes_per_s)
    free = [info.free_share for info in infos if info.free_share is not None]
    return (
        f"preflight: {len(nodes)} node(s), {counted(len(infos), 'process')}, {versions}"
        + (f", {min(free):.0%} of device memory free" if free else "")
        + f"; all-reduce {slowest.all_reduce_bytes_per_s / 1e9:.2f} GB/s per node, least on {slowest.node}"
    )


def find_differences(infos: Sequence[RankInfo]) -> list[tuple[str, str, str]]:
    """Returns a row (node, what, found) for every value that differs from the value of most nodes."""
    rows: dict[tuple[str, str, str], None] = {}
    names = dict.fromkeys(name for info in infos for name in info.versions)
    for name in names:
        values = {info.rank: info.versions.get(name, "missing") for info in infos}
        usual, _ = Counter(values.values()).most_common(1)[0]
        for info in infos:
            if values[info.rank] != usual:
                rows[info.node, name, f"{values[info.rank]}, {usual} on other nodes"] = None
    usual_data, _ = Counter(info.data for info in infos).most_common(1)[0]
    most_free = max((info.free_share for info in infos if info.free_share is not None), default=0.0)
    for info in infos:
        if info.data != usual_data:
            rows[info.node, "--data-path", "data differ from the other nodes"] = None
        if info.free_share is not None and info.free_share < _FREE_MEMORY_SHARE * most_free:
            found = f"rank {info.rank}: {info.free_share:.0%} of device memory free"
            rows[info.node, "memory", f"{found}, up to {most_free:.0%} on other ranks"] = None
        for what, problem in info.folder_problems.items():
            rows[info.node, what, problem] = None
    return list(rows)


def differences_table(rows: Sequence[tuple[str, str, str]]) -> str:
    """Returns the rows of `find_differences` as an aligned table with a heading."""
    return textwrap.indent(format_table([("node", "what", "found"), *rows], left_align=(0, 1, 2)), "  ")


def check_shared_folders(
    folders: Mapping[str, str], rank: int, leads_node: bool, token: str, barrier: Callable[[], object]
) -> dict[str, str]:
    """Returns the problems of folders that all nodes must share: name of the folder ('--save') -> problem.

    The first rank of each node creates a file in each folder and looks for the file of rank 0. leads_node:
    whether this is the first rank of its node. token: a text that is equal on all ranks and different in each
    run. Collective: all ranks call `barrier`.
    """
    problems = {}
    own = {name: Path(folder) / f".preflight-{token}-{rank}" for name, folder in folders.items()}
    marks = {name: Path(folder) / f".preflight-{token}-0" for name, folder in folders.items()}
    for name, path in own.items() if leads_node else ():
        try:
            path.touch()
        except OSError as error:
            problems[name] = f"{folders[name]} cannot be written ({error.strerror})"
    barrier()
    if leads_node:
        for name, path in marks.items():
            if name not in problems and not wait_until(path.exists, _MAX_WAIT_FOR_FILE_S, 0.1):
                problems[name] = (
                    f"{folders[name]} is not the folder that rank 0 sees: it does not contain rank 0's file"
                )
    barrier()
    for path in own.values():
        with suppress(OSError):
            path.unlink()
    return problems


def _folders(config: Config) -> dict[str, str]:
    folders = {"--save": config.checkpoint.save, FOLDER_VARIABLE: os.environ.get(FOLDER_VARIABLE)}
    return {name: folder for name, folder in folders.items() if folder and not is_url(folder)}


def _versions() -> dict[str, str]:
    versions = {"Python": platform.python_version(), **{n: version(n) for n in ("torch", "deepspeed")}}
    versions |= {name: os.environ[name] for name in TF32_VARIABLES if name in os.environ}
    if torch.cuda.is_available():
        versions["device"] = torch.cuda.get_device_name()
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _free_share() -> float | None:
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return free / total


def network_figures(infos: Sequence[RankInfo], device: str, backend: str) -> NetworkFigures:
    """Returns the network rates of the slowest node."""
    nodes = Counter(info.node for info in infos)
    within = [info.node_bytes_per_s for info in infos if info.node_bytes_per_s is not None]
    between = min(info.all_reduce_bytes_per_s for info in infos) if len(nodes) > 1 else None
    return NetworkFigures(
        len(nodes), min(nodes.values()), device, backend, min(within) if within else None, between
    )


def _write_figures(config: Config, infos: Sequence[RankInfo]) -> list[str]:
    """Writes the file of --network-figures on rank 0. Returns a sentence if it cannot be written."""
    path = config.parallel.network_figures
    if path is None or dist.get_rank() != 0:
        return []
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    try:
        write_network_figures(path, network_figures(infos, device, dist.get_backend()))
    except OSError as error:
        return [f"--network-figures {path} cannot be written ({error.strerror})"]
    return []


def _measure_within_node() -> float | None:
    """Returns the rate of `_measure_all_reduce` within this node, measured at the same time on all nodes;
    None on a node with one process. Collective."""
    names = gather_from_all_ranks(node_name(os.environ))
    own = [rank for rank, name in enumerate(names) if name == names[dist.get_rank()]]
    if len(own) == 1:
        dist.barrier()
        return None
    # Only the ranks of the node create the group. If all ranks took part, the time would grow with the number
    # of nodes.
    group = dist.new_group(own, use_local_synchronization=True)
    dist.barrier()
    found = _measure_all_reduce(group)
    dist.destroy_process_group(group)
    return found


def _measure_all_reduce(group: dist.ProcessGroup | None = None) -> float:
    """Returns the bytes per second that each node sends and receives during an all-reduce of one tensor over
    all ranks, as the median of several calls. With `group`, returns the bytes per second of each rank of the
    group.

    In a ring of n ranks every rank sends 2 (n - 1) / n of the tensor, and one rank per node sends to the next
    node. Collective.
    """
    accelerator = get_accelerator()
    kind = "cpu" if accelerator.device_name() == "cpu" else "gpu"
    message = torch.zeros(_MESSAGE_BYTES[kind] // 4, device=accelerator.current_device_name())
    seconds = []
    for _ in range(1 + _TIMED_CALLS):  # the first call opens the connections
        dist.barrier(group)
        accelerator.synchronize()
        started = time.perf_counter()
        dist.all_reduce(message, group=group)
        accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    ranks = dist.get_world_size(group)
    return 2 * (ranks - 1) / ranks * _MESSAGE_BYTES[kind] / statistics.median(seconds[1:])


_KIND = "Megatron network figures"
_GB = 1e9


@dataclass(frozen=True)
class NetworkFigures:
    """Rates of the slowest node, in bytes per second and direction.

    node_size: number of processes on the smallest node. device: name of the devices. intra_bytes_per_s: rate
    of a device, in all-reduces within all nodes at the same time; None with one process per node.
    inter_bytes_per_s: rate of a node, in an all-reduce over all processes; None with one node.
    """

    nodes: int
    node_size: int
    device: str
    backend: str
    intra_bytes_per_s: float | None
    inter_bytes_per_s: float | None

    def __post_init__(self) -> None:
        for name in ("nodes", "node_size"):
            if not is_count(getattr(self, name), 1):
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected a number of 1 or more")
        for name in ("device", "backend"):
            if not is_text(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected a name")
        for name in ("intra_bytes_per_s", "inter_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not (type(rate) in (int, float) and 0 < rate < math.inf):
                raise ValueError(f"{name} is {rate!r}, expected bytes per second or null")

    def describe(self) -> str:
        """Returns one line for the plan."""
        rates = {"per device within a node": self.intra_bytes_per_s, "per node": self.inter_bytes_per_s}
        shown = [f"{rate / _GB:.2f} GB/s {where}" for where, rate in rates.items() if rate is not None]
        return (
            f"{', '.join(shown) or 'nothing'}, measured with {self.backend} on {self.nodes} node(s) of "
            f"{self.node_size} x {self.device}"
        )


def write_network_figures(path: str, figures: NetworkFigures) -> None:
    """Writes the file of --network-figures. Raises OSError if it cannot be written."""
    write_json(Path(path), {"kind": _KIND, **asdict(figures)})


def read_network_figures(config: Config) -> NetworkFigures | None:
    """Reads the file of --network-figures; returns None without the flag. Raises UserError for a file that
    does not exist, is damaged, or was not written by a run."""
    path = config.parallel.network_figures
    if path is None:
        return None
    try:
        return _checked(read_json(Path(path)))
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
    expected = {field.name for field in fields(NetworkFigures)}
    if value.keys() != expected:
        raise ValueError(f"it has {', '.join(sorted(value)) or 'no figures'}; expected {sorted(expected)}")
    return NetworkFigures(**value)
