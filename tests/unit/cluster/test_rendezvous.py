"""Rendezvous: processes connect with equal flags. Otherwise each process raises an error with the reason."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron.cluster import rendezvous
from megatron.cluster.exit_codes import RunStopped, SharedUserError
from megatron.cluster.rendezvous import Address, Preparation, connect_processes
from megatron.config import BatchConfig, Config, ModelConfig, ParallelConfig, ScheduleConfig, TrainingConfig
from megatron.errors import UserError
from tests.support import HANG_TIMEOUT_S


def config(lr: float = 1e-3, seed: int = 1234, timeout: float = 60.0) -> Config:
    return Config(
        model=ModelConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=32, max_position_embeddings=32
        ),
        batch=BatchConfig(micro_batch_size=1, global_batch_size=4),
        schedule=ScheduleConfig(lr=lr),
        training=TrainingConfig(seed=seed),
        parallel=ParallelConfig(start_timeout=timeout),
    )


@pytest.fixture
def port() -> Iterator[int]:
    """Yields the port of a store that a launcher has started."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


def address_of(rank: int, world_size: int, port: int, hosts_store: bool = False) -> Address:
    return Address(rank, world_size, "127.0.0.1", port, hosts_store, True)


def outcomes(
    port: int,
    configs: list[Config],
    world_size: int,
    ranks: Sequence[int] | None = None,
    devices: Sequence[str] = (),
) -> list[Exception | str]:
    """Connects ranks 0, 1, ... (or the given ranks), each in a thread. Returns each rank's error, or the
    value that rank 0 wrote to the store."""
    given = range(len(configs)) if ranks is None else ranks

    def rank(index: int) -> Exception | str:
        number = given[index]
        try:
            device = devices[index] if devices else ""
            store = connect_processes(address_of(number, world_size, port), configs[index], device)
            if number == 0:
                store.set("greeting", "hello")
            return store.get("greeting").decode()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(configs)) as threads:
        return list(threads.map(rank, range(len(configs))))


def test_ranks_with_the_same_flags_get_one_store(port: int) -> None:
    assert outcomes(port, [config()] * 3, 3) == ["hello"] * 3


def test_two_ranks_with_one_device_are_an_error_on_every_rank(port: int) -> None:
    found = outcomes(port, [config()] * 3, 3, devices=["n1 a", "n1 b", "n1 a"])
    assert all(isinstance(error, SharedUserError) for error in found)
    assert {str(error) for error in found} == {str(found[0])} and "ranks 0 and 2 use the same" in str(
        found[0]
    )


def test_devices_and_local_ranks_may_differ(port: int) -> None:
    first = config()
    other = dataclasses.replace(first, parallel=dataclasses.replace(first.parallel, local_rank=1))
    assert outcomes(port, [first, other], 2, devices=["n1 a", "n1 b"]) == ["hello"] * 2


def test_different_flags_are_named_on_every_rank(port: int) -> None:
    found = outcomes(port, [config(), config(), config(lr=5e-3, seed=7)], 3)
    (sentence,) = {str(error) for error in found}
    assert all(isinstance(error, SharedUserError) for error in found)
    assert "--lr is 0.001 on rank 0 and 0.005" in sentence and "--seed is 1234 on rank 0 and 7" in sentence
    assert "on rank 2" in sentence


