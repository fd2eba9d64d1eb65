"""Converts a checkpoint to another format.

    python tools/convert_checkpoint.py --from checkpoints --to dcp/global_step5 --format dcp
    python tools/convert_checkpoint.py --from dcp/global_step5 --to native/global_step5 --format native

The tool recognizes the format of --from. It copies weights, moments and the optimizer's step without loss, in
blocks: the memory does not grow with the model, and no model is built. docs/conversion.md lists what each
format holds. A run needs no conversion, because --load opens these formats on any layout. The tasks of one
command under srun share the work of a conversion to universal. To continue such a conversion after it was
killed, run the command again. tools/ds_to_universal.py and tools/convert_huggingface.py convert with fewer
flags.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from megatron.checkpoint.formats.registry import (
    FORMATS,
    HUGGING_FACE,
    NATIVE,
    TORCH_DIST,
    TORCHTITAN,
    UNIVERSAL,
    format_of,
    open_reader,
    writer_class,
)
from megatron.cluster.launch import decimal_number, rank_of, world_size_of
from megatron.config import LoggingConfig
from megatron.config.mistakes import Mistakes
from megatron.config.tool_parser import (
    ToolParser,
    add_universal_flag,
    at_least_1,
    check_folder,
    exit_on_interrupt,
)
from megatron.errors import (
    USER_ERROR_EXIT_CODE,
    UserError,
    exit_on_user_error,
    exit_with_error,
    printable,
)
from megatron.tokenizer.flags import add_tokenizer_flags, tokenizer_flags, tokenizer_settings

if TYPE_CHECKING:
    from megatron.checkpoint.formats.state import StateReader
    from megatron.checkpoint.formats.writing import CheckpointWriter
    from megatron.checkpoint.record import Checkpoint
    from megatron.tokenizer import TokenizerFlags

# Maximum share of rows of the word embeddings without a token. Above this share, the tokenizer belongs to a
# different model.
MAX_DROPPED_SHARE = 0.05
WORKERS = 4
TARGET_HELP = (
    "folder to write. A Hugging Face model becomes the checkpoint global_step0_universal in it, which --load "
    "of the folder opens, or if its name is global_step... or ends with _universal, the folder itself"
)
ONLY_TO_UNIVERSAL = (
    f"--allow-replica-mismatch acts only from {NATIVE} to --format {UNIVERSAL}: remove the flag"
)


def build_parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="FOLDER",
        help="checkpoint to convert, or a folder whose file `latest` or `latest_universal` names the "
        "checkpoint",
    )
    parser.add_argument("--to", dest="target", required=True, metavar="FOLDER", help=TARGET_HELP)
    written = {name: entry for name, entry in FORMATS.items() if entry.writer}
    parser.add_argument(
        "--format",
        choices=tuple(written),
        metavar="NAME",
        help="; ".join(f"{name}: {entry.description}" for name, entry in written.items())
        + f" (default: {NATIVE}; {UNIVERSAL} from a Hugging Face model)",
    )
    parser.add_argument(
        "--workers",
        type=at_least_1,
        metavar="N",
        help="number of threads; a thread holds a parameter of a Hugging Face model as a whole (default: "
        f"{WORKERS}; 1 from a Hugging Face model)",
    )
    parser.add_argument(
        "--allow-replica-mismatch",
        action="store_true",
        help="from native to universal: if the replicas of a parameter on tensor-parallel ranks differ, use "
        "their mean and print the difference",
    )
    parser.add_argument(
        "--hybrid-model",
        action="store_true",
        help=f"to {TORCH_DIST}: write a HybridModel, in which attention and MLP are layers of their own "
        "(default: a GPTModel)",
    )
    add_flags_of_models(parser)
    return parser


def add_flags_of_models(parser: ToolParser) -> None:
    """Adds the flags that also conversions to and from Hugging Face models use."""
    add_universal_flag(parser, "the given folder")
    parser.add_argument(
        "--no-verify-digests",
        action="store_true",
        help="do not compare the copied data with the digests of the checkpoint or model",
    )
    group = parser.add_argument_group("to a Hugging Face model")
    group.add_argument(
        "--dtype",
        choices=("fp32", "fp16", "bf16"),
        help="precision of the written weights (default: the run's precision); with fp32 the optimizer's "
        "fp32 weights are written",
    )
    group.add_argument("--no-tokenizer", action="store_true", help="write the model without its tokenizer")
    group = add_tokenizer_flags(
        parser,
        "tokenizer and vocabulary (default: the tokenizer of the checkpoint or in the model's folder)",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="TOKENS",
        help="number of tokens, without padding, of a model that is read, if it has no tokenizer (default: "
        "all rows of the word embeddings). A training run then needs this flag, too",
    )


def convert(arguments: argparse.Namespace) -> None:
    """Writes the checkpoint --to. Raises UserError for a user's mistake."""
    from megatron.checkpoint.conversion.source import open_any
    from megatron.checkpoint.formats.native import NativeReader

    target, vocabulary = Path(arguments.target), (tokenizer_settings(arguments), arguments.vocab_size)
    notes: list[str] = []
    reader = open_any(Path(arguments.source), arguments.universal_checkpoint, *vocabulary, notes.append)
    options = {"hybrid_model": True} if arguments.hybrid_model else {}
    if arguments.allow_replica_mismatch:
        if arguments.format != UNIVERSAL or not isinstance(reader, NativeReader):
            raise UserError(ONLY_TO_UNIVERSAL)
        options["allow_replica_mismatch"] = True
    writer, workers = writer_class(arguments.format), arguments.workers or WORKERS
    found = convert_in_tasks(reader, writer, target, workers, not arguments.no_verify_digests, **options)
    count = f"{target}: {len(reader.specs)} parameters of {reader.folder}, format {arguments.format}"
    for line in [*found[:-1], count] if found else []:
        print(printable(line))
    _print_notes(notes if found else ())


