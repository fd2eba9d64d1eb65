"""The token files, their splits, and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from megatron.config.fields import COMMON_FLAGS, Section, flag, option_name
from megatron.config.registries import DATA_ORDERS, TOKENIZERS

TOKENIZER_FIELDS = frozenset({"tokenizer_type"}).union(
    *(tokenizer.settings for tokenizer in TOKENIZERS.values())
)
_groups = partial(flag, (), nargs="+", metavar="GROUP")
_prefixes = partial(flag, (), nargs="+", metavar="PREFIX")
_file = partial(flag, None, metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Token files, their splits, document boundaries, and the tokenizer."""

    group: ClassVar[str] = "data and dataloader"

    data_path: tuple[str, ...] = _prefixes(
        help="token files: the path of a .bin/.idx pair without suffix (made by tools/preprocess_data.py), "
        "or a blend WEIGHT PREFIX WEIGHT PREFIX .... Without weights (PREFIX PREFIX ...) each data set is "
        "read in proportion to its size",
        group=COMMON_FLAGS,
    )
    mock_data: bool = flag(
        False,
        help="train on random tokens of the vocabulary, to measure speed and memory without token files. The "
        "tokens depend only on --seed and on the number of the sample",
        excludes={
            f"data.{name}": "mock data read no files"
            for name in (
                *("data_path", "data_args_path", "per_split_data_args_path"),
                *(f"{split}_data_path" for split in ("train", "valid", "test")),
                *(
                    f"{split}_weighted_split_paths{file}"
                    for split in ("train", "valid", "test")
                    for file in ("", "_path")
                ),
            )
        },
    )
    data_args_path: str | None = _file(help="file with the values of --data-path, separated by white space")
    split: str = flag(
        "969, 30, 1",
        strip_quotes=True,
        metavar="WEIGHTS",
        help="weights of the training, validation and test splits of --data-path, as parts of the documents",
    )
    train_weighted_split_paths: tuple[str, ...] = _groups(
        help="training data, which replaces --data-path and --split: one quoted group 'NAME: WEIGHT "
        "START:END PREFIX, WEIGHT START:END PREFIX, ...', where START and END are fractions of the documents"
    )
    valid_weighted_split_paths: tuple[str, ...] = _groups(
        help="groups of validation data; each group is evaluated and logged under its name"
    )
    test_weighted_split_paths: tuple[str, ...] = _groups(
        help="groups of test data, evaluated at the end of the run"
    )
    train_weighted_split_paths_path: str | None = _file(help="file with the training group in double quotes")
    valid_weighted_split_paths_path: str | None = _file(
        help="file with the validation groups, each in double quotes"
    )
    test_weighted_split_paths_path: str | None = _file(
        help="file with the test groups, each in double quotes"
    )
    train_data_path: tuple[str, ...] = _prefixes(
        help="training data, which replaces --data-path and --split: all documents of the prefixes, in the "
        "form of --data-path"
    )
    valid_data_path: tuple[str, ...] = _prefixes(help="validation data, with --train-data-path")
    test_data_path: tuple[str, ...] = _prefixes(help="test data, with --train-data-path")
    per_split_data_args_path: str | None = _file(
        help="JSON file with the values of --train-data-path, --valid-data-path and --test-data-path under "
        "the keys train, valid and test, each a list or one string"
    )
    data_cache_path: str | None = flag(
        None,
        metavar="FOLDER",
        help="folder for the index files of the sample order, created if missing (default: the folder of the "
        "data)",
    )
    require_prepared_indices: bool = flag(
        False,
        help="stop if tools/prepare_indices.py has not prepared the index files of the sample order, instead "
        "of building them on rank 0 while all other ranks wait",
    )
    data_order: str = flag(
        "native",
        choices=DATA_ORDERS,
        help="rules for the order of the samples (splits, last epoch, blends): the rules of this program "
        "(native) or of a different program. A resume needs the order of its checkpoint. To continue a run "
        "of a different program, choose that program's order and the length of its run",
    )
    max_epochs_per_dataset: float = flag(
        4.0,
        above=0,
        help="number of epochs over a data set above which --max-epochs-action applies. A data set that is "
        "named several times is counted as one. Up to 4 epochs are almost as good as new data "
        "(arXiv:2305.16264)",
    )
    max_epochs_action: str = flag(
        "repeat",
        choices=("repeat", "stop", "renormalize"),
        help="what happens to a data set that training would read for more than --max-epochs-per-dataset "
        "epochs\n"
        "repeat: the run reads it as often as its weight requires, and prints a warning\n"
        "stop: the run ends with an error before its processes connect\n"
        "renormalize: the run reads it exactly to the limit, and the remaining data sets share the rest in "
        "proportion to their weights",
    )
    data_order_samples: int | None = flag(
        None,
        at_least=1,
        help="number of training samples for which the order of the data is planned; the order depends on "
        "this number. If the run is longer, the order is planned for the run's length (default: "
        "the length of the run in samples; with --branch-at, the value of the run in --load)",
    )
    data_first_sample: int = flag(
        0,
        at_least=0,
        help="number of consumed samples at which the run begins to read this training data. With "
        "--branch-at and --override-data, it is set to the checkpoint's number of consumed samples",
    )
    num_workers: int = flag(
        2, at_least=0, help="number of data loading threads for training; 0 loads in the main thread"
    )
    valid_num_workers: int = flag(
        derived="--num-workers", at_least=0, help="number of data loading threads for validation and test"
    )
    reset_position_ids: bool = flag(
        False,
        changes_model=True,
        help="restart the position ids at 0 after each end-of-document token",
        excludes={
            "model.position_embedding_type=alibi": "ALiBi's positions are relative, so it has no effect: "
            "remove --reset-position-ids (--reset-attention-mask separates documents)"
        },
    )
    reset_attention_mask: bool = flag(
        False,
        changes_model=True,
        help="restrict attention to tokens of the same document (without the flag, tokens attend to all "
        "earlier tokens of the sample)",
    )
    eod_mask_loss: bool = flag(
        False,
        changes_model=True,
        help="exclude the first token after each end-of-document token from the loss",
    )
    tokenizer_type: str | None = flag(
        derived="inferred from the tokenizer files",
        choices=TOKENIZERS,
        spellings={
            "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
            "Llama2Tokenizer": "SentencePieceTokenizer",
            "HuggingFaceTokenizer": "PretrainedFromHF",
        },
        help="tokenizer type",
    )
    vocab_file: str | None = _file(help="vocabulary file of GPT2BPETokenizer (vocab.json)")
    merge_file: str | None = _file(help="merge file of GPT2BPETokenizer (merges.txt)")
    tokenizer_name_or_path: str | None = flag(
        None,
        metavar="FOLDER",
        help="Hugging Face tokenizer: a folder, or a name in the local cache. Other tokenizers: --vocab-file "
        "and --merge-file, or --tokenizer-model",
        group=COMMON_FLAGS,
    )
    tokenizer_model: str | None = _file(help="model file of SentencePieceTokenizer")

    @property
    def resets_documents(self) -> bool:
        """Returns whether the attention or the positions of a document do not depend on the documents before
        it in a sample."""
        return self.reset_attention_mask or self.reset_position_ids

    def derive(self) -> dict[str, Any]:
        derived: dict[str, Any] = {}
        if self.valid_num_workers is None:
            derived["valid_num_workers"] = self.num_workers
        fitting = fitting_tokenizer_types(self)
        if self.tokenizer_type is None and len(fitting) == 1:
            derived["tokenizer_type"] = fitting[0]
        return derived


def data_option(data: DataConfig, split_name: str) -> str:
    """Returns the flag that names the data of 'train', 'valid' or 'test'."""
    for words, file in (
        (f"{split_name}_weighted_split_paths", f"{split_name}_weighted_split_paths_path"),
        (f"{split_name}_data_path", "per_split_data_args_path"),
        ("data_path", "data_args_path"),
    ):
        if getattr(data, file) is not None:
            return option_name(file)
        if getattr(data, words):
            return option_name(words)
    return "--data-path"


def fitting_tokenizer_types(flags: Any) -> list[str]:
    """Returns the tokenizer types that use at least one of the files in `flags` (a DataConfig, or the
    arguments of a tool)."""
    return [
        name
        for name, tokenizer in TOKENIZERS.items()
        if any(getattr(flags, field) for field in tokenizer.settings)
    ]
