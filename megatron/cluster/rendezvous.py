"""How the processes of a run find each other: one store, the arrival of every rank, the same flags on all.

torch's own rendezvous waits silently, and starts with whatever flags each process was given. Here rank 0
prints whom it waits for, nobody waits longer than --start-timeout, and the configurations are compared before
any process group exists: ranks with unequal flags would train on and diverge, or wait for each other forever.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.cluster.exit_codes import RunStopped, SharedConfigError
from megatron.cluster.launch import node_name
from megatron.config import Config, ConfigError
from megatron.config.config import SECTIONS
from megatron.config.fields import option_name

# A line is printed after each of these pauses.
_REPORT_INTERVAL_S = 30.0
_POLL_INTERVAL_S = 0.05
_CONNECT_TIMEOUT_S = 30.0
# A name that is unknown for longer than this is misspelt: a name server that starts late is not so slow.
_RESOLVE_TIMEOUT_S = 10.0
_FAREWELL_S = 5.0
_MISSING_RANKS_SHOWN = 8
_DIFFERENCES_SHOWN = 3
# Differs between ranks by design.
_PER_PROCESS_SETTINGS = {("parallel", "local_rank")}


@dataclass(frozen=True)
class Address:
    """Where this process is in the world, and where the processes meet."""

    rank: int
    world_size: int
    host: str
    port: int
    hosts_store: bool
    """Whether this process starts the store; under torch's launcher its agent has."""
    reports: bool
    """Whether this process prints what it waits for before the store can be reached: one per node."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Address:
        """By the variables that a launcher, or `launch.adopt_slurm_task`, has set."""
        rank = int(env["RANK"])
        has_agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank,
            int(env["WORLD_SIZE"]),
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
            hosts_store=rank == 0 and not has_agent_store,
            reports=env.get("LOCAL_RANK", "0") == "0",
        )

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def connect_processes(address: Address, config: Config) -> dist.Store:
    """Waits until all processes have arrived; returns the store through which they can make process groups.

    Raises on every rank: SharedConfigError where flags differ between ranks or two processes have one rank,
    RunStopped where processes are still missing after --start-timeout seconds, ConfigError for an address or
    a port that cannot work.
    """
    deadline = time.monotonic() + config.parallel.start_timeout
    _resolve(address)
    store = _open_store(address, deadline)
    _take_rank(store, address)
    store.set(f"node {address.rank}", node_name(os.environ))
    store.set(f"settings {address.rank}", json.dumps(_settings(config)))
    store.set(f"digest {address.rank}", _digest(config))
    store.add("arrived", 1)
    if address.rank == 0:
        try:
            verdict = _wait_for_all(store, address, deadline) or _difference(store, address.world_size)
        except RunStopped as error:
            _announce(store, f"missing {error}")
            raise
        _announce(store, f"unequal {verdict}" if verdict else "ready")
    else:
        verdict = _verdict_of_rank_0(store, address, deadline)
    if verdict:
        raise SharedConfigError(verdict)
    return store


@contextmanager
def announce_errors(env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """An error that rank 0 meets in the block, before the processes meet, ends the others at once: else they
    wait until --start-timeout. Who has not come within some seconds is not waited for."""
    try:
        yield
    except Exception as error:
        if int(env.get("WORLD_SIZE", "1")) > 1:
            address = Address.from_environment(env)
            kind = "unequal" if isinstance(error, ConfigError) else "missing"
            with suppress(ConfigError, RunStopped, dist.DistError):  # the error itself is to be told
                store = _open_store(address, time.monotonic() + _FAREWELL_S)
                _announce(store, f"{kind} {error}", address.world_size - 1)
        raise


def _open_store(address: Address, deadline: float) -> dist.Store:
    # A restarted job may find the launcher's store with what the last attempt wrote.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", _connect(address, deadline))


def _take_rank(store: dist.Store, address: Address) -> None:
    """Raises ConfigError if another process has this rank already, and lets rank 0 tell all others."""
    me = f"{node_name(os.environ)} {secrets.token_hex(8)}"
    first = store.compare_set(f"process {address.rank}", "", me).decode()
    if first != me:
        mistake = (
            f"two processes have RANK {address.rank}, one on {first.rpartition(' ')[0]} and one on "
            f"{node_name(os.environ)}: give each of the {address.world_size} processes a rank of its own"
        )
        store.set("mistake", mistake)
        raise ConfigError(mistake)


def _resolve(address: Address) -> None:
    end = time.monotonic() + _RESOLVE_TIMEOUT_S
    while True:
        try:
            socket.getaddrinfo(address.host, address.port)
            return
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigError(
                    f"MASTER_ADDR is {address.host}, a name that {node_name(os.environ)} cannot resolve "
                    f"({error.strerror}): expected the host name or IP address of the node of rank 0"
                ) from error
        time.sleep(_POLL_INTERVAL_S)


def _connect(address: Address, deadline: float) -> dist.Store:
    """The store of rank 0, or of the launcher's agent."""
    if address.hosts_store:
        try:
            return dist.TCPStore(
                address.host, address.port, is_master=True, wait_for_workers=False, multi_tenant=True
            )
        except dist.DistError as error:
            raise ConfigError(
                f"MASTER_PORT {address.port} cannot be used on {node_name(os.environ)} "
                f"({_first_line(error)}): another program, or another job, listens there; set another port"
            ) from error
    last = time.monotonic()
    # A plain socket first: torch's store prints the stack of every attempt that fails.
    while not _is_open(address):
        now = time.monotonic()
        if now >= deadline:
            raise RunStopped(
                f"rank {address.rank} found nobody at {address} within --start-timeout: is rank 0 started, "
                "or has it ended with an error (see its output), and are MASTER_ADDR and MASTER_PORT those "
                "of its node?",
                everywhere=False,
            )
        if now - last >= _REPORT_INTERVAL_S and address.reports:
            _print(f"rank {address.rank} is waiting for rank 0 at {address}")
            last = now
        time.sleep(_POLL_INTERVAL_S)
    return dist.TCPStore(address.host, address.port, is_master=False)


