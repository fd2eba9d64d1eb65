"""Whether what lies in a checkpoint is what was written, found by one process that reads it.

A native checkpoint keeps a digest of every file in `run.json`, a universal one made of it the digests of
whole tensors that the record of a resume compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpoint.discovery import RUN_FILE, Checkpoint, is_universal
from megatron.checkpoint.formats.native import VALUES
from megatron.checkpoint.integrity.manifest import Files, describe_file
from megatron.config.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.mpu.parameters import ParameterSpec

WORKERS = 4


def verify_files(folder: Path, files: Files, workers: int = WORKERS) -> Iterator[str | None]:
    """Reads the files, and of each says in words what is wrong with it, None if nothing.

    files: of a native checkpoint's `run.json`: that of a universal one has sizes alone.
    """

    def damage(name: str) -> str | None:
        try:
            is_intact = describe_file(folder / name) == files[name]
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return None if is_intact else f"{name} is damaged: its digest is not that of {RUN_FILE}"

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(damage, files)


def tensor_digests(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """The certificate's digests, by kind ('fp32', 'exp_avg', ...) and parameter; empty where it has none."""
    record = checkpoint.run.get("certificate") or {}
    return record.get("digests", {})


def matches_digest(whole: Tensor, spec: ParameterSpec, digest: str) -> bool:
    """Whether a whole fp32 tensor, with or without padding, is the one that the record tells of."""
    # Imported only here: it comes with the optimizer and DeepSpeed, which take seconds.
    from megatron.checkpoint.verification.digests import fragment_digests
    from megatron.mpu.layout import TPGroup

    found = fragment_digests(spec, TPGroup(), 0, {"": whole.reshape(-1)})[""]
    return f"{found:016x}" == digest


def verify_digests(checkpoint: Checkpoint, weights_only: bool = False) -> tuple[int, list[str]]:
    """(number of things compared, what is wrong in words) after reading all that has a digest: the files of a
    native checkpoint, the tensors of a universal one.

    weights_only: of a native one the layers' files, of a universal one the fp32 values.
    """
    if not is_universal(checkpoint.folder):
        files = {
            name: entry
            for name, entry in checkpoint.run["files"].items()
            if name.startswith("layer_") or not weights_only
        }
        return len(files), list(filter(None, verify_files(checkpoint.folder, files)))
    from megatron.checkpoint.states import UniversalStates, specs_of

    states, specs, problems = UniversalStates(checkpoint), specs_of(checkpoint), []
    compared = [
        (kind, *entry)
        for kind, of_kind in tensor_digests(checkpoint).items()
        for entry in of_kind.items()
        if kind == VALUES or not weights_only
    ]
    for kind, name, digest in compared:
        if name not in specs:
            problems.append(f"{RUN_FILE} has a digest of {name}, which the model does not have")
            continue
        try:
            if not matches_digest(states.read(name, kind), specs[name], digest):
                problems.append(f"{kind} of {name} is damaged: its digest is not that of {RUN_FILE}")
        except ConfigError as error:
            problems.append(str(error))
    return len(compared), problems


def check_weights(checkpoint: Checkpoint) -> int:
    """Reads the weights of a checkpoint and compares them with their digests; returns how many files or
    tensors were compared, 0 where there are no digests. ConfigError names what is damaged."""
    count, damages = verify_digests(checkpoint, weights_only=True)
    if damages:
        raise ConfigError(f"checkpoint {checkpoint.folder}: {'; '.join(damages[:3])}; take an older one")
    return count
