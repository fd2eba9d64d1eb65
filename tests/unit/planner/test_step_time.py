"""The time of a step: closed forms of network, passes and pipeline; effects of single settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron.config import Config
from megatron.config.cli import parse_args
from megatron.config.sections.parallel import ParallelConfig
from megatron.mpu.layout import ParallelLayout
from megatron.pipeline.schedule import simulate_schedule
from megatron.planner.stages import plan_stages
from megatron.planner.timing.communication import ALL_GATHER, ALL_REDUCE, DATA, SEND, STAGES, TENSOR, Exchange
from megatron.planner.timing.network import ACHIEVED, LATENCY_S, Network, find_network
from megatron.planner.timing.step_time import (
    Achieved,
    PipelineTime,
    StageTime,
    StepTime,
    find_cluster,
    planned_step,
    predict_step,
    time_lines,
)
from megatron.planner.timing.work import MEGATRON_2021, layer_work, program_of

VOCAB = 50257
BASE = (
    "--dry-run --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 50257 --micro-batch-size 2 --global-batch-size 512 "
    "--lr 1e-4 --train-samples 5120 --bf16 --hidden-dropout 0 --attention-dropout 0 --gpu a100-80gb"
)


def config_of(flags: str = "") -> Config:
    return parse_args([*BASE.split(), *flags.split()], {})


def predicted(flags: str = "") -> StepTime:
    config = config_of(flags)
    cluster = find_cluster(config)
    assert cluster is not None
    return predict_step(config, plan_stages(config, VOCAB), VOCAB, cluster)


def test_collectives_within_a_node_and_between_nodes() -> None:
    network = Network.of_links(node_size=4, intra_node_gbps=800, inter_node_gbps=400)  # 100 and 50 GB/s
    layout = ParallelLayout.create(16, tp_size=4, pp_size=1)
    size = 10**9
    inside = network.seconds(Exchange(TENSOR, ALL_REDUCE, "", size), layout)
    assert inside == pytest.approx(2 * 3 / 4 * size / (ACHIEVED * 100e9) + 4 * LATENCY_S["intra"])
    # 4 data-parallel rings, one per tensor rank, share the node's 50 GB/s.
    outside = network.seconds(Exchange(DATA, ALL_REDUCE, "", size), layout)
    assert outside == pytest.approx(2 * 3 / 4 * size / (ACHIEVED * 50e9 / 4) + 4 * LATENCY_S["inter"])
    gather = network.seconds(Exchange(DATA, ALL_GATHER, "", size), layout)
    assert gather == pytest.approx(3 / 4 * size / (ACHIEVED * 50e9 / 4) + 4 * LATENCY_S["inter"])
    # With 2 members of a ring per node, half as many rings leave it.
    pairs = ParallelLayout.create(16, tp_size=2, pp_size=1)
    assert network.seconds(Exchange(DATA, ALL_GATHER, "", size), pairs) == pytest.approx(
        7 / 8 * size / (ACHIEVED * 50e9 / 2) + 6 * LATENCY_S["inter"]
    )
    alone = ParallelLayout.create(1, tp_size=1, pp_size=1)
    assert network.seconds(Exchange(DATA, ALL_REDUCE, "", size), alone) == 0


def test_messages_between_stages() -> None:
    network = Network.of_links(node_size=4, intra_node_gbps=800, inter_node_gbps=400)
    near = ParallelLayout.create(4, tp_size=1, pp_size=4)
    message = Exchange(STAGES, SEND, "", 10**9, peer=1)
    assert network.seconds(message, near) == pytest.approx(1 / (ACHIEVED * 100) + LATENCY_S["intra"])
    far = ParallelLayout.create(8, tp_size=4, pp_size=2)
    assert network.seconds(message, far) == pytest.approx(4 / (ACHIEVED * 50) + LATENCY_S["inter"])


def test_flags_override_the_usual_network() -> None:
    usual = find_network(config_of())
    assert usual == Network.of_links(8, 2400, 1600)
    given = find_network(config_of("--node-size 4 --intra-node-gbps 100 --inter-node-gbps 50"))
    assert given == Network.of_links(4, 100, 50)
    assert find_network(parse_args(BASE.replace("--gpu a100-80gb", "").split(), {})) is None


def test_a_layer_has_the_flops_and_weights_of_its_matrices() -> None:
    config = config_of()
    work = layer_work(config, program_of(config))
    tokens, h, s = 2 * 2048, 2048, 2048
    assert work.forward.flops == 24 * tokens * h * h + 4 * tokens * s * h
    # The backward pass of fused attention recomputes the scores.
    assert work.backward.flops == 2 * work.forward.flops + 2 * tokens * s * h
    # 14 hidden states of traffic in the norms, residuals and matrices, 8 of attention, 4 x 4 of the MLP.
    assert work.forward.bytes == 2 * 12 * h * h + 2 * tokens * h * (14 + 8 + 16)
    # A weight is read, its fp32 sum read and written.
    assert work.backward.bytes == (2 + 8) * 12 * h * h + 2 * tokens * h * (26 + 25 + 32)
    assert work.overlap_flops == 2 * tokens * 7 * h * h


def test_recomputation_repeats_the_forward_pass() -> None:
    kept, again = (
        layer_work(config_of(flags), program_of(config_of(flags)))
        for flags in ("", "--checkpoint-activations")
    )
    assert again.backward.bytes == kept.backward.bytes + kept.forward.bytes
    assert again.backward.launches == kept.backward.launches + kept.forward.launches
    # The last matrix product is not recomputed.
    last = 2 * 2 * 2048 * 4 * 2048 * 2048
    assert again.backward.flops == kept.backward.flops + kept.forward.flops - last


def test_heads_without_tensor_cores_are_slow() -> None:
    aligned, odd = (
        layer_work(parse_args(BASE.replace("heads 16", f"heads {heads}").split(), {}), MEGATRON_2021)
        for heads in (16, 512)
    )
    assert aligned.forward.misaligned_flops == 0
    assert odd.forward.misaligned_flops == 4 * 2 * 2048 * 2048 * 2048
    assert odd.forward.flops + odd.forward.misaligned_flops == aligned.forward.flops


@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [("1f1b", 1), ("dualpipev", 2), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 1)],
)
@pytest.mark.parametrize("uneven", [False, True])
def test_more_micro_batches_are_extrapolated_as_they_are_simulated(
    schedule: str, per_rank: int, uneven: bool
) -> None:
    stages = [
        StageTime(stage, 0, 1.0 + 0.3 * (uneven and stage == 2), 2.0, 0.0, 0.0, 0.0, 0.9)
        for stage in range(8)
    ]
    transfers = [0.1] * 7
    parallel = ParallelConfig(
        pipeline_schedule=schedule,
        pipeline_model_parallel_size=8 // per_rank,
        virtual_pipeline_stages=per_rank if schedule == "interleaved" else 1,
    )
    pipeline = PipelineTime.measure(parallel, stages, transfers, 100)
    forward, backward, weight = (
        [getattr(time, kind) for time in stages] for kind in ("forward", "backward", "weight")
    )
    exact = simulate_schedule(schedule, forward, backward, transfers, 100, per_rank, weight).makespan
    assert pipeline.seconds(100) == pytest.approx(exact, rel=1e-3)
    few = simulate_schedule(schedule, forward, backward, transfers, 12, per_rank, weight).makespan
    assert pipeline.seconds(12) == pytest.approx(few)


def test_equal_stages_have_the_textbook_bubble() -> None:
    step = predicted("--world-size 4 --pipeline-model-parallel-size 4 --intra-node-gbps 1e9")
    times = [time.forward + time.backward for time in step.stages]
    # The last stage has the head too, so it is the slowest: the others wait for it.
    longest = max(times)
    expected = (step.micro_batches - 1) * longest + sum(times)
    assert step.pipeline == pytest.approx(expected, rel=0.03)
    busy = step.micro_batches * sum(times) / 4
    assert step.bubble == pytest.approx(1 - busy / step.pipeline)


def test_zero_bubble_divides_the_backward_pass_and_hides_no_all_reduce() -> None:
    flags = "--world-size 8 --pipeline-model-parallel-size 4 --tensor-model-parallel-size 2"
    plain, split = predicted(flags), predicted(f"{flags} --pipeline-schedule zero-bubble")
    assert all(time.weight == 0 for time in plain.stages)
    for before, after in zip(plain.stages, split.stages, strict=True):
        assert after.forward <= before.forward  # 1f1b gathers the parts of a message
        # A third of the matrix products; the all-reduces of inputs' gradients are not hidden any more.
        assert after.matmul / 4 < after.weight < after.backward / 2
        assert after.matmul == pytest.approx(before.matmul) and after.memory == pytest.approx(before.memory)
        assert after.communication > before.communication
    fast = "--intra-node-gbps 1e9 --inter-node-gbps 1e9"
    assert (
        predicted(f"{flags} {fast} --pipeline-schedule zero-bubble").total
        < predicted(f"{flags} {fast}").total
    )


def test_the_parts_add_up_and_the_rates_follow() -> None:
    step = predicted("--world-size 16 --tensor-model-parallel-size 2 --zero-stage 1")
    assert step.total == step.pipeline + step.reduction + step.optimizer + step.gather
    assert step.tokens_per_second == pytest.approx(512 * 2048 / step.total)
    # The run logs 72 B s L h^2 (1 + s / 6h + V / 16Lh) without recomputation; utilisation is the same here.
    flops = 72 * 512 * 2048 * 24 * 2048**2 * (1 + 1 / 6 + 50432 / (16 * 24 * 2048))
    assert step.logged_tflops == pytest.approx(flops / step.total / 16 / 1e12)
    assert step.mfu == pytest.approx(step.logged_tflops / 312)
    assert step.days == pytest.approx(10 * step.total / 86400)
    for stage in step.stages:
        assert stage.forward + stage.backward == pytest.approx(
            stage.matmul + stage.memory + stage.communication
        )
    assert "s predicted" in time_lines(step) and "MFU" in time_lines(step)


def test_a_ramp_up_takes_longer() -> None:
    flags = "--world-size 16 --pipeline-model-parallel-size 4 --train-samples 12800"
    flat, ramped = predicted(flags), predicted(f"{flags} --rampup-batch-size 64 448 6400")
    assert ramped.total == flat.total
    # 100 steps of 64 samples with 8 micro-batches each, and 12.5 of 512 with 64; the half is not run.
    stages = [(time.forward, time.backward) for time in flat.stages]
    forward, backward = zip(*stages, strict=True)
    short = simulate_schedule("1f1b", forward, backward, flat.transfers, 8).makespan
    outside = flat.total - flat.pipeline
    expected = 100 * (short + outside) + 12 * flat.total
    assert ramped.days == pytest.approx(expected / 86400, rel=1e-3)
    assert flat.days == pytest.approx(25 * flat.total / 86400)


def test_what_makes_a_step_slower() -> None:
    step = predicted("--world-size 16 --tensor-model-parallel-size 4").total
    assert predicted("--world-size 16 --tensor-model-parallel-size 4 --intra-node-gbps 600").total > step
    assert predicted("--world-size 16 --tensor-model-parallel-size 4 --inter-node-gbps 100").total > step
    assert predicted("--world-size 16 --tensor-model-parallel-size 4 --node-size 2").total > step
    assert predicted("--world-size 16 --tensor-model-parallel-size 4 --checkpoint-activations").total > step
    # With more TP ranks the kernel also adds the bias, which saves as many bytes as the backward pass costs.
    assert predicted("--world-size 16 --hidden-dropout 0.1").total > predicted("--world-size 16").total
    assert predicted("--world-size 16 --tensor-model-parallel-size 4 --gpu h100-80gb").total < step


def test_the_constants_scale_the_passes() -> None:
    config = config_of("--world-size 1")
    cluster = find_cluster(config)
    assert cluster is not None
    plan = plan_stages(config, VOCAB)
    fast, slow = (
        predict_step(
            config, plan, VOCAB, dataclasses.replace(cluster, achieved=Achieved(matmul, 0.4))
        ).stages[0]
        for matmul in (0.8, 0.4)
    )
    assert slow.matmul == pytest.approx(2 * fast.matmul)
    assert slow.memory == pytest.approx(fast.memory)


@pytest.mark.parametrize("recompute", ["", "--checkpoint-activations"])
def test_chunks_hide_communication_behind_products(recompute: str) -> None:
    """Of the forward pass only one chunk is left, if the products take longer than the messages."""
    sharded = (
        "--world-size 8 --tensor-model-parallel-size 8 --sequence-parallel --hidden-size 8192 "
        f"--num-attention-heads 64 {recompute}"
    )
    plain, chunks = predicted(sharded), predicted(f"{sharded} --tp-comm-overlap")
    assert 0.2 * plain.exposed_communication < chunks.exposed_communication < plain.exposed_communication
    assert chunks.total < plain.total
    odd = f"{sharded} --seq-length 2024"  # shards of 11 x 23 positions: one chunk
    whole = [predicted(flags).exposed_communication for flags in (odd, f"{odd} --tp-comm-overlap")]
    # With recomputation 12 instead of 11 collectives per layer wait: the last one is repeated, too.
    assert whole[1] == pytest.approx(whole[0] * (12 / 11 if recompute else 1), rel=0.01)


def test_layers_are_gathered_and_reduced_while_others_compute() -> None:
    sharded = "--world-size 16 --zero-stage 3"
    overlapped = predicted(sharded)
    waits = [predicted(f"{sharded} --no-overlap-{what}") for what in ("grad-reduce", "param-gather")]
    for plain in waits:
        assert overlapped.exposed_communication < plain.exposed_communication


def test_a_program_that_all_reduces_gradients_reduces_twice_as_long() -> None:
    config = config_of("--world-size 16 --zero-stage 1 --no-overlap-grad-reduce --no-overlap-param-gather")
    cluster = find_cluster(config)
    assert cluster is not None
    program = program_of(config)
    ours, theirs = (
        predict_step(
            config,
            plan_stages(config, VOCAB),
            VOCAB,
            cluster,
            dataclasses.replace(program, all_reduces_gradients=all_reduces),
        )
        for all_reduces in (False, True)
    )
    assert theirs.reduction == pytest.approx(2 * ours.reduction, rel=0.01)
    assert theirs.gather == ours.gather


def test_the_costs_of_dropout_in_the_documentation_are_those_of_the_plan(monkeypatch) -> None:
    flags = (
        "--dry-run --world-size 64 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 "
        "--num-layers 40 --hidden-size 5120 --num-attention-heads 40 --seq-length 2048 "
        "--max-position-embeddings 2048 --vocab-size 50257 --micro-batch-size 1 --global-batch-size 512 "
        "--train-samples 1000000 --lr 1e-4 --bf16 --zero-stage 1 --gpu a100-80gb"
    )
    page = (Path(__file__).resolve().parents[3] / "docs" / "tuning.md").read_text()

    def seconds(more: str = "") -> str:
        config = parse_args([*flags.split(), *more.split()], {})
        step = planned_step(config, plan_stages(config, 50257), 50257)
        assert step is not None
        return f"{step.total:.2f} s"

    without, kernels = seconds("--hidden-dropout 0 --attention-dropout 0"), seconds()
    monkeypatch.setenv("MEGATRON_KERNELS", "pytorch")
    found = (
        f"{without} per step without dropout, {kernels} with the kernels' dropout, {seconds()} with PyTorch's"
    )
    assert found in " ".join(page.split())
