"""The checkpoint formats: how the format of a folder is recognized, and which `StateReader` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpoint.lineage.identity import LATEST_FILE
from megatron.config.registries import Choice, Registry

if TYPE_CHECKING:
    from megatron.checkpoint.formats.state import StateReader
    from megatron.checkpoint.record import Checkpoint

NATIVE, UNIVERSAL, HUGGING_FACE = "native", "universal", "huggingface"
LATEST_UNIVERSAL_FILE = "latest_universal"
# In a universal checkpoint: one folder per parameter.
PARAMETER_FOLDER = "zero"


@dataclass(frozen=True)
class CheckpointFormat(Choice):
    """A checkpoint format. Its implementation is a `StateReader`.

    marker: a file or folder that only checkpoints of this format contain, finished or not. latest_file: the
    file beside the checkpoints that names the newest one; "" if there is none.
    """

    marker: str = ""
    latest_file: str = ""


FORMATS = Registry(
    "checkpoint format",
    {
        NATIVE: CheckpointFormat(
            "what a run saves: DeepSpeed's files, one per rank and layer",
            "megatron.checkpoint.formats.native:NativeReader",
            latest_file=LATEST_FILE,
        ),
        UNIVERSAL: CheckpointFormat(
            "DeepSpeed's format for exchange: one folder per parameter",
            "megatron.checkpoint.formats.universal:UniversalReader",
            marker=PARAMETER_FOLDER,
            latest_file=LATEST_UNIVERSAL_FILE,
        ),
        HUGGING_FACE: CheckpointFormat(
            "a model of Hugging Face transformers: weights only",
            "megatron.checkpoint.huggingface.reader:HuggingFaceReader",
            marker="config.json",
        ),
    },
)


def format_of(folder: Path) -> str:
    """Returns the name of the format of a folder: native, unless it contains the marker of another format. A
    folder with a `latest` file is a folder of checkpoints, and its other files do not count."""
    if any(entry.latest_file and (folder / entry.latest_file).exists() for entry in FORMATS.values()):
        return NATIVE
    marked = (name for name, entry in FORMATS.items() if entry.marker and (folder / entry.marker).exists())
    return next(marked, NATIVE)


def reader_class(folder: Path) -> type[StateReader]:
    """Returns the class that reads the checkpoint in `folder`."""
    return FORMATS.load(format_of(folder))


def open_reader(checkpoint: Checkpoint) -> StateReader:
    """Returns the reader of a checkpoint. It opens files when they are first read."""
    return reader_class(checkpoint.folder)(checkpoint)
