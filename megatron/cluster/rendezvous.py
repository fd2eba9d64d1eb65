"""Rendezvous: the processes of a run connect to one store, and rank 0 compares their flags.

torch's rendezvous waits silently and does not compare flags, so ranks with different flags would hang or
train different models. In the rendezvous of this module, rank 0 prints which ranks are missing and compares
the configurations before any process group exists.

Before a process connects, it prepares the run (`Preparation`): it imports libraries and verifies data; rank 0
also computes the data report and selects the checkpoint. --start-timeout does not limit the duration of this
work, but the time in which no rank connects or makes progress. Rank 0 therefore starts the store first, and
each rank counts its progress in the store. A process makes progress if it uses the CPU, or reads or writes
files. Only the start of Python and the import of torch happen before a process can count.

The store has no passwords: anyone who reaches the port can write to it, so the network of the cluster must be
trusted. Texts from the store are printed as one printable line. A store with hundreds of connections answers
slowly, so rank 0 never waits with one request per rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from megatron.child_processes import io_bytes
from megatron.cluster.exit_codes import RunStopped, SharedUserError
from megatron.cluster.launch import decimal_number, node_name, wait_until
from megatron.config import Config
from megatron.config.config import SECTIONS
from megatron.config.fields import option_name
from megatron.errors import UserError, one_line
from megatron.text_table import first_few

# Time between two lines about missing ranks.
_REPORT_INTERVAL_S = 30.0
_POLL_INTERVAL_S = 0.05
# The longest interval between two requests of a rank to rank 0's store: 1,000 ranks send 2,000 per second.
_MAX_KEY_INTERVAL_S = 0.5
_CONNECT_TIMEOUT_S = 30.0
# A host name that does not resolve within this time is wrong.
_RESOLVE_TIMEOUT_S = 10.0
_INFORM_TIMEOUT_S = 5.0
# A store answers at once, even while its process computes. If nothing answers within this time, another
# program listens on the port.
_STORE_TIMEOUT_S = 30.0
# Timeout of a `get` or `wait` of the store, equal to torch's default.
_OPERATION_TIMEOUT = timedelta(minutes=5)
# Key of the store that counts connected ranks and the progress of ranks that have not connected yet.
PROGRESS_KEY = "progress"
_CONNECTED_KEY, _PREPARING_KEY = "connected ranks", "preparing ranks"
# A preparing process counts its progress once per interval, if it has used at least this share of CPU time or
# read and written this many bytes. The threads of an idle process use less.
_PREPARATION_INTERVAL_S = 5.0
_MIN_CPU_SHARE = 0.02
_MIN_BYTES = 2**20
# Length limit of a text from the store.
_MOST_CHARACTERS = 2000
_MISSING_RANKS_SHOWN = 8
_DIFFERENCES_SHOWN = 3
# Settings that may differ between ranks.
_PER_PROCESS_SETTINGS = {("parallel", "local_rank")}


@dataclass(frozen=True)
class Address:
    """The rank of this process, and the address of the store."""

    rank: int
    world_size: int
    host: str
    port: int
    hosts_store: bool
    """Whether this process starts the store. Under torch's launcher, the launcher's agent has started the
    store."""
    prints_waiting: bool
    """Whether this process prints that it waits for the store: one process per node."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Address:
        """Reads the variables that a launcher or `launch.init_from_slurm_env` has set."""
        rank, has_agent_store = int(env["RANK"]), _has_agent_store(env)
        return cls(
            rank,
            int(env["WORLD_SIZE"]),
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
            hosts_store=rank == 0 and not has_agent_store,
            prints_waiting=env.get("LOCAL_RANK", "0") == "0",
        )

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def connect_processes(address: Address, config: Config, device: str = "") -> dist.Store:
    """Waits until all processes have connected, and returns the store for their process groups.

    device: a name of this process's device, see `devices.device_id`.

    Raises SharedUserError on every rank if flags differ between ranks, or if two processes have the same rank
    or device. Raises RunStopped on every rank if processes are missing and no process has made progress for
    --start-timeout seconds. Raises UserError for an address or a port that cannot be used.
    """
    timeout_s = config.parallel.start_timeout
    store = open_store(address, time.monotonic() + timeout_s)
    _claim_rank(store, address)
    store.set(f"node {address.rank}", node_name(os.environ))
    store.set(f"device {address.rank}", device)
    settings = json.dumps(_settings(config), sort_keys=True)
    store.set(f"settings {address.rank}", settings)
    store.set(f"digest {address.rank}", hashlib.sha256(settings.encode()).hexdigest())
    store.append(_CONNECTED_KEY, f"{address.rank} ")  # type: ignore[attr-defined]
    store.add("connected", 1)
    store.add(PROGRESS_KEY, 1)
    if address.rank == 0:
        try:
            outcome = _wait_for_all(store, address, timeout_s)
            outcome = outcome or _difference(store, address.world_size) or _shared_device(store, address)
        except RunStopped as error:
            _announce(store, f"missing {error}")
            raise
        _announce(store, f"unequal {outcome}" if outcome else "ready")
    else:
        outcome = _outcome_from_rank_0(store, address, timeout_s)
    if outcome:
        raise SharedUserError(outcome)
    return store


