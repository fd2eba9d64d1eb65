"""Universal checkpoints: one file per parameter and moment, whole, in fp32, as DeepSpeed lays them out.

    global_step5_universal/
        zero/<parameter name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt    {"param": whole tensor, "cat_dim": ...}
        zero/<parameter name>/step.pt                               the optimizer's step
        run.json                                                    of the checkpoint that it was made from
    latest_universal                                                the name of the folder

The vocabulary is stored without its padding. `--load` opens native checkpoints of any layout by itself: this
format is for exchange with other programs of the family. Hugging Face's models become such checkpoints too,
without moments (`huggingface_import`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from functools import partial as partial_function
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.folders import PARAMETER_FOLDER, RUN_FILE, Checkpoint, is_universal, open_checkpoint
from megatron.checkpoint.manifest import write_atomically
from megatron.checkpoint.reshape import ParameterState, SavedParameters, recut
from megatron.config import ConfigError
from megatron.mpu.layout import TensorGroup
from megatron.mpu.parameters import ParameterSpec

LATEST_UNIVERSAL_FILE = "latest_universal"
# In the folder of a parameter all of whose files are written, until the conversion is over.
DONE_FILE = "done"
# DeepSpeed's name of the file per name that the optimizer uses; the fp32 values are called the same.
_MOMENT_FILES = {
    "exp_avg": "exp_avg.pt",
    "exp_avg_sq": "exp_avg_sq.pt",
    "momentum_buffer": "momentum_buffer.pt",
}


class UniversalParameters:
    """fp32 values and moments of every parameter in a universal checkpoint, by global name."""

    loss_scaler: dict | None = None
    """The format keeps none: it begins anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str, spec: ParameterSpec, tensor: TensorGroup) -> ParameterState:
        """As `SavedParameters.read`."""
        folder = self.folder / PARAMETER_FOLDER / name
        moments = {
            key: self._shard(folder / file, spec, tensor)
            for key, file in _MOMENT_FILES.items()
            if (folder / file).exists()
        }
        others = {"step": _load(folder / "step.pt")} if (folder / "step.pt").exists() else {}
        return self._shard(folder / "fp32.pt", spec, tensor), moments, others

    def _shard(self, path: Path, spec: ParameterSpec, tensor: TensorGroup) -> Tensor:
        whole = _load(path)["param"]
        if spec.shard_dim is None:
            return whole.reshape(-1)
        saved = replace(spec, whole_shape=tuple(whole.shape))
        return recut(spec, tensor, saved, 1, lambda _rank: whole).reshape(-1)


def read_values(folder: Path, name: str) -> Tensor:
    """The whole fp32 values of a parameter in a universal checkpoint, mapped from its file."""
    return _load(folder / PARAMETER_FOLDER / name / "fp32.pt")["param"]


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere inside torch
        raise ConfigError(f"universal checkpoint file {path} cannot be read ({error})") from error


def convert(source: Path, target: Path, workers: int = 1, allow_drift: bool = False) -> Iterator[str]:
    """Makes the universal checkpoint `target` of the native one `source`; yields each parameter's name when
    it is written. What an interrupted conversion has finished is not made again.

    allow_drift: where copies of a replicated parameter differ between tensor ranks, take their mean.

    Raises ConfigError for a damaged source, too little disk space, and copies that differ.
    """
    checkpoint = open_checkpoint(source)
    specs = _whole_specs(checkpoint)
    partial = target.with_name(target.name + ".partial")
    if target.exists():
        raise ConfigError(f"--output_folder {target} exists: delete it, or give another")
    _check_space(target.parent, specs)
    partial.mkdir(parents=True, exist_ok=True)
    todo = [name for name in specs if not (partial / PARAMETER_FOLDER / name / DONE_FILE).exists()]
    write = partial_function(_write_parameter, source, partial, allow_drift)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(write, todo, [specs[name] for name in todo])
    shutil.copyfile(source / RUN_FILE, partial / RUN_FILE)
    put_in_place(partial, target)


