"""What the model-state files in a universal checkpoint of another framework say about it.

DeepSpeed's converter copies these files. Their entries:

    args, iteration, checkpoint_version     of Megatron programs
    universal_checkpoint_info               of programs that describe how their parameters are sharded
    global_steps, global_samples            of every DeepSpeed engine: iteration and consumed samples
    param_shapes                            names and shapes of the parameters of a tensor-parallel rank

An engine of plain DeepSpeed saves only the last two. The flags of the run give everything else.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.foreign_arguments import plain_arguments
from megatron.checkpoint.formats import megatron_deepspeed
from megatron.checkpoint.formats.deepspeed_files import model_files, sharded_weight_files
from megatron.checkpoint.formats.registry import PARAMETER_FOLDER
from megatron.checkpoint.formats.torch_archive import read_file
from megatron.checkpoint.formats.universal_info import INFO_KEY, SHARDING, VOCAB_SIZE_KEY, check_info
from megatron.checkpoint.names import check_parameter, shown
from megatron.checkpoint.record import RUN_FILE, Checkpoint, TrainingState, step_of
from megatron.errors import UserError

# Modules that wrap a model add this prefix, once each, to the names of all parameters.
_WRAPPER = "module."
_NORM = "input_layernorm.weight"
_NOT_COMPARED = (
    "Another framework wrote it. Its data, dropout and schedule were not compared with this run's; its "
    "model was compared only by the shapes of its tensors and the arguments that it holds"
)
_NO_ARGUMENTS = (
    "It has no arguments of Megatron: query_key_value is taken to be laid out per head, as in Megatron's "
    "checkpoint_version 3.0"
)


def open_external(folder: Path) -> Checkpoint:
    """Opens a universal checkpoint without `run.json`. Raises UserError if it cannot.

    Reads the first model-state file; the others differ from it only in rank and random state. `run` of the
    result has:

    args: the arguments of the source.
    gated: whether Microsoft's Megatron-DeepSpeed wrote it, and the model has a gated MLP.
    vocab_size: the size of the vocabulary without padding, or None.
    shapes: parameter -> shape of a tensor-parallel rank's shard, by stored name.
    unmerged_ranks: number of tensor-parallel ranks whose shards are concatenated along dimension 0, because
    DeepSpeed's converter had no patterns; 1 if the parameters are merged.
    """
    paths = model_files(folder) or sorted(sharded_weight_files(folder))
    if not paths:
        raise UserError(
            f"universal checkpoint {folder} has neither {RUN_FILE} nor mp_rank files, so its iteration is "
            "not known"
        )
    content = read_file(paths[0])
    names = without_wrappers(parameter_folders(folder)).keys()
    if not isinstance(content, Mapping):
        raise UserError(f"checkpoint file {paths[0]} holds no dict: it is not of a universal checkpoint")
    _check_attention_order(content.get("checkpoint_version"), paths[0])
    args = vars(content["args"]) if isinstance(content.get("args"), Namespace) else {}
    args = plain_arguments(args)
    state = _training_state(content, args, folder, paths[0])
    shapes = _shapes(content)
    note, gated = _NOT_COMPARED, False
    if megatron_deepspeed.has_megatron_deepspeed_names(names):
        note += f". {megatron_deepspeed.describe_translation(names)}"
        if not args:
            note += f". {_NO_ARGUMENTS}"
        gated = bool(args.get("swiglu")) if args else megatron_deepspeed.has_gated_mlp(shapes)
    info = content.get(INFO_KEY)
    info = check_info(info, paths[0]) if isinstance(info, Mapping) else {}
    ranks = 1 if any(info.get(key) for key in SHARDING) else _tensor_parallel_size(content)
    run = {
        "args": args,
        "gated": gated,
        "vocab_size": info.get(VOCAB_SIZE_KEY),
        "shapes": shapes,
        "unmerged_ranks": ranks if ranks > 1 and _is_concatenated(folder, shapes, ranks) else 1,
    }
    return Checkpoint(folder, state, run, unverified_note=note)


def parameter_folders(folder: Path) -> list[str]:
    """Returns the stored names of the parameters. Raises HostileFileError for an unsafe folder name."""
    parent = folder / PARAMETER_FOLDER
    return [check_parameter(path.name, parent) for path in parent.iterdir() if path.is_dir()]


def without_wrappers(names: Collection[str]) -> dict[str, str]:
    """Returns each name without the prefixes that all names have from wrapping modules -> the name."""
    bare = {name: name for name in names}
    while bare and all(name.startswith(_WRAPPER) for name in bare):
        bare = {name.removeprefix(_WRAPPER): stored for name, stored in bare.items()}
    return bare


def _training_state(
    content: Mapping[str, Any], args: Mapping[str, Any], folder: Path, path: Path
) -> TrainingState:
    """Returns the progress of the run. Raises UserError if it is not known. path: the file of `content`."""
    iteration = first_int(
        content.get("iteration"), args.get("iteration"), content.get("global_steps"), step_of(folder.name)
    )
    batch = first_int(args.get("global_batch_size"))
    samples = first_int(args.get("consumed_train_samples"), content.get("global_samples"), iteration * batch)
    sequence = first_int(args.get("seq_length"))
    tokens = first_int(args.get("consumed_train_tokens"), content.get("tokens"), samples * sequence)
    if iteration < 0 or samples < 0:
        raise UserError(
            f"checkpoint file {path} has no iteration (it has {shown(content.get('iteration'))}) or no "
            "number of consumed samples, so the position in the data is not known: expected global_steps "
            "and global_samples, which DeepSpeed's engine saves"
        )
    return TrainingState(iteration, samples, max(tokens, 0))


def _shapes(content: Mapping[str, Any]) -> dict[str, list[int]]:
    """Returns the shapes in `param_shapes`, a list of dicts. Entries of any other kind are left out."""
    groups = content.get("param_shapes")
    groups = groups if isinstance(groups, (list, tuple)) else [groups]
    found = (item for group in groups if isinstance(group, Mapping) for item in group.items())
    return {
        name: [int(size) for size in shape]
        for name, shape in found
        if isinstance(name, str)
        and isinstance(shape, Sequence)
        and all(type(size) is int and size > 0 for size in shape)
    }


def _tensor_parallel_size(content: Mapping[str, Any]) -> int:
    """Returns the number of tensor-parallel ranks. Engines before DeepSpeed 0.19 record only the number of
    model-parallel ranks, which is equal without a pipeline."""
    sizes = content.get("checkpoint_parallel_dimensions")
    size = sizes.get("tp_degree") if isinstance(sizes, Mapping) else None
    return first_int(size, content.get("mp_world_size"), 1)


def _is_concatenated(folder: Path, shapes: Mapping[str, Sequence[int]], ranks: int) -> bool:
    """Returns whether a norm, a replicated parameter, is stored once per rank."""
    name = next((name for name in shapes if name.endswith(_NORM)), None)
    if name is None:
        return False
    entry = read_file(folder / PARAMETER_FOLDER / check_parameter(name, folder) / "fp32.pt")
    stored = entry.get("param") if isinstance(entry, Mapping) else entry
    return isinstance(stored, Tensor) and stored.numel() == ranks * prod(shapes[name])


def _check_attention_order(version: Any, path: Path) -> None:
    """Raises UserError for a file of an old Megatron, in which query_key_value is not laid out per head."""
    if isinstance(version, (int, float)) and version < 2:
        raise UserError(
            f"checkpoint file {path} has checkpoint_version {version}, expected 2 or later: rows of its "
            "query_key_value are in another order. Load and save it with the program that wrote it"
        )


def first_int(*values: Any) -> int:
    """Returns the first value that is a non-negative integer; -1 if none is."""
    numbers = (
        value for value in values if isinstance(value, int) and not isinstance(value, bool) and value >= 0
    )
    return next(numbers, -1)
