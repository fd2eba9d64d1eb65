"""Checkpoints of 8-bit Adam have fp32 moments, so that any layout, both formats and plain Adam open them. A
resume on the layout that saved is equal to the last bit."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.conversion.source import open_source
from megatron.checkpoint.manager import load_checkpoint
from megatron.checkpoint.selection import find_checkpoint
from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import merge_shards, spec_of
from megatron.optimizer.eight_bit import WORD_EMBEDDING, moment_bits
from megatron.optimizer.quantized import BLOCK_SIZE, QuantizedMoment, code_values
from tests.support.checkpoints import FINGERPRINT, save_midway, state_after
from tests.support.conversion import to_universal
from tests.support.layouts import Row, build_engine, config_of, train, unconnected_run
from tests.support.pool import run_world

# On 2 and 4 TP ranks the shards of the MLP's matrices end in the middle of a block.
MODEL = {"hidden_size": 64, "kv_channels": 16, "ffn_hidden_size": 100}
BITS = {"8": {"use_bnb_optimizer": True}, "32": {}}
BEFORE, AFTER = 3, 3
SAVERS = {
    "tp2 pp2": Row(tp=2, pp=2, zero=1, micro_batch=2),
    "1 process": Row(micro_batch=2),
    "pp2 dp2": Row(pp=2, dp=2, zero=1, micro_batch=2),
}
OPENERS = {**SAVERS, "tp4 dp2": Row(tp=4, dp=2, zero=1, micro_batch=2), "dp2": Row(dp=2, micro_batch=4)}


def config_for(row, bits, **checkpoint):
    return config_of(row, model=MODEL, optimizer=BITS[bits], checkpoint=checkpoint)


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that a rank owns: fp32 values and moments of the elements from `first` on in
    its TP shard."""

    spec: ParameterSpec
    stage: int
    tp_rank: int
    first: int
    values: dict[str, torch.Tensor]


def pieces_of(engine):
    """Returns the state by parameter name: 'fp32' and the dequantized moments."""
    optimizer, mesh, pieces = engine.optimizer, engine.mesh, {}
    for flat in optimizer.flat:
        for parameter, start, length in flat.fragments():
            values = {"fp32": flat.master.detach()[start : start + length].clone()}
            for key, moment in optimizer.moment_fragments(flat, parameter).items():
                values[key] = moment.clone()
            first = max(flat.start - flat.offsets[parameter], 0)
            name, spec = optimizer.names[parameter], spec_of(parameter)
            pieces[name] = Piece(spec, mesh.pp.rank, mesh.tp.rank, first, values)
    return pieces


def wholes(ranks):
    """Returns (name, kind) -> unsharded tensor from every rank's pieces. A tied weight is taken from its
    first stage."""
    result = {}
    for name in {name for pieces in ranks for name in pieces}:
        pieces = [rank[name] for rank in ranks if name in rank]
        stage = min(piece.stage for piece in pieces)
        # All replicas have equal keys.
        by_place = {(piece.tp_rank, piece.first): piece for piece in pieces if piece.stage == stage}
        spec, size = pieces[0].spec, 1 + max(tp_rank for tp_rank, _ in by_place)
        for kind in pieces[0].values:
            shards = [
                torch.cat([by_place[place].values[kind] for place in sorted(by_place) if place[0] == rank])
                for rank in range(size)
            ]
            shape = spec.local_shape([Axis("tp", 0, size)])
            result[name, kind] = merge_shards(spec, [shard.view(shape) for shard in shards])[
                : spec.num_valid_rows
            ]
    return result


def codes_of(engine):
    """Returns (codes, scales) of every fragment with 8 bits, by name and moment."""
    optimizer = engine.optimizer
    return {
        (optimizer.names[parameter], key): tuple(part.clone() for part in moment.part(start, length))
        for flat in optimizer.flat
        for parameter, start, length in flat.fragments()
        for key, moment in optimizer.moments_of(flat).items()
        if isinstance(moment, QuantizedMoment)
    }


def save_and_continue(row, bits, folder):
    engine = save_midway(row, folder, BEFORE, model=MODEL, optimizer=BITS[bits])
    return pieces_of(engine), codes_of(engine), train(engine, range(BEFORE, BEFORE + AFTER))


