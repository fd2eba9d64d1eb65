"""A user's mistake ends every rank with exit code 2, and is reported once, in one sentence."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.config.registries import DATA_ORDERS
from megatron.data.indexed_dataset import HEADER, IndexedDataset
from megatron.data.splits import split_documents
from tests.end_to_end.command import ROOT, Run, pretrain, pretrain_typed
from tests.end_to_end.flags import ABSOLUTE, MODEL, SHORT
from tests.support import HANG_TIMEOUT_S

FLAGS = [*MODEL, *ABSOLUTE, *SHORT]


def test_a_misspelt_flag_is_answered_at_once_with_the_real_one(data: list[str]) -> None:
    run = pretrain_typed(["--num-layer", "4", *FLAGS, *data])
    assert run.exit_code == 2
    assert run.stdout == ""
    assert run.stderr == "error: unknown flag --num-layer: did you mean --num-layers?\n"
    assert run.cpu_s < 2


def test_fp32_is_refused_without_ieee_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    run = pretrain_typed(["--dry-run", *FLAGS])
    assert (run.exit_code, run.stdout) == (2, "")
    assert run.stderr.startswith("error: NVIDIA_TF32_OVERRIDE 1: ") and run.stderr.count("\n") == 1
    assert pretrain_typed(["--dry-run", "--bf16", "--vocab-size", "128", *FLAGS]).exit_code == 0


def assert_reported_once(run: Run, *parts: str) -> None:
    assert run.exit_code != 0
    (error,) = run.errors
    assert run.stderr.splitlines()[-1] == error
    for part in parts:
        assert part in error
    # The launcher's SIGTERM may reach a rank before the rank has found the mistake.
    assert 2 in run.rank_exit_codes and run.rank_exit_codes <= {1, 2, 128 + signal.SIGTERM}


def truncated(data: list[str], folder: Path) -> tuple[list[str], tuple[str, ...]]:
    prefix = Path(data[1])
    whole = Path(f"{prefix}.bin").read_bytes()
    (folder / "cut.bin").write_bytes(whole[:1000])
    shutil.copy(f"{prefix}.idx", folder / "cut.idx")
    return ["--data-path", str(folder / "cut")], ("cut.bin: truncated, it has 1,000 bytes", f"{len(whole):,}")


def corrupted(data: list[str], folder: Path) -> tuple[list[str], tuple[str, ...]]:
    """Writes a wrong offset into the middle of the .idx file. One process per node checks the offsets."""
    for ending in (".bin", ".idx"):
        shutil.copy(f"{data[1]}{ending}", folder / f"text{ending}")
    documents = len(IndexedDataset(folder / "text"))
    content = bytearray((folder / "text.idx").read_bytes())
    content[HEADER.size + 4 * documents + 8 * (documents // 2)] ^= 1
    (folder / "text.idx").write_bytes(content)
    return ["--data-path", str(folder / "text")], (
        "text.idx: damaged",
        f"document {documents // 2} begins at",
    )


def absent(data: list[str], folder: Path) -> tuple[list[str], tuple[str, ...]]:
    return ["--data-path", str(folder / "none")], ("--data-path", "none.bin does not exist")


def indivisible(data: list[str], folder: Path) -> tuple[list[str], tuple[str, ...]]:
    return ["--tensor-model-parallel-size", "4"], ("2 processes", "--tensor-model-parallel-size 4")


def contradiction(data: list[str], folder: Path) -> tuple[list[str], tuple[str, ...]]:
    (folder / "ds.json").write_text(json.dumps({"train_batch_size": 64}))
    flags = ["--deepspeed_config", str(folder / "ds.json")]
    return flags, ("train_batch_size is 64", "--global-batch-size is 4")


def too_many_samples(data: list[str], folder: Path) -> tuple[list[str], tuple[str, ...]]:
    return ["--train-iters", str(10**14)], ("building their index takes 12,800,000 GB",)


def unwritable_checkpoints(data: list[str], folder: Path) -> tuple[list[str], tuple[str, ...]]:
    (folder / "file").touch()
    return ["--save", str(folder / "file" / "checkpoints")], ("--save", "cannot be created (Not a directory)")


def absent_checkpoints(data: list[str], folder: Path) -> tuple[list[str], tuple[str, ...]]:
    """Returns a mistake that only rank 0 looks for."""
    return ["--load", str(folder / "none"), "--eval-only"], ("--load", "does not exist: --eval-only needs")


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize(
    "mistake",
    [
        *(corrupted, truncated, absent, indivisible, contradiction, too_many_samples),
        *(unwritable_checkpoints, absent_checkpoints),
    ],
    ids=lambda m: m.__name__,
)
def test_a_mistake_is_reported_once_before_the_processes_connect(
    mistake, data: list[str], tmp_path: Path
) -> None:
    flags, parts = mistake(data, tmp_path)
    run = pretrain([*FLAGS, *data, *flags], processes=2)
    assert_reported_once(run, *parts)
    assert run.stdout == ""  # the first line comes after the processes connect


@pytest.mark.full
def test_a_mistake_that_only_rank_0_finds_is_reported_once(data: list[str], tmp_path: Path) -> None:
    """A folder is in the way of an index file, which rank 0 writes for all ranks while they wait."""
    for ending in (".bin", ".idx"):
        shutil.copy(f"{data[1]}{ending}", tmp_path / f"text{ending}")
    # 5 steps of 4 samples, sequences of 32 tokens, the default seed.
    documents = split_documents("900,50,50", len(IndexedDataset(data[1])), DATA_ORDERS["native"])[0]
    assert documents is not None
    stem = f"text_documents{documents.start}-{documents.stop}_indexmap_1epochs_32sl_1234s"
    (tmp_path / f"{stem}_doc_idx.npy").mkdir()
    run = pretrain([*FLAGS, *data, "--data-path", str(tmp_path / "text")], processes=2)
    assert_reported_once(run, "cannot write index files into", str(tmp_path))
    assert run.steps == []


@pytest.mark.full
def test_processes_that_were_started_with_different_flags_end_with_one_sentence(data: list[str]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rates = {"0": "1e-3", "1": "5e-3"}
    processes = [
        subprocess.Popen(
            [sys.executable, "pretrain_gpt.py", *FLAGS, *data, "--lr", rate],
            cwd=ROOT,
            env={
                **os.environ,
                **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"},
                # The store of a launcher. A port that was free before may be taken by now.
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)},
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, rate in rates.items()
    ]
    errors = [processes[0].communicate(timeout=HANG_TIMEOUT_S)[1]]
    processes[1].terminate()  # as a launcher does; until then silent ranks wait
    errors.append(processes[1].communicate(timeout=HANG_TIMEOUT_S)[1])
    assert processes[0].returncode == 2 and processes[1].returncode in (2, -signal.SIGTERM)
    (error,) = "".join(errors).splitlines()
    assert "--lr is 0.001 on rank 0 and 0.005 on rank 1" in error


@pytest.mark.full
def test_a_rank_outside_the_world_says_so_itself(data: list[str]) -> None:
    env = {**os.environ, "RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    run = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *FLAGS, *data], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert run.returncode == 2 and run.stderr.startswith("error: RANK 3 with WORLD_SIZE 2")
