"""Compares the planned time of a step with closed forms of network, passes and pipeline, and tests the
effects of single settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megatron.arguments import parse_args
from megatron.config import Config
from megatron.config.sections.parallel import ParallelConfig
from megatron.mpu.mesh import Mesh
from megatron.optimizer.batch_schedule import BEGIN, Progress
from megatron.pipeline.schedule import simulate_schedule
from megatron.planner.layer_memory import planned_run
from megatron.planner.network import ACHIEVED, ALL_REDUCE, ALL_TO_ALL, LATENCY_S, Network, find_network
from megatron.planner.simulation.passes import GROUP_AXES, Collective, Group, group_name
from megatron.planner.simulation.stage_costs import rank_update
from megatron.planner.step_time import (
    PipelineTime,
    StageTime,
    StepTime,
    find_cluster,
    predict_step,
    time_lines,
)

VOCAB = 50257
BASE = (
    "--dry-run --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 50257 --micro-batch-size 2 --global-batch-size 512 "
    "--lr 1e-4 --train-samples 5120 --bf16 --hidden-dropout 0 --attention-dropout 0 --gpu a100-80gb"
)

# Group of rank 0 -> the coordinates that its ranks share, with the axes of DeepSpeed's topology.
SHARED_COORDINATES: dict[Group, dict[str, int]] = {
    "tensor": {"pipe": 0, "data": 0},
    "data": {"pipe": 0, "model": 0},
    "pipeline": {"data": 0, "model": 0},
    "model": {"data": 0},
    "stage": {"pipe": 0},
    "world": {},
}


def config_of(flags: str = "") -> Config:
    return parse_args([*BASE.split(), *flags.split()], {})


def predicted(flags: str = "", start: Progress = BEGIN) -> StepTime:
    config = config_of(flags)
    cluster = find_cluster(config)
    assert cluster is not None
    return predict_step(replace(planned_run(config, VOCAB), start=start), cluster)


SIZE = 10**9
NEAR, FAR = ACHIEVED * 100e9, ACHIEVED * 50e9
"""Bytes per second within a node of 4 devices (NEAR), and from a node to other nodes (FAR)."""


@pytest.mark.parametrize(
    ("group", "operation", "sizes", "seconds", "near_steps", "far_steps"),
    [
        ("tensor", ALL_REDUCE, (16, 4, 1), 2 * 3 / 4 * SIZE / NEAR, 4, 0),
        # 4 data-parallel rings, one per tensor rank, share the node's 50 GB/s.
        ("data", ALL_REDUCE, (16, 4, 1), 2 * 3 / 4 * SIZE / (FAR / 4), 0, 4),
        ("data", "_allgather_base_", (16, 4, 1), 3 / 4 * SIZE / (FAR / 4), 0, 4),
        # With 2 members of a ring per node, half as many rings leave the node.
        ("data", "_allgather_base_", (16, 2, 1), 7 / 8 * SIZE / (FAR / 2), 0, 6),
        ("data", ALL_REDUCE, (1, 1, 1), 0, 0, 0),
        ("data", ALL_TO_ALL, (4, 1, 1), 3 / 4 * SIZE / NEAR, 3, 0),
        # Each of a node's 4 devices sends 12 of 16 parts to other nodes.
        ("stage", ALL_TO_ALL, (16, 2, 1), 12 / 16 * 4 * SIZE / FAR, 0, 15),
        ("data", ALL_TO_ALL, (1, 1, 1), 0, 0, 0),
    ],
)
def test_collectives_within_a_node_and_between_nodes(
    group: Group, operation: str, sizes: tuple[int, int, int], seconds: float, near_steps: int, far_steps: int
) -> None:
    """Compares the predicted seconds with formulas: bytes over the slowest link, plus a latency per step.
    sizes: (world size, TP, PP)."""
    network = Network.of_links(node_size=4, intra_node_gbps=800, inter_node_gbps=400)  # 100 and 50 GB/s
    found = network.seconds(Collective(group, operation, SIZE), Mesh.create(*sizes))
    latency = near_steps * LATENCY_S["intra"] + far_steps * LATENCY_S["inter"]
    assert found == pytest.approx(seconds + latency)


def test_messages_between_stages() -> None:
    network = Network.of_links(node_size=4, intra_node_gbps=800, inter_node_gbps=400)
    near, far = Mesh.create(4, tp_size=1, pp_size=4), Mesh.create(8, tp_size=4, pp_size=2)
    assert network.message_seconds(SIZE, 0, 1, near) == pytest.approx(SIZE / NEAR + LATENCY_S["intra"])
    assert network.message_seconds(SIZE, 0, 4, far) == pytest.approx(SIZE / (FAR / 4) + LATENCY_S["inter"])


def test_muon_adds_at_most_4_percent_to_the_step_of_a_7b_on_64_gpus() -> None:
    """The batch has 1 M tokens, and the Newton-Schulz iterations are in fp32."""
    flags = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 "
        "--seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rotary "
        "--glu-activation swiglu --normalization RMSNorm "
        "--disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 1 "
        "--global-batch-size 256 --zero-stage 1 --checkpoint-activations --world-size 64"
    )
    adam, muon, fp32 = (
        predicted(f"{flags} {optimizer}")
        for optimizer in ("", "--optimizer muon", "--optimizer muon --muon-matmul-dtype fp32")
    )
    # 5 iterations of 3 products of each matrix of the busiest rank, at the peak rate of an A100.
    gate_and_value = 5 * 2 * (4 * 4096**2 * 11008 + 2 * 4096**3)
    assert gate_and_value / 312e12 < muon.optimizer - adam.optimizer < 0.04 * adam.total
    assert muon.total < 1.04 * adam.total
    assert fp32.optimizer > 4 * muon.optimizer


def test_a_pass_takes_at_least_the_measured_host_time_of_its_kernels() -> None:
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64"
    none, usual, slow, slower = (
        predicted(f"{flags} --host-us-per-kernel {us}").stages[0] for us in (0, 8, 1000, 2000)
    )
    assert slower.forward == pytest.approx(2 * slow.forward)
    assert slower.backward == pytest.approx(2 * slow.backward)
    assert none.backward < usual.backward < slow.backward
    assert usual == predicted(flags).stages[0]
    assert predicted(f"{flags} --cuda-graph-impl local --host-us-per-kernel 1000").stages[0] == none


@pytest.mark.parametrize("group", ["tensor", "data", "pipeline", "model", "stage", "world", (0, 3)])
@pytest.mark.parametrize("sizes", [(1, 4, 2), (2, 4, 2), (8, 4, 4), (2, 4, 16)])
def test_a_group_takes_as_long_as_its_ranks_say(group: Group, sizes: tuple[int, int, int]) -> None:
    """The network computes the sizes of groups without a list of their ranks. The test compares both."""
    tp_size, pp_size, dp_size = sizes
    mesh = Mesh.create(tp_size * pp_size * dp_size, tp_size, pp_size)
    network, size = Network.of_links(8, 1200, 400), 10**8
    ranks = mesh.topology.filter_match(**SHARED_COORDINATES.get(group, {"data": 0, "model": 0}))
    if not isinstance(group, str):
        ranks = [ranks[index] for index in group]
    in_node = max(Counter(rank // 8 for rank in ranks).values())
    expected = network.collective_seconds(True, size, len(ranks), in_node, mesh.world_size)
    assert network.seconds(Collective(group, ALL_REDUCE, size), mesh) == pytest.approx(expected)


@pytest.mark.parametrize("sizes", [(2, 2, 8, 4), (2, 1, 8, 8), (1, 2, 8, 16), (4, 1, 4, 2), (2, 2, 2, 2)])
def test_groups_with_experts_have_names_and_the_time_of_their_ranks(sizes: tuple[int, int, int, int]) -> None:
    """sizes: (TP, CP, DP, EP). The all-to-all of experts is as fast as the slowest connection in its
    group."""
    tp_size, cp_size, dp_size, ep_size = sizes
    mesh = Mesh.create(2 * tp_size * cp_size * dp_size, tp_size, 2, 0, cp_size, ep_size)
    network, size = Network.of_links(8, 1200, 400), 10**8
    for axes in GROUP_AXES.values():
        ranks = mesh.ranks_along(axes, 0)
        if len(ranks) == 1:
            continue
        group = group_name(ranks, mesh)
        assert isinstance(group, str) and mesh.ranks_along(GROUP_AXES[group], 0) == ranks
        in_node = max(Counter(rank // 8 for rank in ranks).values())
        expected = network.all_to_all_seconds(size, len(ranks), in_node)
        assert network.seconds(Collective(group, ALL_TO_ALL, size), mesh) == pytest.approx(expected)
    assert (network.seconds(Collective("expert", ALL_TO_ALL, size), mesh) > size / 100e9) == (ep_size > 8)


def test_flags_override_the_usual_network() -> None:
    usual = find_network(config_of())
    assert usual == Network.of_links(8, 2400, 1600)
    given = find_network(config_of("--node-size 4 --intra-node-gbps 100 --inter-node-gbps 50"))
    assert given == Network.of_links(4, 100, 50)
    assert find_network(parse_args(BASE.replace("--gpu a100-80gb", "").split(), {})) is None


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
    pipeline = PipelineTime(parallel, stages, transfers, 100)
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
    # The last stage also has the head. It is the slowest stage, and the other stages wait for it.
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
        # A third of the matrix products are weight gradients. The all-reduces of input gradients are then
        # exposed.
        assert after.matmul / 5 < after.weight < after.backward / 2
        assert after.matmul == pytest.approx(before.matmul)
        # Concurrent all-reduces lengthen kernels.
        assert after.memory == pytest.approx(before.memory, rel=0.1)
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
    # The run logs 72 B s L h^2 (1 + s / 6h + V / 12Lh) FLOPs without recomputation. The utilization uses
    # them, too.
    flops = 72 * 512 * 2048 * 24 * 2048**2 * (1 + 1 / 6 + 50432 / (12 * 24 * 2048))
    assert step.logged_tflops == pytest.approx(flops / step.total / 16 / 1e12)
    assert step.mfu == pytest.approx(step.logged_tflops / 312)
    assert step.days == pytest.approx(10 * step.total / 86400)
    for stage in step.stages:
        assert stage.forward + stage.backward == pytest.approx(
            stage.matmul + stage.memory + stage.communication
        )
    assert "s predicted" in time_lines(step) and "MFU" in time_lines(step)


def test_a_ramp_up_takes_longer_and_a_resumed_length_has_the_days_that_remain() -> None:
    flags = "--world-size 16 --pipeline-model-parallel-size 4 --train-samples 12800"
    ramp = f"{flags} --rampup-batch-size 64 448 6400"
    flat, ramped = predicted(flags), predicted(ramp)
    assert ramped.total == flat.total
    # 100 steps of 64 samples with 8 micro-batches, then 12 (of 12.5) steps of 512 samples with 64
    # micro-batches.
    stages = [(time.forward, time.backward) for time in flat.stages]
    forward, backward = zip(*stages, strict=True)
    short = simulate_schedule("1f1b", forward, backward, flat.transfers, 8).makespan
    outside = flat.total - flat.pipeline
    expected = 100 * (short + outside) + 12 * flat.total
    assert ramped.days == pytest.approx(expected / 86400, rel=1e-3)
    assert flat.days == pytest.approx(25 * flat.total / 86400)
    assert "days for the whole run" in time_lines(ramped)
    # After 600 steps of 1 sample: 91 steps of 64 samples, then 12 of 512.
    resumed = predicted(ramp, Progress(600, 600, 600 * 2048))
    assert resumed.days == pytest.approx((91 * (short + outside) + 12 * flat.total) / 86400, rel=1e-3)
    assert "days for the rest of the run" in time_lines(resumed)


def test_what_makes_a_step_slower() -> None:
    step = predicted("--world-size 16 --tensor-model-parallel-size 4").total
    assert predicted("--world-size 16 --tensor-model-parallel-size 4 --intra-node-gbps 600").total > step
    assert predicted("--world-size 16 --tensor-model-parallel-size 4 --inter-node-gbps 100").total > step
    assert predicted("--world-size 16 --tensor-model-parallel-size 4 --node-size 2").total > step
    assert predicted("--world-size 16 --tensor-model-parallel-size 4 --checkpoint-activations").total > step
    # Without TP, dropout takes time. With TP its kernel also adds the bias, which saves as much memory
    # traffic as the dropout's backward pass costs.
    assert predicted("--world-size 16 --hidden-dropout 0.1").total > predicted("--world-size 16").total
    assert predicted("--world-size 16 --tensor-model-parallel-size 4 --gpu h100-80gb").total < step


@pytest.mark.parametrize("recompute", ["", "--checkpoint-activations"])
def test_chunks_hide_communication_behind_products(recompute: str) -> None:
    """If matrix products take longer than messages, the forward pass exposes only one chunk."""
    sharded = (
        "--world-size 8 --tensor-model-parallel-size 8 --sequence-parallel --hidden-size 8192 "
        f"--num-attention-heads 64 {recompute}"
    )
    plain, chunks = predicted(sharded), predicted(f"{sharded} --tp-comm-overlap")
    assert 0.2 * plain.exposed_communication < chunks.exposed_communication < plain.exposed_communication
    odd = f"{sharded} --seq-length 2024"  # shards of 11 x 23 positions: one chunk
    whole = [predicted(flags).exposed_communication for flags in (odd, f"{odd} --tp-comm-overlap")]
    # With recomputation 12 instead of 11 collectives per layer wait, since the last one is also repeated.
    assert whole[1] == pytest.approx(whole[0] * (12 / 11 if recompute else 1), rel=0.03)


def test_layers_are_gathered_and_reduced_while_others_compute() -> None:
    sharded = "--world-size 16 --zero-stage 3"
    overlapped = predicted(sharded)
    waits = [predicted(f"{sharded} --no-overlap-{what}") for what in ("grad-reduce", "param-gather")]
    for plain in waits:
        assert overlapped.exposed_communication < plain.exposed_communication


def test_the_forward_pass_hides_the_gather_of_all_buckets_but_the_first() -> None:
    """With TP the GPU has one hardware queue, so the program starts one all-gather after the other."""
    flags = (
        "--world-size 64 --tensor-model-parallel-size 4 --zero-stage 1 --num-layers 40 --hidden-size 5120 "
        "--num-attention-heads 40 --micro-batch-size 4 --global-batch-size 1024 --gpu h100-80gb"
    )
    overlapped, plain = predicted(flags), predicted(f"{flags} --no-overlap-param-gather")
    assert overlapped.micro_batches == 16
    assert 0 < overlapped.gather < 0.15 * plain.gather


@pytest.mark.parametrize(("tensor", "chained"), [(4, [True, False]), (1, [False, False])])
def test_only_a_first_stage_with_one_hardware_queue_chains_the_gathers(
    tensor: int, chained: list[bool]
) -> None:
    """Later stages gather while they wait for their first message."""
    config = config_of(
        f"--world-size {8 * tensor} --tensor-model-parallel-size {tensor} --pipeline-model-parallel-size 2 "
        "--zero-stage 1 --ddp-bucket-size 1"
    )
    run = planned_run(config, VOCAB)
    updates = [rank_update(run, rank) for rank in range(2)]
    assert [update.chained for update in updates] == chained
    for rank, update in enumerate(updates):
        layers = run.stages.num_transformer_layers(rank)
        assert len(update.gathers) == layers


def test_a_plan_that_no_published_run_reached_says_so() -> None:
    fast = predicted("--world-size 1 --micro-batch-size 8")
    assert ("no published run has reached" in time_lines(fast)) == (100 * fast.mfu > 60.7)
    slow = predicted("--world-size 16 --tensor-model-parallel-size 8 --micro-batch-size 1")
    assert not slow.doubt and "published" not in time_lines(slow)


@pytest.mark.parametrize(
    ("fewer", "more"),
    [
        ("", "--attention-dropout 0.1"),
        ("", "--position-embedding-type alibi"),
        ("--seq-length 2047", ""),
        ("--ffn-hidden-size 8184", ""),
        (
            "--hidden-size 1984 --num-attention-heads 16 --kv-channels 124",
            "--hidden-size 1984 --kv-channels 128",
        ),
        ("--vocab-size 50256", "--vocab-size 50257"),
    ],
)
def test_harmless_changes_of_a_setting_change_the_time_by_little(fewer: str, more: str) -> None:
    assert predicted(fewer).total == pytest.approx(predicted(more).total, rel=0.12)


def test_rows_that_are_not_padded_are_slower_but_still_on_tensor_cores() -> None:
    padded, unpadded = predicted(""), predicted("--pad-vocab-size-to 50257")
    assert padded.total < unpadded.total < 1.5 * padded.total


def test_a_window_saves_the_time_of_the_scores_outside_of_it() -> None:
    long = "--seq-length 16384 --max-position-embeddings 16384 --micro-batch-size 1"
    half, tenth = (predicted(f"{long} --window-size {window}") for window in (8192, 1638))
    whole = predicted(long)
    assert tenth.total < 0.8 * half.total < 0.8 * whole.total


def test_layers_with_and_without_a_window_have_their_own_times_and_weights() -> None:
    long = "--seq-length 16384 --max-position-embeddings 16384 --micro-batch-size 1 --num-layers 8"
    long += " --world-size 2 --pipeline-model-parallel-size 2 --partition-method"
    window = "--window-size 1024"
    windows, none = (predicted(f"{long} stages:4,4 {flags}").stages for flags in (window, ""))
    pattern = f"{window} --window-pattern W W W W F F F F"
    first, last = predicted(f"{long} stages:4,4 {pattern}").stages
    for found, expected in ((first, windows[0]), (last, none[1])):
        assert found.forward == pytest.approx(expected.forward, rel=1e-6)
        assert found.backward == pytest.approx(expected.backward, rel=1e-6)
    assert first.forward < 0.7 * last.forward
    mixed = predicted(f"{long} stages:5,3 {window} --window-pattern F W").stages[0]
    layers = 3 * none[0].forward / 4 + 2 * windows[0].forward / 4
    assert mixed.forward == pytest.approx(layers, rel=0.02)

    def layers_of_stage_0(method: str) -> int:
        plan = planned_run(config_of(f"{long} {method} {pattern}"), VOCAB).stages
        return plan.num_transformer_layers(0)

    assert layers_of_stage_0("type:transformer") == 4
    assert layers_of_stage_0("time") == 5
    assert layers_of_stage_0("type:@window|@full:3") == 5


def test_one_process_reduces_no_gradients() -> None:
    step = predicted("--global-batch-size 8")
    assert step.reduction + step.exposed_communication < 1e-9 < step.optimizer
