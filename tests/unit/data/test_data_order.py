"""--data-order: samples and indices equal the ones that the other programs have computed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config import DataConfig
from megatron.config.registries import DATA_ORDERS
from megatron.data import greedy_blend, helpers, indices
from megatron.data.blended_dataset import BlendedDataset
from megatron.data.gpt_dataset import (
    GPTDataset,
    data_fingerprint,
    fingerprint_differences,
    index_requests,
    requested_groups,
)
from megatron.data.greedy_blend import CoreBlend
from megatron.data.indices import build_sample_index, build_sample_order
from megatron.data.loader import GPTBatchLoader
from megatron.data.sample import SampleDataset
from megatron.errors import UserError
from tests.support.assets import ASSETS, unpack
from tests.unit.data.token_files import build


@pytest.fixture(scope="module")
def core_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the files of tests/reference/write_core_data.py, written by megatron-core 0.16.1."""
    return unpack("core_data", tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="module")
def cases(core_data: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((core_data / "cases.json").read_text())
    return content


def digest(*arrays: Any) -> str:
    content = hashlib.sha256()
    for array in arrays:
        content.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
    return content.hexdigest()[:16]


def samples_digest(dataset: SampleDataset) -> str:
    return digest(*(dataset[i] for i in range(len(dataset))))


def blend_words(folder: Path, words: Sequence[Any]) -> list[tuple[str, str]]:
    """Returns (weight, prefix) of each component of a case."""
    return [(str(weight), str(folder / name)) for weight, name in zip(words[::2], words[1::2], strict=True)]


def config_of(folder: Path, case: dict[str, Any], cache: Path, order: str = "megatron-core") -> DataConfig:
    common: dict[str, Any] = {"data_order": order, "data_cache_path": str(cache)}
    pairs = blend_words(folder, case["blend"])
    if case["split"]:
        return DataConfig(data_path=sum(pairs, ()), split=case["split"], **common)
    paths = ", ".join(f"{weight} 0:1 {prefix}" for weight, prefix in pairs)
    return DataConfig(
        train_weighted_split_paths=(f"TRAIN: {paths}",),
        valid_weighted_split_paths=(f"VALID: {paths}",),
        **common,
    )


@pytest.fixture(scope="module")
def expected(cases: dict[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """Returns --data-order -> digests of the samples of the program with this order. None: the program stops
    with an error."""
    core = {kind: [case["samples"] for case in cases[kind]] for kind in ("single", "blends")}
    others: dict[str, Any] = json.loads((ASSETS / "deepspeed_orders.json").read_text())
    return {"megatron-core": core, **others}


PROGRAMS = [order for order in DATA_ORDERS if order != "native"]


def programs(*in_gate: str) -> pytest.MarkDecorator:
    """Parametrizes a test with a row for each program. Rows of programs outside `in_gate` get the mark
    `full`."""
    return pytest.mark.parametrize(
        "order",
        [
            pytest.param(order, marks=() if order in in_gate else pytest.mark.full, id=order)
            for order in PROGRAMS
        ],
    )


@programs("megatron-core")
def test_117_orders_of_one_data_set_equal_the_programs(
    core_data: Path, cases: dict[str, Any], expected: dict[str, Any], order: str
) -> None:
    different = []
    for number, case in enumerate(cases["single"]):
        data = DataConfig(data_path=(str(core_data / case["data"]),), split=case["split"], data_order=order)
        found = []
        for ((group, wanted),) in requested_groups(data, cases["seq_length"], tuple(case["sizes"])):
            (request,) = index_requests(group, wanted, cases["seq_length"], case["seed"], None)
            index = build_sample_order(
                request.dataset.sizes, request.documents, request.seq_length, request.seed, request.plan()
            )
            samples, length = request.plan().total_samples, request.seq_length
            found.append(
                samples_digest(GPTDataset("", request.dataset, lambda index=index: index, samples, length))
            )
        if expected[order]["single"][number] not in (found, None):
            different.append(number)
    assert len(cases["single"]) == len(expected[order]["single"]) == 117 and different == []
    assert expected[order]["single"].count(None) == (7 if order == "megatron-deepspeed" else 0)


@programs("megatron-core", "megatron-deepspeed")
def test_20_blends_equal_the_programs(
    core_data: Path, cases: dict[str, Any], expected: dict[str, Any], tmp_path: Path, order: str
) -> None:
    different = []
    for number, case in enumerate(cases["blends"]):
        data = config_of(core_data, case, tmp_path, order)
        found = build(data, cases["seq_length"], case["seed"], tuple(case["sizes"]))
        datasets = [dataset for dataset in (found.train, *found.valid, *found.test) if dataset is not None]
        if list(map(samples_digest, datasets)) != expected[order]["blends"][number]:
            different.append(number)
    assert len(cases["blends"]) == len(expected[order]["blends"]) == 20 and different == []


def test_blends_without_weights_and_with_short_data_equal_megatron_core(
    core_data: Path, cases: dict[str, Any], tmp_path: Path
) -> None:
    """The last of three sizes is all samples of one epoch, where Megatron-Core ends."""
    different = []
    for number, case in enumerate([*cases["sized"], *cases["short"]]):
        sizes = tuple(case.get("lengths", case["sizes"]))
        words = [word if isinstance(word, float | int) else str(core_data / word) for word in case["blend"]]
        one, each = tuple(map(str, words)), {"data_order": "megatron-core", "data_cache_path": str(tmp_path)}
        data = (
            DataConfig(data_path=one, split=case["split"], **each)
            if case["split"]
            else DataConfig(train_data_path=one, valid_data_path=one, **each)
        )
        found = build(data, cases["seq_length"], case["seed"], sizes)
        datasets = [dataset for dataset in (found.train, *found.valid, *found.test) if dataset is not None]
        if list(map(samples_digest, datasets)) != case["samples"]:
            different.append(number)
    assert (len(cases["sized"]), len(cases["short"])) == (18, 4) and different == []
    with pytest.raises(UserError, match="Megatron-Core ends there"):
        build(
            replace(data, train_data_path=(str(core_data / "a"), str(core_data / "b"))), 16, 1, (10**6, 0, 0)
        )


def test_the_cases_tell_the_programs_apart(expected: dict[str, Any]) -> None:
    """If the orders of two programs were equal in all cases, the cases would not show which one is
    implemented."""
    for kind in ("single", "blends"):
        for order, other in combinations(PROGRAMS, 2):
            pairs = zip(expected[order][kind], expected[other][kind], strict=True)
            assert sum(a != b for a, b in pairs) >= 3, (kind, order, other)


@pytest.mark.parametrize("loop", ["compiled", "numpy"])
def test_tables_equal_megatron_cores_in_every_element(
    cases: dict[str, Any], loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert helpers.compiled() is not None
    if loop == "numpy":
        monkeypatch.setattr(greedy_blend, "compiled", lambda: None)
    for case in cases["tables"][: 5 if loop == "compiled" else 2]:
        blend = CoreBlend.from_fractions([Fraction(weight) for weight in case["weights"]])
        table = blend.table(case["samples"])
        assert digest(*table) == case["table"]
        # The table of a longer run begins with the table of a shorter run.
        assert all(np.array_equal(a, b[:1000]) for a, b in zip(blend.table(1000), table, strict=True))


@pytest.fixture
def cached(core_data: Path, cases: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Returns the run whose cache folder Megatron-Core wrote. A test may change this folder."""
    cache = shutil.copytree(core_data / "cache", tmp_path / "cache")
    case = cases["cached"]
    return {**case, "cache": cache, "data": config_of(core_data, case, cache)}


def next_samples(cached: dict[str, Any], seq_length: int) -> list[list[int]]:
    """Returns the samples of the next global batch, from the micro-batches of two data-parallel ranks."""
    train = build(cached["data"], seq_length, cached["seed"], tuple(cached["sizes"])).train
    assert train is not None
    found: dict[int, list[int]] = {}
    for rank in range(2):
        loader = GPTBatchLoader(train, micro_batch_size=2, dp_rank=rank, dp_size=2)
        for batch in loader.micro_batches(cached["first"], cached["count"]):
            rows = torch.cat((batch.tokens, batch.labels[:, -1:]), dim=1).tolist()
            found.update(zip(batch.samples, rows, strict=True))
    return [found[number] for number in sorted(found)]


def test_a_run_of_megatron_core_continues_in_the_middle_of_a_blend(
    cases: dict[str, Any], cached: dict[str, Any], tmp_path: Path
) -> None:
    seq_length = cases["seq_length"]
    assert next_samples(cached, seq_length) == cached["next_samples"]
    without = {**cached, "data": replace(cached["data"], data_cache_path=str(tmp_path / "empty"))}
    assert next_samples(without, seq_length) == cached["next_samples"]
    # One table serves all splits, and a longer run.
    assert len(list((tmp_path / "empty").glob("blend-*"))) == 2
    read = build(cached["data"], seq_length, cached["seed"], tuple(cached["sizes"])).train
    assert isinstance(read, BlendedDataset)
    for name in ("dataset_index", "dataset_sample_index"):
        (written,) = cached["cache"].glob(f"*-BlendedDataset-train-{name}.npy")
        (own,) = cached["cache"].glob(f"blend-*_{name}.npy")
        content = np.load(written)
        assert np.array_equal(np.load(own)[: len(content)], content)


def test_a_resume_in_another_order_is_rejected(core_data: Path) -> None:
    orders = {
        name: data_fingerprint(DataConfig(data_path=(str(core_data / "a"),), data_order=name), 16, 1, 100)
        for name in DATA_ORDERS
    }
    assert "data_order" not in orders["native"]  # as in checkpoints from before the flag existed
    for saved, fingerprint in orders.items():
        for now, other in orders.items():
            differences = fingerprint_differences(fingerprint, other)
            if saved == now:
                assert differences == []
            else:
                assert f"data_order: {saved} in the checkpoint, {now} now" in differences


def test_a_damaged_table_is_named_and_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy_blend, "_BLOCK", 700)
    blend, folder = CoreBlend((0.2, 0.3, 0.5)), str(tmp_path)
    blend.prepare(folder, 5000, [9000] * 3)
    paths = blend.table_paths(folder, 5000)
    for path in paths:
        whole = Path(path).read_bytes()
        for damaged in (
            whole[:-9],
            whole[:-1] + bytes([whole[-1] ^ 1]),
            whole[:-3001] + b"\2" + whole[-3000:],
        ):
            Path(path).write_bytes(damaged)
            if len(damaged) < len(whole):
                with pytest.raises(UserError, match=rf"{path} is damaged .* one process per node"):
                    blend.load(folder, 5000)
            blend.prepare(folder, 5000, [9000] * 3)
            assert Path(path).read_bytes() == whole


def test_a_component_that_the_greedy_order_exhausts_is_named(tmp_path: Path) -> None:
    blend = CoreBlend((0.5, 0.5))
    with pytest.raises(UserError, match=r"reads 50 samples of its component number 2, .* over 49"):
        blend.prepare(str(tmp_path), 100, [50, 49])


def test_the_compiled_sample_index_equals_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.RandomState(3)
    monkeypatch.setattr(indices, "_COMPILED_FROM", 0)
    for length, dtype in ((1, np.int32), (7, np.int64), (16, np.int32)):
        sizes = generator.randint(0, 30, 5000).astype(np.int32)
        sizes[:3] = 0
        documents = np.tile(np.arange(5000, dtype=dtype), 2)
        monkeypatch.setattr(indices, "_index_dtype", lambda _, dtype=dtype: dtype)
        samples = (2 * int(sizes.sum()) - 1) // length
        fast = build_sample_index(sizes, documents, length, samples)
        with pytest.raises(ValueError, match="too few tokens"):
            build_sample_index(sizes, documents, length, samples + 1)
        with monkeypatch.context() as patch:
            patch.setattr(indices, "compiled", lambda: None)
            slow = build_sample_index(sizes, documents, length, samples)
        assert fast.dtype == slow.dtype == dtype
        assert np.array_equal(fast, slow)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_the_compiled_shuffle_equals_numpys(dtype: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indices, "_COMPILED_FROM", 0)
    for length in (0, 1, 2, 3, 64, 65, 66, 129, 4096, 5000):
        expected, found = np.arange(length, dtype=dtype), np.arange(length, dtype=dtype)
        numpys, own = np.random.RandomState(length), np.random.RandomState(length)
        for _ in range(2):
            numpys.shuffle(expected)
            indices._shuffle(own, found)
        assert np.array_equal(found, expected) and own.bytes(9) == numpys.bytes(9)


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
def test_without_a_compiler_numpy_builds_the_indices(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    assert helpers.compiled.__wrapped__() is None
