#!/usr/bin/env python
"""Write a checkpoint as a folder that Hugging Face's transformers reads.

    python tools/convert_huggingface.py --load checkpoints --output my_model

writes config.json, the weights as safetensors, and the tokenizer. A model with ALiBi and --embed-layernorm
becomes a BloomForCausalLM, one with absolute positions a GPT2LMHeadModel; others are refused. The checkpoint
may have been written on any layout. Its logits and Hugging Face's are equal.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.config import ConfigError, LoggingConfig, exit_on_config_error
from megatron.config.tool_parser import ToolParser
from megatron.tokenizer.flags import add_tokenizer_flags

if TYPE_CHECKING:
    from megatron.checkpoint.folders import Checkpoint


def build_parser() -> ToolParser:
    """The flags."""
    parser = ToolParser(__doc__)
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--load",
        required=True,
        metavar="FOLDER",
        help="folder with the file `latest`, or a global_stepN folder",
    )
    group.add_argument("--output", required=True, metavar="FOLDER", help="folder to make")
    group.add_argument(
        "--dtype",
        choices=("fp32", "fp16", "bf16"),
        help="type of the weights (default: the one that the run trained in)",
    )
    group = add_tokenizer_flags(parser, "tokenizer (default: the checkpoint's own)")
    group.add_argument("--no-tokenizer", action="store_true", help="write the model alone")
    return parser


def tokenizer_writer(arguments: argparse.Namespace, checkpoint: Checkpoint) -> Callable[[Path], None] | None:
    """What writes the tokenizer into a folder; None where none is wanted or the run had none."""
    from megatron.checkpoint.reading import find_tokenizer, tokenizer_flags
    from megatron.config.data import fitting_tokenizer_types
    from megatron.tokenizer.hugging_face import save_as_hugging_face

    flags = tokenizer_flags(arguments, checkpoint)
    if arguments.no_tokenizer:
        if flags is arguments:
            raise ConfigError("--no-tokenizer contradicts the tokenizer's flags: drop one of them")
        return None
    if not fitting_tokenizer_types(flags):
        return None
    kind = find_tokenizer(flags, checkpoint).name
    model = checkpoint.config.model
    max_length = model.max_position_embeddings if model.position_embedding_type == "absolute" else None
    return lambda folder: save_as_hugging_face(kind, flags, folder, max_length)


def run(argv: Sequence[str] | None) -> None:
    """Do the work; ConfigError for a user's mistake."""
    arguments = build_parser().parse_args(argv)
    if not os.path.isdir(arguments.load):
        raise ConfigError(f"--load {arguments.load}: there is no such folder")

    from megatron.training.processes import quiet_library_logs

    quiet_library_logs(LoggingConfig())
    from megatron.checkpoint.huggingface import FAMILIES, family_of, remarks, write_hugging_face
    from megatron.checkpoint.reading import read_checkpoint

    checkpoint = read_checkpoint(arguments.load)
    architecture = FAMILIES[family_of(checkpoint.config.model)].architecture
    notes = [f"not the newest: {checkpoint.passed_over}"] if checkpoint.passed_over else []
    notes += remarks(checkpoint.config)
    writer = tokenizer_writer(arguments, checkpoint)
    if writer is None and not arguments.no_tokenizer:
        notes.append("no tokenizer is written, for the run was given none: its flags can be given here")
    write_hugging_face(checkpoint, Path(arguments.output), arguments.dtype, writer)
    precision = arguments.dtype or checkpoint.config.precision.name
    print(
        f"wrote {arguments.output}: {architecture} in {precision}, iteration {checkpoint.state.iteration} of "
        f"{checkpoint.folder}"
    )
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with code 2, and one sentence, for a user's mistake."""
    with exit_on_config_error():
        run(argv)


if __name__ == "__main__":
    main()
