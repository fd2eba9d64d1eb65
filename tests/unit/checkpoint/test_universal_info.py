"""Merge patterns: each parameter matches one pattern, and each pattern matches a parameter."""

import json
import re
from pathlib import Path

import pytest
from deepspeed.checkpoint import constants

from megatron.checkpoint.formats import universal_info
from megatron.checkpoint.formats.universal_info import (
    AVERAGED,
    COLUMN_PARALLEL,
    ROW_PARALLEL,
    SHARDING,
    VOCABULARY,
    check_info,
    check_patterns,
    derive_info,
    external_spec,
    matching,
    recorded_spec,
    spec_record,
)
from megatron.errors import UserError
from megatron.model.inference.single_process import model_specs
from megatron.mpu.parameter_spec import ParameterSpec, Shard
from tests.support.layouts import EOD, VOCAB, Row, config_of

VARIANTS = {
    "plain": {},
    "gated": {"glu_activation": "swiglu"},
    "bloom": {"embed_layernorm": True, "position_embedding_type": "alibi"},
}


def specs_of(**model):
    return model_specs(config_of(Row(), model=model), VOCAB, EOD)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_has_the_rule_of_its_spec(variant):
    specs = specs_of(**VARIANTS[variant])
    info = derive_info(specs, VOCAB)
    assert info["original_vocab_size"] == VOCAB
    for name, spec in specs.items():
        ((key, pattern),) = matching(info, name)
        assert pattern.startswith("^") and pattern.endswith("$") and re.match(pattern, name)
        is_replicated = any(re.match(p, name) for p in info["pipeline_replicated_parameter_patterns"])
        assert is_replicated == name.startswith("tied_modules.")
        assert (key == VOCABULARY) == name.endswith("word_embeddings.weight")
        assert SHARDING[key] == spec.sharding, name
        saved = recorded_spec(spec_record(spec))
        assert saved.sharding == SHARDING[key]
        assert saved.valid_shape == spec.valid_shape and saved.global_shape == spec.global_shape


def test_the_keys_are_deepspeeds():
    assert universal_info.VERSION == constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE
    assert universal_info.INFO_KEY == constants.UNIVERSAL_CHECKPOINT_INFO
    assert universal_info.VERSION_KEY == constants.UNIVERSAL_CHECKPOINT_VERSION_KEY
    assert universal_info.VOCAB_SIZE_KEY == constants.ORIGINAL_VOCAB_SIZE
    assert universal_info.PIPELINE_REPLICATED_KEY == constants.PIPELINE_REPLICATED_PARAMETER_PATTERNS
    assert SHARDING.keys() - {COLUMN_PARALLEL} == {
        constants.VOCABULARY_PARAMETER_PATTERNS,
        constants.TP_REPLICATED_PARAMETER_PATTERNS,
        constants.PARAMETER_TO_AVERAGE_PATTERNS,
        constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
        constants.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
    }


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda info: info[ROW_PARALLEL].clear(), r"3\.self_attention\.dense\.weight .* matches none"),
        (
            lambda info: info[ROW_PARALLEL].append(r"^\d+\.weight$"),
            r"parameter 8\.weight .*row_parallelism",
        ),
        (lambda info: info[AVERAGED].append("^9.x$"), r"pattern \^9\.x\$ .* matches no parameter"),
        (
            lambda info: info[COLUMN_PARALLEL].append(r"^.*dense_h_to_4h\.bias$"),
            r"h_to_4h\.bias must match one",
        ),
    ],
)
def test_rules_that_do_not_match_are_refused_by_name(change, words):
    specs = specs_of()
    info = derive_info(specs, VOCAB)
    change(info)
    with pytest.raises(ValueError, match=words):
        check_patterns(info, specs)


def test_a_parameter_that_no_rule_can_merge_is_refused_by_name():
    spec = ParameterSpec((12, 8), sharding=(Shard(0, parts=3),))
    with pytest.raises(ValueError, match=r"^3\.x\.weight is sharded as .Shard.dim=0, axis=.tp., parts=3"):
        derive_info({"3.x.weight": spec}, VOCAB)


def test_other_programs_list_no_columns_and_no_anchors():
    """The pattern lists are from Microsoft's Megatron-DeepSpeed, pretrain_gpt.py."""
    info = {
        "vocabulary_parameter_patterns": [r"tied_modules.embed.word_embeddings.weight"],
        "parameter_with_row_parallelism_patterns": [r"\d+.mlp.dense_4h_to_h.weight"],
        "tp_replicated_parameter_patterns": [r"\d+.input_layernorm.weight"],
    }
    info["original_vocab_size"] = 100
    assert external_spec(info, "3.mlp.dense_h_to_4h.weight", (8, 4), 2) == ParameterSpec((16, 4), (Shard(0),))
    words = external_spec(info, "tied_modules.embed.word_embeddings.weight", (64, 4), 2)
    assert words == ParameterSpec((128, 4), (Shard(0),), num_valid_rows=100)
    assert external_spec(info, "3.mlp.dense_4h_to_h.weight", (8, 4), 2) == ParameterSpec((8, 8), (Shard(1),))
    assert external_spec(info, "3.input_layernorm.weight", (8,), 2) == ParameterSpec((8,))
    info["parameter_with_row_parallelism_patterns"].append(r"\d+.input_layernorm")
    with pytest.raises(UserError, match="3.input_layernorm.weight more than one rule"):
        external_spec(info, "3.input_layernorm.weight", (8,), 2)
    with pytest.raises(UserError, match="has parameter_with_sub_params"):
        external_spec({"parameter_with_sub_params": [{}]}, "x", (8,), 2)


@pytest.mark.parametrize("pattern", ["(a+", "\\", 5, "a{2,1}"])
def test_a_pattern_that_is_no_regular_expression_is_named(pattern):
    with pytest.raises(UserError, match="^f has the pattern .*, expected a regular expression"):
        check_info({VOCABULARY: [pattern]}, Path("f"))


def test_a_sharding_over_other_axes_is_recorded():
    spec = ParameterSpec((12, 8), (Shard(0, "cp"), Shard(1, parts=2)))
    record = json.loads(json.dumps(spec_record(spec)))
    assert (
        record["sharding"] == [[0, "cp", 1], [1, "tp", 2]] and recorded_spec(record).sharding == spec.sharding
    )
    assert "sharding" not in spec_record(ParameterSpec((12, 8), (Shard(1, parts=2),)))
