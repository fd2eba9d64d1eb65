"""--window-pattern accepts letters and Megatron-LM's frequency and list, and rejects other values."""

from __future__ import annotations

import pytest

from megatron.arguments import read_command_line
from megatron.config.model import model_summary
from megatron.errors import ConfigError

FLAGS = (
    "--dry-run --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 512 "
    "--position-embedding-type rotary --micro-batch-size 1 --global-batch-size 8 --train-iters 9 --lr 1e-3 "
    "--window-size 32"
).split()
PATTERN = "--window-pattern W F"


def model_of(layers, *words):
    return read_command_line([*FLAGS, "--num-layers", str(layers), *words], {}).config.model


@pytest.mark.parametrize(
    "layers, words, pattern",
    [
        (8, "--window-pattern W W W F", "WWWF"),
        (7, "--window-pattern WWWF", "WWWF"),
        (8, "--window-pattern W W W F W W W F", "WWWF"),
        (8, "--window-attn-skip-freq 4", "WWWF"),
        (8, "--window-attn-skip-freq ([1]*3+[0]*1)*2", "WWWF"),
        (5, "--window-attn-skip-freq 2*[1,0]+[1]", "WF"),
        (5, "--window-attn-skip-freq [1,1,0,1,0]", "WWFWF"),
        (4, "", None),
    ],
)
def test_equal_kinds_of_layers_have_one_pattern(layers, words, pattern):
    model = model_of(layers, *words.split())
    assert model.window_pattern == (pattern and tuple(pattern))
    kinds = "".join("W" if model.has_window(layer) else "F" for layer in range(layers))
    assert kinds == ((pattern or "W") * layers)[:layers]
    assert (f"layers {' '.join(pattern or '')}," in f"{model_summary(model)},") == (pattern is not None)


@pytest.mark.parametrize(
    "words, named",
    [
        ("--window-pattern W X", "--window-pattern is 'WX': expected letters W and F, as in W W W F"),
        ("--window-pattern 0", "--window-pattern is '0': expected letters W and F"),
        ("--window-pattern [2]*4", "is '.2.*4': expected letters"),
        ("--window-pattern ([1]*9999999999999)", "expected letters"),
        ("--window-pattern __import__('os')", "expected letters"),
        ("--window-attn-skip-freq [1]*3", "has 3 layers, but --num-layers is 4: correct one"),
        ("--window-attn-skip-freq 1", "none of the 4 layers .*; remove --window-pattern and --window-size"),
        (
            "--window-pattern W W W W F",
            "gives all 4 layers the window .*; remove --window-pattern, or change",
        ),
        ("--window-rotary-base 500", "--window-rotary-base .*--window-pattern"),
        ("--window-num-attention-heads 8", "--window-num-attention-heads 8 without --window-pattern: only"),
        (f"{PATTERN} --window-num-query-groups 2", "--window-num-query-groups 2 without --group-query-att"),
        (
            f"{PATTERN} --window-num-attention-heads 6 --tensor-model-parallel-size 4 --world-size 4",
            "--window-num-attention-heads 6 is not divisible by --tensor-model-parallel-size 4",
        ),
        (
            f"{PATTERN} --group-query-attention --num-query-groups 2 --window-num-query-groups 3",
            "--num-attention-heads 4 is not divisible by --window-num-query-groups 3",
        ),
        (
            f"{PATTERN} --window-kv-channels 9",
            "even head dimension, but it is 9: change --window-kv-channels",
        ),
        (f"{PATTERN} --window-rotary-percent 0.2", "--window-rotary-percent 0.2 rotates 3 of 16 elements"),
        ("--attention-output-gate-scope head", "--attention-output-gate-scope head without --attention-out"),
        ("--v-channels 8 --multi-latent-attention", "--v-channels 8 with --multi-latent-attention: latent"),
    ],
)
def test_another_pattern_is_rejected(words, named):
    with pytest.raises(ConfigError, match=named):
        model_of(4, *words.split())


def test_a_pattern_needs_a_window():
    flags = [word for word in FLAGS if word not in ("--window-size", "32")]
    with pytest.raises(ConfigError, match="--window-pattern .*--window-size"):
        read_command_line([*flags, "--num-layers", "4", "--window-pattern", "W", "F"], {})


def test_yarns_multiplier_of_scores_is_rejected_if_layers_with_a_window_have_no_yarn():
    words = (
        "--multi-latent-attention --rope-scaling-type yarn --rope-scaling-factor 4 "
        "--rope-original-max-position-embeddings 32 --mscale-all-dim 1"
    ).split()
    pattern = ["--window-pattern", "W", "F"]
    with pytest.raises(
        ConfigError, match="--mscale-all-dim 1 without --window-rope-scaling: .*; add --window-"
    ):
        model_of(4, *words, *pattern)
    model_of(4, *words)
    model_of(4, *words, *pattern, "--window-rope-scaling")
    model_of(4, *words[:-2], *pattern)
