"""Compares the planned costs of a layer with what PyTorch keeps and computes on a CPU."""

from itertools import chain

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.arguments import read_command_line
from megatron.model.gpt_model import ParallelTransformerLayerPipe
from megatron.model.layer_context import LayerContext
from megatron.model.layer_list import FIRST_TRANSFORMER_LAYER, PARAMETER_DTYPES
from megatron.mpu.mesh import ONE_RANK
from megatron.mpu.random import DropoutRNG
from megatron.pipeline.stages import plan_stages
from megatron.planner.layer_memory import bytes_per_parameter, memory_costs, planned_run
from megatron.planner.plan import make_plan
from megatron.planner.rates import is_attention
from megatron.planner.simulation import stage_costs
from megatron.planner.simulation.passes import Kernel
from megatron.planner.simulation.stage_costs import whole_model_costs
from tests.support.tracked_memory import TrackedMemory

SEQ, BATCH, HIDDEN = 128, 2, 64
FLAGS = (
    f"--dry-run --num-layers 2 --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {SEQ} "
    f"--vocab-size 512 --max-position-embeddings {SEQ} --micro-batch-size {BATCH} --global-batch-size 8 "
    "--train-iters 9 --lr 1e-3"
)
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch):
    """Runs the layers without Triton kernels, as on a CPU. tests/simulated compares plans with kernels."""
    monkeypatch.setenv("MEGATRON_KERNELS", "pytorch")


def config_of(words):
    return read_command_line([*FLAGS.split(), *words.split()], {}).config


def make_layer(config):
    layer = ParallelTransformerLayerPipe(LayerContext(config, ONE_RANK, DropoutRNG(0, range(BATCH))), 3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.02)
    return layer.to(PARAMETER_DTYPES[config.precision.name])


@pytest.mark.parametrize(
    "words, in_layer, elsewhere",
    [
        ("--bf16 --zero-stage 0", 18, 18),
        ("--bf16 --zero-stage 1", 2 + 4 + 12 / 4, 2 + 4 + 12 / 4),
        ("--bf16 --zero-stage 3", (2 + 4 + 12) / 4, 2 + 4 + 12 / 4),
        ("--zero-stage 2", 4 + (4 + 8) / 4, 4 + 4 + 8 / 4),
        ("--bf16 --zero-stage 1 --cpu-offload", 2 + 4, 2 + 4),
    ],
)
def test_state_is_planned_as_zero_shards_it(words, in_layer, elsewhere):
    config = config_of(f"{words} --world-size 4")
    in_layers, _, in_others = bytes_per_parameter(config, 512)
    # Buffers are padded, and the optimizer keeps a norm per parameter.
    assert in_layers == pytest.approx(in_layer, rel=0.02)
    assert in_others == pytest.approx(elsewhere, rel=0.02)


def run(config):
    layer = make_layer(config)
    dtype = next(layer.parameters()).dtype
    return layer, layer(torch.randn(SEQ, BATCH, HIDDEN, dtype=dtype, requires_grad=True))


