"""Tests the flags of experts: patterns of layers, settings of a dense model, rejected settings, and flags of
other programs."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron.arguments import read_command_line
from megatron.config import Config
from megatron.config.model import model_summary
from megatron.config.sections.experts import ExpertConfig
from megatron.config.sections.layer_pattern import EXPERT_PATTERN, WINDOW_PATTERN
from megatron.errors import ConfigError

FLAGS = (
    "--dry-run --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 512 --num-layers 4 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 9 --lr 1e-3"
).split()
FIELDS = {field.name for field in dataclasses.fields(ExpertConfig)}


def config_of(words: str) -> Config:
    return read_command_line([*FLAGS, *words.split()], {}).config


def notes_of(words: str) -> tuple[str, ...]:
    return read_command_line([*FLAGS, *words.split()], {}).notes


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ("", "E"),
        ("--moe-layer-freq 1", "E"),
        ("--moe-layer-freq 2", "ED"),
        ("--moe-layer-freq D E", "DE"),
        ("--moe-layer-freq ([0]+[1]*3)", "DEEE"),
        ("--moe-layer-freq [1]*4", "E"),
    ],
)
def test_a_pattern_of_layers_is_saved_and_read_again(words: str, pattern: str) -> None:
    config = config_of(f"--num-experts 8 {words}")
    assert config.model.moe_layer_freq == tuple(pattern)
    kinds = "".join("E" if config.model.has_experts(layer) else "D" for layer in range(4))
    assert kinds == (pattern * 4)[:4]
    assert ("expert layers" in model_summary(config.model)) is (pattern != "E")
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_dense_model_is_what_it_was_before_experts_existed() -> None:
    """Megatron-DeepSpeed's default is --num-experts 1. The run.json of an older version has no fields of
    experts."""
    dense = config_of("")
    assert config_of("--num-experts 1") == dense
    assert "expert" not in model_summary(dense.model) and dense.checkpoint.save_format == "native"
    assert not any(dense.model.has_experts(layer) for layer in range(4))
    older = dense.to_dict()
    for name in FIELDS:
        del older["model"][name]
    for name in ("expert_model_parallel_size", "moe_token_dispatcher_type"):
        del older["parallel"][name]
    assert Config.from_dict(older) == dense


def test_experts_have_the_size_of_the_mlp_and_torch_checkpoints_unless_flags_say_otherwise() -> None:
    config = config_of("--num-experts 8 --ffn-hidden-size 96 --save x")
    assert (config.model.moe_ffn_hidden_size, config.checkpoint.save_format) == (96, "dcp")
    assert config_of("--num-experts 8 --moe-ffn-hidden-size 32").model.moe_ffn_hidden_size == 32
    assert config_of("--save x").checkpoint.save_format == "native"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--num-experts 6 --world-size 4 --expert-model-parallel-size 4", ("6", "divisible by .*size 4")),
        (
            "--num-experts 4 --world-size 2 --tensor-model-parallel-size 2",
            ("parallel-size 2", "sequence-parallel"),
        ),
        (
            "--num-experts 4 --world-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
            "--moe-shared-expert-intermediate-size 33",
            ("intermediate-size 33", "parallel-size 2"),
        ),
        ("--num-experts 4 --moe-router-topk 5", ("topk 5", "num-experts 4")),
        ("--num-experts 4 --moe-router-topk 1", ("topk 1", "always 1", "pre-softmax")),
        ("--num-experts 4 --moe-layer-freq D D", ("none of the 4", "remove --num-experts")),
        ("--num-experts 4 --moe-layer-freq 9", ()),
        ("--num-experts 4 --moe-layer-freq [1,0]", ("has 2 layers", "--num-layers is 4")),
        ("--num-experts 4 --moe-layer-freq W F", ("'WF'", "letters E and D")),
        ("--num-experts 8 --moe-router-num-groups 4", ("num-groups 4", "set --moe-router-group-topk")),
        ("--num-experts 8 --moe-router-group-topk 2", ("group-topk 2", "set --moe-router-num-groups")),
        ("--num-experts 8 --moe-router-num-groups 3 --moe-router-group-topk 1", ("divisible by .*groups 3",)),
        ("--num-experts 8 --moe-router-num-groups 1 --moe-router-group-topk 2", ("larger than .*groups 1",)),
        (
            "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 3",
            ("topk 3", "group-topk 2", "divisible"),
        ),
        (
            "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-topk 4",
            ("topk 4", "2 experts", "group-topk 1"),
        ),
        ("--num-experts 4 --moe-router-enable-expert-bias", ("set --moe-router-score-function sigmoid",)),
        (
            "--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
            "--moe-router-force-load-balancing",
            ("force-load-balancing with", "enable-expert-bias"),
        ),
        ("--num-experts 4 --moe-shared-expert-gate", ("set --moe-shared-expert-intermediate-size",)),
        ("--num-experts 4 --moe-router-bias-update-rate 0.1", ("add --moe-router-enable-expert-bias",)),
        ("--num-experts 4 --mup", ("num-experts 4 with --mup", "remove --mup")),
        ("--num-experts 4 --save x --save-local y --save-local-interval 2", ("save-local", "no place")),
        (
            "--num-experts 4 --save x --save-format native",
            ("save-format native with --num-experts 4", "no place"),
        ),
        ("--num-experts 4 --moe-router-load-balancing-type aux_loss", ("set seq_aux_loss",)),
        ("--num-experts 4 --moe-router-load-balancing-type sinkhorn", ("set seq_aux_loss",)),
        (
            "--num-experts 4 --moe-router-load-balancing-type seq_aux_loss global_aux_loss",
            ("type is 'seq_aux_loss global_aux_loss': expected one value", "keep one"),
        ),
        ("--num-experts 4 --moe-aux-loss-coeff 1e-2 1e-3", ("coeff is '1e-2 1e-3': expected one value",)),
        ("--num-experts 64 64", ("num-experts is '64 64': expected one value", "--moe-layer-freq")),
        ("--num-experts=1 1 8", ("num-experts is '1 1 8': expected one value", "--moe-layer-freq")),
        ("--num-experts 4 --moe-router-score-function sqrtsoftplus", ("set softmax or sigmoid",)),
        ("--num-experts 4 --moe-token-dispatcher-type flex", ("DeepEP", "set alltoall")),
        (
            "--num-experts 4 --moe-router-top-k 2",
            ("unknown flag --moe-router-top-k: did you mean --moe-router-topk",),
        ),
        (
            "--moe-router-topk 4",
            ("topk 4 without --num-experts", "set --num-experts to 2 or more, or remove"),
        ),
        ("--expert-model-parallel-size 2 --world-size 2", ("without --num-experts",)),
    ],
)
def test_a_mistake_gets_one_sentence(words: str, parts: tuple[str, ...]) -> None:
    """A case without `parts` is a correct command line."""
    if not parts:
        assert config_of(words)
        return
    with pytest.raises(ConfigError) as caught:
        config_of(words)
    assert len(str(caught.value).splitlines()) == 1
    for part in parts:
        assert caught.match(part)


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (
            "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
            "--moe-aux-loss-coeff has no effect with --moe-router-load-balancing-type none",
        ),
        (
            "--moe-router-load-balancing-type global_aux_loss",
            "--moe-router-load-balancing-type has no effect without --moe-aux-loss-coeff",
        ),
        (
            "--moe-router-score-function sigmoid --moe-router-pre-softmax",
            "--moe-router-pre-softmax has no effect with --moe-router-score-function sigmoid",
        ),
        ("--moe-router-load-balancing-type none", None),
        ("--moe-aux-loss-coeff 0.1", None),
        (
            "--moe-router-force-load-balancing",
            "--moe-router-force-load-balancing replaces the router's choice of experts: the run only "
            "measures speed, and its model is of no use",
        ),
        (
            "--moe-token-dispatcher-type allgather",
            "--moe-token-dispatcher-type has no effect with --expert-model-parallel-size 1",
        ),
    ],
)
def test_a_setting_of_experts_without_effect_is_noted(words: str, note: str | None) -> None:
    notes = notes_of(f"--num-experts 4 {words}")
    assert [text for text in notes if not text.startswith("nothing balances")] == ([note] if note else [])


@pytest.mark.parametrize(
    ("words", "is_noted"),
    [
        ("", False),
        ("--num-experts 1", False),
        ("--num-experts 4", True),
        ("--num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1", True),
        ("--num-experts 4 --moe-router-load-balancing-type global_aux_loss", True),
        ("--num-experts 4 --moe-aux-loss-coeff 0.01", False),
        ("--num-experts 4 --moe-router-force-load-balancing", False),
        ("--num-experts 4 --eval-only --load x", False),
        ("--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias", False),
    ],
)
def test_experts_whose_load_nothing_balances_are_noted(words: str, is_noted: bool) -> None:
    found = [note for note in notes_of(words) if "nothing balances the load of the experts" in note]
    assert len(found) == is_noted


def test_a_pattern_needs_a_layer() -> None:
    for syntax in (EXPERT_PATTERN, WINDOW_PATTERN):
        for words in (["2"], ["[]"], [syntax.one]):
            with pytest.raises(ConfigError, match=f"{syntax.flag} with --num-layers 0: expected at least 1"):
                syntax.parse(words, 0)


def test_flags_of_peers_that_ask_for_what_is_always_done_are_accepted() -> None:
    megatron_lm = (
        "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --moe-router-dtype fp32 "
        "--expert-tensor-parallel-size 1 --moe-shared-expert-overlap"
    )
    microsoft = (
        "--moe-expert-parallel-size 1 --mlp-type standard --create-moe-param-group --use-tutel "
        "--disable-moe-token-dropping --disable-moe-top2-2nd-expert-sampling"
    )
    words = f"--num-experts 4 --moe-aux-loss-coeff 0.01 {megatron_lm} {microsoft}"
    assert config_of(words) == config_of("--num-experts 4 --moe-aux-loss-coeff 0.01")
    flags = [word for word in f"{megatron_lm} {microsoft}".split() if word.startswith("--")]
    assert sorted(note.split(" is ignored: ")[0] for note in notes_of(words)) == sorted(flags)


def test_flags_of_peers_with_another_meaning_are_answered() -> None:
    given = {
        "--topk 2": "--moe-router-topk",
        "--expert-interval 2": "--moe-layer-freq",
        "--moe-loss-coeff 0.1": "--moe-aux-loss-coeff",
        "--moe-expert-parallel-size 4": "--expert-model-parallel-size",
        "--mlp-type residual": "--moe-shared-expert-intermediate-size",
        "--enable-expert-tensor-parallelism": "--expert-model-parallel-size",
        "--expert-tensor-parallel-size 2": "--expert-model-parallel-size",
        "--moe-train-capacity-factor 1.0": "depends on the layout",
        "--moe-expert-capacity-factor 1.0": "depends on the layout",
        "--moe-input-jitter-eps 0.1": "has no noise",
        "--moe-router-topk-limited-devices 2": "--moe-router-num-groups",
        "--moe-enable-deepep": "--moe-token-dispatcher-type alltoall",
        "--overlap-moe-expert-parallel-comm": "does not overlap",
        "--moe-router-dtype fp64": "fp32",
        "--delay-wgrad-compute": "does not overlap",
        "--save-tokens-per-expert-interval 9": "--moe-per-layer-logging",
        "--moe-a-new-option": "not implemented",
    }
    with pytest.raises(ConfigError) as caught:
        config_of(f"--num-experts 4 {' '.join(given)}")
    sentences = str(caught.value).splitlines()
    assert len(sentences) == len(given)
    for words, answer in given.items():
        name = words.split()[0]
        assert any(line.strip().startswith(f"{name} is ") and answer in line for line in sentences), words


# The flags of experts in Microsoft's examples_deepspeed/MoE/ds_pretrain_gpt_1.3B_dense.sh (4efb479d), which
# trains a dense model, and the defaults of its other flags of experts.
MICROSOFT = (
    "--moe-expert-parallel-size 1 --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 "
    "--moe-eval-capacity-factor 1.0 --moe-min-capacity 4 --topk 1 --expert-interval 2 --mlp-type standard "
    "--create-moe-param-group --disable-moe-token-dropping --enable-expert-tensor-parallelism"
)


@pytest.mark.parametrize("experts", ["", "--num-experts 1"])
def test_a_dense_command_line_of_microsofts_is_dense(experts: str) -> None:
    assert config_of(f"{MICROSOFT} {experts}") == config_of("")
    flags = [word for word in MICROSOFT.split() if word.startswith("--")]
    assert sorted(note.split(" is ignored: ")[0] for note in notes_of(MICROSOFT)) == sorted(flags)


@pytest.mark.parametrize("experts", ["--num-experts 4", "--load x --use-checkpoint-args"])
def test_its_flags_of_experts_are_not_ignored_if_the_model_may_have_experts(experts: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(f"{MICROSOFT} {experts}")
    refused = {line.strip().removeprefix("error: ").split()[0] for line in str(caught.value).splitlines()}
    assert refused - {"--use-checkpoint-args:", "--load"} == {
        *("--moe-loss-coeff", "--moe-train-capacity-factor", "--moe-eval-capacity-factor"),
        *("--moe-min-capacity", "--topk", "--expert-interval", "--enable-expert-tensor-parallelism"),
    }
