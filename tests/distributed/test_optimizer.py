"""Every layout has one optimizer: sums in fp32, one norm, clipping, loss scale, ZeRO-1, and errors on
every rank."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron.checkpoint.record import TrainingState
from megatron.data.loader import MicroBatch
from megatron.mpu.parameters import merge_shards
from megatron.optimizer import flat_group
from megatron.optimizer.flat_group import ALIGNMENT
from megatron.optimizer.gradient_norm import NORM_CHUNK, accurate_norm
from megatron.optimizer.mixed_precision import NonFiniteError
from megatron.optimizer.overlap import Bucket
from tests.distributed.parity import assert_same_numbers
from tests.reference.plain_gpt import plain_gpt_logits
from tests.support.layouts import (
    RATE,
    VOCAB,
    Row,
    build_engine,
    config_of,
    full_weights,
    global_batch,
    sample_tokens,
    train,
    train_layout,
    weights_of,
)
from tests.support.pool import WorldError, run_world
from tests.support.trainers import make_trainer

LAYOUTS = {
    "one process": Row(),
    "TP 2": Row(tp=2, micro_batch=2),
    "PP 2": Row(pp=2, micro_batch=2),
    "DP 2, ZeRO 1": Row(dp=2, zero=1, micro_batch=2),
    "TP 2 x PP 2": Row(tp=2, pp=2, micro_batch=2),
    "PP 2 x DP 2, ZeRO 1": Row(pp=2, dp=2, zero=1, micro_batch=2),
}
TWO_LAYERS = {"num_layers": 2}


# --- sums in fp32 ---


def backward_many_times(precision):
    """Returns the sum of a parameter's gradients: 1 once, then 512 times 2^-9, which bf16 would lose beside
    1."""
    engine = build_engine(config_of(Row(precision=precision)))
    parameter = dict(engine.module.named_parameters())["3.input_layernorm.weight"]
    for gradient in [1.0] + [2.0**-9] * 512:
        (parameter * gradient).sum().backward()
    return parameter.dtype, parameter.main_grad.dtype, parameter.main_grad.unique().tolist()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_small_gradients_are_not_lost_in_a_large_sum(precision):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    assert run_world(1, backward_many_times, precision) == [(dtype, torch.float32, [2.0])]


def norm_of_copies_of_one_sample(row, copies):
    """Returns the grad norm of a global batch of equal samples. It must equal the norm of a single sample."""
    engine = build_engine(config_of(row, model=TWO_LAYERS, batch={"global_batch_size": copies}))
    batch = MicroBatch.from_rows(sample_tokens(0, 1), 0)
    engine.train_step(iter([batch] * (copies // row.dp)), copies, RATE)
    return engine.optimizer.grad_norm


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("row", [Row(), Row(pp=2), Row(pp=2, zero=1), Row(dp=2, zero=1)], ids=str)
def test_many_micro_batches_add_up_in_fp32(row, precision):
    # Dividing the loss by a power of two is exact in every format, so only the sum could lose digits.
    row = replace(row, precision=precision)
    expected = run_world(1, norm_of_copies_of_one_sample, replace(row, pp=1, dp=1, zero=0), 1)[0]
    for norm in run_world(row.world_size, norm_of_copies_of_one_sample, row, 128):
        # A tied embedding's two gradients are added in 16 bits if both are on one stage, and in fp32 over two
        # stages.
        assert norm == pytest.approx(expected, rel=1e-6 if row.pp == 1 else 1e-3)


# --- one norm, one clipping ---


def initial_weights_and_first_norm(row):
    engine = build_engine(config_of(row))
    weights = weights_of(engine)
    train(engine, range(1))
    return weights, engine.optimizer.grad_norm


def plain_norm(weights):
    """Returns the first step's norm in fp64, by plain autograd over the full model, which counts each
    parameter once."""
    weights = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    tokens, labels = global_batch(0)
    logits = plain_gpt_logits(weights, tokens, layers=4, heads=4, vocab=VOCAB)
    torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1)).backward()
    return math.sqrt(sum(weight.grad.square().sum().item() for weight in weights.values()))


COUNTED_ONCE = [
    *LAYOUTS.values(),
    *(Row(tp=2, dp=2, zero=zero, micro_batch=2) for zero in (2, 3)),
    *(
        replace(row, precision=precision)
        for row in (Row(pp=2), Row(pp=2, zero=1), Row(tp=2, pp=2, micro_batch=2))
        for precision in ("bf16", "fp16")
    ),
]


@pytest.mark.gate(
    rows=4,
    also=[
        str(LAYOUTS["PP 2 x DP 2, ZeRO 1"]),
        *(str(Row(tp=2, dp=2, zero=z, micro_batch=2)) for z in (2, 3)),
    ],
)
@pytest.mark.parametrize("row", COUNTED_ONCE, ids=str)
def test_the_norm_counts_tied_and_replicated_parameters_once(row):
    ranks = run_world(row.world_size, initial_weights_and_first_norm, row)
    expected = plain_norm(full_weights([weights for weights, _ in ranks]))
    # A tied weight that is counted twice changes the norm by one tenth, bf16 rounding by a few thousandths.
    bound = 1e-6 if row.precision == "fp32" else 5e-3
    assert [norm for _, norm in ranks] == [pytest.approx(expected, rel=bound)] * row.world_size


def weights_before_and_after_a_clipped_step(row, clip):
    sgd = {"optimizer": "sgd", "weight_decay": 0.0, "clip_grad": clip}
    engine = build_engine(config_of(row, optimizer=sgd))
    before = weights_of(engine)
    train(engine, range(1))
    return before, weights_of(engine), engine.optimizer.grad_norm


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_clipped_step_is_as_long_as_the_flag_says(layout, precision):
    """The first step of SGD moves the weights by the learning rate times the clipped gradient, so its length
    shows the norm to which the gradient was clipped."""
    row, clip = replace(LAYOUTS[layout], precision=precision), 0.25
    ranks = run_world(row.world_size, weights_before_and_after_a_clipped_step, row, clip)
    before, after = (full_weights([rank[i] for rank in ranks]) for i in (0, 1))
    assert all(norm > 2 * clip for _, _, norm in ranks)
    squares = [(after[name].double() - before[name].double()).square().sum().item() for name in before]
    length = math.sqrt(sum(squares))
    # fp16 weights are rounded after the step. The rounding is about as large as the step.
    assert length == pytest.approx(RATE * clip, rel=1e-4 if precision == "fp32" else 0.5)


@pytest.mark.full
@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_clipped_sgd_has_the_same_losses_on_every_layout(layout):
    """A wrong factor on all gradients changes the losses of SGD. Adam would hide the factor."""
    sgd = {"optimizer": {"optimizer": "sgd", "clip_grad": 0.3}, "schedule": {"lr": 1.0}}
    assert_same_numbers(LAYOUTS[layout], 5, sgd)


@pytest.mark.parametrize("numel", [0, 1, NORM_CHUNK - 1, NORM_CHUNK, 3 * NORM_CHUNK + 17, 20_000_000])
def test_the_norm_of_a_tensor_is_exact_to_fp32_rounding(numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(3))
    values *= torch.logspace(-6, 2, numel) if numel > 1 else 1.0
    expected = math.sqrt(sum(part.double().square().sum().item() for part in values.split(1_000_000)))
    assert accurate_norm(values).item() == pytest.approx(expected, rel=1e-7)
    if 1 < numel < 10_000:
        assert accurate_norm(values.view(1, -1).t()).item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_norm_of_a_tensor_with_a_bad_element_is_not_finite(bad):
    values = torch.ones(3 * NORM_CHUNK + 1)
    for place in (0, NORM_CHUNK, 3 * NORM_CHUNK):
        broken = values.clone()
        broken[place] = bad
        assert not math.isfinite(accurate_norm(broken).item())


# --- loss scale ---


def steps_with_loss_scale(row, precision, steps):
    """Returns for each step (overflow, norm is finite, scale after the step, weights are unchanged)."""
    engine = build_engine(config_of(row, model=TWO_LAYERS, precision=precision))
    records = []
    for step in range(steps):
        before = weights_of(engine).shards
        train(engine, [step])
        optimizer, after = engine.optimizer, weights_of(engine).shards
        same = all(torch.equal(before[name], after[name]) for name in before)
        records.append((optimizer.overflow, math.isfinite(optimizer.grad_norm), optimizer.scaler.scale, same))
    return records


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(
    "row",
    [
        Row(micro_batch=4),
        Row(pp=2, micro_batch=4),
        Row(tp=2, dp=2, zero=1, micro_batch=4),
        Row(dp=2, zero=3, micro_batch=4),
    ],
    ids=str,
)
def test_an_fp16_overflow_skips_the_step_on_all_ranks_and_lowers_the_scale(row):
    row = replace(row, precision="fp16")
    settings = {"initial_loss_scale": 2.0**40, "hysteresis": 2, "loss_scale_window": 2}
    ranks = run_world(row.world_size, steps_with_loss_scale, row, settings, 40)
    assert all(records == ranks[0] for records in ranks)
    records = ranks[0]
    skipped = [overflow for overflow, *_ in records].index(False)
    assert skipped >= 3, "the first scales were meant to overflow"
    scale = 2.0**40
    for step, (overflow, finite, after, same) in enumerate(records[:skipped]):
        scale = scale / 2 if step >= 1 else scale  # hysteresis 2 ignores the first overflow
        assert (overflow, finite, after, same) == (True, False, scale, True)
    assert records[skipped] == (False, True, scale, False)
    assert records[skipped + 1] == (False, True, 2 * scale, False), "doubled after two good steps"


def test_an_overflow_at_the_smallest_scale_is_an_error():
    settings = {"initial_loss_scale": 2.0**40, "min_loss_scale": 2.0**39, "hysteresis": 1}
    row = Row(precision="fp16", micro_batch=4)
    (records,) = run_world(1, steps_with_loss_scale, row, settings, 1)
    assert records == [(True, False, 2.0**39, True)], "a skipped step, and the scale at its minimum"
    with pytest.raises(WorldError) as error:
        run_world(1, steps_with_loss_scale, row, settings, 2)
    assert isinstance(error.value.__cause__, NonFiniteError)


def test_skipped_steps_are_counted_and_reported_by_the_loop():
    ((counts, skipped),) = run_world(1, loop_over_overflows)
    assert skipped[0] is True and skipped[-1] is False
    assert counts == [sum(skipped[: step + 1]) for step in range(len(skipped))]


def loop_over_overflows():
    """Returns the number of skipped steps in the training state after each step, and what was logged for each
    step."""
    precision = {"initial_loss_scale": 2.0**24, "hysteresis": 1}
    config = config_of(Row(precision="fp16", micro_batch=4), model=TWO_LAYERS, precision=precision)
    trainer = make_trainer(config, steps=20)
    states = [TrainingState()]
    for _ in range(20):
        states.append(trainer.step(states[-1]))
    records = trainer.metrics.records
    return [state.skipped_iterations for state in states[1:]], [record.skipped for record in records]


def test_a_static_scale_gives_the_numbers_of_an_equal_dynamic_one():
    dynamic, static = (
        run_world(1, train_layout, Row(precision="fp16", micro_batch=4), 5, model=TWO_LAYERS, precision=scale)
        for scale in ({"initial_loss_scale": 2.0**10}, {"loss_scale": 2.0**10})
    )
    assert static == dynamic


# --- gradients that are not finite ---


def error_of_step(engine, step):
    """Returns the error of a step that is not finite, and whether the weights are unchanged."""
    before = weights_of(engine).shards
    with pytest.raises(NonFiniteError) as error:
        train(engine, [step])
    after = weights_of(engine).shards
    return str(error.value), all(torch.equal(before[key], after[key]) for key in before)


def step_with_a_bad_gradient(row, bad_rank, name, settings):
    """Takes two steps. In the second step one rank's gradient of one parameter becomes NaN."""
    engine = build_engine(config_of(row, model=TWO_LAYERS, precision=settings))
    train(engine, [0])
    if engine.mesh.rank == bad_rank:
        dict(engine.module.named_parameters())[name].register_hook(lambda gradient: gradient * math.nan)
    return error_of_step(engine, 1)


