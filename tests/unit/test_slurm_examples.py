"""The flags of the sbatch scripts equal the flags of published runs, except for listed differences."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import read_command_line
from megatron.commands import prepare_indices, preprocess_data
from megatron.commands.sweep import build_parser
from megatron.config import Config
from megatron.config.config import SECTIONS
from megatron.config.fields import flag_of, option_name
from megatron.planner.sweep.axes import given_flags
from megatron.planner.sweep.slurm import read_base_command
from tests.end_to_end.command import ROOT
from tests.support import HANG_TIMEOUT_S
from tests.unit.config.published_scripts import SCRIPTS

EXAMPLES = ROOT / "examples" / "slurm"
SWEEP = "sweep-partition.slurm"  # starts tools/sweep.py, which starts a different example
CONVERT = "convert-universal.slurm"  # starts tools/ds_to_universal.py
PREPROCESS = "preprocess.slurm"  # starts tools/preprocess_data.py
PREPARE = "prepare-indices.slurm"  # starts tools/prepare_indices.py
ALL = sorted(path.name for path in EXAMPLES.glob("*.slurm"))
NAMES = [name for name in ALL if name not in (SWEEP, CONVERT, PREPROCESS, PREPARE)]
README = (EXAMPLES / "README.md").read_text()


def dry_run(script: str, *flags: str, folder: Path, **variables: str) -> str:
    """Returns what `DRY_RUN=1 bash SCRIPT FLAGS` prints outside Slurm, in an empty folder, which stays
    empty."""
    slurm = ("SLURM", "MASTER_", "NNODES", "GPUS_PER_NODE", "RUN_DIR")
    env = {name: value for name, value in os.environ.items() if not name.startswith(slurm)}
    run = subprocess.run(
        ["bash", str(EXAMPLES / script), *flags],
        cwd=folder,
        env={**env, "DRY_RUN": "1", **variables},
        capture_output=True,
        text=True,
        timeout=HANG_TIMEOUT_S,
    )
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert list(folder.iterdir()) == []
    return run.stdout


def commands(printed: str) -> list[list[str]]:
    """Returns the printed commands as words."""
    lines = re.sub(r" \\\n +", " ", printed).splitlines()
    return [shlex.split(line) for line in lines if ".py" in line]


def training_flags(printed: str) -> list[str]:
    """Returns the flags of the last command, which trains."""
    command = commands(printed)[-1]
    return command[command.index(str(ROOT / "pretrain_gpt.py")) + 1 :]


@pytest.mark.parametrize("script", NAMES)
def test_a_dry_run_prints_the_whole_command_and_does_nothing_else(script: str, tmp_path: Path) -> None:
    found = commands(dry_run(script, "--exit-interval", "7", folder=tmp_path))
    assert len(found) == {"smoke.slurm": 2, "resume-universal.slurm": 2}.get(script, 1)
    *_, command = found
    assert {"torch.distributed.launch", "--nnodes", "--nproc_per_node", "$SLURM_PROCID"} <= set(command)
    assert command[-2:] == ["--exit-interval", "7"]


def test_a_dry_run_of_the_preprocessing_prints_both_commands(tmp_path: Path) -> None:
    preprocess, merge = commands(dry_run(PREPROCESS, folder=tmp_path, OUTPUT="out", WORKERS="3"))
    arguments = preprocess_data.build_parser().parse_args(preprocess[2:])
    assert (arguments.output_prefix, arguments.shard, arguments.workers) == ("out/", "slurm", 3)
    assert merge[2:] == ["--input", "out/*_text_document", "--output-prefix", "out/all_text_document"]


@pytest.mark.parametrize("example", NAMES)
def test_a_dry_run_of_the_preparation_prints_a_command_with_the_flags_of_the_run(
    example: str, tmp_path: Path
) -> None:
    run = example.removesuffix(".slurm")
    printed = dry_run(PREPARE, "--data-cache-path", "cache", folder=tmp_path, EXAMPLE=run, THREADS="3")
    ((_, program, *words),) = commands(printed)
    assert program == str(ROOT / "tools" / "prepare_indices.py")
    arguments = prepare_indices.build_parser().parse_args(words)
    assert (arguments.script, arguments.shard, arguments.threads) == (str(EXAMPLES / example), "slurm", 3)
    assert arguments.training == ["--data-cache-path", "cache"]


@pytest.mark.parametrize("script", NAMES)
def test_a_variable_adds_the_flags_of_local_checkpoints(script: str, tmp_path: Path) -> None:
    printed = dry_run(script, folder=tmp_path, SAVE_LOCAL="/disk/{node}", SAVE_LOCAL_INTERVAL="7")
    assert commands(printed)[-1][-4:] == ["--save-local", "/disk/{node}", "--save-local-interval", "7"]


def settings_of(config: Config) -> dict[str, Any]:
    """Returns 'section.field' -> value. For files and folders the value is only whether they are given."""
    settings = {
        f"{section}.{field.name}": bool(value)
        if flag_of(field).metavar in ("FILE", "FOLDER", "PREFIX")
        else value
        for section, kind in SECTIONS.items()
        for field in dataclasses.fields(kind)
        for value in [getattr(getattr(config, section), field.name)]
    }
    # The published scripts name the default backend, and quote the partition method.
    del settings["parallel.distributed_backend"]
    settings["parallel.partition_method"] = settings["parallel.partition_method"].strip("'")
    return {**settings, "curriculum": config.curriculum}


# Script -> its differences from the published script with this name: (ours, theirs).
LOG = {"logging.log_path": (True, False)}
KILL_SWITCH = {"training.kill_switch_path": (True, False)}
PUBLISHED: dict[str, dict[str, tuple[Any, Any]]] = {
    "tr8-104B": {**LOG, **KILL_SWITCH},
    "tr8b-104B-bnb": {**LOG, **KILL_SWITCH, "model.embed_layernorm": (True, False)},
    "tr8b-104B-cl": {**LOG, **KILL_SWITCH},
    "tr11-176B-ml": {
        **LOG,
        "parallel.zero_stage": (1, 0),
        "stability.sync_tp_duplicated_parameters": (False, True),
        "checkpoint.keep_last": (3, None),
        "checkpoint.save_retain_interval": (10000, None),
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_script_has_the_settings_of_the_published_run(name: str, tmp_path: Path) -> None:
    (published,) = (script for script in SCRIPTS if script.name == name)
    folder = tmp_path / "empty"
    folder.mkdir()
    printed = dry_run(f"{name}.slurm", folder=folder)
    nodes, per_node = (
        int(re.search(rf"--{flag} (\d+)", printed)[1]) for flag in ("nnodes", "nproc_per_node")
    )
    assert nodes * per_node == published.processes
    assert f"#SBATCH --nodes={nodes} " in (EXAMPLES / f"{name}.slurm").read_text()
    theirs = {**published.deepspeed_json()}
    ours = {"curriculum_learning": theirs["curriculum_learning"]} if "curriculum_learning" in theirs else {}
    if ours:
        assert json.loads(printed[: printed.index("\n}\n") + 2]) == ours
    found = []
    for words, settings in ((training_flags(printed), ours), (published.words(), theirs)):
        if "--deepspeed_config" in words:
            place = words.index("--deepspeed_config")
            words = words[:place] + words[place + 2 :]
        file = tmp_path / "deepspeed.json"
        file.write_text(json.dumps(settings))
        words = [
            *words,
            "--deepspeed_config",
            str(file),
            "--dry-run",
            "--world-size",
            str(published.processes),
        ]
        found.append(settings_of(read_command_line(words, {}).config))
    differences = {key: (found[0][key], found[1][key]) for key in found[0] if found[0][key] != found[1][key]}
    assert differences == PUBLISHED[name]
    for key in differences:
        assert f"`{option_name(key.split('.')[1])}`" in README, f"the README does not list {key}"


# Bandwidth of the file system in the README, and how the values in its table are rounded.
BYTES_PER_S, ROUNDED_TO_S = 1.5e9, 600


@pytest.mark.parametrize(
    "script", [name for name in NAMES if "--signal=" in (EXAMPLES / name).read_text()], ids=str
)
def test_the_warning_time_covers_the_longest_step_and_a_save(script: str, tmp_path: Path) -> None:
    """The test computes the README's sum from the model that the script trains."""
    flags = training_flags(dry_run(script, folder=tmp_path))

    def number(flag: str) -> int:
        return int(flags[flags.index(flag) + 1])

    layers, hidden = number("--num-layers"), number("--hidden-size")
    vocab = number("--pad-vocab-size-to") if "--pad-vocab-size-to" in flags else 50_304
    vocab = 250_112 if "mt5" in script else vocab
    parameters = 12 * layers * hidden**2 + 13 * layers * hidden + vocab * hidden
    parameters = {"llama3-8B.slurm": 8_030_261_248, "olmoe-1B-7B.slurm": 6_919_161_856}.get(
        script, parameters
    )
    bytes_each = (0 if "--num-experts" in flags else 2) + 4 + (2 if "--use-bnb-optimizer" in flags else 8)
    name = script.removesuffix(".slurm")
    (row,) = re.findall(rf"^\| `{name}` \| ([\d. |]+) \|$", README, re.MULTILINE)
    billions, per_parameter, terabytes, save_s, step_s, signal_s = map(float, row.split("|"))
    assert billions == pytest.approx(parameters / 1e9, rel=2e-3) and per_parameter == bytes_each
    assert terabytes == pytest.approx(parameters * bytes_each / 1e12, rel=1e-2)
    assert save_s == pytest.approx(parameters * bytes_each / BYTES_PER_S, rel=1e-2)
    assert signal_s == -(-(step_s + save_s) // ROUNDED_TO_S) * ROUNDED_TO_S
    assert f"#SBATCH --signal=B:USR2@{signal_s:.0f} " in (EXAMPLES / script).read_text()
    assert step_s == 706 or "104B" not in script


@pytest.mark.parametrize("script", [name for name in NAMES if name not in ("smoke.slurm",)])
def test_an_empty_ramp_up_turns_it_off(script: str, tmp_path: Path) -> None:
    flags = training_flags(dry_run(script, folder=tmp_path, RAMPUP_BATCH_SIZE=""))
    assert "--rampup-batch-size" not in flags


@pytest.mark.parametrize("example", ["tr8-104B", "tr11-176B-ml"])
def test_a_sweep_measures_full_batches(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ramp-up that the environment sets has no effect. The sweep measures every method."""
    printed = dry_run(SWEEP, "--seed", "7", folder=tmp_path, EXAMPLE=example)
    ((_, program, *words),) = commands(printed)
    assert program == str(ROOT / "tools" / "sweep.py")
    options = build_parser().parse_args(words)
    assert (options.action, options.steps, options.sbatch_options) == ("run", 12, "--time=01:00:00")
    (axis,) = options.axes
    assert axis.flag == "--partition-method" and len(set(axis.values)) == 4
    monkeypatch.setenv("RAMPUP_BATCH_SIZE", "16 16 1000")
    script = read_base_command(options.sbatch, options.base, tmp_path)
    assert script.processes == {"tr8-104B": 512, "tr11-176B-ml": 384}[example]
    assert script.flags[-2:] == ["--seed", "7"]
    given = given_flags(script.flags)
    assert given["batch.global_batch_size"] == 2048 and "batch.rampup_batch_size" not in given
    assert "checkpoint.save" not in given and "checkpoint.load" not in given
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", ALL)
def test_every_script_is_in_the_table_of_the_readme(script: str) -> None:
    assert f"| `{script}` |" in README


def test_8_bit_adam_without_a_norm_after_the_embeddings_prints_a_note() -> None:
    (published,) = (script for script in SCRIPTS if script.name == "tr8b-104B-bnb")
    words = [*published.words(), "--dry-run", "--world-size", "512"]
    without, with_norm = (
        read_command_line([*words, *more], {}).notes for more in ([], ["--embed-layernorm"])
    )
    (note,) = set(without) - set(with_norm)
    assert note.startswith("--use-bnb-optimizer without --embed-layernorm: ")
