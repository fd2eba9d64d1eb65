"""Plans very large runs on a machine that could not train them."""

from __future__ import annotations

import re

import pytest

from megatron.units import GIB
from tests.end_to_end.command import Run, pretrain_typed
from tests.end_to_end.flags import ABSOLUTE, MODEL, SHORT
from tests.unit.config.command_lines import BLOOM, GPT_104B


def plan(flags: list[str], world_size: int) -> Run:
    run = pretrain_typed([*flags, "--dry-run", "--world-size", str(world_size)])
    assert run.exit_code == 0, run.stderr
    assert run.stderr == ""
    assert run.cpu_s < 10 and run.peak_bytes < 2 * GIB
    return run


def stages(run: Run) -> list[tuple[int, int, int, int]]:
    """Returns (stage, first layer, last layer, parameters per rank) for each line of the stage map."""
    rows = re.findall(r"^ *(\d+) +(\d+)-(\d+) +[\d.,]+ +[\d.]+ +([\d,]+) ", run.stdout, re.MULTILINE)
    return [(int(stage), int(a), int(b), int(count.replace(",", ""))) for stage, a, b, count in rows]


@pytest.mark.full
def test_a_plan_for_176b_parameters_has_blooms_numbers() -> None:
    run = plan(BLOOM, 384)
    # The published model: 70 layers of 12 h^2 + 13 h, the embedding and its norm, the final norm.
    hidden, vocab, tensor = 14336, 250880, 4
    layer = 12 * hidden**2 + 13 * hidden
    assert vocab * hidden + 70 * layer + 4 * hidden == 176_247_271_424
    assert "parameters 176,247,271,424\n" in run.stdout
    assert "384 processes = TP 4 x PP 12 x DP 8" in run.stdout
    assert "2048 samples = micro-batch 2 x 128 accumulation steps x DP 8" in run.stdout
    assert f"128/(128+12-1) = {128 / 139:.3f}" in run.stdout
    assert "from 192 by 16 over the first 9,765,625 samples" in run.stdout

    # 'type:transformer|embedding' partitions 72 layers into 6 for each of the 12 stages.
    per_rank = 12 * hidden**2 // tensor + 7 * hidden // tensor + 6 * hidden
    embedding = vocab * hidden // tensor
    rows = stages(run)
    assert [row[0] for row in rows] == list(range(12))
    assert rows[0][3] == embedding + 2 * hidden + 5 * per_rank
    assert [row[3] for row in rows[1:11]] == [6 * per_rank] * 10
    assert rows[11][3] == embedding + 5 * per_rank + 2 * hidden  # the final norm, not the embedding's
    assert rows[0][1] == 0 and rows[-1][2] == 70 + 6  # all layers, the last is float16_to_fp32
    assert all(row[1] == before[2] + 1 for before, row in zip(rows, rows[1:], strict=False))


@pytest.mark.full
def test_a_plan_for_104b_parameters_without_its_tokenizer_files() -> None:
    run = plan([*GPT_104B, "--vocab-size", "50257"], 128 * 2)
    hidden, padded = 11600, 50688  # 50257 up to a multiple of 128 x 4
    layers = 64 * (12 * hidden**2 + 13 * hidden)
    assert f"padded to {padded:,}" in run.stdout
    norms = 4 * hidden  # the embedding's norm and the final norm
    assert f"parameters {padded * hidden + 2048 * hidden + layers + norms:,}\n" in run.stdout
    rows = stages(run)
    assert len(rows) == 32
    # Two transformer layers per stage.
    per_rank = 12 * hidden**2 // 4 + 7 * hidden // 4 + 6 * hidden
    assert {row[3] for row in rows[1:31]} == {2 * per_rank}


@pytest.mark.full
def test_a_plan_reports_the_data_if_it_is_there(data: list[str]) -> None:
    flags = [*MODEL, *ABSOLUTE, *SHORT, *data, "--max-epochs-per-dataset", "1e-9"]
    printed = plan(flags, 1).stdout
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if data[1] in line}
    # 5 steps of 4 samples; validation after the last step.
    assert (rows["train"][4], rows["valid"][4]) == ("20", "4")
    assert rows["warning:"][1:4] == ["training", "reads", data[1]]
    printed = plan([*flags, "--data-path", "no/data"], 1).stdout
    assert "--data-path no/data: no/data.bin does not exist" in printed


@pytest.mark.full
def test_a_vocabulary_of_250k_words_gets_stages_of_its_own() -> None:
    """The stages are: only the embedding, 30 stages of two layers, only the head with norm and cast."""
    sizes = "--num-layers 60 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --bf16".split()
    sizes += "--max-position-embeddings 2048 --pad-vocab-size-to 250880 --lr 1e-4 --train-iters 10".split()
    layout = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 32".split()
    batch = "--micro-batch-size 1 --global-batch-size 512".split()
    run = plan([*sizes, *layout, *batch, "--partition-method", "'type:embed:2|transformer:1'"], 128)
    rows = [(first, last) for _, first, last, _ in stages(run)]
    assert rows == [(0, 1), (2, 4), *((first, first + 1) for first in range(5, 63, 2)), (63, 66)]
    assert "max/mean = 1.000" in run.stdout
