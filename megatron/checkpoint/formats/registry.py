"""The checkpoint formats: how a folder's format is recognized, which `StateReader` reads it, and which
`CheckpointWriter` writes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpoint.lineage.identity import LATEST_FILE
from megatron.checkpoint.record import RUN_FILE
from megatron.config.registries import SAVE_FORMATS
from megatron.config.registry import Choice, Registry, load_object

if TYPE_CHECKING:
    from megatron.checkpoint.formats.state import StateReader
    from megatron.checkpoint.formats.writing import CheckpointWriter
    from megatron.checkpoint.record import Checkpoint

NATIVE, UNIVERSAL, HUGGING_FACE = "native", "universal", "huggingface"
DCP, TORCH_DIST, TORCHTITAN = "dcp", "torch_dist", "torchtitan"
LATEST_UNIVERSAL_FILE = "latest_universal"
# The folder in a universal checkpoint that has one folder per parameter.
PARAMETER_FOLDER = "zero"


@dataclass(frozen=True)
class CheckpointFormat(Choice):
    """A checkpoint format. Its implementation is a `StateReader`.

    writer: its `CheckpointWriter`, "module:class"; "" if this program cannot write the format. markers: files
    or folders that only checkpoints of this format contain, all of them. latest_file: the file beside the
    checkpoints that names the newest one; "" if there is none.
    """

    writer: str = ""
    markers: tuple[str, ...] = ()
    latest_file: str = ""


FORMATS = Registry(
    "checkpoint format",
    {
        NATIVE: CheckpointFormat(
            "what a run saves: DeepSpeed's files, one per rank and layer",
            "megatron.checkpoint.formats.native:NativeReader",
            writer="megatron.checkpoint.formats.native_writer:NativeWriter",
            latest_file=LATEST_FILE,
        ),
        UNIVERSAL: CheckpointFormat(
            "DeepSpeed's format for exchange: one folder per parameter",
            "megatron.checkpoint.formats.universal:UniversalReader",
            writer="megatron.checkpoint.formats.universal_writer:UniversalWriter",
            markers=(PARAMETER_FOLDER,),
            latest_file=LATEST_UNIVERSAL_FILE,
        ),
        TORCH_DIST: CheckpointFormat(
            "torch_dist of Megatron-Core",
            "megatron.checkpoint.formats.torch_dist:TorchDistReader",
            writer="megatron.checkpoint.formats.torch_dist_writer:TorchDistWriter",
            markers=(".metadata", "metadata.json"),
        ),
        DCP: CheckpointFormat(
            "torch.distributed.checkpoint, which PyTorch opens without this program",
            "megatron.checkpoint.formats.dcp:DcpReader",
            writer="megatron.checkpoint.formats.dcp_writer:DcpWriter",
            markers=(".metadata", RUN_FILE),
            latest_file=LATEST_FILE,
        ),
        TORCHTITAN: CheckpointFormat(
            "torch.distributed.checkpoint with the names of torchtitan, for Llama models",
            "megatron.checkpoint.formats.torchtitan:TorchtitanReader",
            writer="megatron.checkpoint.formats.torchtitan:TorchtitanWriter",
            markers=(".metadata",),
        ),
        HUGGING_FACE: CheckpointFormat(
            "a model of Hugging Face transformers: weights only",
            "megatron.checkpoint.huggingface.reader:HuggingFaceReader",
            writer="megatron.checkpoint.huggingface.exporter:HuggingFaceWriter",
            markers=("config.json",),
        ),
    },
)


def format_of(folder: Path) -> str:
    """Returns the name of a folder's format: native, unless it contains all markers of a different format. A
    folder with a `latest` file is a folder of checkpoints; its markers are ignored."""
    if any(entry.latest_file and (folder / entry.latest_file).exists() for entry in FORMATS.values()):
        return NATIVE
    for name, entry in FORMATS.items():
        if entry.markers and all((folder / marker).exists() for marker in entry.markers):
            return name
    return NATIVE


def is_run_format(folder: Path) -> bool:
    """Returns whether the checkpoint in `folder` has a format that --save-format accepts."""
    return format_of(folder) in SAVE_FORMATS


def reader_class(folder: Path) -> type[StateReader]:
    return FORMATS.load(format_of(folder))


def open_reader(checkpoint: Checkpoint) -> StateReader:
    """Returns the reader of a checkpoint. It opens each file when it first reads from it."""
    found: type[StateReader] = FORMATS.load(checkpoint.format or format_of(checkpoint.folder))
    return found(checkpoint)


def writer_class(name: str) -> type[CheckpointWriter]:
    """Returns the class that writes checkpoints of a format."""
    return load_object(FORMATS[name].writer)