def _is_open(address: Address) -> bool:
    try:
        with socket.create_connection((address.host, address.port), timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def _wait_for_all(store: dist.Store, address: Address, deadline: float) -> str:
    """The mistake that a process has found meanwhile, in one sentence; "" once all have arrived."""
    last = time.monotonic()
    while (arrived := store.add("arrived", 0)) < address.world_size:
        if store.check(["mistake"]):
            return store.get("mistake").decode()
        now = time.monotonic()
        who = f"{address.world_size - arrived} of {address.world_size} processes at {address}"
        if now >= deadline:
            raise RunStopped(
                f"{who} have not arrived within --start-timeout ({_missing(store, address.world_size)}): "
                f"start {address.world_size} processes, or correct WORLD_SIZE"
            )
        if now - last >= _REPORT_INTERVAL_S:
            _print(f"waiting for {who} ({_missing(store, address.world_size)})")
            last = now
        time.sleep(_POLL_INTERVAL_S)
    return ""


def _missing(store: dist.Store, world_size: int) -> str:
    missing = [rank for rank in range(world_size) if not store.check([f"digest {rank}"])]
    shown = ", ".join(map(str, missing[:_MISSING_RANKS_SHOWN]))
    return f"rank {shown}" + (", ..." if len(missing) > _MISSING_RANKS_SHOWN else "")


def _announce(store: dist.Store, verdict: str, others: int | None = None) -> None:
    """Tells the other ranks, `others` of them or those that have arrived; a store that this process hosts
    stays until they know, or some seconds."""
    store.set("verdict", verdict)
    end = time.monotonic() + _FAREWELL_S
    while verdict != "ready":
        expected = store.add("arrived", 0) - 1 if others is None else others
        if store.add("informed", 0) >= expected or time.monotonic() > end:
            return
        time.sleep(_POLL_INTERVAL_S)


def _verdict_of_rank_0(store: dist.Store, address: Address, deadline: float) -> str:
    # Rank 0 may have begun to wait later than this process.
    seconds = max(deadline - time.monotonic(), 1.0) + _REPORT_INTERVAL_S
    try:
        store.wait(["verdict"], timedelta(seconds=seconds))
    except dist.DistError as error:
        raise RunStopped(
            f"rank {address.rank}: rank 0 has not answered at {address} ({_first_line(error)})",
            everywhere=False,
        ) from None
    kind, _, text = store.get("verdict").decode().partition(" ")
    store.add("informed", 1)
    if kind == "missing":
        raise RunStopped(text)
    return text


# --- are the flags the same? ---


def _settings(config: Config) -> dict[str, dict[str, Any]]:
    return {
        section: {
            name: value for name, value in settings.items() if (section, name) not in _PER_PROCESS_SETTINGS
        }
        for section, settings in config.to_dict().items()
    }


def _digest(config: Config) -> str:
    return hashlib.sha256(json.dumps(_settings(config), sort_keys=True).encode()).hexdigest()


def _difference(store: dist.Store, world_size: int) -> str:
    """One sentence that names the flags and ranks that differ from rank 0's; "" if there are none."""
    digests = store.multi_get([f"digest {rank}" for rank in range(world_size)])
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if not differing:
        return ""
    first = differing[0]
    reference, other = (json.loads(store.get(f"settings {rank}")) for rank in (0, first))
    node = store.get(f"node {first}").decode()
    shown = _differing_flags(reference, other)
    more = "" if len(differing) == 1 else f" ({len(differing)} ranks differ from rank 0)"
    return (
        f"the processes were started with different flags: {'; '.join(shown[:_DIFFERENCES_SHOWN])} on rank "
        f"{first} ({node}){more}: start all of them with the same command and the same files"
    )


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


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