# Name -> (layout, the rank, its parameter, precision, (stage, TP rank, DP rank)).
BAD_GRADIENTS = {
    "one process": (Row(), 0, "3.mlp.dense_h_to_4h.bias", {}, (0, 0, 0)),
    **{
        f"ZeRO {zero}": (Row(dp=2, zero=zero), 1, "4.input_layernorm.weight", {}, (0, 0, 1))
        for zero in (1, 2, 3)
    },
    "TP 2 x PP 2 x DP 2": (
        Row(tp=2, pp=2, dp=2, zero=1, micro_batch=4, precision="bf16"),
        *(7, "4.self_attention.dense.weight", {}, (1, 1, 1)),
    ),
    "PP 2": (Row(pp=2, precision="fp16"), 1, "6.bias", {"loss_scale": 128.0}, (1, 0, 0)),
}


@pytest.mark.gate(rows=3, also=["ZeRO 3", "TP 2 x PP 2 x DP 2"])
@pytest.mark.parametrize("case", BAD_GRADIENTS)
def test_every_rank_names_the_bad_gradient_and_nothing_has_moved(case):
    row, bad_rank, name, settings, (stage, tp_rank, dp_rank) = BAD_GRADIENTS[case]
    answers = run_world(row.world_size, step_with_a_bad_gradient, row, bad_rank, name, settings)
    assert len(set(answers)) == 1, "all ranks say the same"
    message, unchanged = answers[0]
    assert unchanged
    # Earlier stages have received a gradient that is still finite, or none.
    place = f"(stage {stage}, TP rank {tp_rank}, DP rank {dp_rank})"
    assert f"rank {bad_rank} {place}: {name}" in message


