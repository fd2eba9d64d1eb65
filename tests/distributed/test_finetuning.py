"""--finetune and --no-load-optim load the fp32 weights on any layout, and start a fresh optimizer."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from megatron.checkpoint.conversion.source import open_source
from megatron.checkpoint.discovery import find_latest
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.record import TrainingState
from megatron.checkpoint.selection import find_checkpoint
from tests.reference.plain_gpt import train_plain_gpt
from tests.support.checkpoints import FINGERPRINT, make_manager, save_midway, state_after
from tests.support.conversion import to_universal
from tests.support.layouts import (
    CLIP,
    FP32_BOUND,
    RATE,
    VOCAB,
    Row,
    build_engine,
    config_of,
    global_batch,
    relative_errors,
    train,
    unconnected_run,
)
from tests.support.pool import run_world

BEFORE, STEPS = 3, 3
OWN_DATA = {**FINGERPRINT, "tokens": [6000]}
EIGHT_BITS = {"use_bnb_optimizer": True}
# In bf16 the layer files hold rounded weights. From them an fp32 run would get different losses.
SAVERS = {
    "bf16 pp2 dp2": (Row(pp=2, dp=2, zero=1, precision="bf16"), {}),
    "fp16 tp2": (Row(tp=2, precision="fp16"), {}),
    "8 bits": (Row(), EIGHT_BITS),
}
OPENERS = {
    "1 process": Row(micro_batch=4),
    "tp2 pp2": Row(tp=2, pp=2, micro_batch=4),
    "dp2": Row(dp=2),
    "dp2 zero1": Row(dp=2, zero=1),
    "dp2 zero2": Row(dp=2, zero=2),
    "tp2 dp2 zero3": Row(tp=2, dp=2, zero=3),
    "pp4": Row(pp=4, micro_batch=2),
}
FLAGS = {"finetune": range(STEPS), "no_load_optim": range(BEFORE, BEFORE + STEPS)}


def save_base(row, folder, optimizer):
    save_midway(row, folder, BEFORE, optimizer=optimizer)


@cache
def base(saver):
    """Returns a folder with a native checkpoint of three steps, and a folder with its universal form."""
    row, optimizer = SAVERS[saver]
    folder = Path(mkdtemp())
    run_world(row.world_size, save_base, row, folder / "native", optimizer)
    list(to_universal(open_source(folder / "native" / f"global_step{BEFORE}"), folder / "universal" / "base"))
    return folder


def expected_history(saver, steps):
    """Returns the losses of a GPT in plain PyTorch that starts from the checkpoint's fp32 weights with a new
    optimizer."""
    reader = open_reader(find_latest(base(saver) / "native"))
    weights = {name: reader.read_unpadded(name, VALUES) for name in reader.specs}
    batches = [global_batch(step) for step in steps]
    return train_plain_gpt(weights, batches, lr=RATE, vocab=VOCAB, clip=CLIP, layers=4, heads=4)


def start(row, load, save, steps, flag, **optimizer):
    """Starts as the program does, trains on the steps and saves. Returns (state, losses and norms, log)."""
    options = {"load": str(load), "save": str(save), "universal_checkpoint": load.name == "universal"}
    config = config_of(row, checkpoint={**options, flag: True}, optimizer=optimizer)
    data = OWN_DATA if flag == "finetune" else FINGERPRINT
    engine = build_engine(config)
    train(engine, [9])  # differs from a fresh engine: the load must replace all
    run = unconnected_run(config, fingerprint=data)
    checkpoint, engine.run = find_checkpoint(run), replace(run, mesh=engine.mesh)
    manager = make_manager(engine, save)
    log = []
    state = manager.restore_or_init(checkpoint, log.append)
    history = train(engine, steps)
    manager.save(state_after(steps[-1] + 1))
    return state, history, "\n".join(log)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("saver", ["bf16 pp2 dp2", "fp16 tp2"])
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("kind", ["native", "universal"])
@pytest.mark.parametrize("opener", OPENERS)
def test_the_losses_are_those_of_the_fp32_weights_with_a_new_optimizer(opener, kind, flag, saver, tmp_path):
    row, steps = OPENERS[opener], FLAGS[flag]
    expected = expected_history(saver, steps)
    for state, history, log in run_world(
        row.world_size, start, row, base(saver) / kind, tmp_path, steps, flag
    ):
        assert state == (TrainingState() if flag == "finetune" else state_after(BEFORE))
        assert max(relative_errors(history, expected)) <= FP32_BOUND
        assert "not loaded: --" in log and ("(--finetune)" in log) == (flag == "finetune")


def start_with_other_documents(load, save):
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    config = config_of(Row(), checkpoint={"load": str(load), "finetune": True}, data=flags)
    checkpoint = find_checkpoint(unconnected_run(config, fingerprint=OWN_DATA))
    log = []
    make_manager(build_engine(config), save).restore_or_init(checkpoint, log.append)
    return "\n".join(log)


@pytest.mark.full
def test_finetuning_may_treat_documents_in_another_way(tmp_path):
    """With the new treatment of documents the canary loss differs from the checkpoint's: this must not be an
    error."""
    (log,) = run_world(1, start_with_other_documents, base("8 bits") / "native", tmp_path)
    assert "not compared: --reset-position-ids, --reset-attention-mask, --eod-mask-loss differ" in log


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_8_bit_moments_start_fresh(precision, flag, tmp_path):
    """Fails if the moments are loaded: they would change the second step's loss."""
    row, steps = Row(micro_batch=4, precision=precision), FLAGS[flag]
    ((_, history, _),) = run_world(
        1, start, row, base("8 bits") / "native", tmp_path, steps, flag, **EIGHT_BITS
    )
    expected = expected_history("8 bits", steps)
    assert history[0][0] == pytest.approx(expected[0][0], rel=FP32_BOUND if precision == "fp32" else 2e-3)
    assert [loss for loss, _ in history] == pytest.approx([loss for loss, _ in expected], rel=2e-3)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("row", [Row(), Row(tp=2, dp=2, zero=1, precision="bf16")], ids=str)
def test_the_same_command_resumes_what_it_has_saved(row, flag, tmp_path):
    """With the checkpoint's moments, the losses equal the uninterrupted run's to the last bit."""
    load, steps = base("bf16 pp2 dp2") / "native", FLAGS[flag]
    interrupted, last = tmp_path / "interrupted", steps[-1] + 1
    after = range(last, last + 2)
    whole = run_world(row.world_size, start, row, load, tmp_path / "whole", [*steps, *after], flag)
    run_world(row.world_size, start, row, load, interrupted, steps, flag)
    resumed = run_world(row.world_size, start, row, load, interrupted, after, flag)
    for (state, history, log), (_, expected, _) in zip(resumed, whole, strict=True):
        assert state == state_after(last) and "since it started from" in log
        assert history == expected[-2:]