@contextmanager
def announce_errors(env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Sends an error that rank 0 raises in the block to the other ranks, which would otherwise wait for
    --start-timeout seconds. Must be used before `connect_processes`. Ranks that do not connect within some
    seconds do not get the error. A UserError of a different rank is sent to rank 0, which informs all ranks.
    A SharedUserError is not sent, because every rank raises it."""
    try:
        yield
    except SharedUserError:
        raise
    except Exception as error:
        if int(env.get("WORLD_SIZE", "1")) > 1:
            address = Address.from_environment(env)
            kind = "unequal" if isinstance(error, UserError) else "missing"
            with suppress(UserError, RunStopped, dist.DistError):  # must not hide the error of the block
                store = open_store(address, time.monotonic() + _INFORM_TIMEOUT_S)
                if address.rank == 0:
                    _announce(store, f"{kind} {error}", address.world_size - 1)
                elif isinstance(error, UserError):
                    store.set("mistake", str(error))
        raise


def open_store(address: Address, deadline: float) -> dist.Store:
    """Starts the store of the run, or waits until rank 0 has started it. Raises the errors of
    `connect_processes`."""
    _resolve(address)
    # After a restart the launcher's store may still hold the keys of the previous attempt. The launcher's id
    # separates this launch from another launch with an equal port.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "") if _has_agent_store(os.environ) else ""
    return dist.PrefixStore(f"launch {launch} attempt {attempt}", _connect(address, deadline))


def _has_agent_store(env: Mapping[str, str]) -> bool:
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class Preparation:
    """A context manager whose thread counts the progress of this process in the store, until `end` or the end
    of the block. It does nothing for a single process and for a dry run.

    The block must last until the process has connected, because this object keeps the store of rank 0 alive.
    """

    def __init__(self, config: Config, env: Mapping[str, str] = os.environ) -> None:
        self._timeout_s = config.parallel.start_timeout
        self._interval_s = min(_PREPARATION_INTERVAL_S, self._timeout_s / 4)
        is_run = int(env.get("WORLD_SIZE", "1")) > 1 and not config.training.dry_run
        self._address = Address.from_environment(env) if is_run else None
        self._ended = threading.Event()
        self._store: dist.Store | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Preparation:
        """Raises UserError if this process must start the store and cannot use the port."""
        if self._address is not None:
            if self._address.hosts_store:
                self._store = open_store(self._address, time.monotonic() + self._timeout_s)
            self._thread = threading.Thread(target=self._run, name="preparation", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Stops counting. Must be called before the process connects, because waiting uses the CPU, too, and
        would count as progress."""
        self._ended.set()

    def _run(self) -> None:
        assert self._address is not None
        # Errors are ignored in this thread, because the main thread raises them when it connects.
        with suppress(UserError, RunStopped, dist.DistError):
            store = self._store or open_store(self._address, time.monotonic() + self._timeout_s)
            mark_preparing(store, self._address.rank)
            cpu_s, bytes_ = time.process_time(), io_bytes()
            while not self._ended.wait(self._interval_s):
                now_cpu_s, now_bytes = time.process_time(), io_bytes()
                if now_cpu_s - cpu_s >= _MIN_CPU_SHARE * self._interval_s or now_bytes - bytes_ >= _MIN_BYTES:
                    store.add(PROGRESS_KEY, 1)
                    cpu_s, bytes_ = now_cpu_s, now_bytes


def mark_preparing(store: dist.Store, rank: int) -> None:
    """Records that a rank prepares the run and has not connected yet."""
    store.append(_PREPARING_KEY, f"{rank} ")  # type: ignore[attr-defined]


def _ranks_in(store: dist.Store, key: str) -> set[int]:
    """Returns the ranks that have added themselves to a key."""
    words = store.get(key).decode(errors="replace").split() if store.check([key]) else []
    return {rank for word in words if (rank := decimal_number(word)) is not None}


def _text(store: dist.Store, key: str) -> str:
    """Returns a value of the store as one printable line."""
    return one_line(store.get(key).decode(errors="replace"), _MOST_CHARACTERS)


def _claim_rank(store: dist.Store, address: Address) -> None:
    """Raises UserError if another process already has this rank, and informs rank 0."""
    me = f"{node_name(os.environ)} {secrets.token_hex(8)}"
    first = store.compare_set(f"process {address.rank}", "", me).decode(errors="replace")
    if first != me:
        mistake = (
            f"two processes have RANK {address.rank}, one on {one_line(first.rpartition(' ')[0])} and one on "
            f"{node_name(os.environ)}: give each of the {address.world_size} processes a different rank"
        )
        store.set("mistake", mistake)
        raise UserError(mistake)


def _resolve(address: Address) -> None:
    end = time.monotonic() + _RESOLVE_TIMEOUT_S
    while True:
        try:
            socket.getaddrinfo(address.host, address.port)
            return
        except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is too long
            if isinstance(error, UnicodeError) or time.monotonic() > end:
                reason = getattr(error, "strerror", None) or one_line(error)
                raise UserError(
                    f"MASTER_ADDR is {one_line(address.host, 60)}, a name that {node_name(os.environ)} "
                    f"cannot resolve ({reason}): expected the host name or IP address of the node of rank 0"
                ) from error
        time.sleep(_POLL_INTERVAL_S)


def _connect(address: Address, deadline: float) -> dist.Store:
    """Returns the store of rank 0 or of the launcher's agent."""
    if address.hosts_store:
        try:
            return dist.TCPStore(
                address.host, address.port, is_master=True, wait_for_workers=False, multi_tenant=True
            )
        except dist.DistError as error:
            raise UserError(
                f"MASTER_PORT {address.port} cannot be used on {node_name(os.environ)} "
                f"({one_line(error)}): another program or job listens on it; set a different port"
            ) from error
    last = time.monotonic()
    # A plain socket is tried first: torch's store prints a stack for every failed attempt.
    while not _is_open(address):
        now = time.monotonic()
        if now >= deadline:
            raise RunStopped(
                f"rank {address.rank} could not connect to {address} within --start-timeout: check that rank "
                "0 has started and has not failed (see its output), and that MASTER_ADDR and MASTER_PORT "
                "name its node",
                on_all_ranks=False,
            )
        if now - last >= _REPORT_INTERVAL_S and address.prints_waiting:
            _print(f"rank {address.rank} is waiting for rank 0 at {address}")
            last = now
        time.sleep(_POLL_INTERVAL_S)
    return _client(address)


def _client(address: Address) -> dist.Store:
    """Connects to the store at a port. Raises UserError if no store listens on it, because torch would wait
    forever."""
    found: list[dist.Store] = []

    def connect() -> None:
        with suppress(dist.DistError):
            timeout = timedelta(seconds=_STORE_TIMEOUT_S)
            found.append(dist.TCPStore(address.host, address.port, is_master=False, timeout=timeout))

    thread = threading.Thread(target=connect, name="store", daemon=True)
    thread.start()
    thread.join(_STORE_TIMEOUT_S)
    if not found:
        raise UserError(
            f"rank {address.rank}: {address} is open, but it is not the store of this run: another program "
            "or job listens on MASTER_PORT; set a different port"
        )
    found[0].set_timeout(_OPERATION_TIMEOUT)
    return found[0]


def _is_open(address: Address) -> bool:
    try:
        with socket.create_connection((address.host, address.port), timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


class _IdleTimer:
    """Measures the time in which no rank has connected or made progress with its preparation."""

    def __init__(self, store: dist.Store, limit_s: float) -> None:
        self._store, self._limit_s = store, limit_s
        self._count, self._since = store.add(PROGRESS_KEY, 0), time.monotonic()

    def has_expired(self) -> bool:
        """Returns whether the time without progress has reached the limit."""
        count = self._store.add(PROGRESS_KEY, 0)
        if count != self._count:
            self._count, self._since = count, time.monotonic()
        return time.monotonic() - self._since >= self._limit_s


def _wait_for_all(store: dist.Store, address: Address, timeout_s: float) -> str:
    """Waits for all ranks. Returns the error that a rank has reported in the meantime, or "". Raises
    RunStopped if, for --start-timeout seconds, no rank has connected or made progress."""
    idle_timer, last = _IdleTimer(store, timeout_s), time.monotonic()
    while (connected := store.add("connected", 0)) < address.world_size:
        if store.check(["mistake"]):
            return _text(store, "mistake")
        now = time.monotonic()
        who = f"{address.world_size - connected} of {address.world_size} processes"
        if idle_timer.has_expired():
            raise RunStopped(
                f"{who} did not connect to {address} within --start-timeout "
                f"({_missing(store, address.world_size)}): start {address.world_size} processes, or correct "
                "WORLD_SIZE"
            )
        if now - last >= _REPORT_INTERVAL_S:
            _print(f"waiting for {who} to connect to {address} ({_missing(store, address.world_size)})")
            last = now
        time.sleep(_POLL_INTERVAL_S)
    return ""


def _missing(store: dist.Store, world_size: int) -> str:
    missing = sorted(set(range(world_size)) - _ranks_in(store, _CONNECTED_KEY))
    preparing = sorted(_ranks_in(store, _PREPARING_KEY).intersection(missing))
    shown = [first_few(map(str, ranks), _MISSING_RANKS_SHOWN) for ranks in (missing, preparing)]
    return f"rank {shown[0]}" + (f"; preparing: rank {shown[1]}" if preparing else "")


def _announce(store: dist.Store, outcome: str, others: int | None = None) -> None:
    """Publishes the outcome of the comparison to all ranks. After an error, waits some seconds at most until
    `others` ranks (default: all connected ranks) have read it, because the store may end with this
    process."""

    def is_read() -> bool:
        expected = store.add("connected", 0) - 1 if others is None else others
        return store.add("informed", 0) >= expected

    store.set("outcome", outcome)
    if outcome != "ready":
        wait_until(is_read, _INFORM_TIMEOUT_S, _POLL_INTERVAL_S)


def _outcome_from_rank_0(store: dist.Store, address: Address, timeout_s: float) -> str:
    try:
        # Rank 0 has a shorter limit, so that all ranks report the error of rank 0.
        idle_timer = _IdleTimer(store, timeout_s + _REPORT_INTERVAL_S)
        while not _is_set(store, "outcome"):
            if idle_timer.has_expired():
                raise RunStopped(
                    f"rank {address.rank}: rank 0 did not connect to {address} within --start-timeout "
                    "and makes no progress with its preparation: see its output",
                    on_all_ranks=False,
                )
            if address.prints_waiting and not store.check(["digest 0"]):
                state = "is preparing" if 0 in _ranks_in(store, _PREPARING_KEY) else "has not connected"
                _print(f"rank {address.rank} is waiting at {address} for rank 0, which {state}")
    except dist.DistError as error:
        raise RunStopped(
            f"rank {address.rank}: rank 0 does not answer at {address} ({one_line(error)})",
            on_all_ranks=False,
        ) from None
    kind, _, text = _text(store, "outcome").partition(" ")
    store.add("informed", 1)
    if kind == "missing":
        raise RunStopped(text)
    return text


def _is_set(store: dist.Store, key: str) -> bool:
    """Waits for a key, until the next line about missing ranks is due at the latest. Returns whether the key
    is set.

    It polls, because torch prints a warning for each `wait` that times out.
    """
    until, interval = time.monotonic() + _REPORT_INTERVAL_S, _POLL_INTERVAL_S
    while not store.check([key]):
        if time.monotonic() >= until:
            return False
        time.sleep(interval)
        interval = min(2 * interval, _MAX_KEY_INTERVAL_S)
    return True


# --- comparison of flags ---


def _settings(config: Config) -> dict[str, dict[str, Any]]:
    return {
        section: {
            name: value for name, value in settings.items() if (section, name) not in _PER_PROCESS_SETTINGS
        }
        for section, settings in config.to_dict().items()
    }


def _difference(store: dist.Store, world_size: int) -> str:
    """Returns a sentence that names the flags and ranks that differ from rank 0; "" if none differ."""
    digests = store.multi_get([f"digest {rank}" for rank in range(world_size)])
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if not differing:
        return ""
    first = differing[0]
    node = _text(store, f"node {first}")
    try:
        reference, other = (json.loads(store.get(f"settings {rank}")) for rank in (0, first))
        shown = [one_line(flag) for flag in _differing_flags(reference, other)]
    except (ValueError, AttributeError, TypeError, RecursionError):
        shown = ["settings that no process of this program writes"]
    more = "" if len(differing) == 1 else f" ({len(differing)} ranks differ from rank 0)"
    return (
        f"the processes were started with different flags: {'; '.join(shown[:_DIFFERENCES_SHOWN])} on rank "
        f"{first} ({node}){more}: start all of them with one command and equal files"
    )


def _shared_device(store: dist.Store, address: Address) -> str:
    """Returns a sentence that names two ranks with one device; "" if there are none."""
    ranks: dict[bytes, int] = {}
    devices = store.multi_get([f"device {rank}" for rank in range(address.world_size)])
    for rank, device in enumerate(devices):
        if device and device in ranks:
            node = one_line(device.decode(errors="replace").partition(" ")[0])
            return (
                f"ranks {ranks[device]} and {rank} use the same device of {node}: start as many processes "
                "per node as it has devices, or give each task its own device (srun --gpus-per-task=1)"
            )
        ranks[device] = rank
    return ""


def _differing_flags(reference: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    flags = []
    for section in {**reference, **other}:
        mine, theirs = reference.get(section, {}), other.get(section, {})
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                flag = option_name(name) if section in SECTIONS else f"{section}.{name} of --deepspeed_config"
                flags.append(f"{flag} is {mine.get(name)} on rank 0 and {theirs.get(name)}")
    return flags


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