def step_with_a_bad_loss(row):
    engine = build_engine(config_of(row, model=TWO_LAYERS))
    final_norm = dict(engine.module.named_parameters()).get("6.weight")
    if final_norm is not None:
        final_norm.data.fill_(math.inf)
    return error_of_step(engine, 0)


@pytest.mark.parametrize("row", [Row(), Row(tp=2, pp=2, micro_batch=2), Row(dp=2, precision="bf16")], ids=str)
def test_a_loss_that_is_not_finite_stops_every_rank_before_the_step(row):
    answers = run_world(row.world_size, step_with_a_bad_loss, row)
    assert len(set(answers)) == 1
    message, unchanged = answers[0]
    assert unchanged and "the step was not taken" in message and "stage" in message


# --- ZeRO-1, tied and replicated weights ---


def sizes_of_state(row):
    """Returns (elements of the moments on this rank, parameters on this rank, groups)."""
    engine = build_engine(config_of(row, model={"hidden_size": 64, "kv_channels": 16}))
    train(engine, [0])
    states = engine.optimizer.optimizer.state.values()
    held = sum(state["exp_avg"].numel() for state in states)
    assert held == sum(state["exp_avg_sq"].numel() for state in states)
    return held, sum(p.numel() for p in engine.module.parameters()), len(engine.optimizer.flat)


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_zero_1_shares_the_moments_out_over_the_replicas(dp, precision):
    row = Row(dp=dp, zero=1, micro_batch=2, precision=precision)
    for held, parameters, groups in run_world(dp, sizes_of_state, row):
        # Each group is padded to a multiple of the alignment times the number of partitions.
        assert parameters / dp <= held <= parameters / dp + ALIGNMENT * groups
    for held, parameters, _ in run_world(dp, sizes_of_state, replace(row, zero=0)):
        assert held == pytest.approx(parameters, abs=2 * ALIGNMENT)