def test_missing_ranks_are_named_on_every_connected_rank(port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(outcomes, port, [config()], 4, ranks=(1,))
        # Rank 0 connects after rank 1 has connected, and times out at its first poll.
        store.wait(["launch  attempt 0/digest 1"], timedelta(seconds=HANG_TIMEOUT_S))
        found = [*outcomes(port, [config(timeout=1e-9)], 4, ranks=(0,)), *first.result()]
    assert all(isinstance(error, RunStopped) for error in found)
    assert str(found[0]) == str(found[1])
    assert "(rank 2, 3)" in str(found[0]) and "of 4 processes" in str(found[0])


@pytest.mark.parametrize(
    ("failing", "kind"), [(0, UserError), (0, RunStopped), (0, PermissionError), (2, UserError)]
)
def test_error_of_a_rank_before_it_connects_ends_the_waiting_ranks(
    port: int, failing: int, kind: type
) -> None:
    env = {"RANK": str(failing), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def fail() -> None:
        with rendezvous.announce_errors({**env, "TORCHELASTIC_USE_AGENT_STORE": "True"}):
            raise kind("--load x does not exist")

    with ThreadPoolExecutor(1) as thread:
        failed = thread.submit(fail)
        found = outcomes(port, [config()] * 2, 3, ranks=[rank for rank in range(3) if rank != failing])
        assert isinstance(failed.exception(), kind)
    expected = SharedUserError if kind is UserError else RunStopped
    assert [type(error) for error in found] == [expected] * 2
    assert {str(error) for error in found} == {"--load x does not exist"}


def test_error_of_rank_0_is_raised_although_its_port_is_in_use(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "_INFORM_TIMEOUT_S", 0.0)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with pytest.raises(UserError, match="a typo"), rendezvous.announce_errors(env):
            raise UserError("a typo")


def test_two_processes_with_one_rank_are_an_error_on_every_rank(port: int) -> None:
    found = outcomes(port, [config()] * 4, 4, ranks=(0, 1, 2, 2))
    assert all(isinstance(error, UserError) for error in found)
    (sentence,) = {str(error) for error in found}
    assert "two processes have RANK 2, one on " in sentence and " and one on " in sentence
    # The second process raises its own error, since rank 0 may read it too late.
    assert sum(isinstance(error, SharedUserError) for error in found) == 3


def test_late_second_process_of_a_rank_is_refused(port: int) -> None:
    assert outcomes(port, [config()] * 2, 2) == ["hello"] * 2
    (late,) = outcomes(port, [config()], 2, ranks=(1,))
    assert isinstance(late, UserError) and "two processes have RANK 1" in str(late)


def test_missing_ranks_are_printed_while_waiting(port: int, monkeypatch) -> None:
    lines: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(rendezvous, "_REPORT_INTERVAL_S", 0.0)
    monkeypatch.setattr(rendezvous, "_print", lines.put)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(outcomes, port, [config()], 2, ranks=(0,))
        line = lines.get(timeout=HANG_TIMEOUT_S)
        second = outcomes(port, [config()], 2, ranks=(1,))
        assert [*first.result(), *second] == ["hello"] * 2
    assert line == f"waiting for 1 of 2 processes to connect to 127.0.0.1:{port} (rank 1)"


def unused_port() -> socket.socket:
    """Returns a socket on a port that no other process can take. The socket does not listen."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    return taken


def test_rank_that_cannot_connect_names_the_address() -> None:
    with unused_port() as taken:
        address = address_of(1, 2, taken.getsockname()[1])
        with pytest.raises(RunStopped, match=f"rank 1 could not connect to {address}.*has not failed"):
            connect_processes(address, config(timeout=0.2))


def test_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"MASTER_PORT {port} cannot be used"):
            connect_processes(address_of(0, 2, port, hosts_store=True), config())


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.2\r\n"])
def test_another_program_at_the_port_is_named_by_each_rank(answer: bytes, monkeypatch) -> None:
    """torch's store would wait forever for an answer of a program that sends nothing."""
    monkeypatch.setattr(rendezvous, "_STORE_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as program, ThreadPoolExecutor(1) as thread:
        connections: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):  # fails at the end of the test
                while True:
                    connections.append(program.accept()[0])
                    connections[-1].sendall(answer)

        thread.submit(serve)
        address = address_of(3, 4, program.getsockname()[1])
        with pytest.raises(UserError, match=f"rank 3: {address} is open, but it is not the store"):
            connect_processes(address, config())
        program.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()


def test_time_is_limited_only_while_nobody_makes_progress(port: int, monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: now[0]))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    idle_timer = rendezvous._IdleTimer(store, 600.0)
    for _ in range(10):
        now[0] += 599.0
        assert not idle_timer.has_expired()
        store.add(rendezvous.PROGRESS_KEY, 1)
    assert not idle_timer.has_expired()  # `has_expired` sees the last progress
    now[0] += 600.0
    assert idle_timer.has_expired()


def test_preparing_ranks_are_among_the_missing_ones(port: int, monkeypatch) -> None:
    lines: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(rendezvous, "_REPORT_INTERVAL_S", 0.0)
    monkeypatch.setattr(rendezvous, "_print", lines.put)
    env = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ThreadPoolExecutor(1) as thread, Preparation(config(), env):
        first = thread.submit(outcomes, port, [config()], 3, ranks=(0,))
        while not lines.get(timeout=HANG_TIMEOUT_S).endswith("(rank 1, 2; preparing: rank 2)"):
            pass
        others = outcomes(port, [config()] * 2, 3, ranks=(1, 2))
        assert [*first.result(), *others] == ["hello"] * 3


def test_a_hostile_host_of_300_characters_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"MASTER_ADDR is a{60}\.\.\., a name that .* cannot resolve"):
        rendezvous._resolve(Address(0, 2, "a" * 300, 29500, True, True))


def test_unresolvable_host_is_named(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "_RESOLVE_TIMEOUT_S", 0.0)

    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError, match="MASTER_ADDR is no-such-node, a name that .* cannot resolve"):
        connect_processes(Address(0, 2, "no-such-node", 29500, True, True), config())


class CountingStore(dist.Store):
    """Counts the requests to a store that answers slowly, as a store with hundreds of idle connections
    does."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.questions = store, 0

    def __getattribute__(self, name: str) -> object:
        if name in ("add", "check", "get", "multi_get", "set", "append"):
            self.questions += 1
            return getattr(self.store, name)
        return super().__getattribute__(name)


def test_the_missing_ranks_of_a_large_run_take_few_questions(port: int) -> None:
    store = CountingStore(dist.TCPStore("127.0.0.1", port, is_master=False))
    rendezvous.mark_preparing(store, 7)
    address = address_of(0, 10_000, port)
    with pytest.raises(RunStopped, match=r"9999 of 10000 .*rank 1, 2, .* and 9991 more; preparing: rank 7"):
        store.append("connected ranks", "0 ")
        store.add("connected", 1)
        rendezvous._wait_for_all(store, address, timeout_s=0.0)
    assert store.questions < 12


@pytest.mark.parametrize(
    "settings", [b"\x1b[2J", b"[]", b'{"model": 3}', b"[" * 100_000], ids=["text", "list", "number", "deep"]
)
def test_hostile_values_of_the_store_are_one_printable_line(port: int, settings: bytes) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    values = {"digest 0": b"a", "digest 1": b"b", "settings 0": b"{}", "settings 1": settings}
    for name, value in values.items():
        store.set(name, value)
    store.set("node 1", b"n1\x1b]0;title\x07\nerror: all is lost\xff")
    sentence = rendezvous._difference(store, 2)
    assert sentence.isprintable() and "n1\\x1b]0;title\\x07" in sentence and "all is lost" not in sentence


def test_processes_of_two_launches_at_one_port_do_not_meet(port: int, monkeypatch) -> None:
    address = address_of(0, 2, port)
    stores = []
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for launch in ("17", "18"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
        stores.append(rendezvous.open_store(address, 0.0))
    stores[0].set("key", "")
    assert stores[0].check(["key"]) and not stores[1].check(["key"])
