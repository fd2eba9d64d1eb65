"""Tests --use-checkpoint-args, and the flags that --finetune contradicts."""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest

from megatron.arguments import parse_args, read_command_line
from megatron.checkpoint.saved_config import SavedConfig
from megatron.config import Config
from megatron.errors import UserError
from tests.unit.checkpoint.native_folder import random_wholes, write_native
from tests.unit.config.command_lines import SMALL

RUN = "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 10 --dry-run".split()
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --glu-activation swiglu "
    "--position-embedding-type alibi --embed-layernorm --kv-channels 8 --hidden-dropout 0.2 "
    "--tokenizer-name-or-path bloom --reset-attention-mask"
).split()


@pytest.fixture
def saved() -> Config:
    return parse_args([*RUN, *MODEL], {})


def read_with(saved: Config, *words: str) -> Config:
    """Returns the configuration of a command line with --use-checkpoint-args and a checkpoint of `saved`."""
    found = SavedConfig("folder/global_step5", saved)
    with mock.patch("megatron.arguments.checkpoint_args.read_saved_config", return_value=found):
        return read_command_line([*RUN, "--load", "folder", "--use-checkpoint-args", *words], {}).config


def test_no_flag_of_the_model_or_the_tokenizer_is_needed(saved: Config) -> None:
    config = read_with(saved)
    assert config.model == saved.model
    assert config.model_settings() == saved.model_settings()
    assert config.data.tokenizer_name_or_path == "bloom" and config.data.tokenizer_type == "PretrainedFromHF"


def test_a_flag_that_does_not_change_the_model_takes_precedence(saved: Config) -> None:
    config = read_with(saved, *"--seq-length 16 --hidden-dropout 0 --vocab-file v --merge-file m".split())
    assert (config.model.seq_length, config.model.max_position_embeddings) == (16, 16)
    assert config.model.hidden_dropout == 0
    assert config.data.tokenizer_type == "GPT2BPETokenizer" and config.data.tokenizer_name_or_path is None


def test_finetuning_treats_documents_as_its_own_flags_say(saved: Config) -> None:
    assert saved.data.reset_attention_mask
    assert not read_with(saved, "--finetune").data.reset_attention_mask


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--hidden-size 32", "--hidden-size 32 contradicts .*folder/global_step5 has 64"),
        ("--glu-activation geglu", "--glu-activation geglu contradicts .*has swiglu"),
        ("--apply-residual-connection-post-layernorm", "post-layernorm contradicts .*does not have it"),
        ("--eod-mask-loss", "--eod-mask-loss contradicts .*does not have it"),
    ],
)
def test_a_flag_that_changes_the_model_must_not_differ(saved: Config, words: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        read_with(saved, *words.split())
    read_with(saved, "--hidden-size", "64", "--embed-layernorm")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--moe-layer-freq 2", None),
        ("--moe-layer-freq [1,0]", None),
        ("--window-pattern W F", None),
        ("--moe-layer-freq 1", "--moe-layer-freq 1 contradicts .*has E D; remove"),
        ("--moe-layer-freq D E", "--moe-layer-freq D E contradicts .*has E D; remove"),
        ("--moe-layer-freq [1]", r"--moe-layer-freq \[1\] contradicts .*has E D; remove"),
        ("--window-pattern 1", "--window-pattern 1 contradicts .*has W F; remove"),
        ("--num-experts 1", "--num-experts 1 contradicts .*has 4; remove"),
    ],
)
def test_a_flag_is_compared_with_the_checkpoint_by_its_meaning(words: str, named: str | None) -> None:
    kinds = "--num-experts 4 --moe-layer-freq E D --window-size 8 --window-pattern 2"
    saved = parse_args([*RUN, *MODEL, *kinds.split()], {})
    if named is None:
        assert read_with(saved, *words.split()).model == saved.model
        return
    with pytest.raises(UserError, match=named) as caught:
        read_with(saved, *words.split())
    assert len(str(caught.value).splitlines()) == 1


def test_one_expert_is_the_dense_model_of_a_checkpoint(saved: Config) -> None:
    assert read_with(saved, "--num-experts", "1").model == saved.model


@pytest.mark.parametrize("value", ["4", 4.0, [4], True])
def test_a_value_of_another_type_is_refused(saved: Config, value: object) -> None:
    model = dataclasses.replace(saved.model)
    object.__setattr__(model, "num_layers", value)
    with pytest.raises(UserError, match="folder/global_step5: model.num_layers"):
        read_with(dataclasses.replace(saved, model=model), "--moe-layer-freq", "2")


def test_missing_flags_of_the_model_name_use_checkpoint_args_beside_load() -> None:
    words = ["--micro-batch-size", "1", "--global-batch-size", "4", "--lr", "1e-3", "--train-iters", "5"]
    with pytest.raises(UserError, match="--num-layers .*; --use-checkpoint-args takes"):
        parse_args([*words, "--load", "checkpoints", "--finetune", "--save", "tuned"])
    with pytest.raises(UserError, match=r"(?m)--seq-length \(sequence length in tokens\)$"):
        parse_args(words)


def test_the_checkpoint_is_that_of_load_or_what_the_run_has_saved_since(tmp_path: Path) -> None:
    config = parse_args(SMALL, {})
    base = write_native(tmp_path / "base", config, random_wholes(config))
    words = [*RUN, "--use-checkpoint-args", "--save", str(tmp_path / "own"), "--load"]
    for load in (base.parent, base):
        command = read_command_line([*words, str(load)], {})
        assert command.config.model == config.model and str(base) in command.notes[0]
    with pytest.raises(UserError, match="--use-checkpoint-args: .*holds no checkpoint"):
        read_command_line([*words, str(tmp_path / "none")], {})
    (base.parent / "latest").unlink()  # as after a power failure
    read_command_line([*words, str(base.parent)], {})
    base.parent.rename(tmp_path / "own")
    read_command_line([*words, str(base.parent)], {})


def test_other_flags_are_refused_with_their_remedy(tmp_path: Path) -> None:
    folder, other = str(tmp_path / "a"), str(tmp_path / "b")
    inside = f"{folder}/global_step5"
    for words, named in [
        ("--finetune", "--finetune without --load"),
        ("--use-checkpoint-args", "--use-checkpoint-args without --load"),
        (
            f"--finetune --load {folder} --eval-only",
            "--finetune with --no-train: an evaluation .--eval-only.",
        ),
        (
            f"--finetune --load {folder} --use-checkpoint-opt_param-scheduler",
            "--finetune with --use-checkpoint-lr-scheduler: ",
        ),
        (f"--finetune --load {folder} --save {folder}", "--finetune with --load .* set another --save"),
        (f"--finetune --load {inside} --save {folder}/", "--finetune with --load"),
        (f"--no-load-optim --load {folder} --save {folder}", "--no-load-optim with --load"),
    ]:
        with pytest.raises(UserError, match=named):
            parse_args([*SMALL, *words.split()], {})
    for words in (
        f"--finetune --load {folder} --save {other} --no-load-rng --override-opt_param-scheduler",
        f"--finetune --load {folder} --save {folder} --universal_checkpoint",
        f"--no-load-optim --load {folder} --save {folder} --eval-only",
    ):
        parse_args([*SMALL, *words.split()], {})


def test_flags_without_effect_are_noted() -> None:
    words = "--finetune --load a --no-load-optim --no-load-rng".split()
    notes = read_command_line([*SMALL, *words], {}).notes
    assert notes == (
        "--no-load-rng is ignored: checkpoints hold no random state",
        "--no-load-optim has no effect with --finetune",
    )
