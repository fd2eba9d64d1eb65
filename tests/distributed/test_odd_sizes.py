"""In a model whose matrices have odd sizes every parameter is aligned, and the padding changes no loss."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.record import TrainingState
from tests.distributed.parity import Changes, assert_same_numbers
from tests.distributed.resharding import STEPS_AFTER, STEPS_BEFORE, resume_midway, save_before
from tests.distributed.test_universal import is_equal, torch_files_in
from tests.support.layouts import Row, build_engine, config_of, relative_errors, train, train_layout
from tests.support.pool import run_world

ODD: Changes = {
    "model": {
        "hidden_size": 36,
        "kv_channels": 9,
        "ffn_hidden_size": 50,
        "make_vocab_size_divisible_by": 1,
    }
}
ALIGNMENT = "megatron.optimizer.flat_group.PARAMETER_ALIGNMENT"
ROWS = [
    Row(precision="bf16"),
    Row(tp=2, dp=2, zero=1, precision="bf16"),
    Row(pp=2, dp=2, zero=1),
    Row(dp=2, zero=2, precision="bf16"),
    Row(dp=2, zero=3, precision="bf16"),
]


def unaligned(row: Row) -> list[str]:
    """Returns the weights and gradients whose offset in their flat buffer is not a multiple of 128 bytes, or
    whose address is not a multiple of 64 bytes."""
    engine = build_engine(config_of(row, **ODD))
    train(engine, [0])
    found, gradients = [], {}
    for flat in engine.optimizer.flat:
        gradients |= zip(flat.parameters, flat.full_grads, strict=True)
    with engine.optimizer.gathered_params():
        for name, parameter in engine.module.named_parameters():
            for kind, tensor in (("weight", parameter), ("gradient", gradients[parameter])):
                offset = tensor.storage_offset() * tensor.element_size()
                found += [f"{kind} {name}"] * (offset % 128 != 0 or tensor.data_ptr() % 64 != 0)
    return found


def history_with_alignment(row: Row, alignment: int) -> list[tuple[float, float]]:
    with mock.patch(ALIGNMENT, alignment):
        assert bool(unaligned(row)) == (alignment == 1)  # the sizes are odd
        return train_layout(row, 3, **ODD)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_weight_and_gradient_is_aligned_and_no_number_depends_on_it(row: Row) -> None:
    packed = run_world(row.world_size, history_with_alignment, row, 1)
    for found, expected in zip(
        run_world(row.world_size, history_with_alignment, row, 64), packed, strict=True
    ):
        loss_error, norm_error = relative_errors(found, expected)
        # The order of summation in a norm depends on the positions of its elements.
        assert loss_error <= 1e-7 and norm_error <= 1e-6


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("row", [Row(tp=2, pp=2, dp=2, zero=1), Row(dp=4, zero=3)], ids=str)
def test_odd_sizes_train_as_one_process_does(row: Row) -> None:
    assert_same_numbers(row, 4, ODD)


def save_packed(row: Row, folder: Path) -> None:
    """Saves as older versions did, which packed parameters without padding."""
    with mock.patch(ALIGNMENT, 1):
        save_before(row, folder, ODD)


def resume(row: Row, folder: Path) -> tuple[TrainingState, list[tuple[float, float]]]:
    state, history = resume_midway(row, folder, ODD)
    return state, history


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (Row(dp=2, zero=1), Row(tp=2, dp=2, zero=2)),
        (Row(tp=2, pp=2), Row(dp=2, zero=1)),
        (Row(dp=4, zero=3), Row(pp=2)),
    ],
    ids=str,
)
def test_a_checkpoint_without_padding_resumes_on_other_layouts(
    saved: Row, loaded: Row, tmp_path: Path
) -> None:
    run_world(saved.world_size, save_packed, saved, tmp_path)
    expected = run_world(1, train_layout, Row(), STEPS_BEFORE + STEPS_AFTER, **ODD)[0][STEPS_BEFORE:]
    for state, history in run_world(loaded.world_size, resume, loaded, tmp_path):
        assert state.iteration == STEPS_BEFORE
        assert max(relative_errors(history, expected)) <= 1e-5


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("row", [Row(tp=2), Row(zero=1)], ids=str)
def test_the_values_and_places_in_files_do_not_depend_on_the_padding(row: Row, tmp_path: Path) -> None:
    """Other programs rely on these places to read the files."""
    packed, padded = tmp_path / "packed", tmp_path / "padded"
    packed.mkdir()
    padded.mkdir()
    run_world(row.world_size, save_packed, row, packed)
    run_world(row.world_size, save_before, row, padded, ODD)
    files = [torch_files_in(folder / f"global_step{STEPS_BEFORE}") for folder in (packed, padded)]
    assert len(files[0]) > 4 and is_equal(*files)
    runs = [open_checkpoint(folder / f"global_step{STEPS_BEFORE}").run for folder in (packed, padded)]
    assert runs[0]["index"] == runs[1]["index"]
