"""Processes meet when all have come with the same flags, and otherwise each says why they do not."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import SimpleQueue

import pytest
import torch.distributed as dist

from megatron.cluster import rendezvous
from megatron.cluster.exit_codes import RunStopped, SharedConfigError
from megatron.cluster.rendezvous import Address, connect_processes
from megatron.config import (
    BatchConfig,
    Config,
    ConfigError,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    TrainingConfig,
)


def config(lr: float = 1e-3, seed: int = 1234, timeout: float = 60.0) -> Config:
    return Config(
        model=ModelConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            seq_length=32,
            max_position_embeddings=32,
        ),
        batch=BatchConfig(micro_batch_size=1, global_batch_size=4),
        schedule=ScheduleConfig(lr=lr),
        training=TrainingConfig(seed=seed),
        parallel=ParallelConfig(start_timeout=timeout),
    )


@pytest.fixture
def port() -> Iterator[int]:
    """Of a store that a launcher has started."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


def outcomes(
    port: int, configs: list[Config], world_size: int, ranks: Sequence[int] | None = None
) -> list[Exception | str]:
    """What becomes of ranks 0, 1, ..., or of those given, each in a thread of its own: its error, or what
    rank 0 wrote."""
    given = range(len(configs)) if ranks is None else ranks

    def rank(index: int) -> Exception | str:
        number = given[index]
        try:
            store = connect_processes(
                Address(number, world_size, "127.0.0.1", port, False, True), configs[index]
            )
            if number == 0:
                store.set("greeting", "hello")
            return store.get("greeting").decode()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(configs)) as threads:
        return list(threads.map(rank, range(len(configs))))


def test_ranks_with_the_same_flags_get_one_store(port: int) -> None:
    assert outcomes(port, [config()] * 3, 3) == ["hello"] * 3


def test_the_place_on_the_machine_is_no_difference(port: int) -> None:
    first = config()
    other = dataclasses.replace(first, parallel=dataclasses.replace(first.parallel, local_rank=1))
    assert outcomes(port, [first, other], 2) == ["hello"] * 2


def test_every_rank_learns_which_flags_differ_and_where(port: int) -> None:
    found = outcomes(port, [config(), config(), config(lr=5e-3, seed=7)], 3)
    (sentence,) = {str(error) for error in found}
    assert all(isinstance(error, SharedConfigError) for error in found)
    assert "--lr is 0.001 on rank 0 and 0.005" in sentence and "--seed is 1234 on rank 0 and 7" in sentence
    assert "on rank 2" in sentence


def test_ranks_that_do_not_come_are_named_on_every_rank_that_came(port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(outcomes, port, [config()], 4, ranks=(1,))
        # Rank 0 comes when rank 1 is there, and gives up at its first look.
        store.wait(["attempt 0/digest 1"], timedelta(seconds=60))
        found = [*outcomes(port, [config(timeout=1e-9)], 4, ranks=(0,)), *first.result()]
    assert all(isinstance(error, RunStopped) for error in found)
    assert str(found[0]) == str(found[1])
    assert "(rank 2, 3)" in str(found[0]) and "of 4 processes" in str(found[0])


@pytest.mark.parametrize("kind", [ConfigError, RunStopped, PermissionError])
def test_a_mistake_that_rank_0_finds_before_it_comes_ends_those_that_wait_for_it(
    port: int, kind: type
) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def rank_0() -> None:
        with rendezvous.announce_errors({**env, "TORCHELASTIC_USE_AGENT_STORE": "True"}):
            raise kind("--load x does not exist")

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(rank_0)
        found = outcomes(port, [config()] * 2, 3, ranks=(1, 2))
        assert isinstance(first.exception(), kind)
    expected = SharedConfigError if kind is ConfigError else RunStopped
    assert [type(error) for error in found] == [expected] * 2
    assert {str(error) for error in found} == {"--load x does not exist"}


def test_a_mistake_of_rank_0_is_told_though_nobody_else_comes_and_its_port_is_in_use(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "_FAREWELL_S", 0.0)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with pytest.raises(ConfigError, match="a typo"), rendezvous.announce_errors(env):
            raise ConfigError("a typo")


def test_two_processes_with_one_rank_end_all_with_a_sentence_that_names_it(port: int) -> None:
    found = outcomes(port, [config()] * 4, 4, ranks=(0, 1, 2, 2))
    assert all(isinstance(error, ConfigError) for error in found)
    (sentence,) = {str(error) for error in found}
    assert "two processes have RANK 2, one on " in sentence and " and one on " in sentence
    # The second one speaks for itself, should rank 0 have heard of it too late.
    assert sum(isinstance(error, SharedConfigError) for error in found) == 3


def test_a_second_process_that_comes_late_is_refused_and_does_not_disturb_the_others(port: int) -> None:
    assert outcomes(port, [config()] * 2, 2) == ["hello"] * 2
    (late,) = outcomes(port, [config()], 2, ranks=(1,))
    assert isinstance(late, ConfigError) and "two processes have RANK 1" in str(late)


def test_a_line_says_which_ranks_are_awaited(port: int, monkeypatch) -> None:
    lines: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(rendezvous, "_REPORT_INTERVAL_S", 0.0)
    monkeypatch.setattr(rendezvous, "_print", lines.put)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(outcomes, port, [config()], 2, ranks=(0,))
        line = lines.get(timeout=60)
        second = outcomes(port, [config()], 2, ranks=(1,))
        assert [*first.result(), *second] == ["hello"] * 2
    assert line == f"waiting for 1 of 2 processes at 127.0.0.1:{port} (rank 1)"


def unused_port() -> socket.socket:
    """A port that nobody else can take, and that does not listen."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    return taken


def test_a_rank_that_finds_nobody_says_where_it_looked() -> None:
    with unused_port() as taken:
        address = Address(1, 2, "127.0.0.1", taken.getsockname()[1], False, True)
        with pytest.raises(RunStopped, match=f"rank 1 found nobody at {address}.*has it ended with an error"):
            connect_processes(address, config(timeout=0.2))


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"MASTER_PORT {port} cannot be used"):
            connect_processes(Address(0, 2, "127.0.0.1", port, True, True), config())


def test_a_host_that_does_not_resolve_is_named(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "_RESOLVE_TIMEOUT_S", 0.0)

    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match="MASTER_ADDR is no-such-node, a name that .* cannot resolve"):
        connect_processes(Address(0, 2, "no-such-node", 29500, True, True), config())
