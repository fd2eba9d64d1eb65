"""Compares FLOPs with matrix products counted by hand, and with published measurements."""

import sys
from dataclasses import dataclass, replace

import pytest

from megatron.model import flops as module
from megatron.model.flops import iteration_flops, palm_flops, tflops_per_device
from megatron.pipeline.stages import plan_stages
from tests.support.measured_worlds import config_of


def product(rows: int, inner: int, columns: int) -> int:
    """Returns the FLOPs of a product [rows, inner] x [inner, columns]."""
    return 2 * rows * inner * columns


@dataclass(frozen=True)
class Shape:
    """A step, and the sizes of its matrix products. windows: number of keys of each query, per layer.
    experts, chosen: in all layers but the dense ones. shared: hidden size of the shared expert."""

    flags: str
    batch: int = 4
    seq: int = 64
    hidden: int = 64
    heads: int = 4
    groups: int = 4
    head: int = 16
    ffn: int = 256
    gated: bool = False
    padded: int = 384
    windows: tuple[int, ...] = (64, 64)
    experts: int = 0
    chosen: int = 0
    shared: int = 0
    dense: tuple[int, ...] = ()
    recomputed: str = "nothing"

    def by_hand(self) -> int:
        """Returns the FLOPs of a step: products forward, twice as many backward, and recomputed products."""
        tokens, layers, scores = self.batch * self.seq, 0, 0
        for layer, keys in enumerate(self.windows):
            layers += product(tokens, self.hidden, self.heads * self.head)  # queries
            layers += 2 * product(tokens, self.hidden, self.groups * self.head)  # keys and values
            for _ in range(self.batch * self.heads):
                scores += product(self.seq, self.head, keys)
                layers += product(self.seq, self.head, keys)  # scores
                layers += product(self.seq, keys, self.head)  # weighted values
            layers += product(tokens, self.heads * self.head, self.hidden)  # output
            inputs = 2 if self.gated else 1
            if self.experts and layer not in self.dense:
                layers += product(tokens, self.hidden, self.experts)  # router
                for size in (*[self.ffn] * self.chosen, self.shared):
                    layers += (inputs + 1) * product(tokens, self.hidden, size)
            else:
                width = 256 if self.experts else self.ffn
                layers += inputs * product(tokens, self.hidden, width)
                layers += product(tokens, width, self.hidden)
        head = product(tokens, self.hidden, self.padded)
        again = {"nothing": 0, "layers": layers, "scores": scores}[self.recomputed]
        return 3 * (layers + head) + again


