"""Training resumes from a universal checkpoint of Microsoft's Megatron-DeepSpeed on every layout."""

import json

import pytest
import torch

from megatron.checkpoint.conversion.source import open_source
from megatron.checkpoint.discovery import find_universal
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.universal import UniversalReader
from megatron.checkpoint.manager import load_checkpoint
from megatron.checkpoint.selection import find_checkpoint
from megatron.commands import ds_to_universal
from megatron.data.loader import MicroBatch
from tests.distributed.resharding import SHAPES, STEPS_BEFORE, resume_midway, save_before, uninterrupted
from tests.support.checkpoints import FINGERPRINT, state_after
from tests.support.conversion import to_universal
from tests.support.layouts import FP32_BOUND, Row, build_engine, config_of, relative_errors, unconnected_run
from tests.support.pool import run_world
from tests.unit.checkpoint.megatron_deepspeed_folder import (
    ASSET_MODELS,
    ASSET_VOCAB,
    SEQ,
    plain_loss,
    unpack,
    write_as_megatron_deepspeed,
)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("changes", [{"glu_activation": "swiglu"}, {"position_embedding_type": "rotary"}])
def test_training_resumes_with_the_same_numbers(changes, tmp_path):
    """Covers weights, moments, step and position in the data. A gated MLP is sharded after its halves are
    swapped."""
    changes = {"model": changes}
    run_world(1, save_before, Row(), tmp_path / "native", changes)
    for _ in to_universal(
        open_source(tmp_path / "native" / f"global_step{STEPS_BEFORE}"), tmp_path / "universal"
    ):
        pass
    reader = UniversalReader(find_universal(tmp_path / "universal"))
    states = {}
    for name in reader.names:
        kinds = {
            "fp32" if kind == VALUES else kind: reader.read(name, kind) for kind in reader.state_names(name)
        }
        states[name] = {**kinds, "step": reader.optimizer_scalars(name)["step"]}
    write_as_megatron_deepspeed(tmp_path / "theirs", config_of(Row(), **changes), states)
    expected = uninterrupted(changes)
    resumed = {**changes, "checkpoint": {"universal_checkpoint": True}}
    for row in (SHAPES["tp2 pp2"], SHAPES["pp4 dp2"]):
        for state, history in run_world(row.world_size, resume_midway, row, tmp_path / "theirs", resumed):
            assert state == state_after(STEPS_BEFORE)
            assert max(relative_errors(history, expected)) <= FP32_BOUND


# --- files that Megatron-DeepSpeed itself wrote ---


@pytest.fixture
def asset(tmp_path):
    unpack(tmp_path)
    return tmp_path


def convert_native(folder):
    source = folder / "global_step3"
    ds_to_universal.main(["--input_folder", str(source), "--output_folder", f"{source}_converted"])


def next_steps(folder):
    return json.loads((folder / "next_steps.json").read_text())


def resume_asset(row, folder, model):
    """Returns the state, and (loss, grad norm) of Megatron-DeepSpeed's next steps on its samples."""
    options = {"load": str(folder), "universal_checkpoint": True}
    config = config_of(row, model=model, optimizer={"weight_decay": 0.0}, checkpoint=options)
    checkpoint = find_checkpoint(unconnected_run(config, ASSET_VOCAB))
    engine = build_engine(config, vocab_size=ASSET_VOCAB)
    load_checkpoint(engine, checkpoint, FINGERPRINT)
    history = []
    for step in next_steps(folder):
        samples = torch.tensor(step["samples"])
        batches = (MicroBatch.from_rows(sample, k) for k, sample in enumerate(samples.split(1)))
        loss = engine.train_step(batches, len(samples), 1e-2)
        history.append((loss.item(), engine.optimizer.grad_norm))
    return checkpoint.state, history


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("row", [Row(), Row(tp=2, pp=2)], ids=str)
@pytest.mark.parametrize(
    "name, converter",
    [
        ("llama", "DeepSpeed's"),
        ("swiglu", "ours"),
        ("learned", "DeepSpeed's"),
        ("learned", "ours"),
        ("llama", "ours"),
    ],
)
def test_training_continues_with_the_numbers_of_the_other_program(name, converter, row, asset):
    folder = asset / name
    if converter == "ours":
        convert_native(folder)
    expected = next_steps(folder)
    samples = 3 * len(expected[0]["samples"])
    for state, history in run_world(row.world_size, resume_asset, row, folder, ASSET_MODELS[name]):
        assert (state.iteration, state.consumed_samples, state.consumed_tokens) == (3, samples, samples * SEQ)
        assert history == [pytest.approx((step["loss"], step["norm"]), rel=FP32_BOUND) for step in expected]
    plain = plain_loss(folder, name, torch.tensor(expected[0]["samples"]))
    assert plain == pytest.approx(expected[0]["loss"], rel=FP32_BOUND)


@pytest.mark.parametrize("name", ["learned", "llama"])
def test_both_converters_write_the_same_tensors(name, asset):
    theirs = UniversalReader(find_universal(asset / name))
    convert_native(asset / name)
    ours = UniversalReader(find_universal(asset / name))
    assert theirs.folder != ours.folder and set(theirs.stored_names) == set(ours.stored_names)
    for name in ours.stored_names:
        assert theirs.state_names(name) == ours.state_names(name) == [VALUES, "exp_avg", "exp_avg_sq"]
        assert all(
            torch.equal(theirs.read(name, kind), ours.read(name, kind)) for kind in ours.state_names(name)
        )
        assert theirs.optimizer_scalars(name) == ours.optimizer_scalars(name)
