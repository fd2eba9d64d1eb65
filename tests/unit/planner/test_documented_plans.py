"""The predicted figures of docs/recipes.md and of other pages equal the planner's, to the printed digits."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

import pytest

from megatron.arguments import read_command_line
from megatron.data.vocabulary import find_vocabulary
from megatron.pipeline.schedule import simulate_schedule
from megatron.pipeline.stages import StagePlan
from megatron.planner.layer_memory import planned_run
from megatron.planner.plan import Plan, make_plan
from megatron.units import GIB
from tests.end_to_end.command import ROOT

DOCS = ROOT / "docs"
PROGRAM = "pretrain_gpt.py "
PREDICTED = re.compile(
    r"^Predicted for .*: peak ([\d.]+) GiB"
    r"(?: per GPU, ([\d.]+) s per step, ([\d,]+) tokens/s, MFU (\d+) %)?\.$",
    re.MULTILINE,
)
VARIANT = re.compile(r"^\| .* \| `(--.*)` \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    """A command of docs/recipes.md and its printed figures. A figure is None if the page does not have it.

    tokens_per_second: rounded to hundreds. mfu: in percent.
    """

    flags: str
    peak_gib: str
    step_s: str | None = None
    tokens_per_second: str | None = None
    mfu: str | None = None


def sections(page: str) -> dict[str, str]:
    """Returns heading -> text of a page's sections, with joined lines in the commands."""
    text = (DOCS / page).read_text().replace("\\\n", " ")
    parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def recipes() -> dict[str, Recipe]:
    """Returns heading -> recipe. The key of a variant is its heading and number."""
    found: dict[str, Recipe] = {}
    for heading, text in sections("recipes.md").items():
        dry_runs = [line for line in text.splitlines() if PROGRAM in line and "--dry-run" in line]
        if not dry_runs:
            continue
        (command,), (figures,) = dry_runs, PREDICTED.findall(text)
        flags, (peak, *times) = command.partition(PROGRAM)[2], figures
        found[heading] = Recipe(flags, peak, *(figure or None for figure in times))
        for number, (change, *changed) in enumerate(VARIANT.findall(text), 1):
            change = change.replace("\\|", "|")
            found[f"{heading}, variant {number}"] = Recipe(f"{flags} {change}", *changed)
    return found


RECIPES = recipes()


def plan_of(flags: str) -> Plan:
    """Returns the plan of a run."""
    config = read_command_line(shlex.split(flags), {}).config
    return make_plan(config, find_vocabulary(config).size)


def partition_of(flags: str) -> StagePlan:
    """Returns the stages of a run. Layers are recorded only for --partition-method memory."""
    config = read_command_line(shlex.split(flags), {}).config
    return planned_run(config).stages


def page_text(page: str) -> str:
    """Returns the page in one line."""
    return " ".join((DOCS / page).read_text().split())


def as_printed(value: float, printed: str) -> str:
    """Returns the value with the decimal places of `printed`."""
    return f"{value:.{len(printed.partition('.')[2])}f}"


def step_s(flags: str, printed: str) -> str:
    """Returns the predicted step time of a command, in the form of `printed`."""
    return as_printed(plan_of(flags).prediction.total, printed)


def test_the_page_has_its_recipes() -> None:
    assert 6 <= sum("variant" not in name for name in RECIPES) <= 12
    assert len(RECIPES) >= 20
    rows = re.findall(r"\]\(#([\w-]+)\) \|$", (DOCS / "recipes.md").read_text(), re.MULTILINE)
    headings = [re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in RECIPES if "," not in name]
    assert set(rows) >= set(headings)


