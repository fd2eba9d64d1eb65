"""The models of a layer's memory and work against what PyTorch keeps and computes."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import read_command_line
from megatron.model.gpt_model import PARAMETER_DTYPES, ParallelTransformerLayerPipe
from megatron.model.layer_context import LayerContext
from megatron.model.loss import CrossEntropy
from megatron.mpu.layers import parallel_logits
from megatron.mpu.layout import TPGroup
from megatron.mpu.random import DropoutRNG
from megatron.planner.memory.layer_memory import head_activation_bytes, transformer_layer_activation_bytes
from megatron.planner.stages import layer_table
from megatron.planner.timing.flops import head_flops, transformer_layer_flops
from megatron.testing.tracked_memory import TrackedMemory

SEQ, BATCH, HIDDEN = 128, 2, 64
FLAGS = (
    f"--dry-run --num-layers 2 --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {SEQ} "
    f"--vocab-size 512 --max-position-embeddings {SEQ} --micro-batch-size {BATCH} --global-batch-size 8 "
    "--train-iters 9 --lr 1e-3"
)


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch):
    """The layers run on a CPU. tests/simulated compares the plan with kernels."""
    monkeypatch.setenv("MEGATRON_KERNELS", "pytorch")


def config_of(words):
    return read_command_line([*FLAGS.split(), *words.split()], {}).config


def make_layer(config):
    layer = ParallelTransformerLayerPipe(LayerContext(config, TPGroup(), DropoutRNG(0, range(BATCH))), 3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.02)
    return layer.to(PARAMETER_DTYPES[config.precision.name])


@pytest.mark.parametrize("zero, replicas", [(0, 1), (1, 4)])
def test_8_bit_moments_of_layers_are_planned_as_such_and_those_of_the_embedding_are_not(zero, replicas):
    layout = f"--bf16 --zero-stage {zero} --world-size {replicas}"
    names, parameters = ["EmbeddingPipe", "ParallelTransformerLayerPipe", "EmbeddingPipe"], [1000, 1000, 1000]
    plain, quantized = (
        layer_table(config_of(f"{layout} {flag}"), 512, names, parameters, None).state_bytes
        for flag in ("", "--use-bnb-optimizer")
    )
    assert plain == [1000 * (2 + 4 + 12 / replicas)] * 2 + [0]
    assert quantized == [plain[0], 1000 * (2 + 4 + (4 + 2 * (1 + 4 / 256)) / replicas), 0]


@pytest.mark.parametrize(
    "words, in_layer, elsewhere",
    [
        ("--bf16 --zero-stage 0", 18, 18),
        ("--bf16 --zero-stage 1", 2 + 4 + 12 / 4, 2 + 4 + 12 / 4),
        ("--bf16 --zero-stage 2", 2 + (4 + 12) / 4, 2 + 4 + 12 / 4),
        ("--bf16 --zero-stage 3", (2 + 4 + 12) / 4, 2 + 4 + 12 / 4),
        ("--zero-stage 3", (4 + 4 + 8) / 4, 4 + 4 + 8 / 4),
        ("--bf16 --zero-stage 1 --cpu-offload", 2 + 4, 2 + 4),
        ("--bf16 --zero-stage 3 --cpu-offload", (2 + 4) / 4, 2 + 4),
    ],
)
def test_state_is_planned_as_zero_shards_it(words, in_layer, elsewhere):
    names = ["EmbeddingPipe", "ParallelTransformerLayerPipe", "EmbeddingPipe"]
    table = layer_table(config_of(f"{words} --world-size 4"), 512, names, [1000, 1000, 1000], None)
    assert table.state_bytes == [1000 * elsewhere, 1000 * in_layer, 0]


def run(config):
    layer = make_layer(config)
    dtype = next(layer.parameters()).dtype
    return layer, layer(torch.randn(SEQ, BATCH, HIDDEN, dtype=dtype, requires_grad=True))


@pytest.mark.parametrize("dropout", ["--hidden-dropout 0 --attention-dropout 0", "", "--attention-dropout 0"])
@pytest.mark.parametrize("options", ["", "--bf16", "--glu-activation swiglu"])
def test_activation_bytes_are_those_that_autograd_keeps(dropout, options):
    config = config_of(f"{dropout} {options}")
    kept = {}

    def note(tp_group):
        kept[tp_group.untyped_storage().data_ptr()] = tp_group
        return tp_group

    with saved_tensors_hooks(note, lambda tp_group: tp_group):
        layer, output = run(config)
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    measured = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)
    assert output.requires_grad
    assert transformer_layer_activation_bytes(config) == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize("options", ["", "--glu-activation swiglu"])
def test_flops_are_those_that_pytorch_counts(options):
    config = config_of(f"--attention-dropout 0.1 {options}")  # attention spelt out: a matrix product each
    with FlopCounterMode(display=False) as counter:
        _, output = run(config)
        output.sum().backward()
    assert transformer_layer_flops(config) == pytest.approx(counter.get_total_flops(), rel=1e-6)


def kept_by(flags):
    return transformer_layer_activation_bytes(config_of(f"--attention-dropout 0.1 {flags}"))


def test_selective_recomputation_recomputes_the_scores_of_attention_with_dropout():
    scores = BATCH * 4 * SEQ**2
    of_scores = scores * (4 + 1 + 4) + SEQ**2  # softmax, mask, dropped softmax; the causal mask
    assert kept_by("") - kept_by("--recompute-granularity selective") == of_scores
    config = config_of("--attention-dropout 0.1 --recompute-granularity selective")
    with FlopCounterMode(display=False) as counter:
        _, output = run(config)
        output.sum().backward()
    assert transformer_layer_flops(config) == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_recomputed_layers_keep_their_inputs_as_the_flags_say():
    layout = "--world-size 2 --tensor-model-parallel-size 2 --checkpoint-activations"
    whole = SEQ * BATCH * HIDDEN * 4
    assert kept_by(layout) == kept_by(f"{layout} --recompute-granularity full") == whole
    assert kept_by(f"{layout} --checkpoint-num-layers 2") == whole / 2
    assert kept_by(f"{layout} --partition-activations") == whole / 2
    assert kept_by(f"{layout} --checkpoint-in-cpu") == 0


def test_the_head_is_a_matrix_product_forward_and_two_backward():
    assert head_flops(config_of(""), 512) == 3 * 2 * SEQ * BATCH * HIDDEN * 512


@pytest.mark.parametrize("loss", ["fused", "plain"])
@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_the_heads_activation_bytes_are_those_that_its_loss_keeps(loss, precision):
    config = config_of(f"--loss-implementation {loss} {precision}")
    dtype = PARAMETER_DTYPES[config.precision.name]
    hidden = torch.randn(BATCH, SEQ, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(512, HIDDEN).to(dtype).requires_grad_()
    labels = (torch.zeros(BATCH, SEQ, dtype=torch.int64), torch.ones(BATCH, SEQ))
    entropy = CrossEntropy(TPGroup(), 512)
    with TrackedMemory() as tracked:
        if loss == "fused":
            result = entropy.from_hidden(hidden, weight, labels)
        else:
            result = entropy(parallel_logits(hidden, weight, TPGroup()).float(), labels)
    assert result.requires_grad
    measured = tracked.live + hidden.numel() * hidden.element_size()
    assert head_activation_bytes(config, 512) == pytest.approx(measured, rel=0.12)
