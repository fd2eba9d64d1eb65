"""The layouts that a search finds fit, a separate plan of each layout has equal values, and their flags can
be parsed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest

from megatron.arguments import parse_args, read_command_line
from megatron.config import Config, ConfigError
from megatron.config.sections.training import recomputation
from megatron.errors import UserError
from megatron.pipeline.stages import plan_stages
from megatron.planner.command import PROGRAM, replaced, run_flags, with_defaults
from megatron.planner.plan import make_plan
from megatron.planner.plan_tool import (
    explain,
    layout_words,
    plan_report,
    recipe_report,
    search_report,
    what_if,
)
from megatron.planner.search import (
    PARTITION_METHODS,
    Change,
    SearchResult,
    changed,
    evaluate,
    first_layouts,
    schedules,
    search,
    variations,
)
from megatron.training.out_of_memory import cheap_modules
from tests.end_to_end.command import ROOT

EXAMPLES = ROOT / "examples" / "slurm"
# These scripts do not start pretrain_gpt.py.
NO_RUN = ("sweep-partition.slurm", "convert-universal.slurm", "preprocess.slurm", "prepare-indices.slurm")
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.slurm") if path.name not in NO_RUN)
VOCAB = 50257
MODEL = (
    "--gpu a100-80gb --num-layers 40 --hidden-size 5120 --num-attention-heads 40 --seq-length 2048 "
    f"--global-batch-size 256 --vocab-size {VOCAB} --hidden-dropout 0 --attention-dropout 0"
)


@cache
def words() -> tuple[str, ...]:
    return tuple(with_defaults(run_flags(MODEL.split(), None, 16))[0])


@cache
def found() -> SearchResult:
    return search(parse_args(words(), {}), VOCAB, planned=40)


def test_the_layouts_fit_and_are_sorted_and_their_flags_plan_them_again() -> None:
    result = found()
    rates = [one.tokens_per_second for one in result.candidates]
    assert len(rates) >= 4 and rates == sorted(rates, reverse=True)
    assert all(one.fits for one in result.candidates) and not any(one.fits for one in result.too_large)
    assert 40 <= result.planned < 150
    for one in result.candidates[:3]:
        again = make_plan(read_command_line(replaced(words(), one.change), {}).config, VOCAB)
        assert (again.config, again.step, again.memory) == (one.config, one.step, one.memory)
    text = explain(1, result.candidates[0], result, words())
    assert "to spare" in text and "matrix products" in text and f"flags      {PROGRAM} --dry-run" in text


SMALL = (
    "--gpu a100-80gb --num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--hidden-dropout 0 --attention-dropout 0"
)
# A large head unbalances pipeline stages. Experts have their own replicas and collectives.
MODELS = {
    "dense": f"{SMALL} --vocab-size 128000",
    "experts": f"{SMALL} --vocab-size 128000 --num-experts 16 --moe-ffn-hidden-size 1024",
}


def config_of(model: str, world_size: int, batch: int) -> Config:
    flags = f"{MODELS[model]} --global-batch-size {batch}"
    return parse_args(with_defaults(run_flags(flags.split(), None, world_size))[0], {})


def all_layouts(config: Config) -> Iterator[Change]:
    """Yields all layouts of 4 devices without context parallelism, including invalid ones."""
    sizes = (1, 2, 4)
    for tp_size, pp_size, ep_size, micro_batch in product(sizes, sizes, sizes, (1, 2, 4, 8)):
        if tp_size * pp_size > 4 or (ep_size > 1 and config.model.num_experts is None):
            continue
        micro_batches = config.batch.global_batch_size * tp_size * pp_size // 4 // micro_batch
        recomputations = [recomputation(), recomputation(cheap_modules(config)), recomputation(layers=True)]
        for schedule, zero_stage, sequence, recomputed, method in product(
            schedules(pp_size, config.model.num_layers, micro_batches),
            range(4),
            {False, tp_size > 1},
            recomputations,
            PARTITION_METHODS if pp_size > 1 else PARTITION_METHODS[:1],
        ):
            yield {
                "parallel.tensor_model_parallel_size": tp_size,
                "parallel.pipeline_model_parallel_size": pp_size,
                "parallel.expert_model_parallel_size": ep_size,
                "parallel.pipeline_schedule": schedule[0],
                "parallel.virtual_pipeline_stages": schedule[1],
                "parallel.zero_stage": zero_stage,
                "parallel.sequence_parallel": sequence,
                "parallel.partition_method": method,
                "batch.micro_batch_size": micro_batch,
                **recomputed,
            }


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_no_layout_of_the_space_is_faster_than_the_one_found(model: str) -> None:
    """The reference is a complete search in a small space of layouts."""
    config = config_of(model, 4, 8).with_settings({"model.num_layers": 4})
    best = search(config, 128000).candidates[0].tokens_per_second
    for change in all_layouts(config):
        try:
            one = evaluate(config, change, 128000)
        except UserError:
            continue
        assert not one.fits or one.tokens_per_second <= 1.01 * best, change


def test_long_sequences_are_searched_with_context_parallelism() -> None:
    """A rank keeps at least 8,192 tokens of a sequence, so short sequences are not divided."""
    for length, expected in ((2048, {1}), (32768, {1, 2, 4}), (131072, {1, 2, 4, 8, 16})):
        flags = MODEL.replace("--seq-length 2048", f"--seq-length {length}")
        config = parse_args(with_defaults(run_flags(flags.split(), None, 16))[0], {})
        found = list(first_layouts(config, 8))
        assert {change["parallel.context_parallel_size"] for change in found} == expected
        for change in found:
            assert config.with_settings(change).parallel.data_parallel_size >= 1


def test_tensor_parallelism_stays_in_a_node_and_divides_the_query_groups() -> None:
    config = parse_args(words(), {})
    grouped = config.with_settings({"model.num_query_groups": 5, "model.group_query_attention": True})
    for model, node_size, sizes in ((config, 4, {1, 2, 4}), (config, 8, {1, 2, 4, 8}), (grouped, 8, {1})):
        found = first_layouts(model, node_size)
        assert {change["parallel.tensor_model_parallel_size"] for change in found} == sizes


def test_experts_are_searched_on_all_ranks_that_can_share_them() -> None:
    experts = "--num-experts 24 --moe-ffn-hidden-size 1280"
    config = parse_args(with_defaults(run_flags([*MODEL.split(), *experts.split()], None, 16))[0], {})
    found = list(first_layouts(config, 8))
    layouts = set()
    for change in found:
        parallel = config.with_settings(change).parallel
        size, ranks = parallel.expert_model_parallel_size, parallel.expert_replicas
        layouts.add((parallel.pipeline_model_parallel_size, size))
        assert 24 % size == 0 and size * ranks * parallel.pipeline_model_parallel_size == 16
        assert parallel.sequence_parallel == (parallel.tensor_model_parallel_size > 1)
    assert layouts == {(pp, ep) for pp in (1, 2, 4, 8, 16) for ep in (1, min(8, 16 // pp))}
    one = evaluate(config, {**found[0], "parallel.expert_model_parallel_size": 1}, VOCAB)
    size = one.as_dict()["layout"]["expert_parallel"]
    assert one.assumption and f"EP {size}" in layout_words(one.config)
    rows = {row.change: row for row in what_if(one)}
    assert (
        rows["tensor-parallel size 2"].tokens_per_second and rows["expert-parallel size 2"].tokens_per_second
    )


def test_expert_ranks_that_do_not_fit_in_a_stage_are_an_error_with_every_partition_method() -> None:
    config = config_of("experts", 4, 8)
    change = {"parallel.pipeline_model_parallel_size": 2, "parallel.expert_model_parallel_size": 4}
    for method in PARTITION_METHODS:
        with pytest.raises(ConfigError, match="--expert-model-parallel-size 4 does not divide the 2 ranks"):
            evaluate(
                config, {**change, "parallel.zero_stage": 1, "parallel.partition_method": method}, 128000
            )


def test_a_search_without_a_layout_that_fits_or_without_a_gpu_is_a_sentence() -> None:
    for model, gpus, sentence in (
        (
            MODEL.replace("a100-80gb", "v100-16gb"),
            2,
            "no layout of 2 dev",
        ),
        (MODEL.replace("--gpu a100-80gb", ""), 8, "--gpu"),
    ):
        flags = with_defaults(run_flags(model.split(), None, gpus))[0]
        with pytest.raises(UserError, match=sentence):
            search_report(parse_args(flags, {}), flags, 3)


def test_while_nothing_fits_the_search_varies_the_layouts_of_least_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slowest layouts, with TP 8, need the least memory. With full recomputation one of them fits."""

    def planned(config: Config, change: Change, _: int) -> SimpleNamespace:
        layout = changed(config, change)
        tp_size, recomputes = layout.parallel.tensor_model_parallel_size, layout.training.recomputes_layers
        fits = tp_size == 8 and recomputes
        return SimpleNamespace(
            **{"config": layout, "change": change, "fits": fits, "reserve_bytes": 0, "device_bytes": 10},
            peak_bytes=10 if fits else 800 // tp_size,
            prediction=SimpleNamespace(total=tp_size**3.0),
            tokens_per_second=1.0,
            run=SimpleNamespace(stages=SimpleNamespace(bounds=())),
        )

    monkeypatch.setattr("megatron.planner.search.evaluate", planned)
    assert search(parse_args(words(), {}), VOCAB).candidates