def test_the_lines_of_the_introduction() -> None:
    introduction = (DOCS / "recipes.md").read_text().partition("\n## ")[0]
    plan = plan_of(RECIPES["8 A100s and a 7B model"].flags)
    step, reserve = plan.prediction, plan.reserve_bytes / GIB
    assert f" {step.total:.2f} s predicted: {step.tokens_per_second:,.0f} tokens/s" in introduction
    assert f" needs {plan.peak_bytes / GIB:.2f} GiB and a reserve of {reserve:.2f} GiB" in introduction


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_and_its_figures_are_the_planners(name: str) -> None:
    recipe = RECIPES[name]
    plan = plan_of(recipe.flags)
    assert plan.fits is True
    found = [as_printed(plan.peak_bytes / GIB, recipe.peak_gib)]
    if recipe.step_s is not None:
        found.append(as_printed(plan.prediction.total, recipe.step_s))
    if recipe.tokens_per_second is not None:
        step = plan.prediction
        found += [f"{round(step.tokens_per_second, -2):,.0f}", f"{100 * step.mfu:.0f}"]
    printed = (recipe.peak_gib, recipe.step_s, recipe.tokens_per_second, recipe.mfu)
    assert found == [figure for figure in printed if figure is not None], f"docs/recipes.md, {name}"


def test_the_launch_of_a_recipe_has_the_flags_of_its_plan() -> None:
    for launch, name in (
        ("From a plan to a launch", "8 A100s and a 7B model"),
        ("No GPU: try it on a laptop", "No GPU: try it on a laptop"),
    ):
        (command,) = re.findall(r"torch\.distributed\.run .*", sections("recipes.md")[launch])
        started = set(re.findall(r"--\S+ [^-\s]\S*|--\S+", command))
        planned = set(re.findall(r"--\S+ [^-\s]\S*|--\S+", RECIPES[name].flags))
        only_planned = {flag.split()[0] for flag in planned - started}
        assert only_planned <= {"--dry-run", "--world-size", "--gpu", "--device-memory", "--vocab-size"}


def test_the_overlap_of_tensor_parallelism() -> None:
    text = next(text for text in sections("parallelism.md").values() if "### Tensor" in text)
    command = next(line for line in text.splitlines() if "--tp-comm-overlap" in line and PROGRAM in line)
    flags = command.partition(PROGRAM)[2]
    words = " ".join(text.split())
    (figures,) = re.findall(
        r"step of ([\d.]+) s on H100s; without `--tp-comm-overlap` ([\d.]+) s.* the prediction is ([\d.]+) s "
        r"with the flag and ([\d.]+) s without",
        words,
    )
    small = flags + " --hidden-size 4096 --micro-batch-size 1"
    commands = [flags, flags.replace("--tp-comm-overlap", ""), small, small.replace("--tp-comm-overlap", "")]
    assert list(figures) == [step_s(*each) for each in zip(commands, figures, strict=True)]


@pytest.mark.full
def test_the_memory_of_context_parallelism() -> None:
    text = (DOCS / "context_parallel.md").read_text().replace("\\\n", " ")
    ((flags, size),) = re.findall(r"pretrain_gpt\.py (--dry-run .*--context-parallel-size (\d+) .*)", text)
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert size in {row[0] for row in rows} and len(rows) == 5
    for own, *printed in rows:
        plan = plan_of(flags.replace(f"parallel-size {size} ", f"parallel-size {own} "))
        (memory,) = plan.memory
        figures = (memory.state, memory.total - memory.state, memory.total)
        found = [as_printed(x / GIB, text) for x, text in zip(figures, printed, strict=True)]
        assert found == printed, f"CP {own}"


def test_the_cost_of_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "tuning.md").read_text()
    (search,) = re.findall(r"--search --gpus 64 (.*)", page.replace("\\\n", " "))
    flags = (
        f"--dry-run --world-size 64 {search} --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 "
        "--zero-stage 1 --micro-batch-size 1 --bf16 --max-position-embeddings 2048 --lr 1e-4 --train-iters 9"
    )
    without = "--hidden-dropout 0 --attention-dropout 0"
    (figures,) = re.findall(
        r"predicts a step of ([\d.]+) s, and ([\d.]+) s without dropout.* it predicts ([\d.]+) s",
        " ".join(page.split()),
    )
    assert step_s(flags.replace(without, ""), figures[0]) == figures[0]
    assert step_s(flags, figures[1]) == figures[1]
    monkeypatch.setenv("MEGATRON_KERNELS", "pytorch")
    assert step_s(flags.replace(without, ""), figures[2]) == figures[2]


