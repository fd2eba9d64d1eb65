"""Conversions of checkpoints without a command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.checkpoint.conversion.pipeline import convert
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.formats.state import StateReader
from megatron.checkpoint.formats.universal_writer import UniversalWriter
from megatron.checkpoint.huggingface.exporter import HuggingFaceWriter, takes_fp32_values
from megatron.checkpoint.record import Checkpoint


def to_universal(source: StateReader, target: Path, **options: Any) -> Iterator[str]:
    """Converts parameter by parameter, without comparing digests. Yields the parameters' names."""
    return convert(source, UniversalWriter, target, **{"workers": 1, "verify": False, **options})


def write_hugging_face(
    checkpoint: Checkpoint, target: Path, precision: str | None = None, verify: bool = True, **options: Any
) -> str:
    """Writes a Hugging Face model. Returns what the model's weights are compared with."""
    reader = open_reader(checkpoint)
    for _ in convert(reader, HuggingFaceWriter, target, verify=verify, precision=precision, **options):
        pass
    return reader.weights_verification(takes_fp32_values(checkpoint.config, precision))