def test_a_search_without_a_valid_layout_names_the_first_error() -> None:
    """With one layer on nodes of one device, all 16 devices are data-parallel, and 16 does not divide 7
    samples."""
    flags = MODEL.replace("--global-batch-size 256", "--global-batch-size 7 --num-layers 1 --node-size 1")
    config = parse_args(with_defaults(run_flags(flags.split(), None, 7))[0], {})
    config = config.with_settings({"parallel.world_size": 16})
    with pytest.raises(ConfigError, match="no layout .* is valid. The first one: .*--global-batch-size"):
        search(config, VOCAB)


def test_variations_remove_what_their_setting_does_not_support() -> None:
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
    given = [*MODEL.split(), *flags.split(), "--tp-comm-overlap"]
    config = parse_args(with_defaults(run_flags(given, None, 16))[0], {})
    changes = dict(variations(config))
    for title in ("tensor-parallel size 1", "tensor-parallel size 4", "schedule zero-bubble"):
        parallel = changed(config, changes[title]).parallel
        assert parallel.tp_comm_overlap is (title == "tensor-parallel size 4")
        assert parallel.sequence_parallel is (title != "tensor-parallel size 1")


def test_a_plan_is_plain_data() -> None:
    config = changed(parse_args(words(), {}), {"parallel.pipeline_model_parallel_size": 4})
    report = plan_report(config)
    data = json.loads(json.dumps(report.data))
    assert [stage["transformer_layers"] for stage in data["stages"]] == [10] * 4
    assert len(data["memory"]) == 4 and data["memory"][0]["total"] == max(p["total"] for p in data["memory"])
    assert data["peak_bytes"] == data["memory"][0]["total"]
    assert {event["kind"] for event in data["timeline"]} == {"forward", "backward"}
    assert len(data["timeline"]) == 2 * 4 * data["timeline_micro_batches"]
    assert {row["group"] for row in data["communication"]} >= {"data", "stages", "stages 0 and 3"}
    changes = {row["change"]: row for row in data["what_if"]}
    assert changes["tensor-parallel size 2"]["tokens_per_second"] > 0
    assert changes["ZeRO 3"]["reason"].startswith("--zero-stage 3")
    assert "what if" in report.text and "GiB to spare" in report.text
    size = f"{data['parameters'] / 1e9:.3g} B parameters (40 layers x 5120)"
    assert data["title"] == f"{size}, 16 x a100-80gb" and data["layout"]["expert_parallel"] is None
    known = [row for row in data["what_if"] if not row["reason"]]
    rates = [(row["fits"], row["tokens_per_second"]) for row in known]
    assert rates == sorted(rates, reverse=True) and not data["what_if"][-1]["tokens_per_second"]
    best = next(row for row in known if not row["changes_training"])
    is_faster = best["tokens_per_second"] > data["step"]["tokens_per_second"]
    assert data["best_change"] == (best["change"] if is_faster else None)
    assert ("yes, best" in report.text) is is_faster


