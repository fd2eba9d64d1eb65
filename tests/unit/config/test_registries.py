"""Registries: every implementation can be imported, and flags, help and errors come from the registries."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.arguments import parse_args
from megatron.config import Config, ConfigError, registries
from megatron.config.config import SECTIONS, settings_of_section
from megatron.config.flag_parser import make_parser
from megatron.config.model import model_summary
from megatron.config.registries import OPTIMIZERS, TOKENIZERS
from megatron.config.registry import Registry
from tests.unit.config.command_lines import SMALL

REGISTRIES = [value for value in vars(registries).values() if isinstance(value, Registry)]


def test_every_implementation_can_be_imported_and_is_in_the_help_with_its_description() -> None:
    # The text has no white space, since lines of the help are broken at spaces and hyphens.
    text = "".join(make_parser().format_help().split())
    for registry in REGISTRIES:
        assert registry and registry.option in text
        for name, choice in registry.items():
            assert registry.load(name) is not None
            assert f"{name}:{''.join(choice.description.split())}" in text


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.option)
def test_an_unknown_name_is_refused_with_the_known_ones(registry: Registry) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.load("unheard-of")
    assert all(part in str(caught.value) for part in (registry.option, "'unheard-of'", *registry))
    with pytest.raises(ConfigError, match=rf"{registry.option} is 'unheard-of': expected"):
        parse_args([*SMALL, registry.option, "unheard-of"], {})


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.option)
def test_settings_of_choices_are_fields_of_one_section(registry: Registry) -> None:
    settings = {field for choice in registry.values() for field in choice.settings}
    assert any(settings <= {field.name for field in dataclasses.fields(kind)} for kind in SECTIONS.values())


def test_settings_that_only_other_choices_use_are_known() -> None:
    adam, muon = ("adam_beta1", "adam_beta2", "adam_eps"), set(OPTIMIZERS["muon"].settings)
    unused = set(OPTIMIZERS.unused_settings("sgd"))
    assert unused >= {*adam, *muon, "lion_beta1", "lion_beta2"}
    assert unused.isdisjoint(OPTIMIZERS["sgd"].settings)
    unused = set(TOKENIZERS.unused_settings("PretrainedFromHF"))
    assert (
        unused >= {"vocab_file", "merge_file", "tokenizer_model"} and "tokenizer_name_or_path" not in unused
    )


def config(*words: str) -> Config:
    return parse_args([*SMALL, *words], {})


def test_a_model_field_changes_the_model_unless_it_says_otherwise() -> None:
    exempt = {setting.field for setting in settings_of_section("model") if not setting.changes_model}
    assert exempt >= {
        *("seq_length", "vocab_size", "make_vocab_size_divisible_by", "pad_vocab_size_to"),
        *("init_method_std", "hidden_dropout", "attention_dropout"),
    }
    assert exempt.isdisjoint(("num_layers", "hidden_size", "rotary_base", "position_embedding_type"))


def test_fields_without_an_effect_on_the_time_of_a_layer() -> None:
    without = {
        setting.field for setting in settings_of_section("model") if not setting.flag.changes_layer_time
    }
    assert without >= {
        *("num_layers", "max_position_embeddings", "layernorm_epsilon", "init_method_std"),
        *("vocab_size", "make_vocab_size_divisible_by", "pad_vocab_size_to"),  # the padded size counts
        *("softmax_scale", "rotary_base", "rope_scaling_type", "rope_scaling_factor"),
        *("rope_original_max_position_embeddings", "rope_low_freq_factor", "rope_high_freq_factor"),
        *("rope_beta_slow", "rope_beta_fast", "window_rotary_base"),
        "window_pattern",  # layers with and without a window are measured separately
    }
    assert "hidden_size" not in without


def test_the_settings_of_the_model_are_those_that_change_what_it_computes() -> None:
    before = config().model_settings()
    assert config("--lr", "1", "--hidden-dropout", "0.5", "--seed", "9").model_settings() == before
    other = config("--eod-mask-loss", "--vocab-size", "90", "--tokenizer-model", "m", "--num-layers", "5")
    assert {name for name, value in other.model_settings().items() if before[name] != value} == {
        "eod_mask_loss",
        "num_layers",
    }
    assert "max_position_embeddings" in before
    assert "max_position_embeddings" not in config("--position-embedding-type", "alibi").model_settings()


def test_the_summary_of_a_model_names_its_variants() -> None:
    assert model_summary(config().model).endswith("4 heads, sequence 32, absolute positions")
    assert model_summary(config("--embed-layernorm", "--glu-activation", "swiglu").model).endswith(
        "absolute positions, embedding norm, swiglu"
    )
