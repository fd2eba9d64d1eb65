"""Tests variants of the model: residual connection and its precision, recomputation, masked loss, head."""

import pytest
import torch

from megatron.data.loader import MicroBatch
from megatron.model.gpt_model import ParallelTransformerLayerPipe
from megatron.model.loss import CrossEntropy
from megatron.model.norm import MixedFusedLayerNorm
from megatron.mpu.mesh import Axis
from tests.reference import plain_gpt
from tests.support.layouts import (
    EOD,
    FP32_BOUND,
    GLOBAL_BATCH,
    LOW_PRECISION_BOUND,
    RATE,
    SEQ,
    VOCAB,
    Row,
    build_engine,
    build_model,
    config_of,
    evaluate,
    relative_errors,
    train,
    train_layout,
)
from tests.support.pool import run_world
from tests.unit.model.single_process import (
    logits,
    model_with_weights,
    random_tokens,
    random_weights,
    random_weights_and_logits,
)

TOKENS = random_tokens(2, SEQ)
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}


def plain_logits_with_residual_after_the_norm(weights):
    """Computes the logits of this variant from its definition, with parts of the plain reference GPT."""
    x = weights["tied_modules.embed.word_embeddings.weight"][TOKENS]
    x = x + weights["tied_modules.embed.position_embeddings.weight"][:SEQ]
    for index in range(3, 7):
        x = plain_gpt.norm(weights, f"{index}.input_layernorm", x)
        sizes = {"heads": 4, "groups": 4, "dim": x.shape[-1] // 4}
        x = x + plain_gpt.attention(weights, index, x, sizes, "absolute", {})
        x = plain_gpt.norm(weights, f"{index}.post_attention_layernorm", x)
        x = x + plain_gpt.mlp(weights, index, x, None)
    return plain_gpt.norm(weights, "8", x) @ weights["tied_modules.embed.word_embeddings.weight"][:VOCAB].T


def test_the_residual_can_branch_off_after_the_norm():
    changes = {"model": {"apply_residual_connection_post_layernorm": True}}
    ((weights, logits),) = run_world(1, random_weights_and_logits, Row(), TOKENS, changes)
    torch.testing.assert_close(
        logits, plain_logits_with_residual_after_the_norm(weights), rtol=1e-5, atol=1e-5
    )
    before = plain_gpt.plain_gpt_logits(weights, TOKENS, layers=4, heads=4, vocab=VOCAB)
    assert (logits - before).abs().max() > 1e-2


def logits_and_logits_of_doubled_queries(row, tokens):
    """Returns the logits with --softmax-scale 2 / sqrt(8), and the logits with the default scale and each
    query head's rows multiplied by 2."""
    weights = random_weights(row)
    scaled = logits(model_with_weights(row, weights, model={"softmax_scale": 2 / 8**0.5}), tokens)
    for name, weight in weights.items():
        if "query_key_value" in name:
            weight.unflatten(0, (4, 3, 8))[:, 0] *= 2
    return scaled, logits(model_with_weights(row, weights), tokens)


@pytest.mark.parametrize("positions", ["absolute", "rotary", "alibi"])
def test_the_softmax_scale_multiplies_the_scores(positions):
    ((scaled, doubled),) = run_world(
        1, logits_and_logits_of_doubled_queries, Row(positions=positions), TOKENS
    )
    torch.testing.assert_close(scaled, doubled, rtol=1e-5, atol=1e-5)
    plain = run_world(1, random_weights_and_logits, Row(positions=positions), TOKENS, {})[0][1]
    assert (scaled - plain).abs().max() > 1e-3


# --- the residual in fp32 ---


def residual_formats(row, precision):
    """Returns the dtypes of the transformer layers' outputs, of their parameters and of the logits."""
    model = model_with_weights(row, random_weights(row), precision=precision)
    passed_on, parameters = set(), set()
    for layer in model.modules():
        if isinstance(layer, ParallelTransformerLayerPipe):
            layer.register_forward_hook(lambda _layer, _inputs, output: passed_on.add(output.dtype))
            parameters |= {p.dtype for p in layer.parameters()}
    with torch.no_grad():
        logits = model(TOKENS)
    return passed_on, parameters, logits.dtype, logits[..., :VOCAB]


@pytest.mark.parametrize("precision, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_residual_connection_can_be_fp32(precision, dtype):
    row = Row(precision=precision)
    ((exact, fp32, fp32_logits, expected),) = run_world(1, residual_formats, Row(), {})
    assert (exact, fp32, fp32_logits) == ({torch.float32}, {torch.float32}, torch.float32)
    ((narrow, parameters, logits_dtype, logits),) = run_world(1, residual_formats, row, {})
    assert (narrow, parameters, logits_dtype) == ({dtype}, {dtype}, torch.float32)
    ((wide, parameters, logits_dtype, wide_logits),) = run_world(
        1, residual_formats, row, {"fp32_residual_connection": True}
    )
    assert (wide, parameters, logits_dtype) == ({torch.float32}, {dtype}, torch.float32)
    assert (wide_logits - expected).square().mean() < (logits - expected).square().mean()


def train_with_fp32_residual(row):
    return train_layout(row, 5, precision={"fp32_residual_connection": True})


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_fp32_residual_crosses_stages_and_trains(precision):
    row = Row(pp=2, micro_batch=2, precision=precision)
    expected = run_world(1, train_layout, Row(), 5)[0]
    for history in run_world(2, train_with_fp32_residual, row):
        assert relative_errors(history, expected)[0] <= LOW_PRECISION_BOUND


# --- recomputation ---


def gradients(row, training):
    engine = build_engine(config_of(row, model=DROPOUT, training=training))
    kept = {}
    step = engine.optimizer.step

    def keep_and_step():
        kept.update({name: p.main_grad.clone() for name, p in engine.module.named_parameters()})
        step()

    engine.optimizer.step = keep_and_step
    ((loss, norm),) = train(engine, [0])
    return loss, norm, kept


@pytest.mark.gate(rows=3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layers_together", [1, 2, 3])
@pytest.mark.parametrize("positions", ["absolute", "alibi"])
def test_recomputed_layers_have_the_same_gradients_to_the_last_bit(precision, layers_together, positions):
    row = Row(precision=precision, positions=positions, micro_batch=4)
    ((loss, norm, expected),) = run_world(1, gradients, row, {})
    recompute = {"checkpoint_activations": True, "checkpoint_num_layers": layers_together}
    ((loss_again, norm_again, found),) = run_world(1, gradients, row, recompute)
    assert (loss, norm) == (loss_again, norm_again)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# --- the loss of masked tokens ---


def samples_with_unequal_masks():
    """Returns a global batch whose samples contain 0, 3, 6, ... ends of documents. The last sample contains
    nothing else."""
    samples = random_tokens(GLOBAL_BATCH, SEQ + 1)
    for sample, row in enumerate(samples):
        row[1 : 1 + 3 * sample] = EOD
    samples[-1] = EOD
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def losses_with_masks(row, masked=True):
    """Returns (loss, grad norm) of three steps, then (loss of an evaluation, this loss computed by hand). On
    a single rank, PyTorch's functions compute the last one from the logits of all unmasked tokens."""
    engine = build_engine(config_of(row))
    tokens, labels = samples_with_unequal_masks()
    mask = (tokens != EOD).float() if masked else torch.ones_like(tokens, dtype=torch.float32)
    size, mesh = row.micro_batch, engine.mesh

    def batches():
        starts = range(mesh.dp.rank * size, GLOBAL_BATCH, mesh.dp_size * size)
        rows = (slice(i, i + size) for i in starts)
        return (MicroBatch(range(size), tokens[i], labels[i], mask[i].contiguous()) for i in rows)

    history = []
    for _ in range(3):
        loss = engine.train_step(batches(), GLOBAL_BATCH, RATE, masks_tokens=masked)
        history.append((loss.item(), engine.optimizer.grad_norm))
    evaluated = by_hand = evaluate(engine, batches(), engine.micro_batches).item()
    if row.world_size == 1:
        with torch.no_grad():
            logits = torch.cat(
                [engine.module.eval()(tokens[i : i + 1])[..., :VOCAB] for i in range(len(tokens))]
            )
        kept = mask.bool()
        by_hand = torch.nn.functional.cross_entropy(logits[kept], labels[kept]).item()
    return [*history, (evaluated, by_hand)]


@pytest.mark.gate(rows=3)
@pytest.mark.parametrize(
    "row",
    [
        Row(micro_batch=2),
        Row(dp=2, micro_batch=2, zero=1),
        Row(cp=2, tp=2, micro_batch=2),
        Row(micro_batch=8),
        Row(pp=2, micro_batch=4),
        Row(pp=2, dp=2),
    ],
    ids=str,
)
def test_a_masked_loss_does_not_depend_on_the_layout(row):
    expected = run_world(1, losses_with_masks, Row())[0]
    for history in run_world(row.world_size, losses_with_masks, row):
        assert max(relative_errors(history, expected)) <= FP32_BOUND


@pytest.mark.parametrize("masked", [True, False])
def test_the_logged_loss_is_the_mean_over_all_unmasked_tokens(masked):
    *_, (evaluated, by_hand) = run_world(1, losses_with_masks, Row(), masked)[0]
    assert evaluated == pytest.approx(by_hand, rel=FP32_BOUND)


def test_a_mask_takes_its_tokens_out_of_the_loss():
    masked, plain = (run_world(1, losses_with_masks, Row(), flag)[0] for flag in (True, False))
    assert relative_errors(masked, plain)[0] > 1e-3


def test_the_loss_is_the_weighted_sum_of_the_losses_of_the_tokens():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 5, 104, generator=generator)
    labels = torch.randint(0, VOCAB, (3, 5), generator=generator)
    weights = torch.tensor([[1.0, 1, 1, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]) / 7
    loss = CrossEntropy(Axis("tp"), VOCAB)(logits.clone(), (labels, weights))
    kept = weights > 0
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits[kept][:, :VOCAB], labels[kept]))


def test_a_model_for_apex_is_described_without_apex():
    with torch.device("meta"):
        norm = MixedFusedLayerNorm(8, 1e-5, use_apex=True)
    with pytest.raises(ImportError, match="apex"):
        norm(torch.zeros(1, 8, device="meta"))


# --- the head and the loss as one step ---


def outputs_after_a_step(row, training):
    """Returns the shapes of a trained model's outputs: called directly, for a loss, and through DeepSpeed."""
    engine = build_engine(config_of(row, training=training))
    train(engine, [0])
    model = engine.module.eval()
    with torch.no_grad():
        logits = model(TOKENS)
        with model.fused_head_loss():
            outputs = model(TOKENS)
    batch = MicroBatch(range(2), TOKENS, TOKENS, torch.ones(2, SEQ))
    loss, returned = engine.eval_batch(iter([batch]), return_logits=True, num_micro_batches=1)
    plain_loss = evaluate(engine, iter([batch]), 1)
    torch.testing.assert_close(loss, plain_loss)
    return [tuple(x.shape) for x in (logits, outputs, returned)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluation_can_return_logits(precision):
    logits, hidden = (2, SEQ, 104), (2, SEQ, 32)
    row = Row(precision=precision, micro_batch=2)
    for implementation, for_loss in (("fused", hidden), ("plain", logits)):
        found = run_world(1, outputs_after_a_step, row, {"loss_implementation": implementation})
        assert found == [[logits, for_loss, logits]]


def validation_loss(z_loss_weight):
    engine = build_engine(config_of(Row(), training={"z_loss_weight": z_loss_weight}))
    batch = MicroBatch(range(2), TOKENS, TOKENS, torch.ones(2, SEQ))
    return evaluate(engine, iter([batch]), 1).item()


def test_the_validation_loss_has_no_z_loss():
    assert run_world(1, validation_loss, 0.1) == run_world(1, validation_loss, 0.0)


def model_cut_behind_the_head():
    with pytest.raises(ValueError, match="begins with layer 10.*head.*layer 9"):
        build_model(config_of(Row(pp=2, precision="bf16")), [0, 10, 11])


def test_a_last_stage_without_the_head_is_refused():
    run_world(2, model_cut_behind_the_head)
