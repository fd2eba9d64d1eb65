"""Saving and resuming through DeepSpeed's engine, on the layout that the checkpoint was written on.

A checkpoint is a folder `global_step<N>` with DeepSpeed's files and, written last, `run.json`: how far the
run had come, its configuration, vocabulary, layout and data. The file `latest` beside the folders names the
newest. Nothing else has to be remembered: dropout and initial weights are functions of the seed and of global
sample numbers, and the learning rate of progress, so there is no random state to save.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.optimizer_files import OptimizerFiles
from megatron.config import Config, ConfigError
from megatron.data.gpt_dataset import fingerprint_differences
from megatron.engine.pipeline_engine import GPTEngine

RUN_FILE = "run.json"
LATEST_FILE = "latest"


@dataclass(frozen=True)
class TrainingState:
    """How far a run has come."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_iterations: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: its folder and what `run.json` says."""

    folder: Path
    state: TrainingState
    run: dict[str, Any]
    passed_over: str = ""
    """Why a newer one was not taken, if so."""

    @property
    def config(self) -> Config:
        """The configuration of the run that wrote it."""
        return Config.from_dict(self.run["config"])

    @property
    def vocab_size(self) -> int:
        """True size of the vocabulary, without padding."""
        return int(self.run["vocab_size"])

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token, None if the run knew none."""
        return self.run["eod"]


def find_latest(folder: str | Path) -> Checkpoint | None:
    """The newest complete checkpoint of `folder`: the one that `latest` names, or if that is incomplete or
    missing the newest `global_step<N>` that is not; or `folder` itself if it is one. None if there is none.

    Raises ConfigError when there are checkpoints but none of them is complete.
    """
    folder = Path(folder)
    if (folder / RUN_FILE).is_file():
        return open_checkpoint(folder)
    latest = folder / LATEST_FILE
    named = latest.read_text().strip() if latest.is_file() else None
    others = {path.parent.name for path in folder.glob(f"global_step*/{RUN_FILE}")} - {named}
    newest_first = sorted(others, key=_step_of, reverse=True)
    damage: ConfigError | None = None
    for name in [named, *newest_first] if named else newest_first:
        try:
            checkpoint = open_checkpoint(folder / name)
        except ConfigError as error:
            damage = damage or error
        else:
            return replace(checkpoint, passed_over=str(damage or ""))
    if damage is not None:
        raise damage
    return None


def _step_of(name: str) -> int:
    digits = name.removeprefix("global_step")
    return int(digits) if digits.isdigit() else -1


def describe_start(checkpoint: Checkpoint | None, load: str | None) -> str:
    """The line that says what a run starts from, and why."""
    if checkpoint is None:
        return "starting from new weights" + (f" (--load {load} holds no checkpoint)" if load else "")
    why = f" ({checkpoint.passed_over})" if checkpoint.passed_over else ""
    return f"starting from {checkpoint.folder}, iteration {checkpoint.state.iteration}{why}"


def agree_on_checkpoint(checkpoint: Checkpoint | None) -> None:
    """Raises ConfigError on every rank unless all of them have found the same checkpoint. Collective."""
    found = checkpoint.folder.name if checkpoint else "none"
    everywhere: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    if len(set(everywhere)) > 1:
        differing = next(rank for rank, other in enumerate(everywhere) if other != everywhere[0])
        raise ConfigError(
            f"rank 0 would resume from {everywhere[0]} and rank {differing} from {everywhere[differing]}: "
            f"--load must be a folder that all nodes share"
        )


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Reads what a `global_step<N>` folder says of itself; ConfigError names a missing or damaged file."""
    path = Path(folder) / RUN_FILE
    try:
        run = json.loads(path.read_text())
        return Checkpoint(path.parent, TrainingState(**run["state"]), run)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"checkpoint {path.parent}: {RUN_FILE} cannot be read ({error}); point --load at a folder whose "
            f"`{LATEST_FILE}` names a complete checkpoint"
        ) from error