def parameter_names(source: Path) -> list[str]:
    """The names of all parameters in a native checkpoint."""
    return list(_whole_specs(open_checkpoint(source)))


def find_universal(folder: str | Path) -> Checkpoint:
    """The universal checkpoint that `latest_universal` of the folder names, or the folder itself if it is
    one; ConfigError where there is none."""
    folder = Path(folder)
    if not is_universal(folder):
        latest = folder / LATEST_UNIVERSAL_FILE
        if not latest.is_file():
            raise ConfigError(
                f"--universal_checkpoint: {folder} has no file {LATEST_UNIVERSAL_FILE}: make one with "
                "tools/ds_to_universal.py, or drop the flag: --load opens native checkpoints on any layout"
            )
        folder = folder / latest.read_text().strip()
    if not (folder / RUN_FILE).is_file():
        raise ConfigError(
            f"universal checkpoint {folder} has no {RUN_FILE}: only those that tools/ds_to_universal.py made "
            "can be opened"
        )
    return open_checkpoint(folder, with_files=False)


def _whole_specs(checkpoint: Checkpoint) -> dict[str, ParameterSpec]:
    """The specs that the checkpoint tells, with the vocabulary as it is without padding."""
    specs = {}
    for name, fields in checkpoint.run["parameters"].items():
        shape = tuple(fields["whole_shape"])
        rows = fields["used_rows"]
        whole = shape if rows is None else (rows, *shape[1:])
        specs[name] = ParameterSpec(**{**fields, "whole_shape": whole})
    return specs


def _check_space(folder: Path, specs: dict[str, ParameterSpec]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    needed = sum(3 * 4 * prod(spec.whole_shape) for spec in specs.values())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"--output_folder: {folder} has {free / 1e9:,.1f} GB free and {needed / 1e9:,.1f} GB are needed: "
            "make space, or give another folder"
        )


@cache
def _opened(source: Path) -> SavedParameters:
    """Once per worker process: opening all files of a large checkpoint takes a while."""
    torch.set_num_threads(1)
    return SavedParameters(open_checkpoint(source))


def _write_parameter(source: Path, partial: Path, allow_drift: bool, name: str, spec: ParameterSpec) -> str:
    """Writes the files of one parameter; returns its name."""
    saved = _opened(source)
    state = saved.read(name, spec, TensorGroup())
    if spec.shard_dim is None and (drift := saved.spread(name)) > 0:
        if not allow_drift:
            raise ConfigError(
                f"checkpoint {source}: the copies of {name} on the tensor ranks differ by up to {drift:.2e}: "
                "convert an older checkpoint, or take their mean with --allow-drift"
            )
        state = saved.mean(name)
    write_parameter(partial, name, spec, state)
    return name


def write_parameter(folder: Path, name: str, spec: ParameterSpec, state: ParameterState) -> None:
    """Writes the files of one whole parameter, without padding, into a universal checkpoint in the making."""
    values, moments, others = state
    folder = folder / PARAMETER_FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    files = {"fp32.pt": values, **{_MOMENT_FILES[key]: moment for key, moment in moments.items()}}
    for file, tensor in files.items():
        # Cloned: torch.save writes the whole storage that a slice lies in.
        entry: dict[str, Any] = {
            "param": tensor.view(spec.whole_shape).clone(),
            "cat_dim": spec.shard_dim or 0,
        }
        if spec.used_rows is not None:
            entry["vocab_tensor"] = True
        torch.save(entry, folder / file)
    if "step" in others:
        torch.save(others["step"], folder / "step.pt")
    (folder / DONE_FILE).touch()


def put_in_place(partial: Path, target: Path) -> None:
    """Gives a finished universal checkpoint its name, and lets `latest_universal` tell it."""
    for mark in (partial / PARAMETER_FOLDER).glob(f"*/{DONE_FILE}"):
        mark.unlink()
    os.rename(partial, target)
    write_atomically(target.parent / LATEST_UNIVERSAL_FILE, target.name)
