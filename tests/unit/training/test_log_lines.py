"""Tests the console format: golden lines, lines of Megatron-LM, and parsing."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.log_lines import (
    IntervalSummary,
    format_training_line,
    format_validation_lines,
    parse_log_line,
)

BF16 = IntervalSummary(
    iteration=94768,
    total_iterations=115311,
    consumed_samples=177927088,
    consumed_tokens=364394676224,
    seconds_per_iteration=105.217,
    learning_rate=7.61e-6,
    global_batch_size=2048,
    seq_length=None,
    lm_loss=1.943883,
    loss_scale=None,
    grad_norm=0.1281,
    skipped=0,
    not_finite=0,
    samples_per_second=19.463,
    tokens_per_second=39860.0,
    tflops_per_device=149.0199,
)


def test_training_line_has_the_megatron_deepspeed_format():
    assert format_training_line(BF16) == (
        " iteration    94768/  115311 | consumed samples:    177927088 | consumed tokens: 364394676224 |"
        " elapsed time per iteration (s): 105.22 | learning rate: 7.610E-06 | global batch size:  2048 |"
        " lm loss: 1.943883E+00 | grad norm: 0.128 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 | samples per second: 19.463 | TFLOPs: 149.02 |"
    )


def test_fp16_line_has_the_loss_scale_after_the_loss():
    line = format_training_line(IntervalSummary(**{**vars(BF16), "loss_scale": 16384.0, "skipped": 2}))
    assert " lm loss: 1.943883E+00 | loss scale: 16384.0 | grad norm: 0.128 |" in line
    assert " number of skipped iterations:   2 |" in line


def test_curriculum_seqlen_is_in_the_line():
    line = format_training_line(IntervalSummary(**{**vars(BF16), "seq_length": 264}))
    assert " curriculum seqlen:   264 |" in line
    assert parse_log_line(line)["curriculum_seqlen"] == 264


def test_small_values_have_four_decimals():
    small = {**vars(BF16), "seconds_per_iteration": 0.01234, "tflops_per_device": 0.00567}
    line = format_training_line(IntervalSummary(**small))
    assert " elapsed time per iteration (s): 0.0123 |" in line
    assert line.endswith(" TFLOPs: 0.0057 |")


def test_metrics_of_experts_are_readable_and_have_a_fixed_order():
    """Values that a user's model records are in E notation. They follow the metrics of experts, and metrics
    of layers come last."""
    values = {"MaxVio": 1.59668, "tokens per expert, max": 5317.0, "load balancing loss": 1.112955}
    per_layer = {f"layer {layer} {name}": value for layer in (10, 2) for name, value in values.items()}
    recorded = {**per_layer, "a user's": 0.25, **dict(reversed(values.items()))}
    line = format_training_line(IntervalSummary(**{**vars(BF16), "recorded": recorded}))
    texts = ["MaxVio: 1.597", "tokens per expert, max: 5317.0", "load balancing loss: 1.112955E+00"]
    layers = [f"layer {layer} {text}" for layer in (2, 10) for text in texts]
    assert " | ".join(["", *texts, "a user's: 2.500000E-01", *layers, "number of skipped"]) in line
    assert parse_log_line(line)["layer_10_tokens_per_expert_max"] == 5317.0


def test_validation_lines_have_the_megatron_deepspeed_format():
    rule, line, last = format_validation_lines("validation", "iteration 100", 2.302585093)
    assert (
        line
        == " validation loss at iteration 100 | lm loss value: 2.302585E+00 | lm loss PPL: 1.000000E+01 | "
    )
    assert rule == last == "-" * (len(line) + 1)


def test_perplexity_is_capped():
    assert "PPL: 4.851652E+08" in format_validation_lines("test", "the end", 4000.0)[1]


# Lines of other trainers, from public logs.
BIGSCIENCE = (
    "[default7]: iteration    12695/  115311 | consumed samples:      9841584 | "
    "consumed tokens:  20155564032 | elapsed time per iteration (s): 105.22 | learning rate: 5.969E-05 | "
    "global batch size:  2048 | lm loss: 2.463556E+00 | grad norm: 0.174 | num zeros: 0.0 | "
    "number of skipped iterations:   0 | "
    "number of nan iterations:   0 | samples per second: 19.463 | TFLOPs: 149.02 |"
)
MEGATRON_LM = (
    " [2024-04-06 02:59:36] iteration       43/     100 | consumed samples:         5504 | "
    "elapsed time per iteration (ms): 5444.9 | throughput per GPU (TFLOP/s/GPU): 239.8 | "
    "learning rate: 8.600000E-06 | global batch size:   128 | lm loss: 1.825991E+00 | loss scale: 1.0 | "
    "grad norm: 1.426 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_bigscience_line_is_parsed():
    assert parse_log_line(BIGSCIENCE) == {
        "kind": "training",
        "iteration": 12695,
        "total_iterations": 115311,
        "consumed_samples": 9841584,
        "consumed_tokens": 20155564032,
        "seconds_per_iteration": 105.22,
        "learning_rate": 5.969e-05,
        "global_batch_size": 2048,
        "lm_loss": 2.463556,
        "grad_norm": 0.174,
        "num_zeros": 0.0,
        "number_of_skipped_iterations": 0,
        "number_of_nan_iterations": 0,
        "samples_per_second": 19.463,
        "tflops_per_device": 149.02,
    }


def test_megatron_lm_line_is_parsed_in_seconds():
    parsed = parse_log_line(MEGATRON_LM)
    assert parsed["seconds_per_iteration"] == pytest.approx(5.4449)
    assert (parsed["tflops_per_device"], parsed["loss_scale"], parsed["iteration"]) == (239.8, 1.0, 43)


def test_validation_lines_are_parsed():
    line = format_validation_lines("validation", "iteration 100", 2.5)[1]
    assert parse_log_line(line) == {
        "kind": "validation",
        "name": "validation",
        "at": "iteration 100",
        "iteration": 100,
        "lm_loss": 2.5,
        "lm_loss_ppl": pytest.approx(math.exp(2.5), rel=1e-6),
    }
    end = "[default7]:valid loss at the end of training for val data | lm loss value: 2.0E+00 | "
    assert parse_log_line(end) == {
        "kind": "validation",
        "name": "valid",
        "at": "the end of training for val data",
        "lm_loss": 2.0,
    }


@pytest.mark.parametrize(
    "line",
    ["", "saved a checkpoint at iteration 7", "-" * 80, "iteration 3/ 10 |", "weight loss at home | kg: 3 |"],
)
def test_other_lines_are_none(line):
    assert parse_log_line(line) is None


def test_truncated_field_is_ignored():
    truncated = BIGSCIENCE[: BIGSCIENCE.index("3556E+00")]  # '... | lm loss: 2.46'
    parsed = parse_log_line(truncated)
    assert "lm_loss" not in parsed
    assert parsed["global_batch_size"] == 2048


def test_nan_loss_is_parsed():
    parsed = parse_log_line(format_training_line(IntervalSummary(**{**vars(BF16), "lm_loss": math.nan})))
    assert math.isnan(parsed["lm_loss"])


counts = st.integers(0, 10**15)
values = st.floats(1e-6, 1e6)


@given(
    st.builds(
        IntervalSummary,
        iteration=counts,
        total_iterations=counts,
        consumed_samples=counts,
        consumed_tokens=counts,
        seconds_per_iteration=values,
        learning_rate=st.floats(0, 1),
        global_batch_size=counts,
        lm_loss=st.none() | values,
        loss_scale=st.none() | st.sampled_from([2.0**n for n in range(33)]),
        grad_norm=st.none() | values,
        skipped=counts,
        not_finite=counts,
        samples_per_second=values,
        tflops_per_device=values,
    )
)
def test_formatted_line_is_parsed_back(summary):
    parsed = parse_log_line(format_training_line(summary))
    for name in ("iteration", "total_iterations", "consumed_samples", "consumed_tokens", "global_batch_size"):
        assert parsed[name] == getattr(summary, name)
    assert parsed["number_of_skipped_iterations"] == summary.skipped
    assert parsed["number_of_nan_iterations"] == summary.not_finite
    assert parsed.get("loss_scale") == summary.loss_scale
    assert parsed["learning_rate"] == pytest.approx(summary.learning_rate, rel=1e-3)
    assert parsed["seconds_per_iteration"] == pytest.approx(summary.seconds_per_iteration, rel=6e-3, abs=6e-5)
    assert ("grad_norm" in parsed) == (summary.grad_norm is not None)
    if summary.lm_loss is None:
        assert "lm_loss" not in parsed
    else:
        assert parsed["lm_loss"] == pytest.approx(summary.lm_loss, rel=1e-6)
