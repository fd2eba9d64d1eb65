"""The stage map that is printed at the start of a run and by --dry-run."""

import re
from dataclasses import replace

import pytest

from megatron.pipeline.methods import Partition
from megatron.pipeline.stages import StagePlan
from megatron.training.run_report import heaviest_line, pipeline_efficiency, stage_map

LAYER = "ParallelTransformerLayerPipe"
NAMES = ["_to_float16", "EmbeddingPipe", "to_sequence_first", *[LAYER] * 6, "to_batch_first"]
NAMES += ["MixedFusedLayerNorm", "EmbeddingPipe"]
# The embedding has 1,000 parameters, a transformer layer 400 and the norm 8.
PARAMETERS = [0, 1_000, 0, *[400] * 6, 0, 8, 1_000]


def plan(bounds, weights, unit="ms", rank_of_stage=None, method="profile"):
    ranks = rank_of_stage or tuple(range(len(weights)))
    return StagePlan(method, NAMES, PARAMETERS, Partition(bounds, weights, unit), ranks, 3_408)


def columns(stages):
    """The cells of the header and of each row; content last."""
    *rows, _ = stage_map(stages).splitlines()
    return [re.split(r"\s{2,}", row.strip()) for row in rows]


TWO_STAGES = plan([0, 7, 12], [30.0, 50.0])


def test_a_row_has_layers_weight_share_parameters_and_content():
    assert columns(TWO_STAGES) == [
        ["stage", "layers", "weight (ms)", "of mean", "parameters per rank", "content"],
        ["0", "0-6", "30", "0.75", "2,600", "embedding, 4 x transformer layer"],
        ["1", "7-11", "50", "1.25", "1,808", "2 x transformer layer, final norm, LM head"],
    ]


@pytest.mark.parametrize(
    ("bounds", "contents"),
    [
        ([0, 12], ["embedding, 6 x transformer layer, final norm, LM head"]),
        ([0, 2, 4, 12], ["embedding", "transformer layer", "5 x transformer layer, final norm, LM head"]),
        ([0, 3, 9, 10, 12], ["embedding", "6 x transformer layer", "nothing", "final norm, LM head"]),
        ([0, 1, 11, 12], ["nothing", "embedding, 6 x transformer layer, final norm", "LM head"]),
    ],
)
def test_the_content_of_a_stage_names_layers_and_no_functions(bounds, contents):
    stages = plan(bounds, [1.0] * (len(bounds) - 1))
    assert [row[-1] for row in columns(stages)[1:]] == contents


@pytest.mark.parametrize("norm", ["MixedFusedLayerNorm", "RMSNorm"])
def test_every_kind_of_norm_is_shown_as_the_final_norm(norm):
    names = [norm if name == "MixedFusedLayerNorm" else name for name in NAMES]
    titles = replace(TWO_STAGES, names=names).layer_titles()
    assert titles == ["", "embedding", "", *["transformer layer"] * 6, "", "final norm", "LM head"]


def test_numbers_are_right_aligned_with_their_header():
    header, *rows, _ = stage_map(TWO_STAGES).splitlines()
    for name, cell in [("layers", "0-6"), ("weight (ms)", "30"), ("parameters per rank", "2,600")]:
        assert rows[0].index(f"  {cell} ") + 2 + len(cell) == header.index(name) + len(name)
    assert len({row.index(first) for row, first in zip(rows, ("embedding", "2 x"), strict=True)}) == 1


def test_weights_without_a_unit_have_none_in_the_header():
    assert columns(plan([0, 7, 12], [4.0, 2.0], unit=""))[0][2] == "weight"


@pytest.mark.parametrize(
    ("weight", "shown"), [(2.0, "2"), (2.5, "2.5"), (14.0912, "14.09"), (0.055723, "0.05572")]
)
def test_weights_are_shown_with_four_digits(weight, shown):
    assert columns(plan([0, 7, 12], [weight, 1.0]))[1][2] == shown


