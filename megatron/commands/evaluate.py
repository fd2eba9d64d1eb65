"""Computes the loss and perplexity of a checkpoint on data sets, or runs tasks of lm-evaluation-harness.

    python tools/evaluate.py --load checkpoints --data-path data/text_text_document data/code_text_document
    python tools/evaluate.py --load checkpoints --tasks lambada_openai hellaswag
    python tools/evaluate.py --load checkpoints --tasks toy --tensor-model-parallel-size 2

The checkpoint may be a native one of any layout, or a universal one. Its configuration sets the model, the
sequence length, the split, the seed and the precision. Each data set is evaluated separately and read once,
in samples of the sequence length. The last tokens are not read if they are fewer than a sample. The loss is
the mean over the unmasked tokens, as in training, so on equal samples it equals the validation loss of the
run.

--tasks runs tasks of EleutherAI's lm-evaluation-harness (pip install lm_eval) with the checkpoint's
tokenizer. --tasks-path names a folder of further tasks. The task `toy` needs no download.

With a parallel size above 1 and without a launcher, the tool starts all ranks on this host. Under a launcher
such as torch.distributed.run, data-parallel replicas share the texts of the tasks.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tqdm import tqdm

from megatron.arguments.data_checks import no_harness
from megatron.cluster.devices import set_library_defaults
from megatron.cluster.exit_codes import RunStopped
from megatron.cluster.launch import init_from_slurm_env, world_size_of
from megatron.config import LoggingConfig, ParallelConfig
from megatron.config.mistakes import Mistakes, mistakes_of_call
from megatron.config.registries import DATA_ORDERS
from megatron.config.rules import rule_mistakes
from megatron.config.tool_parser import (
    ToolParser,
    add_universal_flag,
    add_verify_digests_flag,
    at_least_1,
    check_folder,
)
from megatron.data.flags import SPLIT_NAMES, parse_split, splits_with_own_data
from megatron.data.gpt_dataset import VOCABULARY_KEY, one_epoch
from megatron.data.indexed_dataset import IndexedDataset, index_path
from megatron.data.splits import split_documents
from megatron.errors import UserError, exit_on_user_error, exit_with_error
from megatron.tokenizer.vocabulary_record import check_record
from megatron.training.log_lines import perplexity

if TYPE_CHECKING:
    from megatron.checkpoint.record import Checkpoint
    from megatron.data.gpt_dataset import GPTDataset
    from megatron.data.loader import MicroBatch
    from megatron.model.inference.scoring import LanguageModel
    from megatron.run import Run
    from megatron.training.harness.model import Tasks

ALL = "all"
# Arguments of Python that start this tool on the other ranks.
PROGRAM = ["-m", "megatron.commands.evaluate"]
# Flags of the layout. Each flag is a field of `ParallelConfig`.
_SIZES = (
    *("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"),
    "expert_model_parallel_size",
)


def build_parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.add_argument(
        "--load",
        required=True,
        metavar="FOLDER",
        help="folder with the file `latest` or `latest_universal`, or a global_stepN folder",
    )
    add_universal_flag(parser, "the folder")
    parser.add_argument(
        "--data-path",
        nargs="+",
        default=[],
        metavar="PREFIX",
        help="paths of .bin/.idx pairs, without suffix and without weights",
    )
    parser.add_argument(
        "--tasks", nargs="+", default=[], metavar="TASK", help="tasks of lm-evaluation-harness"
    )
    parser.add_argument(
        "--tasks-path",
        metavar="FOLDER",
        help="folder with YAML files of further tasks; these files can run Python code, so use only files "
        "that you trust",
    )
    parser.add_argument(
        "--limit", type=at_least_1, metavar="N", help="use the first N documents of each task (default: all)"
    )
    parser.add_argument(
        "--split",
        metavar="WEIGHTS",
        help="weights of the training, validation and test splits (default: the split of the checkpoint)",
    )
    parser.add_argument(
        "--subset",
        choices=(*SPLIT_NAMES, ALL),
        help="documents to read: one split, or all (default: valid if --split is set, or if the checkpoint "
        "was trained on a split of the data; otherwise all)",
    )
    parser.add_argument(
        "--seq-length",
        type=at_least_1,
        metavar="TOKENS",
        help="sequence length in tokens (default: from the checkpoint)",
    )
    parser.add_argument(
        "--reset-attention-mask",
        action="store_true",
        help="as in training: a token attends only to its own document (default: as the checkpoint's run)",
    )
    parser.add_argument(
        "--reset-position-ids",
        action="store_true",
        help="as in training: the positions of each document begin at 0 (default: as the checkpoint's run)",
    )
    parser.add_argument(
        "--samples",
        type=at_least_1,
        help="read the first N samples of each data set, in the order of training (default: all)",
    )
    parser.add_argument(
        "--micro-batch-size",
        type=at_least_1,
        metavar="SAMPLES",
        help="number of samples that are computed at a time (default: from the checkpoint)",
    )
    add_verify_digests_flag(parser)
    group = parser.add_argument_group("layout (may differ from the checkpoint's)")
    for field in _SIZES:
        title = f"{field.partition('_')[0]}-parallel"
        group.add_argument(
            f"--{field.replace('_', '-')}", type=at_least_1, default=1, metavar="N", help=f"{title} size"
        )
    group.add_argument(
        "--local-rank",
        "--local_rank",
        type=int,
        metavar="RANK",
        help="rank of this process on its node; torch.distributed.launch sets it",
    )
    return parser


def argument_mistakes(arguments: argparse.Namespace) -> Iterator[str]:
    """Yields a sentence for each flag that is missing, superfluous or invalid."""
    yield from mistakes_of_call(check_folder, "--load", arguments.load or "")
    if not arguments.data_path and not arguments.tasks:
        yield "nothing to evaluate: set --data-path or --tasks"
    for flag in ("tasks_path", "limit"):
        if getattr(arguments, flag) is not None and not arguments.tasks:
            yield f"--{flag.replace('_', '-')} is for --tasks: set --tasks, or remove it"
    for flag in ("samples", "split", "subset"):
        if getattr(arguments, flag) is not None and not arguments.data_path:
            yield f"--{flag} is for --data-path: set --data-path, or remove it"
    if arguments.tasks and find_spec("lm_eval") is None:
        yield str(no_harness("--tasks", "there is no module lm_eval"))
    if arguments.tasks_path is not None:
        yield from mistakes_of_call(check_folder, "--tasks-path", arguments.tasks_path)
    if arguments.split is not None:
        yield from mistakes_of_call(parse_split, arguments.split)
    for prefix in arguments.data_path:
        if prefix.replace(".", "", 1).isdigit() and not os.path.exists(index_path(prefix)):
            yield (
                f"--data-path {prefix}: expected prefixes without weights, since each data set is evaluated "
                "on its own"
            )


def with_separate_documents(checkpoint: Checkpoint, arguments: argparse.Namespace) -> Checkpoint:
    """Returns the checkpoint with the flags that separate documents, if they are set. Raises UserError for
    --reset-position-ids with a model that has no position ids."""
    names = ("reset_attention_mask", "reset_position_ids")
    given = {f"data.{name}": True for name in names if getattr(arguments, name)}
    if not given:
        return checkpoint
    config = checkpoint.config.with_settings(given)
    if mistakes := list(rule_mistakes(config, ["data"])):
        raise UserError("; ".join(mistakes))
    return replace(checkpoint, run={**checkpoint.run, "config": config.to_dict()})


def open_datasets(arguments: argparse.Namespace, checkpoint: Checkpoint) -> list[tuple[GPTDataset, str]]:
    """Returns (one epoch, text that names the documents) of each data set. Raises UserError for damaged data,
    data of a different vocabulary and data with fewer tokens than a sample."""

    config = checkpoint.config
    order = DATA_ORDERS[config.data.data_order]
    split = arguments.split or config.data.split
    digest = (checkpoint.run.get("data") or {}).get(VOCABULARY_KEY)
    datasets = []
    for prefix in arguments.data_path:
        dataset = IndexedDataset(prefix)
        if digest is not None:
            check_record(prefix, "--data-path", digest)
        subset = arguments.subset or default_subset(arguments.split, dataset, checkpoint)
        documents: range | None = range(len(dataset))
        if subset != ALL:
            documents = split_documents(split, len(dataset), order)[SPLIT_NAMES.index(subset)]
        if not documents:
            raise UserError(
                f"--split {split} assigns none of the {len(dataset):,} documents of --data-path {prefix} to "
                f"the {subset} split: change --split, or evaluate all documents with --subset {ALL}"
            )
        seq_length = arguments.seq_length or config.model.seq_length
        try:
            samples = one_epoch(dataset, subset, documents, seq_length, config.training.seed)
        except UserError as error:
            remedy = "" if subset == ALL else f"; --subset {ALL} evaluates all {len(dataset):,} documents"
            raise UserError(f"{error}{remedy}") from error
        if dataset.loss_mask is not None and not config.data.reset_attention_mask:
            print(
                f"note: {prefix} has a loss mask (prompts or chats), and its documents attend to each other: "
                "set --reset-attention-mask, and --reset-position-ids for a model without ALiBi, to evaluate "
                "each document alone",
                file=sys.stderr,
            )
        of_split = "" if subset == ALL else f" ({subset} of --split {split})"
        datasets.append((samples, f"{len(documents):,} of {len(dataset):,} documents{of_split}"))
    return datasets


def default_subset(split: str | None, dataset: IndexedDataset, checkpoint: Checkpoint) -> str:
    """Returns "valid" for data on which the run was trained, or if --split is set; "all" for all other data.

    The run was trained on a data set if the checkpoint records its file name, or its numbers of documents and
    tokens (the files may have moved).
    """
    if split is not None:
        return "valid"
    if splits_with_own_data(checkpoint.config.data):
        return ALL
    data = checkpoint.run.get("data") or {}
    names = map(os.path.basename, data.get("paths") or [])
    sizes = zip(data.get("documents") or [], data.get("tokens") or [], strict=False)
    is_known = os.path.basename(dataset.prefix) in names or (len(dataset), dataset.num_tokens) in sizes
    return "valid" if is_known else ALL


def check_seq_length(seq_length: int | None, checkpoint: Checkpoint) -> None:
    """Raises UserError if the model has too few position embeddings for --seq-length."""
    model = checkpoint.config.model
    positions = model.max_position_embeddings
    if model.position_embedding_type == "absolute" and (seq_length or 0) > positions:
        raise UserError(
            f"--seq-length is {seq_length}, expected at most {positions}: the model has that many position "
            "embeddings"
        )


def micro_batches(
    dataset: GPTDataset, num_samples: int, size: int, checkpoint: Checkpoint
) -> Iterator[MicroBatch]:
    """Yields the first `num_samples` samples in micro-batches of at most `size`."""
    # The import is late, because torch takes seconds to import.
    from megatron.data.loader import GPTBatchLoader

    data, remainder = checkpoint.config.data, num_samples % size
    for first, count, batch_size in (
        (0, num_samples - remainder, size),
        (num_samples - remainder, remainder, remainder),
    ):
        if count:
            loader = GPTBatchLoader(
                dataset,
                micro_batch_size=batch_size,
                dp_rank=0,
                dp_size=1,
                eod=checkpoint.eod,
                eod_mask_loss=data.eod_mask_loss,
                needs_document_ids=data.resets_documents,
                vocab_size=checkpoint.vocab_size,
            )
            yield from loader.micro_batches(first, count)


def mean_loss(
    model: LanguageModel, dataset: GPTDataset, num_samples: int, size: int, checkpoint: Checkpoint
) -> float:
    """Returns the mean loss over the unmasked tokens. Computes `size` samples at a time, and shows the
    progress on stderr. Raises UserError if all tokens are masked."""
    total, tokens = 0.0, 0.0
    interval_s = 0.1 if sys.stderr.isatty() else 60.0
    with tqdm(total=num_samples, unit="sample", mininterval=interval_s) as bar:
        for batch in micro_batches(dataset, num_samples, size, checkpoint):
            losses = -model.score(batch.tokens, batch.labels, batch.document_ids).log_probs
            total += (losses * batch.loss_mask.to(losses.device)).sum().item()
            tokens += batch.loss_mask.sum().item()
            bar.set_postfix_str(f"loss {total / max(tokens, 1):.4f}", refresh=False)
            bar.update(len(batch.samples))
    if not tokens:
        raise UserError(
            f"all tokens of the {num_samples:,} samples of {dataset.name} data are masked (--eod-mask-loss, "
            "or a loss mask): there is nothing to evaluate"
        )
    return total / tokens


class Evaluation:
    """The data sets and tasks of a command. The rank that prints opens and checks them before the weights are
    loaded."""

    def __init__(self, arguments: argparse.Namespace, checkpoint: Checkpoint) -> None:
        """Opens the data sets and tasks. Raises UserError if one cannot be used."""
        self.arguments, self.checkpoint = arguments, checkpoint
        check_seq_length(arguments.seq_length, checkpoint)
        self.datasets = open_datasets(arguments, checkpoint)
        self.tasks = self._load_tasks() if arguments.tasks else None

    def _load_tasks(self) -> Tasks:
        # The import is late, because torch takes seconds to import, and lm_eval is optional.
        from megatron.checkpoint.reading import find_tokenizer

        try:
            from megatron.training.harness.model import Tasks
        except ImportError as error:
            raise no_harness("--tasks", str(error)) from error
        arguments = self.arguments
        # Special tokens in texts are parsed, as by the harness's models.
        tokenizer = find_tokenizer(self.checkpoint.config.data, self.checkpoint, parse_special=True)
        length = arguments.seq_length or self.checkpoint.config.model.seq_length
        return Tasks(arguments.tasks, arguments.tasks_path, arguments.limit, tokenizer, length)

    def run(self, model: LanguageModel, batch_size: int) -> None:
        """Prints a line for each data set and task. batch_size: samples in one call of the model."""

        checkpoint = self.checkpoint
        print(f"{checkpoint.folder}, trained for {checkpoint.state.iteration} iterations", file=sys.stderr)
        for prefix, (dataset, documents) in zip(self.arguments.data_path, self.datasets, strict=True):
            num_samples = min(len(dataset), self.arguments.samples or len(dataset))
            loss = mean_loss(model, dataset, num_samples, batch_size, checkpoint)
            print(
                f"{prefix} | {dataset.name} | {documents} | {num_samples:,} of {len(dataset):,} samples of "
                f"{dataset.seq_length:,} tokens | lm loss: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E}",
                flush=True,
            )
        if self.tasks is not None:
            for task, metrics in self.tasks.run(model, batch_size).items():
                values = " | ".join(f"{name}: {value:.6G}" for name, value in metrics.items())
                print(f"{task} | {values}", flush=True)


def run(argv: Sequence[str]) -> None:
    mistakes = Mistakes()
    arguments = build_parser().collect(argv, mistakes)
    init_from_slurm_env()
    set_library_defaults()
    mistakes.extend(argument_mistakes(arguments))
    mistakes.raise_all()

    # The import is late, because torch and DeepSpeed take seconds to import.
    from megatron.cluster.processes import configure_logging, is_main_process, use_device_alone

    configure_logging(LoggingConfig())
    from megatron.checkpoint.reading import load_model, read_checkpoint, verify_weights
    from megatron.cluster.rendezvous import Preparation, announce_errors
    from megatron.training.build import run_of_layout

    sizes = {field: getattr(arguments, field) for field in _SIZES}
    launched = world_size_of(os.environ)
    tensor, context, pipeline, expert = sizes.values()
    # The ranks of a pipeline rank share the experts. They belong to one replica or to several replicas.
    world_size = launched if launched > 1 else pipeline * math.lcm(tensor * context, expert)
    evaluation = None
    with announce_errors():
        checkpoint = read_checkpoint(arguments.load, arguments.universal_checkpoint)
        checkpoint = with_separate_documents(checkpoint, arguments)
        planned = run_of_layout(checkpoint, ParallelConfig(**sizes, world_size=world_size))
    verify = not arguments.no_verify_digests
    with ExitStack() as stack:
        # Keeps the store of rank 0, to which the other ranks connect while rank 0 downloads a task.
        preparation = stack.enter_context(Preparation(planned.config))
        with announce_errors():
            if is_main_process():
                evaluation = Evaluation(arguments, checkpoint)
                if verify and world_size > 1:
                    verify_weights(checkpoint)
        preparation.end()
        size = arguments.micro_batch_size or checkpoint.config.batch.micro_batch_size
        if evaluation is not None and world_size == 1:
            use_device_alone()
            evaluation.run(load_model(checkpoint, verify=verify), size)
            return
        if launched == 1:
            from megatron.cluster.processes import start_other_ranks

            stack.enter_context(start_other_ranks([*PROGRAM, *argv], world_size))
        run_on_ranks(evaluation, checkpoint, planned, size)


def run_on_ranks(evaluation: Evaluation | None, checkpoint: Checkpoint, planned: Run, size: int) -> None:
    """Evaluates on all ranks. evaluation: None except on rank 0. size: samples per micro-batch."""
    import torch.distributed as dist

    # The import is late, because torch and DeepSpeed take seconds to import.
    from megatron.checkpoint.lineage.start import share_checkpoint
    from megatron.cluster.preflight import check_attention, check_kernels
    from megatron.cluster.processes import init_distributed
    from megatron.cluster.rendezvous import announce_errors
    from megatron.training.build import load_distributed_model

    leads_node = os.environ.get("LOCAL_RANK", "0") == "0"  # later the variable has the device's index
    with announce_errors():  # rank 0 prints that another rank has no device
        rank = init_distributed(planned.config)
    for note in check_kernels(required=False) + check_attention(planned.config):
        if rank == 0:
            print(note, file=sys.stderr, flush=True)
    # A run may have saved a newer checkpoint since rank 0 read this one.
    shared = share_checkpoint(checkpoint, leads_node=leads_node)
    assert shared is not None
    model = load_distributed_model(shared, planned.connected(rank), size)
    if evaluation is None:
        model.serve()
    else:
        try:
            evaluation.run(model, model.batch_size)
        finally:
            if not model.is_responding:
                model.stop()
    dist.destroy_process_group()


@exit_on_user_error()
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the tool. On a user's mistake, prints one sentence and exits with code 2. If a rank never
    connects, prints one sentence and exits with code 1."""

    try:
        run(sys.argv[1:] if argv is None else argv)
    except RunStopped as error:  # each rank that has the error prints it
        exit_with_error(str(error), error.exit_code, os.environ if error.on_all_ranks else {})


if __name__ == "__main__":
    main()