def load_and_continue(row, bits, folder, universal=False):
    config = config_for(row, bits, load=str(folder), universal_checkpoint=universal)
    checkpoint = find_checkpoint(unconnected_run(config))
    engine = build_engine(config)
    train(engine, [9])  # other weights and moments: the load must replace all
    assert checkpoint.state == state_after(BEFORE)
    load_checkpoint(engine, checkpoint, FINGERPRINT)
    return pieces_of(engine), codes_of(engine), train(engine, range(BEFORE, BEFORE + AFTER))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns a function: (layout, bits) -> (folder with the native and the universal checkpoint, the results
    of `save_and_continue`)."""

    @cache
    def save(saver: str, bits: str) -> tuple[Path, list]:
        folder = tmp_path_factory.mktemp("saved")
        row = SAVERS[saver]
        ranks = run_world(row.world_size, save_and_continue, row, bits, folder)
        list(to_universal(open_source(folder / f"global_step{BEFORE}"), folder / "universal"))
        return folder, ranks

    return save


def half_a_step(kind, expected):
    """Returns the largest error of quantizing the moment: half of the widest gap between codes, times the
    largest scale that a block can have."""
    values = code_values(kind, torch.device("cpu"))
    return values.diff().max().item() / 2 * expected.abs().max().item() * (1 + 1e-5)


def check_opened(row, bits, folder, universal, saved_ranks):
    """Loads a saved checkpoint on a layout and continues. Compares the values of every parameter, then
    the losses."""
    expected, losses = wholes([pieces for pieces, _, _ in saved_ranks]), saved_ranks[0][2]
    found = run_world(row.world_size, load_and_continue, row, bits, folder, universal)
    specs = {name: piece.spec for pieces, _, _ in found for name, piece in pieces.items()}
    opened = wholes([pieces for pieces, _, _ in found])
    assert opened.keys() == expected.keys() and len(opened) == 3 * len(specs)
    for (name, kind), value in opened.items():
        if bits == "8" and kind != "fp32" and moment_bits(name, specs[name]) == 8:
            error = (value - expected[name, kind]).abs().max().item()
            assert error <= half_a_step(kind, expected[name, kind]), (name, kind)
        else:
            assert torch.equal(value, expected[name, kind]), (name, kind)
    for _, _, history in found:
        # The first loss follows from the saved weights, and does not depend on the moments.
        assert history[0][0] == pytest.approx(losses[0][0], rel=1e-6)
        assert [loss for loss, _ in history] == pytest.approx([loss for loss, _ in losses], rel=5e-3)


# (bits, universal) of a load. Each layout opens the checkpoints of all other layouts, and takes the ways
# in turn.
WAYS = [("8", False), ("32", True), ("8", True), ("32", False)]


@pytest.mark.full
@pytest.mark.parametrize("saver", SAVERS)
def test_any_layout_opens_a_checkpoint_of_8_bits_with_either_adam(saver, saved):
    folder, ranks = saved(saver, "8")
    others = [opener for opener in OPENERS if opener != saver]
    for turn, opener in enumerate(others, start=list(SAVERS).index(saver)):
        bits, universal = WAYS[turn % len(WAYS)]
        check_opened(OPENERS[opener], bits, folder, universal, ranks)


@pytest.mark.full
@pytest.mark.parametrize("universal", [False, True], ids=["native", "universal"])
def test_8_bits_open_a_checkpoint_of_plain_adam(universal, saved):
    folder, ranks = saved("tp2 pp2", "32")
    for opener in ("tp2 pp2", "dp2"):
        check_opened(OPENERS[opener], "8", folder, universal, ranks)


@pytest.mark.full
@pytest.mark.parametrize("universal", [False, True], ids=["native", "universal"])
@pytest.mark.parametrize("saver", SAVERS)
def test_the_layout_that_saved_resumes_to_the_last_bit(saver, universal, saved):
    folder, ranks = saved(saver, "8")
    row = SAVERS[saver]
    found = run_world(row.world_size, load_and_continue, row, "8", folder, universal)
    for (_, codes, history), (_, expected_codes, expected) in zip(found, ranks, strict=True):
        assert history == expected
        assert codes.keys() == expected_codes.keys() and codes
        for key, (code, scale) in codes.items():
            assert torch.equal(code, expected_codes[key][0]), key
            assert torch.equal(scale, expected_codes[key][1]), key


def test_other_replicas_and_stages_have_the_same_codes(saved):
    """Each parameter's TP shard begins with a new block. So only tensor parallelism changes which elements
    share a block, and data or pipeline parallelism keeps all codes."""
    folder, ranks = saved("1 process", "8")
    expected = wholes([ranks[0][0]])
    row = OPENERS["pp2 dp2"]
    found = run_world(row.world_size, load_and_continue, row, "8", folder)
    found_state = wholes([rank[0] for rank in found])
    assert all(torch.equal(value, expected[key]) for key, value in found_state.items())


def test_the_files_hold_fp32_without_gaps_and_the_rule_is_recorded(saved):
    folder, _ = saved("tp2 pp2", "8")
    folder = folder / f"global_step{BEFORE}"
    run = json.loads((folder / "run.json").read_text())
    record = run["optimizer_state"]
    assert record["bits"] == 8 and record["block_size"] == BLOCK_SIZE and record["bitsandbytes"]
    assert record["32_bits"]["fewer_elements_than"] == 4096
    assert record["32_bits"]["parameters"] == [WORD_EMBEDDING]
    assert set(record["maps"]) == {"exp_avg", "exp_avg_sq"}
    files = list(folder.glob("zero_pp_rank_*_optim_states.pt"))
    assert files
    for path in files:
        state = torch.load(path, weights_only=False)["optimizer_state_dict"]
        base = state["base_optimizer_state"]
        for group, addresses in enumerate(state["param_slice_mappings"]):
            kept = base["state"][group]
            assert kept["step"] == BEFORE
            length = state["single_partition_of_fp32_groups"][group].numel()
            assert {kept[key].dtype for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}
            assert {kept[key].numel() for key in ("exp_avg", "exp_avg_sq")} == {length}
            if base["param_groups"][group]["moment_bits"] == 8:
                ends = [address.start + address.numel for address in addresses.values()]
                assert [address.start for address in addresses.values()] == [0, *ends[:-1]]
                assert ends[-1] == length and state["group_paddings"][group] == 0
