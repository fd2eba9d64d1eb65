"""Converts a checkpoint to a Hugging Face model, or a Hugging Face model to a checkpoint.

    python tools/convert_huggingface.py --from checkpoints --to my_model
    python tools/convert_huggingface.py --from models/Llama-3.2-1B --to runs/llama

A checkpoint becomes a folder with config.json, the weights as safetensors files, and the tokenizer. The
checkpoint may be a native one of any layout, or a universal one that this repository wrote. A Hugging Face
model becomes a universal checkpoint; the tool prints the flags with which pretrain_gpt.py starts from it on
any layout. Both directions preserve the logits. --from detects the direction; --load and --from-hugging-face
set it. docs/huggingface.md lists the model types and the flags that each needs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config import DataConfig, LoggingConfig
from megatron.config.tool_parser import (
    ToolParser,
    add_universal_flag,
    add_verify_digests_flag,
    check_folder,
    exit_on_interrupt,
)
from megatron.errors import UserError, exit_on_user_error, printable
from megatron.tokenizer.flags import add_tokenizer_flags, tokenizer_flags, tokenizer_settings

if TYPE_CHECKING:
    from megatron.checkpoint.record import Checkpoint
    from megatron.tokenizer import TokenizerFlags

# The largest share of rows of the word embeddings without a token. Above it, the tokenizer belongs to another
# model.
MAX_DROPPED_SHARE = 0.05
# Flags that act only on one kind of input.
CHECKPOINT, MODEL = "a checkpoint", "a Hugging Face model"
FLAGS_OF_ONE = {
    CHECKPOINT: ("--universal_checkpoint", "--dtype", "--no-tokenizer", "--no-verify-digests"),
    MODEL: ("--vocab-size",),
}


def build_parser() -> ToolParser:
    parser = ToolParser(__doc__)
    group = parser.add_argument_group("input (one of three) and output")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--from",
        dest="source",
        metavar="FOLDER",
        help="convert this folder: a Hugging Face model if it has a config.json, else a checkpoint",
    )
    source.add_argument(
        "--load",
        metavar="FOLDER",
        help="convert this checkpoint to a Hugging Face model: a folder with `latest` or "
        "`latest_universal`, or a global_stepN folder",
    )
    source.add_argument(
        "--from-hugging-face",
        metavar="FOLDER",
        help="convert this Hugging Face model to a universal checkpoint; nothing is downloaded",
    )
    group.add_argument(
        "--to",
        "--output",
        dest="output",
        required=True,
        metavar="FOLDER",
        help="folder to write. For a universal checkpoint that a run opens with --load CKPT: CKPT with "
        "--from, CKPT/global_step0_universal with --from-hugging-face",
    )
    group = parser.add_argument_group(f"for {CHECKPOINT}")
    add_universal_flag(group, "the folder")
    group.add_argument(
        "--dtype",
        choices=("fp32", "fp16", "bf16"),
        help="precision of the written weights (default: the run's precision); fp32 takes the optimizer's "
        "fp32 weights",
    )
    group.add_argument("--no-tokenizer", action="store_true", help="write the model without its tokenizer")
    add_verify_digests_flag(group)
    group = parser.add_argument_group(f"for {MODEL}")
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="TOKENS",
        help="number of tokens without padding, if the folder has no tokenizer (default: vocab_size of "
        "config.json); the training run also needs this flag",
    )
    add_tokenizer_flags(
        parser, "tokenizer (default: the tokenizer of the checkpoint, or the one in the model's folder)"
    )
    return parser


def find_direction(arguments: argparse.Namespace) -> None:
    """Detects the direction of --from and sets its flags. Raises UserError if the folder does not exist."""
    if arguments.source is None:
        return
    check_folder("--from", arguments.source)
    if not os.path.isfile(os.path.join(arguments.source, "config.json")):
        arguments.load = arguments.source
        return
    arguments.from_hugging_face = arguments.source
    if not Path(arguments.output).name.endswith("_universal"):
        arguments.output = os.path.join(arguments.output, "global_step0_universal")


def check_direction(arguments: argparse.Namespace) -> None:
    """Raises UserError for a missing folder or a flag of the other direction."""
    is_checkpoint = arguments.load is not None
    folder = arguments.load if is_checkpoint else arguments.from_hugging_face
    check_folder("--load" if is_checkpoint else "--from-hugging-face", folder)
    kind, other = (CHECKPOINT, MODEL) if is_checkpoint else (MODEL, CHECKPOINT)
    for flag in FLAGS_OF_ONE[other]:
        if getattr(arguments, flag.removeprefix("--").replace("-", "_")):
            raise UserError(f"{flag} acts only on {other}, and {folder} is {kind}: remove the flag")


def exported_tokenizer(arguments: argparse.Namespace, checkpoint: Checkpoint) -> TokenizerFlags | None:
    """Returns the flags of the tokenizer to write; None with --no-tokenizer, or if the run had none."""
    from megatron.checkpoint.reading import find_tokenizer
    from megatron.config.sections.data import fitting_tokenizer_types

    flags = tokenizer_flags(arguments, checkpoint.config.data)
    if arguments.no_tokenizer:
        if flags is arguments:
            raise UserError("--no-tokenizer contradicts the tokenizer's flags: remove one of them")
        return None
    if not fitting_tokenizer_types(flags):
        return None
    find_tokenizer(flags, checkpoint)  # compares it with the checkpoint's
    return flags


def to_hugging_face(arguments: argparse.Namespace) -> list[str]:
    """Writes the Hugging Face model; returns notes for the user."""
    from megatron.checkpoint.huggingface.exporter import format_differences, write_hugging_face
    from megatron.checkpoint.huggingface.family import family_of
    from megatron.checkpoint.reading import read_checkpoint

    checkpoint = read_checkpoint(arguments.load, arguments.universal_checkpoint)
    _, family = family_of(checkpoint.config.model)
    notes = [f"not the newest checkpoint: {checkpoint.skip_reason}"] if checkpoint.skip_reason else []
    notes += format_differences(checkpoint.config)
    tokenizer = exported_tokenizer(arguments, checkpoint)
    if tokenizer is None and not arguments.no_tokenizer:
        notes.append("no tokenizer is written, since the run had none: set the tokenizer flags to write one")
    verify = not arguments.no_verify_digests
    output = Path(arguments.output)
    compared = write_hugging_face(checkpoint, output, arguments.dtype, tokenizer, verify=verify)
    precision = arguments.dtype or checkpoint.config.precision.name
    print(
        f"wrote {output}: {family.architecture} in {precision}, iteration {checkpoint.state.iteration} of "
        f"{checkpoint.folder}"
    )
    print(f"verified: {compared if verify else 'file sizes only (--no-verify-digests)'}")
    return notes


def check_tokenizer_fits(rows: int, tokens: int, vocab_size: int | None) -> None:
    """Raises UserError if the tokenizer has far fewer tokens than the model has word embeddings, unless
    --vocab-size confirms the number. BLOOM has 0.08 % more rows than tokens."""
    dropped = rows - tokens
    if vocab_size is None and dropped > MAX_DROPPED_SHARE * rows:
        raise UserError(
            f"the tokenizer has {tokens:,} tokens and the model {rows:,} word embeddings, {dropped:,} of "
            f"which would be removed: set the flags of the model's own tokenizer, or --vocab-size {tokens} "
            "if this tokenizer is the right one"
        )


def to_universal(arguments: argparse.Namespace) -> list[str]:
    """Writes the universal checkpoint; returns notes for the user."""
    from megatron.checkpoint.conversion.external import describe_run
    from megatron.checkpoint.formats.universal_writer import UniversalWriter
    from megatron.checkpoint.huggingface.exporter import token_ids
    from megatron.checkpoint.huggingface.file_digests import check_digests
    from megatron.checkpoint.huggingface.importer import own_tokenizer, start_flags
    from megatron.checkpoint.huggingface.reader import HuggingFaceReader
    from megatron.checkpoint.record import TOKEN_IDS_KEY
    from megatron.data.vocabulary import find_vocabulary

    source, output = Path(arguments.from_hugging_face), Path(arguments.output)
    check_digests(source)
    reader = HuggingFaceReader(HuggingFaceReader.open_external(source))
    model = reader.model
    tokenizer = tokenizer_settings(arguments) or own_tokenizer(source)
    vocab_size, notes = arguments.vocab_size, []
    if not tokenizer and vocab_size is None:
        vocab_size = model.rows
        notes.append(
            f"{source} has no tokenizer: the vocabulary has {vocab_size:,} tokens, as in its config.json; if "
            "some of them are padding, set the tokenizer flags or --vocab-size"
        )
    config = model.config(DataConfig(**tokenizer), vocab_size)
    vocabulary = find_vocabulary(config)
    check_tokenizer_fits(model.rows, vocabulary.size, arguments.vocab_size)
    if vocabulary.size > model.rows:
        raise UserError(
            f"{source} has embeddings of {model.rows} tokens, and the tokenizer has {vocabulary.size}: give "
            "the flags of the tokenizer that the model was trained with"
        )
    describe_run(reader, config, vocabulary)
    if not tokenizer_settings(arguments):  # the ids are of the folder's own tokenizer
        reader.checkpoint.run[TOKEN_IDS_KEY] = token_ids(source)
    # One thread: a weight is in memory as a whole. Its files were compared with their digests above.
    for _ in UniversalWriter.write_checkpoint(reader, output, workers=1, verify=False):
        pass
    print(f"wrote {output}: {model.family.architecture} of {source}, {vocabulary.size:,} tokens")
    print(f"start from it with: {shlex.join(start_flags(config, output))}")
    if dropped := model.rows - vocabulary.size:
        notes.append(
            f"{dropped:,} of {model.rows:,} rows of the word embeddings belong to no token and are removed"
        )
    return notes


def run(argv: Sequence[str] | None) -> None:
    arguments = build_parser().parse_args(argv)
    find_direction(arguments)
    check_direction(arguments)

    from megatron.cluster.processes import configure_logging

    configure_logging(LoggingConfig())
    notes = to_hugging_face(arguments) if arguments.load is not None else to_universal(arguments)
    for note in notes:
        print(printable(f"note: {note}"), file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> None:
    with exit_on_interrupt(), exit_on_user_error():
        run(argv)


if __name__ == "__main__":
    main()
