"""Tests valid values of `--partition-method`, and the errors for invalid values."""

from fractions import Fraction

import pytest

from megatron.config import ConfigError
from megatron.pipeline.partition_method import StageContent, parse_partition_method


def alternatives(text):
    return [(a.pattern, a.place, a.weight) for a in parse_partition_method(text).alternatives]


def stages(text):
    return list(parse_partition_method(text).stages)


@pytest.mark.parametrize("word", ["uniform", "parameters", "memory", "time", "profile"])
def test_the_case_of_a_method_name_does_not_matter(word):
    assert parse_partition_method(word).kind == parse_partition_method(word.upper()).kind == word


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("type:transformer", [("transformer", "", 1)]),
        ("type:embed:2|transformer:1", [("embed", "", 2), ("transformer", "", 1)]),
        ("weighted_type:embed:2|transformer", [("embed", "", 2), ("transformer", "", 1)]),
        ("TYPE:embed:0.25|mlp:.5", [("embed", "", Fraction(1, 4)), ("mlp", "", Fraction(1, 2))]),
        ("type:embed@first:2|embed@LAST:3", [("embed", "first", 2), ("embed", "last", 3)]),
        (r"type:(?:a|b):2|c[|:]|d\|e:3", [("(?:a|b)", "", 2), ("c[|:]", "", 1), (r"d\|e", "", 3)]),
        ("type:[(]:2|transformer", [("[(]", "", 2), ("transformer", "", 1)]),
        ("type:norm:0|transformer", [("norm", "", 0), ("transformer", "", 1)]),
    ],
)
def test_alternatives_have_a_pattern_a_place_and_a_weight(text, expected):
    assert alternatives(text) == expected


@pytest.mark.parametrize(
    ("layout", "per_stage"),
    [
        ("Et*3|(tt|)*29,t|L", [3, *[2] * 29, 1, 0]),  # the example of Megatron-LM's documentation
        ("Ettt|tt|ttL", [3, 2, 2]),
        ("E|(t|)*2 L", [0, 1, 1, 0]),
        ("E||tt|L", [0, 0, 2, 0]),
        ("((Et|)*1(tt|)*2)*1L", [1, 2, 2, 0]),
        ("EttL", [2]),
    ],
)
def test_layout_strings_are_written_out(layout, per_stage):
    found = stages(f"layout:{layout}")
    assert [stage.transformer_layers for stage in found] == per_stage
    assert [stage.embedding for stage in found] == [True, *[False] * (len(per_stage) - 1)]
    assert [stage.head for stage in found] == [*[False] * (len(per_stage) - 1), True]


@pytest.mark.parametrize(
    ("text", "per_stage"),
    [
        ("5,6*10,5", [5, *[6] * 10, 5]),
        ("E + 5,6 * 10, 5 +L", [5, *[6] * 10, 5]),
        ("E,2*3,L", [0, 2, 2, 2, 0]),
        ("0,4,0", [0, 4, 0]),
        ("E+4+L", [4]),
        ("E+L", [0]),
    ],
)
def test_transformer_layers_per_stage(text, per_stage):
    found = stages(f"stages:{text}")
    assert [stage.transformer_layers for stage in found] == per_stage
    assert found[0].embedding and found[-1].head
    assert all(stage == StageContent(False, stage.transformer_layers, False) for stage in found[1:-1])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("best", "uniform, parameters, memory, time, profile"),
        ("type", "uniform, parameters"),
        ("", "uniform, parameters"),
        ("uniform:3", "uniform, parameters"),
        ("type:", "has no pattern"),
        ("type:embed:2|", "has no pattern"),
        ("type:embed:-2|transformer", "'-2' of 'embed:-2'"),
        ("type:embed:two", "'two' of 'embed:two'"),
        ("type:embed:nan", "'nan'"),
        ("type:embed:1:2", "'embed:1:2' has more than one weight"),
        ("type:(", "regular expression"),
        ("layout:Ett|qL", "'q' at position 5"),
        ("layout:Et|(ttL", "unmatched '('"),
        ("layout:Et)L", "')' at position 3"),
        ("layout:Et*L", "at position 3 needs a number"),
        ("layout:EEtL", "2 x E"),
        ("layout:Ett", "0 x L"),
        ("layout:tEL", "E before every t"),
        ("layout:|EtL", "first stage"),
        ("layout:EtL|", "last stage"),
        ("layout:E((t*9999)*9999)*9999L", "more than 100,000 layers"),
        ("stages:5,,5", "'': expected a number of layers"),
        ("stages:5,-1", "'-1'"),
        ("stages:5,x*2", "'x*2'"),
        ("stages:5,E+5", "only be on the first stage"),
        ("stages:5+L,5", "only be on the last stage"),
        ("stages:9*999999", "more than 100,000 stages"),
        ("stages:5*0", "repeats a stage 0 times"),
        ("stages:6 6", "'6 6'"),
        ("stages:E+", "'E+'"),
        ("stages:" + "9" * 5000, "expected a number of layers"),
        ("layout:" + "(" * 2000, "more than 100 brackets"),
        ("layout:Et*2*3L", "'*' at position 5"),
        ("type:a{99999999999999}", "regular expression"),
        ("type:" + "(" * 2000, "regular expression"),
        ("type:[[a]", "regular expression"),
        ("type:a@first@last", "has no pattern"),
        ("type:a:" + "9" * 5000, "not a non-negative number"),
    ],
)
def test_a_syntax_error_names_the_part_and_an_example(text, part):
    with pytest.raises(ConfigError) as caught:
        parse_partition_method(text)
    sentence = str(caught.value)
    assert part in sentence and "--partition-method" in sentence and text in sentence
    assert any(example in sentence for example in ("type:embed:2", "layout:Et*3", "stages:5,6*10,5"))
