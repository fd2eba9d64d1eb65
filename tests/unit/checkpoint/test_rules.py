"""Merge rules: each parameter matches one pattern, and each pattern a parameter."""

import re

import pytest
from deepspeed.checkpoint import constants

from megatron.checkpoint.convert import rules
from megatron.checkpoint.convert.rules import (
    Rule,
    check_rules,
    derive_info,
    external_rule,
    matching,
    spec_record,
)
from megatron.config import ConfigError
from megatron.model.single_process import model_specs
from megatron.mpu.parameters import ParameterSpec
from megatron.testing.layouts import EOD, VOCAB, Row, config_of

VARIANTS = {
    "plain": {},
    "gated": {"glu_activation": "swiglu"},
    "bloom": {"embed_layernorm": True, "position_embedding_type": "alibi"},
}


def records_of(**model):
    return {
        name: spec_record(spec)
        for name, spec in model_specs(config_of(Row(), model=model), VOCAB, EOD).items()
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_has_the_rule_of_its_spec(variant):
    records = records_of(**VARIANTS[variant])
    info = derive_info(records, VOCAB)
    assert info["original_vocab_size"] == VOCAB
    for name, record in records.items():
        ((rule, pattern),) = matching(info, name)
        assert pattern.startswith("^") and pattern.endswith("$") and re.match(pattern, name)
        is_replicated = any(re.match(p, name) for p in info["pipeline_replicated_parameter_patterns"])
        assert is_replicated == name.startswith("tied_modules.")
        expected = {None: Rule.REPLICATED, 1: Rule.ROWS, 0: Rule.COLUMNS}[record["shard_dim"]]
        if record["blocks"] == 2:
            expected = Rule.TWO_SUB_PARAMS
        if name.endswith("word_embeddings.weight"):
            expected = Rule.VOCABULARY
        assert rule is expected, name


def test_the_keys_are_deepspeeds():
    assert rules.VERSION == constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE
    assert rules.INFO_KEY == constants.UNIVERSAL_CHECKPOINT_INFO
    assert rules.VERSION_KEY == constants.UNIVERSAL_CHECKPOINT_VERSION_KEY
    assert rules.VOCAB_SIZE_KEY == constants.ORIGINAL_VOCAB_SIZE
    assert rules.PIPELINE_REPLICATED_KEY == constants.PIPELINE_REPLICATED_PARAMETER_PATTERNS
    assert {rule.value for rule in Rule} - {Rule.COLUMNS.value} == {
        constants.VOCABULARY_PARAMETER_PATTERNS,
        constants.TP_REPLICATED_PARAMETER_PATTERNS,
        constants.PARAMETER_TO_AVERAGE_PATTERNS,
        constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
        constants.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
    }


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda info: info[Rule.ROWS.value].clear(), r"3\.self_attention\.dense\.weight .* matches none"),
        (
            lambda info: info[Rule.ROWS.value].append(r"^\d+\.weight$"),
            r"parameter 8\.weight .*row_parallelism",
        ),
        (lambda info: info[Rule.AVERAGED.value].append("^9.x$"), r"pattern \^9\.x\$ .* matches no parameter"),
        (
            lambda info: info[Rule.COLUMNS.value].append(r"^.*dense_h_to_4h\.bias$"),
            r"h_to_4h\.bias must match one",
        ),
    ],
)
def test_rules_that_do_not_match_are_refused_by_name(change, words):
    records = records_of()
    info = derive_info(records, VOCAB)
    change(info)
    with pytest.raises(ValueError, match=words):
        check_rules(info, records)


def test_a_parameter_that_no_rule_can_merge_is_refused_by_name():
    spec = ParameterSpec((12, 8), shard_dim=0, num_fused_parts=3)
    with pytest.raises(ValueError, match=r"^3\.x\.weight is sharded along dimension 0 with 3 fused parts"):
        derive_info({"3.x.weight": spec_record(spec)}, VOCAB)


def test_other_programs_list_no_columns_and_no_anchors():
    """Microsoft's Megatron-DeepSpeed, pretrain_gpt.py."""
    info = {
        "vocabulary_parameter_patterns": [r"tied_modules.embed.word_embeddings.weight"],
        "parameter_with_row_parallelism_patterns": [r"\d+.mlp.dense_4h_to_h.weight"],
        "tp_replicated_parameter_patterns": [r"\d+.input_layernorm.weight"],
    }
    assert external_rule(info, "3.mlp.dense_h_to_4h.weight") is Rule.COLUMNS
    assert external_rule(info, "tied_modules.embed.word_embeddings.weight") is Rule.VOCABULARY
    assert external_rule(info, "3.mlp.dense_4h_to_h.weight") is Rule.ROWS
    info["parameter_with_row_parallelism_patterns"].append(r"\d+.input_layernorm")
    with pytest.raises(ConfigError, match="3.input_layernorm.weight more than one rule"):
        external_rule(info, "3.input_layernorm.weight")
    with pytest.raises(ConfigError, match="has parameter_with_sub_params"):
        external_rule({"parameter_with_sub_params": [{}]}, "x")