def find_checkpoint(config: Config, vocab_size: int, fingerprint: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint that --load resumes from; None for a fresh start, where there is none yet.

    Raises ConfigError for one that this run cannot go on from: another model, layout or data.
    """
    checkpoint = find_latest(config.checkpoint.load) if config.checkpoint.load else None
    if checkpoint is not None:
        check_model(checkpoint, config, vocab_size)
        check_layout(checkpoint, config)
        check_data(checkpoint, fingerprint)
    return checkpoint


def layout_record(config: Config) -> dict[str, Any]:
    """What must be equal to resume without reshaping."""
    parallel = config.parallel
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "zero_stage": parallel.zero_stage,
        "precision": config.precision.name,
        "optimizer": config.optimizer.optimizer,
    }


def check_layout(checkpoint: Checkpoint, config: Config) -> None:
    """Refuses to resume on another layout, naming what differs."""
    saved, now = checkpoint.run["layout"], layout_record(config)
    differences = [f"{key} was {saved.get(key)}, is {now[key]}" for key in now if saved.get(key) != now[key]]
    if differences:
        raise ConfigError(
            f"checkpoint {checkpoint.folder} was written on another layout ({'; '.join(differences)}): "
            f"resume with the flags that wrote it"
        )


def check_model(checkpoint: Checkpoint, config: Config, vocab_size: int) -> None:
    """Refuses a checkpoint of another model, naming what differs."""
    saved, now = _model_settings(checkpoint.config), _model_settings(config)
    # Dropout and the initial scale may change between runs, and the vocabulary is compared by its true size.
    free = {"hidden_dropout", "attention_dropout", "init_method_std", "seq_length", "vocab_size"}
    differences = [
        f"{key} was {saved.get(key)}, is {now[key]}"
        for key in now
        if key not in free and saved.get(key) != now[key]
    ]
    if checkpoint.vocab_size != vocab_size:
        differences.append(f"the vocabulary had {checkpoint.vocab_size} tokens, has {vocab_size}")
    if differences:
        raise ConfigError(f"checkpoint {checkpoint.folder} holds another model: {'; '.join(differences)}")


def _model_settings(config: Config) -> dict[str, Any]:
    """What decides which function of the tokens the model is, wherever the flag stands."""
    settings = config.to_dict()
    documents = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    return {
        **settings["model"],
        "fp32_residual_connection": settings["precision"]["fp32_residual_connection"],
        **{name: settings["data"][name] for name in documents},
    }


def check_data(checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> None:
    """Refuses to go on with other data: the position in it would mean nothing."""
    differences = fingerprint_differences(checkpoint.run["data"], fingerprint)
    if differences:
        raise ConfigError(
            f"checkpoint {checkpoint.folder} was trained on other data ({'; '.join(differences)}): "
            f"give the flags that wrote it, or start anew in another --save folder"
        )


def save_checkpoint(
    engine: GPTEngine,
    folder: str | Path,
    state: TrainingState,
    vocab_size: int,
    eod: int | None,
    fingerprint: dict[str, Any],
) -> Path:
    """Writes `global_step<iteration>` in `folder`, then lets `latest` name it. Collective."""
    tag = f"global_step{state.iteration}"
    folder = Path(folder)
    if engine.global_rank == 0:
        # Written over, a folder must not look complete while old and new files are mixed in it.
        (folder / tag / RUN_FILE).unlink(missing_ok=True)
    dist.barrier()
    # `latest` is written below: DeepSpeed writes it before the other ranks have finished their files.
    engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    dist.barrier()
    if engine.global_rank == 0:
        run = {
            "state": asdict(state),
            "config": engine.run_config.to_dict(),
            "layout": layout_record(engine.run_config),
            "stages": engine.module.stages_record(),
            "vocab_size": vocab_size,
            "eod": eod,
            "data": fingerprint,
        }
        _write_atomically(folder / tag / RUN_FILE, json.dumps(run, indent=2) + "\n")
        _write_atomically(folder / LATEST_FILE, tag)
    dist.barrier()
    return folder / tag


def load_checkpoint(engine: GPTEngine, checkpoint: Checkpoint) -> TrainingState:
    """Restores weights, master weights, moments, step and loss scale, also where the layers were cut into
    stages elsewhere. Collective."""
    saved, now = checkpoint.run.get("stages", {}), engine.module.stages_record()
    same_stages = all(saved.get(key) == now[key] for key in ("bounds", "pipeline_schedule"))
    engine.load_checkpoint(
        str(checkpoint.folder.parent), tag=checkpoint.folder.name, load_optimizer_states=same_stages
    )
    if not same_stages:
        layout = engine.layout
        files = OptimizerFiles(checkpoint.folder, layout.tensor_rank, layout.tensor)
        engine.optimizer.load_by_name(files.parameter, files.loss_scaler)
    return checkpoint.state


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