def bytes_of_saved_state(row):
    """Returns the bytes of the optimizer state that torch.save writes. It writes each storage once."""
    masters = [flat["fp32"] for flat, _ in build_engine(config_of(row)).optimizer.packed_groups()]
    storages = {master.untyped_storage().data_ptr(): master.untyped_storage().nbytes() for master in masters}
    return sum(storages.values()), sum(master.nbytes for master in masters)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_saves_its_own_partition_of_the_master_weights(precision):
    for written, own in run_world(2, bytes_of_saved_state, Row(dp=2, zero=1, precision=precision)):
        assert own <= written <= 1.1 * own


def reduce_scatters():
    """Returns a context in which ZeRO's gradients are reduce-scattered, as with NCCL."""
    return mock.patch.object(flat_group, "prefers_all_reduce", lambda group: False)


def train_a_little(row, options):
    with reduce_scatters():
        return train_layout(row, 5, model={"num_layers": 4}, parallel=options)


BUCKETS = {"ddp_bucket_size": 1}  # one layer in each bucket
OVERLAP = {
    "none": {},
    "buckets": BUCKETS,
    "late gradients": {**BUCKETS, "no_overlap_grad_reduce": True},
    "early weights": {**BUCKETS, "no_overlap_param_gather": True},
}


def check_same_steps(expected, found):
    """Asserts that all ranks have the expected losses. With ZeRO the grad norm, which is summed from parts of
    parameters, may differ by rounding."""
    for one, other in zip(expected, found, strict=True):
        assert [loss for loss, _ in one] == [loss for loss, _ in other]
        assert [norm for _, norm in one] == pytest.approx([norm for _, norm in other], rel=1e-7)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("overlap", OVERLAP)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_both_zero_stages_take_the_same_steps(precision, overlap):
    row = Row(pp=2, dp=2, micro_batch=2, precision=precision)
    expected = run_world(4, train_a_little, row, {})
    found = run_world(4, train_a_little, replace(row, zero=1), OVERLAP[overlap])
    check_same_steps(expected, found)


