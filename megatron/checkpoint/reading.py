"""Opens a checkpoint for a tool, and builds the model and the tokenizer that it was trained with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpoint.compatibility import check_vocabulary
from megatron.checkpoint.discovery import find_latest, find_universal
from megatron.checkpoint.formats.registry import LATEST_UNIVERSAL_FILE, UNIVERSAL, format_of, open_reader
from megatron.checkpoint.lineage.identity import LATEST_FILE
from megatron.checkpoint.record import RUN_FILE, Checkpoint
from megatron.checkpoint.saved_config import check_run_file
from megatron.data.gpt_dataset import VOCABULARY_KEY
from megatron.errors import UserError
from megatron.tokenizer import Tokenizer, TokenizerFlags, build_tokenizer
from megatron.tokenizer.flags import tokenizer_flags
from megatron.tokenizer.vocabulary_record import vocabulary_digest

if TYPE_CHECKING:
    from megatron.model.inference.single_process import GPTModel


def read_checkpoint(folder: str | Path, universal: bool = False, allow_external: bool = False) -> Checkpoint:
    """Opens `folder` if it is a checkpoint, else the checkpoint that `latest` in the folder names. With
    `universal`, or if there is no native checkpoint, opens the one that `latest_universal` names. Raises
    UserError if there is none.

    allow_external: accept a checkpoint of another framework, which records no config.
    """
    folder = Path(folder)
    if universal:
        checkpoint = find_universal(folder)
    else:
        native = find_latest(folder) if folder.is_dir() else None
        if native is None and not (folder / LATEST_UNIVERSAL_FILE).is_file():
            raise UserError(
                f"{folder} holds no checkpoint, expected a folder with the file `{LATEST_FILE}` or "
                f"`{LATEST_UNIVERSAL_FILE}`, or a global_stepN folder with {RUN_FILE}"
            )
        checkpoint = native or find_universal(folder)
    if not checkpoint.is_external:
        check_run_file(checkpoint)
    elif not allow_external:
        raise lacks_configuration(checkpoint)
    return checkpoint


def lacks_configuration(checkpoint: Checkpoint) -> UserError:
    """Returns the error for a checkpoint of another framework that does not describe its model completely."""
    flag = "--universal_checkpoint and " if format_of(checkpoint.folder) == UNIVERSAL else ""
    return UserError(
        f"checkpoint {checkpoint.folder} was made by another framework and lacks the full configuration of "
        f"the model and its vocabulary: start pretrain_gpt.py from it, with the flags of the model, {flag}"
        "--save, and use the checkpoint that this run saves"
    )


def load_model(checkpoint: Checkpoint, *, verify: bool = False, fp32_on_cpu: bool = False) -> GPTModel:
    """Returns the single-process model with the checkpoint's weights, on the accelerator, in evaluation mode.

    The model has the precision of the training run; it is fp32 if fp32_on_cpu is set and there is no GPU.
    verify: call `verify_weights` first. Raises UserError for files that are damaged or cannot be read.
    """
    # The import is late: these modules load torch and DeepSpeed, which takes seconds.
    from deepspeed.accelerator import get_accelerator

    from megatron.model.inference.single_process import GPTModel
    from megatron.model.layer_list import PARAMETER_DTYPES

    reader = open_reader(checkpoint)
    if verify:
        verify_weights(checkpoint)
    model = GPTModel(checkpoint.config, checkpoint.vocab_size, checkpoint.eod)
    reader.load_weights(model)
    if not (fp32_on_cpu and get_accelerator().device_name() == "cpu"):
        precision = checkpoint.config.precision.name
        model.to(get_accelerator().current_device_name(), PARAMETER_DTYPES[precision])
    return model.eval()


def verify_weights(checkpoint: Checkpoint) -> None:
    """Compares the weights with their digests. Prints a note on stderr if the checkpoint has no digests.
    Raises UserError for files that are damaged or cannot be read."""
    if not open_reader(checkpoint).verify_weights():
        print(f"{checkpoint.folder} has no digests of its weights: they are not verified", file=sys.stderr)


def find_tokenizer(flags: TokenizerFlags, checkpoint: Checkpoint, parse_special: bool = False) -> Tokenizer:
    """Builds the tokenizer that the flags name, or the checkpoint's if they name none. parse_special: see
    `Tokenizer`. Raises UserError if the checkpoint was trained with a different tokenizer."""
    tokenizer = build_tokenizer(
        tokenizer_flags(flags, checkpoint.config.data), checkpoint.config.model.vocab_size, parse_special
    )
    if (tokenizer.vocab_size, tokenizer.eod) != (checkpoint.vocab_size, checkpoint.eod):
        raise UserError(
            f"checkpoint {checkpoint.folder} was trained with {checkpoint.vocab_size} tokens and "
            f"end-of-document id {checkpoint.eod}, but this tokenizer has {tokenizer.vocab_size} and "
            f"{tokenizer.eod}: give the flags of the tokenizer that the checkpoint was trained with"
        )
    check_vocabulary(checkpoint, {VOCABULARY_KEY: vocabulary_digest(tokenizer)})
    return tokenizer