def test_a_single_layer_is_not_shown_as_a_range():
    assert [row[1] for row in columns(plan([0, 3, 4, 12], [1.0, 1.0, 1.0]))[1:]] == ["0-2", "3", "4-11"]


def test_a_stage_may_be_empty():
    assert columns(plan([0, 7, 7, 12], [4.0, 0.0, 2.0]))[2] == ["1", "-", "0", "0.00", "0", "nothing"]


def test_embedding_and_head_on_one_stage_are_one_matrix():
    assert columns(plan([0, 12], [9.0]))[1][4] == f"{1_000 + 6 * 400 + 8:,}"


def test_with_dualpipev_the_first_columns_are_the_rank_and_its_weight():
    rows = columns(plan([0, 4, 6, 8, 12], [1.0, 2.0, 3.0, 6.0], rank_of_stage=(0, 1, 1, 0)))
    assert [row[:4] for row in rows] == [
        ["rank", "its weight", "stage", "layers"],
        ["0", "7", "0", "0-3"],
        ["1", "5", "1", "4-5"],
        ["1", "5", "2", "6-7"],
        ["0", "7", "3", "8-11"],
    ]
    assert [row[5] for row in rows[1:]] == ["1.17", "0.83", "0.83", "1.17"], "of the mean of the ranks"
    assert rows[4][6] == "408", "rank 0 has the head's matrix already: it is the embedding's"


# --- The last line ---


def test_the_last_line_names_the_heaviest_stage():
    assert stage_map(TWO_STAGES).splitlines()[-1] == heaviest_line(TWO_STAGES)


def test_others_wait_for_the_stage_that_takes_longest():
    """Mean 40 ms, longest 50 ms: a fifth of its time the average stage has nothing to do."""
    assert heaviest_line(TWO_STAGES) == (
        "heaviest   stage 1 by --partition-method profile, max/mean = 1.250: "
        "waiting for it costs up to 20.0 % of the efficiency"
    )


def test_a_stage_with_more_memory_is_not_waited_for():
    assert heaviest_line(plan([0, 7, 12], [30.0, 50.0], "GiB", method="memory")) == (
        "heaviest   stage 1 by --partition-method memory, max/mean = 1.250: "
        "it needs 25.0 % more than the mean"
    )


def test_of_equally_heavy_stages_the_first_is_named():
    line = heaviest_line(plan([0, 4, 8, 12], [2.0, 2.0, 2.0], unit="", method="uniform"))
    assert "stage 0 by" in line
    assert "max/mean = 1.000: waiting for it costs up to 0.0 %" in line


def test_an_empty_stage_lowers_the_mean():
    """Two of three stages work: a third of the efficiency is lost."""
    assert "max/mean = 1.500: waiting for it costs up to 33.3 %" in heaviest_line(
        plan([0, 7, 7, 12], [3.0, 0, 3.0])
    )


def test_with_dualpipev_ranks_are_weighed_not_stages():
    """Stage 3 is the heaviest, but rank 1 has more to do: 4 + 5 against 1 + 6."""
    assert heaviest_line(plan([0, 4, 6, 8, 12], [1.0, 4.0, 5.0, 6.0], rank_of_stage=(0, 1, 1, 0))).startswith(
        "heaviest   rank 1 by --partition-method profile, max/mean = 1.125: waiting for it costs up to 11.1 %"
    )


def test_layers_that_weigh_nothing_have_no_heaviest_stage():
    weightless = plan([0, 7, 12], [0.0, 0.0], method="type:embed:0")
    assert heaviest_line(weightless).startswith("heaviest   none")
    assert [row[3] for row in columns(weightless)[1:]] == ["-", "-"]


def test_pipeline_efficiency_counts_the_steps_of_filling_and_draining():
    assert pipeline_efficiency(8, 1) == 1
    assert pipeline_efficiency(1, 4) == 0.25
    assert pipeline_efficiency(128, 12) == pytest.approx(128 / 139)