@pytest.mark.parametrize("dropout", ["--hidden-dropout 0 --attention-dropout 0", "", "--attention-dropout 0"])
@pytest.mark.parametrize("options", ["", "--bf16", "--glu-activation swiglu"])
def test_activation_bytes_are_those_that_autograd_keeps(dropout, options):
    config = config_of(f"{dropout} {options}")
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        layer, output = run(config)
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    measured = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)
    assert output.requires_grad
    assert kept_by(config) == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize(
    "options, kernels",
    [
        ("--bf16 --attention-dropout 0", "cudnn"),
        ("--attention-dropout 0", "efficient"),
        ("--bf16 --attention-dropout 0.1", "attention_"),
        ("--bf16 --attention-dropout 0 --position-embedding-type alibi", "attention_"),
        ("--bf16 --attention-dropout 0.1 --group-query-attention --num-query-groups 2", "attention_"),
    ],
)
def test_the_rate_of_an_attention_kernel_depends_on_its_sequence_and_head_size(monkeypatch, options, kernels):
    monkeypatch.delenv("MEGATRON_KERNELS")
    config = config_of(options)
    costs = whole_model_costs(config, plan_stages(config, 512).layers, 512)
    actions = chain.from_iterable(costs.passes.values())
    found = [action for action in actions if isinstance(action, Kernel) and is_attention(action)]
    assert len(found) >= 4
    assert all(kernels in kernel.name for kernel in found)
    assert {kernel.product for kernel in found} == {(SEQ, SEQ, HIDDEN // 4)}


def kept_by(config):
    """Returns the bytes that the recorded transformer layer keeps, counting its output instead of its
    input."""
    costs = whole_model_costs(config, plan_stages(config, 512).layers, 512)
    (layer,) = (layer for layer in costs.layers if layer.first == FIRST_TRANSFORMER_LAYER)
    return layer.forward.change / (layer.end - layer.first)


def test_the_method_memory_counts_the_activations_of_every_layer():
    config = config_of("--num-layers 6 --attention-dropout 0.1")
    kept = memory_costs(config, 512).activation_bytes
    assert kept[FIRST_TRANSFORMER_LAYER:][:6] == pytest.approx([kept_by(config)] * 6, rel=0.02)
    assert kept[-1] > 0, "the fused head and loss"


def allocated_by(config):
    layer, hidden = make_layer(config), torch.randn(SEQ, BATCH, config.model.hidden_size).bfloat16()
    with TrackedMemory() as tracked:
        output = layer(hidden.requires_grad_())
    assert output.requires_grad
    return tracked.live


def test_dispatch_keeps_the_rows_of_experts_twice():
    """With k experts per token, an expert layer keeps k rows per token before and after the experts. The
    experts are narrow, so that their own activations are small."""
    flags = (
        f"--bf16 --hidden-size 1024 --num-experts 8 --moe-ffn-hidden-size 8 {NO_DROPOUT} "
        "--moe-router-force-load-balancing --moe-router-topk"
    )
    ranks = "--world-size 2 --expert-model-parallel-size 2"
    more = 2 * (4 - 2) * SEQ * BATCH * 1024 * 2
    few, many = (config_of(f"{flags} {k}") for k in (2, 4))
    measured, planned = (measure(many) - measure(few) for measure in (allocated_by, kept_by))
    assert planned == pytest.approx(measured, rel=0.03)
    few, many = (config_of(f"{flags} {k} {ranks}") for k in (2, 4))
    for extra in (measured, planned, kept_by(many) - kept_by(few)):
        assert extra == pytest.approx(more, rel=0.03)


def test_memory_of_experts_is_planned_as_zero_shards_them():
    """ZeRO shards experts over the TP x CP x DP / EP ranks that hold equal experts, and other layers over CP
    x DP ranks."""
    experts = "--num-experts 8 --expert-model-parallel-size 4 --moe-layer-freq D E"
    config = config_of(f"--bf16 --zero-stage 1 --world-size 8 --global-batch-size 16 {experts}")
    optimizer = bytes_per_parameter(config.with_settings({"parallel.zero_stage": 0}), 512)[0] - 6
    found = memory_costs(config, 512).state_bytes
    run = planned_run(config, 512)
    dense, experts = (run.stages.parameters[FIRST_TRANSFORMER_LAYER + layer] for layer in (0, 1))
    assert found[FIRST_TRANSFORMER_LAYER] == pytest.approx(dense * (6 + optimizer / 8), rel=0.02)
    of_experts = run.stages.expert_parameters / 4
    expected = (experts - of_experts) * (6 + optimizer / 8) + of_experts * (6 + optimizer / 2)
    assert found[FIRST_TRANSFORMER_LAYER + 1] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    "layout",
    [
        "--world-size 192",
        "--world-size 128 --expert-model-parallel-size 8",
        "--world-size 256 --expert-model-parallel-size 16 --tensor-model-parallel-size 2 --sequence-parallel",
        "--world-size 256 --expert-model-parallel-size 64 --pipeline-model-parallel-size 2",
        "--world-size 128 --expert-model-parallel-size 8 --zero-stage 3",
        "--world-size 512 --expert-model-parallel-size 16 --context-parallel-size 4 "
        "--expert-model-parallel-size 8",
    ],
)
def test_many_replicas_are_planned_as_if_all_were_recorded(monkeypatch, layout):
    """Steps of many replicas are extrapolated from fewer replicas, whose process groups have equal names."""
    flags = (
        "--bf16 --gpu h100-80gb --zero-stage 1 --num-experts 64 --global-batch-size 768 --hidden-size 512 "
        f"--ddp-bucket-size 1000000 --moe-ffn-hidden-size 128 --micro-batch-size 1 {layout}"
    )
    config = config_of(flags)
    extrapolated = make_plan(config, 512)
    monkeypatch.setattr(stage_costs, "_MANY_REPLICAS", 10**6)
    complete = make_plan(config, 512)
    assert extrapolated.prediction.total == pytest.approx(complete.prediction.total, rel=0.01)
    assert extrapolated.bytes_by_rank == pytest.approx(complete.bytes_by_rank, rel=0.01)
    few, all_ranks = (
        {(row.rank, row.group, row.operation, row.during): row.bytes for row in one.communication}
        for one in (extrapolated, complete)
    )
    assert few == pytest.approx(all_ranks, rel=0.01, abs=1000)