def gathers_and_layers(row):
    """Returns the order in which buckets are gathered ('gather 3') and layers run ('3') in a step and after
    it."""
    engine = build_engine(config_of(row, model={"num_layers": 4}, parallel=BUCKETS))
    train(engine, [0])
    seen = []
    for index, layer in engine.module.transformer_layers().items():
        layer.register_forward_pre_hook(lambda *_, index=index: seen.append(index))
    start = Bucket.start_gather

    def noted(bucket):
        seen.append(bucket.flats[0].unit.replace("layers", "gather"))
        start(bucket)

    with mock.patch.object(Bucket, "start_gather", noted):
        train(engine, [1])
        engine.optimizer.wait_for_params()
    return seen


def test_with_one_hardware_queue_each_bucket_starts_the_all_gather_of_the_next_one():
    """If all all-gathers were launched at once, they would delay the first layer."""
    row, layers = Row(dp=2, zero=1, micro_batch=2, precision="bf16"), ["3", "4", "5", "6"]
    gathers = [f"gather {layer}" for layer in layers]
    assert run_world(2, gathers_and_layers, row) == [[*layers, *layers, *gathers]] * 2
    chained = ["gather 4", "3", "gather 5", "4", "gather 6", "5", "6", *layers, *gathers]
    assert run_world(4, gathers_and_layers, replace(row, tp=2)) == [chained] * 4


def weights_after_steps(row):
    engine = build_engine(config_of(row, model={"embed_layernorm": True, **TWO_LAYERS}))
    train(engine, range(3))
    return weights_of(engine)


def test_padding_rows_of_the_vocabulary_stay_zero():
    ranks = run_world(2, weights_after_steps, Row(tp=2, micro_batch=4))
    name = "tied_modules.embed.word_embeddings.weight"
    full = merge_shards(ranks[0].specs[name], [rank.shards[name] for rank in ranks])
    assert full.shape[0] == 112 and not full[VOCAB:].any() and full[:VOCAB].any(dim=1).all()
