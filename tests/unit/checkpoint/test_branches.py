"""--branch-at: a branch takes its flags from its base run, and wrong commands are rejected with
one sentence."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import parse_args, read_command_line
from megatron.checkpoint.files import describe_file
from megatron.checkpoint.lineage.start import choose_checkpoint
from megatron.checkpoint.saving.run_record import layout_record
from megatron.checkpoint.selection import find_checkpoint
from megatron.config import Config
from megatron.errors import UserError
from megatron.optimizer.schedule import schedule_of
from tests.support.layouts import unconnected_run
from tests.unit.checkpoint import saved_runs

MODEL = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--vocab-size 64 --micro-batch-size 1 --global-batch-size 4 --dry-run"
).split()
CONSTANT = "--lr 1e-3 --lr-decay-style constant --lr-warmup-iters 10 --train-iters 1000"
DECAY = "--lr-wsd-decay-iters 20"


class Run(saved_runs.Run):
    """A run whose checkpoints contain its flags."""

    def __init__(self, save: Path, words: str = CONSTANT, load: Path | None = None, **flags: Any) -> None:
        self.flags = parse_args([*MODEL, *words.split()], {})
        super().__init__(save, load, **flags)

    def write(self, step: int) -> Any:
        entry = super().write(step)
        path = next(self.folder.glob(f"saving-{entry.name}*")) / "run.json"
        run = json.loads(path.read_text())
        run |= {"config": self.flags.to_dict(), "layout": layout_record(self.flags), "stages": {}}
        run |= {"vocab_size": 64, "eod": None, "data": {}}
        states = path.with_name("mp_rank_00_model_states.pt")
        states.write_text("moments")
        run["files"][states.name] = describe_file(states)
        run["state"] |= {"consumed_samples": 4 * step, "consumed_tokens": 64 * step}
        run = saved_runs.add_checksum(run)
        path.write_text(json.dumps(run))
        return dataclasses.replace(entry, sha256=run["sha256"])


@pytest.fixture
def trunk(tmp_path: Path) -> Path:
    Run(tmp_path / "a", load=tmp_path / "a").save(5, 10, 100, 200)
    return tmp_path / "a"


def branch(trunk: Path, words: str = DECAY, at: int = 100, save: str = "b") -> Config:
    flags = ["--branch-at", str(at), "--load", str(trunk), "--save", str(trunk.parent / save)]
    return read_command_line([*MODEL, *words.split(), *flags], {}).config


def test_a_branch_has_the_schedule_of_a_run_that_was_planned_so(trunk: Path) -> None:
    config = branch(trunk, f"{DECAY} --lr-wsd-decay-style linear --min-lr 1e-5")
    words = "--lr 1e-3 --min-lr 1e-5 --lr-decay-style WSD --lr-wsd-decay-style linear --lr-warmup-iters 10"
    planned = parse_args([*MODEL, *words.split(), *"--train-iters 120 --lr-wsd-decay-iters 20".split()], {})
    assert schedule_of(config) == schedule_of(planned)
    assert config.training.train_iters == 120 and config.data.data_order_samples == 4000
    longer = branch(trunk, f"{DECAY} --train-iters 150")
    assert longer.training.train_iters == 150 and schedule_of(longer).decay_length == 120
    assert branch(trunk / "global_step100").training.train_iters == 120


@pytest.mark.parametrize("at", [10, 100])
def test_a_branch_of_a_run_in_samples_with_a_warm_up_fraction(at: int, tmp_path: Path) -> None:
    words = "--lr 1e-3 --min-lr 1e-4 --lr-warmup-fraction 0.01 --train-samples 4000 --lr-decay-style WSD"
    Run(tmp_path / "a", f"{words} --lr-wsd-decay-samples 1000 --lr-wsd-decay-style cosine").save(at)
    config = branch(tmp_path / "a", "--lr-wsd-decay-samples 80", at)
    schedule = schedule_of(config)
    assert (schedule.decay_start, schedule.decay_length) == (4 * at, 4 * at + 80)
    assert (schedule.min_lr, schedule.wsd_style, schedule.warmup) == (1e-4, "cosine", 40)
    assert config.training.train_samples == 4 * at + 80


def test_other_data_are_read_from_their_first_sample(trunk: Path) -> None:
    config = branch(trunk, f"{DECAY} --override-data")
    assert (config.data.data_first_sample, config.data.data_order_samples) == (400, None)
    with pytest.raises(UserError, match="--data-first-sample 400: the run starts before it, at sample 20"):
        start = dataclasses.replace(config.checkpoint, branch_at=None, load=str(trunk / "global_step5"))
        find_checkpoint(unconnected_run(dataclasses.replace(config, checkpoint=start), 64, {}))


def test_the_same_command_resumes_the_branch_even_without_the_trunk(trunk: Path) -> None:
    first = branch(trunk)
    options = first.checkpoint
    words = "--lr 1e-3 --lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-warmup-iters 10 --train-iters 120"
    run = Run(Path(options.save), words, trunk, branch_at=100)
    assert run.start.is_branch_point and run.started_from == "global_step100"
    assert [entry.name for entry in run.identity.lineage] == [
        "global_step5",
        "global_step10",
        "global_step100",
    ]
    run.save(110)
    for _ in range(2):
        again = choose_checkpoint(options, None)
        assert again is not None and again.folder.name == "global_step110" and not again.is_branch_point
        assert schedule_of(branch(trunk)) == schedule_of(first)
        shutil.rmtree(trunk, ignore_errors=True)
    with pytest.raises(UserError, match="--branch-at 90: .*holds no global_step90"):
        branch(trunk, at=90)


def test_another_branch_or_run_does_not_take_over_the_folder(trunk: Path) -> None:
    Run(trunk.parent / "b", load=trunk, branch_at=100).save(110)
    for flags in ({"branch_at": 200}, {}):
        with pytest.raises(UserError, match="another run .global_step110"):
            Run(trunk.parent / "b", load=trunk, **flags)
    both = [Run(trunk.parent / name, load=trunk, branch_at=100).identity.run_id for name in ("c", "d")]
    assert both[0] != both[1]


def test_a_damaged_branch_point_is_refused_and_no_other_taken(trunk: Path) -> None:
    config = branch(trunk)
    problem = {str(trunk / "global_step100"): "layer_01 is damaged"}
    with pytest.raises(UserError, match="global_step100: layer_01 is damaged; pass another"):
        choose_checkpoint(config.checkpoint, problem)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "without --lr-wsd-decay-iters: set it"),
        ("--lr-wsd-decay-iters 0", "without --lr-wsd-decay-iters: set it"),
        ("--lr-wsd-decay-samples 8", "counted in iters; give --lr-wsd-decay-iters, not --lr-wsd-decay-samp"),
        (f"{DECAY} --train-samples 8", "counted in iters; give --train-iters, not --train-samples"),
        (f"{DECAY} --lr-decay-iters 300", "needs --lr-decay-iters 120, not 300: remove"),
        (f"{DECAY} --lr 2e-3", "needs --lr 0.001, not 0.002: remove --lr"),
        (f"{DECAY} --lr-decay-style cosine", "with --lr-decay-style cosine: a branch decays by WSD"),
        (f"{DECAY} --finetune", "and --finetune contradict each other"),
        (f"{DECAY} --eval-only", "and --eval-only contradict each other"),
        (f"{DECAY} --use-checkpoint-lr-scheduler", "and --use-checkpoint-lr-scheduler contradict"),
        (f"{DECAY} --lr-decay-tokens 9", "and --lr-decay-tokens contradict"),
    ],
)
def test_a_flag_that_contradicts_the_branch_is_one_sentence(trunk: Path, words: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        branch(trunk, words)
    assert sentence in str(caught.value) and str(caught.value).startswith("--branch-at 100")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("at", "sentence"),
    [
        (5, "global_step5 is in the warm-up of its run, at 5 of 10 iterations: branch from a later"),
        (150, "holds no global_step150: it holds global_step5, global_step10, global_step100"),
        (0, "--branch-at is 0: expected at least 1"),
    ],
)
def test_a_branch_point_that_cannot_be_is_one_sentence(trunk: Path, at: int, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        branch(trunk, at=at)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        ("--lr-decay-style cosine", "--lr-decay-style cosine, which decays .*a run with constant or WSD"),
        ("--lr-decay-style linear", "--lr-decay-style linear, which decays from the end of its warm-up"),
        ("--lr-decay-style inverse-square-root", "inverse-square-root, which decays"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 920", "the decay of its run began at 80: branch from an"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 900", None),
    ],
)
def test_a_trunk_that_decays_has_no_branches(schedule: str, sentence: str | None, tmp_path: Path) -> None:
    Run(tmp_path / "a", f"--lr 1e-3 --lr-warmup-iters 10 --train-iters 1000 {schedule}").save(100)
    if sentence is None:
        assert schedule_of(branch(tmp_path / "a")).decay_start == 100
        return
    with pytest.raises(UserError, match=sentence):
        branch(tmp_path / "a")


def test_folders_that_cannot_be(trunk: Path) -> None:
    for save in (str(trunk), "a"):
        with pytest.raises(UserError, match="a branch is a separate run; set another --save"):
            branch(trunk, save=save)
    with pytest.raises(UserError, match="a branch is a separate run"):
        branch(trunk / "global_step100", save="../a")
    for given, missing in (("--load", "--save"), ("--save", "--load")):
        flags = ["--branch-at", "100", given, str(trunk)]
        with pytest.raises(UserError, match=f"--branch-at 100 without {missing}"):
            read_command_line([*MODEL, *DECAY.split(), *flags], {})
    universal = ["--branch-at", "100", "--load", str(trunk), "--save", "b", "--universal_checkpoint"]
    with pytest.raises(UserError, match="has no file latest_universal"):
        read_command_line([*MODEL, *DECAY.split(), *universal], {})
