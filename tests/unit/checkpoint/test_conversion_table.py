"""The table of docs/conversion.md states what a conversion carries over. Each row is converted, the target is
searched for the five properties of the source, and its files are verified."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.formats.dcp import DcpFolder
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.registry import (
    FORMATS,
    HUGGING_FACE,
    NATIVE,
    TORCHTITAN,
    format_of,
    open_reader,
)
from megatron.checkpoint.huggingface.importer import own_tokenizer
from megatron.checkpoint.inspect import inspect_checkpoint
from megatron.commands import ds_to_universal
from megatron.config import DataConfig
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.flags import tokenizer_settings
from tests.end_to_end.command import ROOT
from tests.support.assets import unpack
from tests.support.layouts import Row, config_of
from tests.unit.checkpoint import megatron_deepspeed_folder, native_folder
from tests.unit.checkpoint.native_folder import convert
from tests.unit.checkpoint.test_torchtitan import LLAMA
from tests.unit.tokenizer.vocabularies import train_gpt2_vocabulary

PAGE = (ROOT / "docs" / "conversion.md").read_text()
FACTS = ("weights", "Adam's moments, step", "schedule", "position in the data", "tokenizer")
(TABLE,) = re.findall(r"^\| from \| to \|(.*)\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE[1].splitlines()]
TEXT = "The quick brown fox"
VOCAB = 400


def test_the_table_has_every_written_format_in_both_directions() -> None:
    assert [cell.strip() for cell in TABLE[0].strip("| ").split("|")] == list(FACTS)
    names = [[re.findall("`(.*?)`", cell)[0] for cell in row[:2]] for row in ROWS]
    written = {name for name, entry in FORMATS.items() if entry.writer} | {HUGGING_FACE}
    assert {source for source, _ in names} == {target for _, target in names} == written


def native(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes a native bf16 checkpoint whose schedule and tokenizer differ from the defaults."""
    vocab, merges = train_gpt2_vocabulary(folder, VOCAB)
    data = {"vocab_file": vocab, "merge_file": merges, "tokenizer_type": "GPT2BPETokenizer"}
    schedule = {"min_lr": 1e-4, "lr_decay_style": "cosine", "lr_warmup_iters": 3}
    row = Row(tp=2, pp=2, dp=2, zero=1, precision="bf16")
    config = config_of(row, model=LLAMA, data=data, schedule=schedule)
    monkeypatch.setattr(native_folder, "VOCAB", VOCAB)
    return native_folder.write_native(folder / "native", config, native_folder.random_wholes(config))


def megatron_core(folder: Path) -> Path:
    return unpack("torch_dist_llama", folder)


def megatron_deepspeed(folder: Path) -> Path:
    megatron_deepspeed_folder.unpack(folder)
    source = folder / "swiglu" / "global_step3"
    ds_to_universal.main(["--input_folder", str(source), "--output_folder", f"{source}_universal"])
    return source.with_name(f"{source.name}_universal")


OTHERS: dict[str, Callable[[Path], Path]] = {
    "`torch_dist` of Megatron-Core": megatron_core,
    "`universal` of Megatron-DeepSpeed": megatron_deepspeed,
}


def weights(folder: Path) -> dict[str, Tensor]:
    reader = open_reader(open_checkpoint(folder))
    return {name: reader.read_unpadded(name, VALUES).float() for name in reader.stored_names}


def moments(folder: Path) -> dict[Any, Tensor]:
    if format_of(folder) == TORCHTITAN:  # `StateReader` sees only its weights
        stored = DcpFolder(folder)
        keys = [key for key in stored.tensors if key.startswith("optimizer.")]
        return {key: stored.read(key) for key in keys}
    reader = open_reader(open_checkpoint(folder))
    found = {
        (name, kind): reader.read_unpadded(name, kind)
        for name in reader.stored_names
        for kind in reader.state_names(name)
        if kind != VALUES
    }
    steps = {(name, "step"): reader.optimizer_scalars(name)["step"] for name, _ in found}
    return found | {key: torch.as_tensor(step) for key, step in steps.items()}


def are_of_torchtitan(folder: Path) -> bool:
    """Returns whether the moments have the values that `native_folder` writes, in the order of torchtitan's
    weights."""
    stored = DcpFolder(folder)
    names = [key for key in stored.tensors if not key.startswith("optimizer.")]
    return all(
        torch.equal(stored.read(f"optimizer.state.{name}.exp_avg"), stored.read(name) / 8)
        and torch.equal(stored.read(f"optimizer.state.{name}.exp_avg_sq"), stored.read(name) ** 2)
        and stored.read(f"optimizer.state.{name}.step") == 5
        for name in names
    )


def token_ids(folder: Path) -> list[int] | None:
    """Returns the ids of a text by the tokenizer that the folder contains or names."""
    checkpoint = open_checkpoint(folder)
    if format_of(folder) in (HUGGING_FACE, TORCHTITAN):
        settings = own_tokenizer(folder)
    else:
        settings = {} if checkpoint.is_external else tokenizer_settings(checkpoint.config.data)
    return build_tokenizer(DataConfig(**settings)).tokenize(TEXT) if settings else None


def carried(source: Path, target: Path) -> list[str]:
    """Returns the cells of the table's row for a conversion."""
    before, after = weights(source), weights(target)
    assert before.keys() == after.keys()
    cells = ["no"]
    if all(torch.equal(before[name], after[name]) for name in before):
        cells = ["yes"]
    elif all(torch.equal(before[name].bfloat16().float(), after[name]) for name in before):
        cells = ["in the run's precision"]
    had, has = moments(source), moments(target)
    if format_of(target) == TORCHTITAN:
        same = are_of_torchtitan(target)
    else:
        same = has.keys() == had.keys() and all(torch.equal(had[key], has[key]) for key in had)
    assert same or not has
    old, new = open_checkpoint(source), open_checkpoint(target)
    schedule = old.records_run and new.records_run and old.config.schedule == new.config.schedule
    position = new.state.iteration > 0 and old.state == new.state
    tokenizer = (ids := token_ids(source)) is not None and ids == token_ids(target)
    return cells + ["yes" if fact else "no" for fact in (same and had, schedule, position, tokenizer)]


# For these formats, tests in other files compare the bits of checkpoints after a conversion and back.
RETURNING = ("`universal`", "`dcp`", "`torch_dist`")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.full] if row[0] in RETURNING else []) for row in ROWS],
    ids=[" to ".join(row[:2]).replace("`", "") for row in ROWS],
)
def test_a_conversion_carries_what_the_row_says(
    row: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, target = row[0], row[1].strip("`")
    if origin in OTHERS:
        source = OTHERS[origin](tmp_path)
    else:
        source = native(tmp_path, monkeypatch)
        if (name := origin.strip("`")) != NATIVE:
            source = convert(source, tmp_path / "source", name)
    written = convert(source, tmp_path / "target" / "global_step5_universal", target)
    assert carried(source, written) == row[2:]
    report = inspect_checkpoint(written, verify=True)
    assert report.is_complete and report.problems == []