def task_of(env: Mapping[str, str]) -> tuple[int, int]:
    """Returns the rank of this task and the number of tasks of one command."""
    return decimal_number(rank_of(env)) or 0, world_size_of(env)


def convert_in_tasks(
    reader: StateReader,
    writer_class: type[CheckpointWriter],
    target: Path,
    workers: int,
    verify: bool,
    **options: Any,
) -> list[str]:
    """Writes a checkpoint and shows the progress. All tasks of the command share the work, if the writer
    allows it. Returns the lines of the result in the task that publishes the checkpoint. Returns no lines in
    all other tasks, and if an earlier command has converted the checkpoint. For the arguments see
    `pipeline.convert`."""
    from megatron.checkpoint.conversion import pipeline

    task = task_of(os.environ)
    rank, num_tasks = task
    keeps = writer_class.keeps_parameters
    if rank > 0 and not keeps:
        return []
    # All tasks raise the error of `is_published`.
    if pipeline.is_published(target, pipeline.identity_of(reader) if keeps else None) and rank == 0:
        print(printable(f"{target}: an earlier command has converted {reader.folder}"))
    lines: list[str] = []
    arguments = workers, verify, task if keeps else (0, 1), lines.append
    names = pipeline.convert(reader, writer_class, target, *arguments, **options)
    try:
        with tqdm(total=len(reader.specs), unit="parameter", disable=True if rank > 0 else None) as bar:
            for name in names:
                bar.set_postfix_str(name)
                bar.update()
    except UserError as error:
        if num_tasks == 1:
            raise
        exit_with_error(str(error), USER_ERROR_EXIT_CODE, {})  # only this task may have it, so it prints
    return lines


# --- to and from Hugging Face ---


def exported_tokenizer(arguments: argparse.Namespace, checkpoint: Checkpoint) -> TokenizerFlags | None:
    """Returns the flags of the tokenizer to write; None with --no-tokenizer, or if the run had none."""
    from megatron.checkpoint.reading import find_tokenizer
    from megatron.config.sections.data import fitting_tokenizer_types

    flags = tokenizer_flags(arguments, checkpoint.config.data)
    if arguments.no_tokenizer or not fitting_tokenizer_types(flags):
        return None
    find_tokenizer(flags, checkpoint)  # compares the tokenizer with the checkpoint's
    return flags