def test_what_if_lists_no_change_without_an_effect() -> None:
    config = changed(parse_args(words(), {}), {"parallel.pipeline_model_parallel_size": 1})
    titles = {row.change.split()[0] for row in what_if(make_plan(config, VOCAB))}
    assert "ZeRO" in titles and not titles & {"schedule", "partition"}


def test_what_if_equals_a_plan_with_that_change() -> None:
    config = parse_args(words(), {})
    rows = what_if(make_plan(config, VOCAB))
    (row,) = (one for one in rows if one.change == "recompute full")
    again = make_plan(changed(config, {"training.checkpoint_activations": True}), VOCAB)
    assert again.step is not None
    assert row.tokens_per_second == again.step.tokens_per_second and row.peak_bytes == again.peak_bytes


@pytest.mark.parametrize("recipe", ["nodes", "micro-batch"])
def test_a_recipe_ends_with_a_plan_that_fits(recipe: str) -> None:
    report = recipe_report(parse_args(words(), {}), list(words()), recipe)
    first, last = report.data["steps"][0], report.plan
    assert last.fits
    if recipe == "nodes":
        assert (first["layout"]["tensor_parallel"], first["layout"]["pipeline_parallel"]) == (8, 2)
        assert first["layout"]["micro_batch_size"] == 1
    else:
        assert first["layout"]["world_size"] == 1 and first["layout"]["micro_batch_size"] >= 4
        assert last.config.parallel.world_size == 16
    for step in report.data["steps"]:
        read_command_line(step["flags"], {})


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_planned_with_the_command_that_it_prints(script: str) -> None:
    vocab = 128_000 if "llama3" in script else 50_280 if "olmoe" in script else 250_000
    flags = run_flags(["--gpu", "a100-80gb", "--vocab-size", str(vocab)], str(EXAMPLES / script), None)
    if script == "smoke.slurm":
        flags = [*flags, "--bf16"]
    config = parse_args([*flags, "--make-vocab-size-divisible-by", "128"], {})
    assert config.parallel.world_size % (config.parallel.node_size or 1) == 0
    assert len(plan_stages(config, vocab).bounds) == config.parallel.num_stages + 1