def test_the_schedules_of_a_13b_model() -> None:
    base = (
        "--dry-run --world-size 128 --bf16 --zero-stage 1 --micro-batch-size 1 --lr 1e-4 --train-iters 100 "
        "--vocab-size 50257 --gpu h100-80gb --inter-node-gbps 3200 --num-layers 40 --hidden-size 5120 "
        "--num-attention-heads 40 --seq-length 2048 --max-position-embeddings 2048 --global-batch-size "
    )
    text = (DOCS / "pipeline_schedules.md").read_text()
    rows = re.findall(
        r"^\| TP (\d), PP (\d)(.*?) \| (\d+) \| ([\d.]+) s \| ([\d.]+) s \|$", text, re.MULTILINE
    )
    assert len(rows) == 3
    for tp, pp, more, count, *printed in rows:
        layout = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
        recompute = "--checkpoint-activations" if "--checkpoint-activations" in more else ""
        batch = int(count) * 128 // (int(tp) * int(pp))
        flags = f"{base}{batch} {layout} {recompute} --pipeline-schedule "
        schedules = ("1f1b", "zero-bubble")
        assert printed == [
            step_s(flags + name, figure) for name, figure in zip(schedules, printed, strict=True)
        ]


def test_the_simulated_schedules() -> None:
    text = (DOCS / "pipeline_schedules.md").read_text()
    rows = re.findall(
        r"^\| (\S+)(.*?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE
    )
    assert len(rows) == 5
    ranks, micro_batches = 8, 16
    for title, more, *printed in rows:
        name = title.strip("`,").lower()
        per_rank = int(more.rpartition("= ")[2]) if name == "interleaved" else 1 + (name == "dualpipev")
        forward = [2 / per_rank] * ranks * per_rank
        backward = [2 * seconds for seconds in forward]
        chunks = per_rank if name == "interleaved" else None
        free, slow = (
            simulate_schedule(name, forward, backward, [transfer] * (len(forward) - 1), micro_batches, chunks)
            for transfer in (0.0, 0.25)
        )
        kept = [free.peak_in_flight[rank] / per_rank for rank in (0, -1)]
        assert [f"{value:g}" for value in (free.makespan, slow.makespan, *kept)] == printed, title


def test_the_stages_of_the_partition_methods() -> None:
    text = sections("partition.md")["Choose a method"]
    (command,) = re.findall(r"--dry-run .*", (DOCS / "partition.md").read_text().replace("\\\n", " "))
    rows = re.findall(r"^\| `([^`]*)`.* \| ([^|]*\d.*) \|$", text, re.MULTILINE)
    assert len(rows) == 11
    for method, printed in rows:
        if method == "profile":  # measured when a run starts
            continue
        plan = partition_of(f"{command} --partition-method '{method.replace(chr(92), '')}'")
        layers = list(map(plan.num_transformer_layers, range(len(plan.rank_of_stage))))
        found = [f"{count}" for count in layers]
        found[0], found[-1] = f"E+{found[0]}", f"{found[-1]}+L".removeprefix("0+")
        assert ", ".join(found) == printed, method
    for method, printed in re.findall(
        r"`(\S+)` (?:reports|has) max/mean = ([\d.]*\d)", page_text("partition.md")
    ):
        weights = partition_of(f"{command} --partition-method {method}").partition.weights
        assert as_printed(float(max(weights) / (sum(weights) / len(weights))), printed) == printed


def test_the_picture_of_the_readme_shows_the_plan_of_its_command() -> None:
    readme = (ROOT / "README.md").read_text().replace("\\\n", " ")
    (command,) = (line for line in readme.splitlines() if PROGRAM in line and "--dry-run" in line)
    plan = plan_of(command.partition(PROGRAM)[2])
    shown = (DOCS / "figures" / "console.txt").read_text()
    step = plan.prediction
    assert f"\nstep       {step.total:.2f} s predicted: {step.tokens_per_second:,.0f} tokens/s, " in shown
    assert f" stage 0 needs {plan.peak_bytes / GIB:.2f} GiB and a reserve of " in shown