def write_model(arguments: argparse.Namespace) -> None:
    """Converts a checkpoint to a Hugging Face model."""
    from megatron.checkpoint.huggingface.exporter import (
        HuggingFaceWriter,
        format_differences,
        takes_fp32_values,
    )
    from megatron.checkpoint.huggingface.family import family_of
    from megatron.checkpoint.reading import read_checkpoint

    checkpoint = read_checkpoint(arguments.source, arguments.universal_checkpoint)
    config = checkpoint.config
    _, family = family_of(config.model)
    notes = [f"not the newest checkpoint: {checkpoint.skip_reason}"] if checkpoint.skip_reason else []
    notes += format_differences(config)
    tokenizer = exported_tokenizer(arguments, checkpoint)
    if tokenizer is None and not arguments.no_tokenizer:
        notes.append("no tokenizer is written, since the run had none: set the tokenizer flags to write one")
    verify, target, reader = not arguments.no_verify_digests, Path(arguments.target), open_reader(checkpoint)
    options = {"precision": arguments.dtype, "tokenizer": tokenizer}
    if not convert_in_tasks(reader, HuggingFaceWriter, target, 1, verify, **options):
        return
    print(
        f"wrote {target}: {family.architecture} in {arguments.dtype or config.precision.name}, iteration "
        f"{checkpoint.state.iteration} of {checkpoint.folder}"
    )
    compared = reader.weights_verification(takes_fp32_values(config, arguments.dtype))
    print(f"verified: {compared if verify else 'file sizes only (--no-verify-digests)'}")
    _print_notes(notes)


def check_tokenizer_fits(rows: int, tokens: int, vocab_size: int | None) -> None:
    """Raises UserError if the tokenizer has far fewer tokens than the model has word embeddings, unless
    --vocab-size confirms the number. BLOOM has 0.08 % more rows than tokens."""
    dropped = rows - tokens
    if vocab_size is None and dropped > MAX_DROPPED_SHARE * rows:
        raise UserError(
            f"the tokenizer has {tokens:,} tokens and the model {rows:,} word embeddings, so {dropped:,} "
            "embeddings would be removed: set the flags of the model's own tokenizer, or "
            f"--vocab-size {tokens} if this tokenizer is the right one"
        )


def read_model(arguments: argparse.Namespace) -> None:
    """Converts a Hugging Face model to a universal checkpoint."""
    from megatron.checkpoint.conversion.external import open_external
    from megatron.checkpoint.formats.universal_writer import UniversalWriter
    from megatron.checkpoint.huggingface.exporter import check_digests, token_ids
    from megatron.checkpoint.huggingface.importer import losses, own_tokenizer, start_flags
    from megatron.checkpoint.record import TOKEN_IDS_KEY

    source, target = Path(arguments.source), Path(arguments.target)
    if not arguments.no_verify_digests:
        check_digests(source)
    reader_class = FORMATS.load(TORCHTITAN if format_of(source) == TORCHTITAN else HUGGING_FACE)
    reader = reader_class(reader_class.open_external(source))
    notes = losses(source)
    given = tokenizer_settings(arguments)
    tokenizer = given or own_tokenizer(source)
    open_external(reader, tokenizer, arguments.vocab_size)
    rows, num_tokens = reader.model.rows, reader.checkpoint.vocab_size
    check_tokenizer_fits(rows, num_tokens, arguments.vocab_size)
    if not tokenizer and arguments.vocab_size is None:
        notes.append(
            f"{source} has no tokenizer: the vocabulary has {num_tokens:,} tokens, as in its config.json; if "
            "some of them are padding, set the tokenizer flags or --vocab-size"
        )
    if not given:  # the folder's tokenizer defines the ids
        reader.checkpoint.run[TOKEN_IDS_KEY] = token_ids(source)
    # One worker is the default, because each worker has a whole weight in memory. No further verification is
    # needed, because the files were compared with their digests above.
    if not convert_in_tasks(reader, UniversalWriter, target, arguments.workers or 1, False):
        return
    print(f"wrote {target}: {reader.model.family.architecture} of {source}, {num_tokens:,} tokens")
    print(f"start from it with: {shlex.join(start_flags(reader.checkpoint.config, target))}")
    if dropped := rows - num_tokens:
        notes.append(
            f"{dropped:,} of {rows:,} rows of the word embeddings belong to no token and are removed"
        )
    _print_notes(notes)


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(printable(f"note: {note}"), file=sys.stderr)