def test_given_flags_override_those_of_a_script() -> None:
    script = str(EXAMPLES / "tr11-176B-ml.slurm")
    flags = run_flags(["--micro-batch-size", "4", "--world-size", "192"], script, None)
    assert flags.count("--micro-batch-size") == 1 and flags.count("--world-size") == 1
    config = parse_args([*flags, "--vocab-size", "250680"], {})
    assert (config.batch.micro_batch_size, config.parallel.data_parallel_size) == (4, 4)
    assert config.parallel.node_size == 8


def test_a_search_without_a_batch_size_has_a_micro_batch_on_each_device() -> None:
    words, notes = with_defaults("--world-size 8 --micro-batch-size 2".split())
    assert "--global-batch-size 16 " in " ".join(words) and words[-1] == "1"
    assert "--global-batch-size is not set: planned with 16; set it to compare layouts" in notes
    words, notes = with_defaults("--world-size 8 --micro-batch-size 2".split(), chooses_layout=False)
    assert "--global-batch-size" not in words
    assert any("planned with micro-batch size x data-parallel size" in note for note in notes)


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ("--world-size 384 --micro-batch-size 2 --global-batch-size 2048", 3),
        ("--world-size 8 --micro-batch-size 1 --global-batch-size 64", 1),
        ("--world-size 8 --micro-batch-size 1 --global-batch-size 64 --rampup-batch-size 4 4 100", 2),
        ("--world-size 7 --micro-batch-size 2 --global-batch-size 3", 1),
        ("--world-size 0 --micro-batch-size 1 --global-batch-size 8", 1),
    ],
)
def test_a_search_starts_from_a_layout_whose_batch_is_divisible(flags: str, stages: int) -> None:
    """If no layout has a divisible batch, the search starts from one stage, and the check of the flags names
    the mistake."""
    words, _ = with_defaults(flags.split())
    assert words[-2:] == ["--pipeline-model-parallel-size", str(stages)]
    given = [*flags.split(), "--tensor-model-parallel-size", "2"]
    assert "--pipeline-model-parallel-size" not in with_defaults(given)[0]
