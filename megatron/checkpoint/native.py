"""Saving through DeepSpeed's engine, and resuming on any layout.

A checkpoint is a folder `global_step<N>` with DeepSpeed's files and, written last, `run.json`: how far the
run had come, its configuration, vocabulary, layout and data. The file `latest` beside the folders names the
newest. Nothing else has to be remembered: dropout and initial weights are functions of the seed and of global
sample numbers, and the learning rate of progress, so there is no random state to save.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.folders import (
    LATEST_FILE,
    RUN_FILE,
    SAVING,
    Checkpoint,
    TrainingState,
    find_latest,
    step_of,
)
from megatron.checkpoint.manifest import describe_files, first_damaged, seal, write_atomically
from megatron.checkpoint.reshape import SavedParameters, spec_record
from megatron.checkpoint.rules import INFO_KEY, client_state, derive_info
from megatron.checkpoint.universal_reading import UniversalParameters, check_foreign, find_universal
from megatron.config import Config, ConfigError
from megatron.data.gpt_dataset import fingerprint_differences
from megatron.engine.pipeline_engine import GPTEngine
from megatron.mpu.parameters import spec_of


class SaveError(OSError):
    """A checkpoint cannot be written; those that were complete are still there."""


def find_checkpoint(
    config: Config, vocab_size: int, fingerprint: dict[str, Any], damaged: Mapping[str, str] | None = None
) -> Checkpoint | None:
    """The checkpoint that --load resumes from; None for a fresh start, where there is none yet.

    Raises ConfigError for one that this run cannot go on from: another model, or other data.
    """
    checkpoint = None
    if config.checkpoint.universal_checkpoint:
        checkpoint = find_universal(config.checkpoint.load)
    elif config.checkpoint.load:
        checkpoint = find_latest(config.checkpoint.load, damaged)
    if checkpoint is not None and checkpoint.is_foreign:
        check_foreign(checkpoint, config, vocab_size)
    elif checkpoint is not None:
        check_model(checkpoint, config, vocab_size)
        check_data(checkpoint, fingerprint)
    return checkpoint


def settle_on_checkpoint(
    checkpoint: Checkpoint | None, config: Config, vocab_size: int, fingerprint: dict[str, Any]
) -> Checkpoint | None:
    """The checkpoint that all ranks have found, or if its files are not what was written the newest one
    before it. Reads all files once, shared over the ranks. Collective."""
    damaged: dict[str, str] = {}
    while True:
        _check_agreement(checkpoint)
        if checkpoint is None or config.checkpoint.universal_checkpoint:
            return checkpoint
        damage = first_damaged(checkpoint.folder, checkpoint.run["files"])
        if damage is None:
            return checkpoint
        damaged[checkpoint.folder.name] = damage
        checkpoint = find_checkpoint(config, vocab_size, fingerprint, damaged)


def _check_agreement(checkpoint: Checkpoint | None) -> None:
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


def layout_record(config: Config) -> dict[str, Any]:
    """The layout in words for people and tools."""
    parallel = config.parallel
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "zero_stage": parallel.zero_stage,
        "precision": config.precision.name,
        "optimizer": config.optimizer.optimizer,
    }


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
    """Writes `global_step<iteration>` in `folder`, then lets `latest` name it. Collective.

    Until it is complete the folder has another name; one of the same step that is there already stays until
    then. Raises SaveError on the rank that cannot write.
    """
    folder, tag = Path(folder), f"global_step{state.iteration}"
    saving = folder / f"{SAVING}{tag}"
    if engine.global_rank == 0:
        shutil.rmtree(saving, ignore_errors=True)
    dist.barrier()
    parameters = _parameter_records(engine)
    info = derive_info(parameters, vocab_size)
    try:
        # `latest` is written below: DeepSpeed writes it before the other ranks have finished their files.
        extra = client_state(info, engine.run_config, asdict(state))
        engine.save_checkpoint(str(folder), tag=saving.name, client_state=extra, save_latest=False)
        dist.barrier()
        files = describe_files(saving)
        if engine.global_rank == 0:
            run = {
                "state": asdict(state),
                "config": engine.run_config.to_dict(),
                "layout": layout_record(engine.run_config),
                "stages": engine.module.stages_record(),
                "versions": {name: version(name) for name in ("torch", "deepspeed")},
                "vocab_size": vocab_size,
                "eod": eod,
                "data": fingerprint,
                "parameters": parameters,
                INFO_KEY: info,
                "files": files,
            }
            write_atomically(saving / RUN_FILE, json.dumps(seal(run), indent=2) + "\n")
            _put_in_place(saving, folder / tag)
            write_atomically(folder / LATEST_FILE, tag)
            _remove_old(folder, folder / tag, engine.run_config.checkpoint.keep_last)
    except (OSError, RuntimeError) as error:
        raise SaveError(f"checkpoint {folder / tag} cannot be written ({error})") from error
    dist.barrier()
    return folder / tag


def _parameter_records(engine: GPTEngine) -> dict[str, Any]:
    """By name, what every parameter of the model is, for those who read without the model. Collective."""
    own = {name: spec_record(spec_of(p)) for name, p in engine.module.named_parameters()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    return {name: record for records in everywhere for name, record in records.items()}


def _put_in_place(saving: Path, final: Path) -> None:
    """Renames; what is complete is found at every instant, under one name or another."""
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        _remove(replaced)
        os.rename(final, replaced)
    os.rename(saving, final)
    _remove(replaced)


def _remove_old(folder: Path, newest: Path, keep_last: int | None) -> None:
    """Leaves the `keep_last` newest complete checkpoints, and of unfinished ones none."""
    for path in folder.glob(f"{SAVING}global_step*"):
        _remove(path)
    if keep_last is not None:
        complete = {path.parent for path in folder.glob(f"global_step*/{RUN_FILE}")} - {newest}
        for path in sorted(complete, key=lambda path: step_of(path.name), reverse=True)[keep_last - 1 :]:
            _remove(path)


def _remove(folder: Path) -> None:
    # First what makes it look complete: the rest takes time, in which the job may be killed.
    (folder / RUN_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def load_checkpoint(engine: GPTEngine, checkpoint: Checkpoint) -> TrainingState:
    """Restores weights, master weights, moments, step and loss scale, whatever layout, precision and stages
    saved them. Another kind of optimizer starts with fresh moments."""
    now = engine.run_config
    parameters: SavedParameters | UniversalParameters
    if now.checkpoint.universal_checkpoint:
        parameters = UniversalParameters(checkpoint)
    else:
        parameters = SavedParameters(checkpoint)
    same_precision = not checkpoint.is_foreign and checkpoint.config.precision.name == now.precision.name
    engine.optimizer.load_by_name(
        parameters.read,
        parameters.loss_scaler if same_precision else None,
        with_moments=parameters.kept_by == _moments_of(now),
    )
    return checkpoint.state


def _moments_of(config: Config) -> str:
    """What an optimizer keeps: adam and adamw keep the same."""
    return "sgd" if config.optimizer.optimizer == "sgd" else "adam"