def run(argv: Sequence[str] | None) -> None:
    mistakes = Mistakes()
    arguments = build_parser().collect(sys.argv[1:] if argv is None else argv, mistakes)
    with mistakes.collect():
        check_folder("--from", arguments.source or "")
    convert_arguments(
        arguments, format_of(Path(arguments.source or "")) in (HUGGING_FACE, TORCHTITAN), mistakes
    )


def convert_arguments(arguments: argparse.Namespace, is_model: bool, mistakes: Mistakes) -> None:
    """Converts according to the flags. is_model: whether --from has only the weights of a model. mistakes:
    mistakes that were found before. Raises ConfigError with all mistakes."""
    source = Path(arguments.source or "")
    name = Path(arguments.target or "").name
    if is_model and not (name.startswith("global_step") or name.endswith("_universal")):
        arguments.target = os.path.join(arguments.target or "", "global_step0_universal")
    arguments.format = arguments.format or (UNIVERSAL if is_model else NATIVE)
    writes_model = arguments.format == HUGGING_FACE
    given = {"--dtype": arguments.dtype, "--no-tokenizer": arguments.no_tokenizer}
    mistakes.extend(
        f"{flag} acts only on a checkpoint that becomes a Hugging Face model: remove it"
        for flag in given
        if given[flag] and not writes_model
    )
    if writes_model and arguments.vocab_size is not None:
        mistakes.add("--vocab-size acts only on a Hugging Face model that is read: remove it")
    if writes_model and arguments.workers is not None:
        mistakes.add(
            f"--workers acts on all formats but {HUGGING_FACE}, whose files one thread writes: remove it"
        )
    if arguments.no_tokenizer and tokenizer_settings(arguments):
        mistakes.add("--no-tokenizer contradicts the tokenizer's flags: remove one of them")
    if arguments.hybrid_model and arguments.format != TORCH_DIST:
        mistakes.add(
            f"--hybrid-model acts only on --format {TORCH_DIST}: add this format, or remove the flag"
        )
    if arguments.allow_replica_mismatch and (is_model or writes_model):
        mistakes.add(ONLY_TO_UNIVERSAL)
    if is_model and arguments.universal_checkpoint:
        mistakes.add(f"--universal_checkpoint acts only on a checkpoint, and {source} is a model: remove it")
    mistakes.raise_all()
    if is_model and arguments.format != UNIVERSAL:
        raise UserError(
            f"--format {arguments.format}: --from {source} holds only the weights of a model, expected "
            f"--format {UNIVERSAL}; convert the universal checkpoint further"
        )
    if not is_model and not writes_model:
        convert(arguments)
        return
    # Imported after the checks of the flags, because loading torch and transformers takes seconds.
    from megatron.checkpoint.discovery import open_checkpoint
    from megatron.cluster.processes import configure_logging

    configure_logging(LoggingConfig())
    if is_model:
        open_checkpoint(source)  # raises an error that names what the folder lacks
        read_model(arguments)
    else:
        write_model(arguments)


def main(argv: Sequence[str] | None = None) -> None:
    with exit_on_interrupt(), exit_on_user_error({"RANK": str(task_of(os.environ)[0])}):
        run(argv)


if __name__ == "__main__":
    main()