GROUPED = "--group-query-attention --num-query-groups"
SHAPES = {
    "plain": Shape(""),
    "plain, recomputed": Shape("--checkpoint-activations", recomputed="layers"),
    "recomputed in groups": Shape(
        "--checkpoint-activations --checkpoint-num-layers 2 --num-layers 3",
        recomputed="layers",
        windows=(64,) * 3,
    ),
    "gated, 4 h": Shape("--glu-activation swiglu --ffn-hidden-size 256", gated=True),
    "gated, wider than 4 h": Shape("--glu-activation swiglu --ffn-hidden-size 272", ffn=272, gated=True),
    "gated, recomputed": Shape(
        "--glu-activation swiglu --ffn-hidden-size 256 --checkpoint-activations",
        gated=True,
        recomputed="layers",
    ),
    "grouped": Shape(
        f"{GROUPED} 2 --glu-activation swiglu --ffn-hidden-size 160", groups=2, ffn=160, gated=True
    ),
    "one group, long heads": Shape(f"{GROUPED} 1 --kv-channels 32", groups=1, head=32),
    "window": Shape("--window-size 16", windows=(16, 16)),
    "window in three of four layers": Shape(
        "--window-size 24 --window-pattern W W W F --num-layers 6 --checkpoint-activations",
        windows=(24, 24, 24, 64, 24, 24),
        recomputed="layers",
    ),
    "a window longer than the sequence": Shape("--window-size 100", windows=(64, 64)),
    "recomputed scores": Shape(
        "--recompute-granularity selective --attention-dropout 0.1", recomputed="scores"
    ),
    "a large vocabulary and a long sequence": Shape(
        "--seq-length 1024 --vocab-size 130000 --untie-embeddings-and-output-weights",
        seq=1024,
        padded=130048,
        windows=(1024, 1024),
    ),
    "padded for tensor parallelism": Shape(
        "--world-size 2 --tensor-model-parallel-size 2 --vocab-size 500", padded=512
    ),
    "experts": Shape("--num-experts 8 --moe-ffn-hidden-size 96", ffn=96, experts=8, chosen=2),
    "experts with an mlp's size, recomputed": Shape(
        "--num-experts 4 --moe-router-topk 3 --checkpoint-activations",
        experts=4,
        chosen=3,
        recomputed="layers",
    ),
    "a dense layer, then gated experts and a shared one": Shape(
        "--num-experts 8 --moe-layer-freq D E E --num-layers 3 --moe-ffn-hidden-size 32 --moe-router-topk 4 "
        "--moe-shared-expert-intermediate-size 48 --glu-activation swiglu --ffn-hidden-size 256",
        ffn=32,
        gated=True,
        windows=(64,) * 3,
        experts=8,
        chosen=4,
        shared=48,
        dense=(0,),
    ),
    "document masks do not count": Shape("--reset-attention-mask --eod-mask-loss"),
}
VOCAB = 384


def config_with(flags: str):
    sizes = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
        "--global-batch-size 4 --hidden-dropout 0 --attention-dropout 0 "
    )
    if "--position-embedding-type" not in flags:
        sizes += "--max-position-embeddings 2048 "
    return config_of(sizes + flags)


@pytest.mark.parametrize("name", SHAPES)
def test_flops_by_hand(name: str) -> None:
    shape = SHAPES[name]
    config, vocab = config_with(shape.flags), 500 if shape.padded == 512 else shape.padded
    assert iteration_flops(config, vocab, on_cpu=True) == shape.by_hand()
    assert iteration_flops(config, vocab, batch_size=1, on_cpu=True) * shape.batch == shape.by_hand()
    of_model = replace(shape, recomputed="nothing").by_hand()
    assert iteration_flops(config, vocab, with_recomputation=False, on_cpu=True) == of_model


def test_flops_by_hand_of_a_shorter_sequence_of_a_curriculum() -> None:
    shape = Shape("", seq=32, windows=(24, 24))
    assert iteration_flops(config_with("--window-size 24"), VOCAB, seq_length=32) == shape.by_hand()


def test_a_wider_mlp_has_more_flops() -> None:
    found = [
        iteration_flops(config_with(f"--glu-activation swiglu --ffn-hidden-size {n}"), VOCAB)
        for n in (240, 256, 272)
    ]
    assert found[1] - found[0] == found[2] - found[1] == 6 * 4 * 64 * 2 * 3 * 16 * 64


# Source: train/tr11-176B-ml/chronicles-prequel.md of bigscience-workshop/bigscience. Each row has (layers,
# hidden size, batch, seconds per iteration, TFLOP/s per GPU). All rows have sequence 2048, vocabulary 250880,
# 384 GPUs and full recomputation.
PUBLISHED = [
    ("line 608", 72, 14336, 2048, 134.02, 120.29),
    ("line 687", 96, 12288, 2048, 122.96, 128.69),
    ("line 695", 84, 13312, 2048, 125.52, 129.29),
    ("line 778", 72, 14336, 1568, 92.75, 133.08),
    ("line 789", 72, 14336, 2016, 125.52, 126.43),
    ("line 801", 72, 14336, 2048, 110.48, 145.92),
    ("line 870", 78, 13824, 2048, 107.12, 151.64),
    ("line 909", 106, 12288, 2048, 120.34, 145.01),
    ("176B run, iteration 12695", 70, 14336, 2048, 105.22, 149.02),
]


