"""What the model reads: the token files, how they are split, and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.fields import Section, flag, option_name

# The fields that each kind of tokenizer is made from; it needs all of them.
TOKENIZER_FILES = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "PretrainedFromHF": ("tokenizer_name_or_path",),
    "SentencePieceTokenizer": ("tokenizer_model",),
}


def _groups(help: str) -> Any:
    return flag((), nargs="+", metavar="GROUP", help=help)


def _groups_file(what: str) -> Any:
    return flag(None, metavar="FILE", help=f"a file that holds {what}, each in double quotes")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Token files, their split, document boundaries, and the tokenizer."""

    group: ClassVar[str] = "data and dataloader"

    data_path: tuple[str, ...] = flag(
        (),
        nargs="+",
        metavar="PREFIX",
        help="path of a .bin/.idx pair made by tools/preprocess_data.py, no ending; or a blend: weights and "
        "prefixes in turn",
    )
    split: str = flag("969, 30, 1", strip_quotes=True, help="parts for training, validation and test")
    train_weighted_split_paths: tuple[str, ...] = _groups(
        "in place of --data-path and --split: one quoted group of documents to train on, 'NAME: WEIGHT "
        "START:END PREFIX, WEIGHT START:END PREFIX, ...', with START and END as fractions of all documents"
    )
    valid_weighted_split_paths: tuple[str, ...] = _groups(
        "such groups for validation, each evaluated under its name"
    )
    test_weighted_split_paths: tuple[str, ...] = _groups("such groups for the test at the end")
    train_weighted_split_paths_path: str | None = _groups_file("the group")
    valid_weighted_split_paths_path: str | None = _groups_file("groups")
    test_weighted_split_paths_path: str | None = _groups_file("groups")
    num_workers: int = flag(2, at_least=0, help="threads that read training data ahead; 0: none")
    valid_num_workers: int = flag(
        derived="--num-workers", at_least=0, help="threads that read validation and test data ahead"
    )
    reset_position_ids: bool = flag(False, help="positions start again at 0 after each end of a document")
    reset_attention_mask: bool = flag(False, help="no attention across the end of a document")
    eod_mask_loss: bool = flag(False, help="no loss where the input token is the end of a document")
    tokenizer_type: str | None = flag(
        derived="the one that the files below fit",
        choices=tuple(TOKENIZER_FILES),
        help="kind of tokenizer",
    )
    vocab_file: str | None = flag(None, metavar="FILE", help="vocabulary of GPT2BPETokenizer (vocab.json)")
    merge_file: str | None = flag(None, metavar="FILE", help="merges of GPT2BPETokenizer (merges.txt)")
    tokenizer_name_or_path: str | None = flag(
        None, metavar="FOLDER", help="folder, or name in the local cache, for PretrainedFromHF"
    )
    tokenizer_model: str | None = flag(None, metavar="FILE", help="model of SentencePieceTokenizer")

    def derive(self) -> dict[str, Any]:
        derived: dict[str, Any] = {}
        if self.valid_num_workers is None:
            derived["valid_num_workers"] = self.num_workers
        fitting = fitting_tokenizer_types(self)
        if self.tokenizer_type is None and len(fitting) == 1:
            derived["tokenizer_type"] = fitting[0]
        return derived


def groups_option(data: DataConfig, split_name: str) -> str:
    """The flag that gave the groups of 'train', 'valid' or 'test'."""
    name = f"{split_name}_weighted_split_paths"
    return option_name(name if getattr(data, f"{name}_path") is None else f"{name}_path")


def fitting_tokenizer_types(flags: Any) -> list[str]:
    """The kinds of tokenizer that can use some of the files in `flags` (DataConfig or a tool's arguments)."""
    return [kind for kind, names in TOKENIZER_FILES.items() if any(getattr(flags, name) for name in names)]
