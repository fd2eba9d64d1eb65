"""Converts a checkpoint to another format.

    python tools/convert_checkpoint.py --from checkpoints --to dcp/global_step5 --format dcp
    python tools/convert_checkpoint.py --from dcp/global_step5 --to native/global_step5 --format native

The format of --from is recognized. Weights, moments and the optimizer's step are copied without loss, in
blocks: the memory does not grow with the model, and no model is built. docs/conversion.md lists what each
format holds. A run needs no conversion: --load opens these formats on any layout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from megatron.checkpoint.formats.registry import (
    FORMATS,
    HUGGING_FACE,
    NATIVE,
    TORCHTITAN,
    UNIVERSAL,
    format_of,
    open_reader,
    writer_class,
)
from megatron.config.mistakes import Mistakes
from megatron.config.tool_parser import (
    ToolParser,
    add_universal_flag,
    check_at_least_1,
    check_folder,
    exit_on_interrupt,
)
from megatron.errors import UserError, exit_on_user_error, printable
from megatron.tokenizer.flags import add_tokenizer_flags, tokenizer_settings

if TYPE_CHECKING:
    from megatron.checkpoint.formats.state import StateReader


def build_parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="FOLDER",
        help="checkpoint to convert, or a folder whose `latest` or `latest_universal` names it",
    )
    parser.add_argument("--to", dest="target", required=True, metavar="FOLDER", help="folder to write")
    written = {name: entry for name, entry in FORMATS.items() if entry.writer or name == HUGGING_FACE}
    parser.add_argument(
        "--format",
        default=NATIVE,
        choices=tuple(written),
        metavar="NAME",
        help="; ".join(f"{name}: {entry.description}" for name, entry in written.items())
        + " (default: %(default)s)",
    )
    add_universal_flag(parser, "--from")
    parser.add_argument(
        "--workers", type=int, default=4, metavar="N", help="number of threads (default: %(default)s)"
    )
    parser.add_argument(
        "--no-verify-digests",
        action="store_true",
        help="do not compare weights and moments with the checkpoint's digests",
    )
    group = add_tokenizer_flags(
        parser, "vocabulary of a checkpoint of Megatron-Core (default: all rows of its word embeddings)"
    )
    group.add_argument("--vocab-size", type=int, metavar="N", help="number of tokens without padding")
    return parser


def open_source(
    folder: Path,
    universal: bool = False,
    tokenizer: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
) -> StateReader:
    """Returns the reader of a checkpoint to convert, with the specs of its parameters.

    tokenizer, vocab_size: of a checkpoint of another framework, if they are given. Raises UserError if there
    is no checkpoint, or if another framework made it and it does not describe its model.
    """
    from megatron.checkpoint.conversion import source as native_source
    from megatron.checkpoint.formats.universal_info import recorded_spec
    from megatron.checkpoint.reading import read_checkpoint
    from megatron.checkpoint.record import RUN_FILE
    from megatron.files import expect_layout

    checkpoint = read_checkpoint(folder, universal, allow_external=True)
    if checkpoint.is_external:
        # Imported only here: it loads torch and DeepSpeed, which takes seconds.
        from megatron.checkpoint.conversion.external import open_external

        return open_external(checkpoint, tokenizer or {}, vocab_size)
    if tokenizer or vocab_size is not None:
        raise UserError(
            f"--from {folder} records its vocabulary: remove --vocab-size and the flags of the tokenizer"
        )
    if format_of(checkpoint.folder) == NATIVE:
        return native_source.open_source(checkpoint.folder, derive_patterns=True)
    reader = open_reader(checkpoint)
    with expect_layout(checkpoint.folder / RUN_FILE, "the record of a checkpoint of this program"):
        records = checkpoint.run["parameters"]
        reader.specs = {name: recorded_spec(record) for name, record in records.items()}
    reader.check_complete()
    return reader


def convert(arguments: argparse.Namespace) -> None:
    """Writes the checkpoint --to. Raises UserError for a user's mistake."""
    source, target = Path(arguments.source), Path(arguments.target)
    vocabulary = tokenizer_settings(arguments), arguments.vocab_size
    reader = open_source(source, arguments.universal_checkpoint, *vocabulary)
    count, verify = 0, not arguments.no_verify_digests
    with tqdm(total=len(reader.specs), unit="parameter", disable=None) as bar:
        for name in writer_class(arguments.format).write_checkpoint(
            reader, target, arguments.workers, verify
        ):
            bar.set_postfix_str(name)
            bar.update()
            count += 1
    print(printable(f"{target}: {count} parameters of {reader.folder}, format {arguments.format}"))


def run(argv: Sequence[str] | None) -> None:
    mistakes = Mistakes()
    arguments = build_parser().collect(sys.argv[1:] if argv is None else argv, mistakes)
    with mistakes.collect():
        check_at_least_1(arguments, "workers")
    with mistakes.collect():
        check_folder("--from", arguments.source or "")
    mistakes.raise_all()
    source = Path(arguments.source)
    is_model = format_of(source) in (HUGGING_FACE, TORCHTITAN)
    if is_model and arguments.format != UNIVERSAL:
        raise UserError(
            f"--format {arguments.format}: --from {source} holds only the weights of a model, expected "
            f"--format {UNIVERSAL}; convert the universal checkpoint further"
        )
    if is_model or arguments.format == HUGGING_FACE:
        # Imported only here: it loads torch and transformers, which takes seconds.
        from megatron.checkpoint.discovery import open_checkpoint
        from megatron.commands import convert_huggingface

        if is_model:
            open_checkpoint(source)  # its errors name what the folder lacks
        verify = ["--no-verify-digests"] if arguments.no_verify_digests and not is_model else []
        universal = ["--universal_checkpoint"] if arguments.universal_checkpoint else []
        flag = "--from-hugging-face" if is_model else "--load"
        convert_huggingface.run([flag, str(source), "--to", arguments.target, *verify, *universal])
    else:
        convert(arguments)


def main(argv: Sequence[str] | None = None) -> None:
    with exit_on_interrupt(), exit_on_user_error():
        run(argv)


if __name__ == "__main__":
    main()