@pytest.mark.parametrize(("source", "layers", "hidden", "batch", "seconds", "tflops"), PUBLISHED)
def test_published_throughput_follows_from_its_seconds(source, layers, hidden, batch, seconds, tflops):
    config = config_with(
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads 64 --seq-length 2048 "
        "--checkpoint-activations"
    )
    flops = iteration_flops(config, 250880, batch_size=batch)
    assert tflops_per_device(flops, seconds, 384) == pytest.approx(tflops, rel=1e-3)


def test_flops_need_no_torch():
    assert "torch" not in sys.modules["megatron.model.flops"].__dict__


LLAMA_3_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    f"{GROUPED} 8 --seq-length 8192 --glu-activation swiglu --position-embedding-type rotary "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--make-vocab-size-divisible-by 1"
)


def test_palms_formula_of_llama_3_8b_is_6_n_and_12_l_h_q_t() -> None:
    """N excludes the embedding, a look-up: 8.03 B parameters less 128,256 x 4,096."""
    config, tokens = config_with(LLAMA_3_8B), 4 * 8192
    parameters = plan_stages(config, 128256).total_parameters
    assert parameters == 8_030_261_248
    attention = 12 * 32 * 32 * 128 * 8192
    expected = tokens * (6 * (8_030_261_248 - 128256 * 4096) + attention)
    assert palm_flops(config, 128256, parameters) == expected
    # The matrix products exclude the norms, 65 x 4,096 parameters.
    assert iteration_flops(config, 128256) == expected - 6 * tokens * 65 * 4096
    assert palm_flops(config, 128256, parameters, batch_size=1) == expected / 4


@pytest.mark.parametrize(
    ("flags", "lookups", "keys"),
    [
        ("", 2048, 128),
        ("--untie-embeddings-and-output-weights", 2048 + 384, 128),
        ("--window-size 16 --position-embedding-type alibi", 0, 32),
    ],
)
def test_palms_formula_leaves_out_tables_and_counts_windows(flags: str, lookups: int, keys: int) -> None:
    found = palm_flops(config_with(flags), VOCAB, 10**6)
    assert found == 4 * 64 * (6 * (10**6 - lookups * 64) + 12 * 64 * keys)


def test_layers_of_a_kind_count_with_their_own_heads() -> None:
    """The FLOPs of a model with a layer of each kind are the mean of two models, each with two layers of one
    kind."""
    pattern = "--window-size 99 --window-pattern W F"
    own = "--window-num-attention-heads 8 --window-num-query-groups 4 --window-kv-channels 32"
    full, window = f"{GROUPED} 2", f"{GROUPED} 4 --num-attention-heads 8 --kv-channels 32"
    gate = "--v-channels 24 --attention-output-gate --attention-output-gate-scope head"
    common = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
        f"--position-embedding-type rotary {gate}"
    )
    for count in (iteration_flops, lambda config, vocab: palm_flops(config, vocab, 9999)):
        mixed, *others = (
            count(config_of(f"{common} {flags}"), 100) for flags in (f"{full} {pattern} {own}", full, window)
        )
        assert 2 * mixed == sum(others) and others[0] != others[1]


@pytest.mark.parametrize(
    ("flags", "calls"),
    [
        ("", []),
        ("--recompute-granularity selective", [None]),
        ("--recompute-granularity selective --window-size 8 --window-pattern WF", [8, None]),
    ],
)
def test_the_attention_is_chosen_once_per_kind_of_layer(
    flags: str, calls: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(
        "--num-layers 96 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
        f"--position-embedding-type rotary {flags}"
    )
    chosen: list[int | None] = []
    choose = module.training_attention

    def count(config, window, on_cpu):
        chosen.append(window)
        return choose(config, window, on_cpu)

    monkeypatch.setattr(module, "training_attention", count)
    iteration_flops(config, 100)
    assert chosen == calls
