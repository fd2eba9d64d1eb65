"""The watchdog gets one heartbeat per micro-batch on every stage, and one per file of a checkpoint."""

from pathlib import Path

import torch.distributed as dist

from megatron.checkpoint.files import describe_file, file_problem
from megatron.checkpoint.ranks import first_problem
from tests.support.layouts import GLOBAL_BATCH, RATE, Row, build_engine, config_of, micro_batches
from tests.support.pool import run_world


def heartbeats():
    engine = build_engine(config_of(Row(pp=2, micro_batch=1)))
    found: list[str] = []
    engine.train_step(micro_batches(engine, 0), GLOBAL_BATCH, RATE, heartbeat=lambda: found.append("step"))
    engine.evaluate_totals(micro_batches(engine, 1), 2, heartbeat=lambda: found.append("evaluation"))
    engine.train_step(micro_batches(engine, 2), GLOBAL_BATCH, RATE)
    return found.count("step"), found.count("evaluation")


def test_every_stage_has_a_heartbeat_per_micro_batch():
    assert run_world(2, heartbeats) == [(GLOBAL_BATCH, 2)] * 2


def files_verified(folder: Path):
    from megatron.checkpoint.formats.writing import Content
    from megatron.checkpoint.saving.background import DirectFiles

    saved: list[str] = []
    loaded: list[str] = []
    content = Content(lambda file: file.write(b"x"))
    DirectFiles(lambda: saved.append("file")).write(folder / f"of rank {dist.get_rank()}", [content])
    files = {path.name: describe_file(path) for path in folder.glob("file*")}
    first_problem(
        sorted(files),
        lambda name: file_problem(folder, name, files[name]["sha256"]),
        lambda: loaded.append("file"),
    )
    return len(saved), len(loaded)


def test_each_file_of_a_checkpoint_is_a_heartbeat_of_the_rank_that_writes_or_reads_it(tmp_path):
    for index in range(5):
        (tmp_path / f"file{index}").write_bytes(b"x" * index)
    assert run_world(2, files_verified, tmp_path) == [(1, 3), (1, 2)]
