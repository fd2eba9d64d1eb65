"""Converts a checkpoint to a Hugging Face model, or a Hugging Face model to a checkpoint.

    python tools/convert_huggingface.py --from checkpoints --to my_model
    python tools/convert_huggingface.py --from models/Llama-3.2-1B --to runs/llama

A checkpoint becomes a folder with config.json, the weights as safetensors files, and the tokenizer. The
checkpoint may be a native one of any layout, or a universal one that this repository wrote. A Hugging Face
model becomes a universal checkpoint; the tool prints the flags with which pretrain_gpt.py starts from it on
any layout. Both directions preserve the logits. The content of --from determines the direction; --load and
--from-hugging-face set it explicitly. docs/huggingface.md lists the model types and the flags that each type
needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron.checkpoint.formats.registry import HUGGING_FACE, UNIVERSAL
from megatron.commands.convert_checkpoint import (
    TARGET_HELP,
    add_flags_of_models,
    convert_arguments,
    task_of,
)
from megatron.config.mistakes import Mistakes
from megatron.config.tool_parser import ToolParser, check_folder, exit_on_interrupt
from megatron.errors import exit_on_user_error


def build_parser() -> ToolParser:
    parser = ToolParser(__doc__)
    group = parser.add_argument_group("input (one of three) and output")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--from",
        dest="source",
        metavar="FOLDER",
        help="folder to convert: a Hugging Face model if it has a config.json, otherwise a checkpoint",
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
        dest="target",
        required=True,
        metavar="FOLDER",
        help=TARGET_HELP,
    )
    add_flags_of_models(parser)
    return parser


def run(argv: Sequence[str] | None) -> None:
    mistakes = Mistakes()
    arguments = build_parser().collect(sys.argv[1:] if argv is None else argv, mistakes)
    names = {"--from": "source", "--load": "load", "--from-hugging-face": "from_hugging_face"}
    given = ((flag, getattr(arguments, name)) for flag, name in names.items() if getattr(arguments, name))
    flag, folder = next(given, ("--from", ""))
    with mistakes.collect([flag]):
        check_folder(flag, folder)
    is_detected = flag == "--from" and os.path.isfile(os.path.join(folder, "config.json"))
    is_model = is_detected or flag == "--from-hugging-face"
    arguments.source, arguments.format = folder, UNIVERSAL if is_model else HUGGING_FACE
    arguments.workers, arguments.allow_replica_mismatch, arguments.hybrid_model = None, False, False
    convert_arguments(arguments, is_model, mistakes)


def main(argv: Sequence[str] | None = None) -> None:
    with exit_on_interrupt(), exit_on_user_error({"RANK": str(task_of(os.environ)[0])}):
        run(argv)


if __name__ == "__main__":
    main()
