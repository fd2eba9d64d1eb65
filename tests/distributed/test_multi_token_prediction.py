"""Multi-token prediction: one process is compared with a GPT in plain PyTorch, and every layout with one
process."""

from dataclasses import replace

import pytest
import torch

from megatron.checkpoint.manager import load_checkpoint
from megatron.checkpoint.selection import find_checkpoint
from megatron.commands import convert_checkpoint
from megatron.errors import UserError
from megatron.model.experts import Router
from megatron.pipeline.layer_times import find_layer_times
from tests.distributed.parity import (
    LAYOUTS,
    SEQUENCE_PARALLEL,
    assert_same_numbers,
    assert_same_on,
    merged,
    rows_of,
)
from tests.distributed.resharding import STEPS_BEFORE, resume_midway, save_before, uninterrupted
from tests.distributed.test_experts import GLM
from tests.distributed.test_model_variants import GEMMA3, LLAMA, plain_history
from tests.reference.plain_experts import PlainExperts
from tests.reference.plain_gpt import plain_gpt_logits
from tests.support.checkpoints import FINGERPRINT, save_midway
from tests.support.layouts import (
    EOD,
    FP32_BOUND,
    GLOBAL_BATCH,
    SEQ,
    STEPS,
    VOCAB,
    Row,
    build_engine,
    config_of,
    evaluate,
    make_run,
    micro_batches,
    relative_errors,
    sample_tokens,
    train,
    train_layout,
    unconnected_run,
)
from tests.support.pool import run_world

MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}
TIED = {"position_embedding_type": "rotary", **MTP}
UNTIED = {**LLAMA, **MTP}
# With 2 prediction layers, an element's gradient is almost 0 in the first step, and Adam amplifies its
# rounding.
GEMMA = {**GEMMA3, **MTP, "mtp_num_layers": 1, "softmax_scale": None}
EXPERTS = {**GLM, "mtp_num_layers": 1}
# Name -> (the model, the arguments of the plain GPT).
PLAIN_CASES = {
    "tied": (TIED, {}),
    "untied": (UNTIED, {"groups": 2}),
    "plain loss": (UNTIED, {"groups": 2}),
    "gemma3": (
        GEMMA,
        {
            **{"groups": 2, "window": 7, "pattern": "WWF", "arrangement": "pre-post-norm"},
            **{"scale_embeddings": True, "zero_centered": True},
            **{"rotary": {"base": 500.0}, "full": {"base": 50.0, "factor": 4.0}},
        },
    ),
    "experts": (EXPERTS, {"groups": 2}),
}
GLM_OPTIONS = {
    **{"k": 4, "score": "sigmoid", "groups": 4, "group_topk": 2, "factor": 2.5, "bias_rate": 0.01},
    **{"balance": "seq_aux_loss", "coefficient": 0.01, "z_coefficient": 0.001},
}


def weights_and_history(row, steps, **changes):
    """Returns (initial weights, (loss, grad norm, losses of multi-token prediction) of each step)."""
    engine = build_engine(config_of(row, **changes))
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    history, device = [], torch.device("cpu")
    for step in range(steps):
        with engine.module.metrics.recording():
            (numbers,) = train(engine, [step])
        found = engine.module.metrics.collect(device)
        others = [found[f"mtp_{k + 1} loss"] for k in range(changes["model"]["mtp_num_layers"])]
        history.append((*numbers, *others))
    return weights, history


def history_with_later_losses(row, steps, **changes):
    return weights_and_history(row, steps, **changes)[1]


@pytest.mark.gate(rows=3)
@pytest.mark.parametrize("case", PLAIN_CASES)
def test_one_process_trains_as_a_gpt_in_plain_pytorch_does(case):
    model, options = PLAIN_CASES[case]
    changes = {"model": model}
    if case == "plain loss":
        changes["training"] = {"loss_implementation": "plain"}
    if case == "experts":
        options = {**options, "experts": PlainExperts(**GLM_OPTIONS)}
    steps = STEPS // 2 if case == "experts" else STEPS
    ((weights, history),) = run_world(1, weights_and_history, Row(micro_batch=4), steps, **changes)
    factors = {"mtp_layers": model["mtp_num_layers"], "mtp_factor": model.get("mtp_loss_scaling_factor", 0.1)}
    plain = plain_history(weights, model, steps, **options, **factors)
    found, wanted = torch.tensor(history), torch.tensor(plain)
    assert found.shape == wanted.shape
    assert ((found - wanted).abs() / wanted.abs()).max() <= FP32_BOUND
    assert (wanted[:, 2] != wanted[:, 0]).all(), "other losses than the main model's"


ROWS = rows_of(
    {
        "untied": LAYOUTS,
        "tied": (
            *("tp2-pp2-dp2-zero1-dropout", "tp4-sequence-recompute", "pp4-recompute", "dp4-zero1-buckets"),
            *("pp2-dp2-zero1-interleaved", "pp2-dualpipev", "tp2-pp2-zero-bubble-sequence"),
            *("dp2-zero3-recompute", "cp2"),
        ),
        "gemma3": ("tp2-cp2-sequence-recompute",),
        "experts": (
            *("tp2-cp2-sequence-recompute", "pp2-dp2-zero1-interleaved", "dp2-zero3-recompute"),
            *("tp2-pp2-zero-bubble-sequence", "tp2-pp2-partitioned-activations"),
        ),
    }
)
REJECTIONS = {
    "experts": {"tp2-pp2-partitioned-activations": "--partition-activations with --sequence-parallel"},
}
PLAIN = {"training": {"loss_implementation": "plain"}}
DOCUMENTS = {"data": {"reset_attention_mask": True, "reset_position_ids": True}}
# Name -> (model, layout, changes of the layout, changes of both runs).
MORE_ROWS = {
    "a stage of its own": (
        TIED,
        Row(pp=2, micro_batch=2),
        {"parallel": {"partition_method": "stages:E+4,L"}},
        {},
    ),
    "plain loss": (UNTIED, Row(pp=4), PLAIN, {}),
    "tied, documents": (TIED, Row(cp=2, pp=2), {}, DOCUMENTS),
    "untied, documents": (UNTIED, Row(tp=2, pp=2), SEQUENCE_PARALLEL, DOCUMENTS),
}


@pytest.mark.gate(rows=1, also=["tied-pp4-recompute", "tied-cp2", "experts-dp2-zero3-recompute"])
@pytest.mark.parametrize("model, layout", ROWS)
def test_every_layout_trains_as_one_process_does(model, layout):
    """Losses, grad norms and the losses of multi-token prediction are equal up to rounding."""
    numbers = {"model": PLAIN_CASES[model][0]}
    assert_same_on(layout, numbers, REJECTIONS.get(model), history_with_later_losses)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", MORE_ROWS)
def test_documents_and_other_stages_train_as_one_process_does(name):
    model, row, layout, numbers = MORE_ROWS[name]
    numbers = merged({"model": model}, numbers)
    assert_same_numbers(row, STEPS, numbers, layout, history_with_later_losses)


def losses_of_masked_tokens(row, changes):
    """Returns the losses of a step whose mask excludes unequal numbers of tokens in each sample."""
    engine = build_engine(config_of(row, **changes))
    evaluate(engine, micro_batches(engine, 0), GLOBAL_BATCH // row.dp)
    batches = (
        replace(batch, loss_mask=(batch.labels % (2 + batch.samples[0] % 3) > 0).float())
        for batch in micro_batches(engine, 0)
    )
    with engine.module.metrics.recording():
        loss = engine.train_step(batches, GLOBAL_BATCH, 0.0, masks_tokens=True).item()
    found = engine.module.metrics.collect(torch.device("cpu"))
    return loss, found["mtp_1 loss"], found["mtp_2 loss"], engine.optimizer.grad_norm


def test_the_loss_is_the_mean_over_unmasked_tokens_of_the_global_batch():
    (wanted,) = run_world(1, losses_of_masked_tokens, Row(), {"model": UNTIED})
    weights = run_world(1, weights_and_history, Row(), 0, model=UNTIED)[0][0]
    samples = sample_tokens(0, GLOBAL_BATCH)
    tokens, labels = samples[:, :-1], samples[:, 1:]
    mask = torch.stack([labels[i] % (2 + i % 3) > 0 for i in range(GLOBAL_BATCH)])
    later = [torch.nn.functional.pad(labels[:, k:], (0, k)) for k in range(2)]
    all_logits = plain_gpt_logits(
        weights,
        tokens,
        layers=4,
        heads=4,
        positions="rotary",
        glu="swiglu",
        groups=2,
        vocab=VOCAB,
        next_tokens=later,
    )
    for k, logits in enumerate(all_logits):
        kept = mask[:, k:]
        expected = torch.nn.functional.cross_entropy(logits[:, : SEQ - k][kept], labels[:, k:][kept])
        assert wanted[k] == pytest.approx(expected.item(), rel=1e-5)
    for row in (Row(dp=2), Row(tp=2, pp=2), Row(cp=2)):
        for found in run_world(row.world_size, losses_of_masked_tokens, row, {"model": UNTIED}):
            assert found == pytest.approx(wanted, rel=1e-5)


# Name -> (changes of both runs, changes of only the run on a layout). The reference runs on one process.
SETTINGS = {
    "Muon": ({"optimizer": {"optimizer": "muon", "weight_decay": 0.1}}, {}),
    "Muon, ZeRO 3": ({"optimizer": {"optimizer": "muon"}}, {"parallel": {"zero_stage": 3}}),
    "CPU offload": ({}, {"parallel": {"cpu_offload": True}}),
    "chunks of tensor parallelism": ({}, {"parallel": {"tp_comm_overlap": True}}),
    "compile": ({}, {"training": {"compile": True}}),
    "partitioned activations": (
        {},
        {"training": {"checkpoint_activations": True, "partition_activations": True}},
    ),
    "selective recomputation": ({}, {"training": {"recompute_granularity": "selective"}}),
    "muP": ({"model": {"mup": True, "mup_base_hidden_size": 16}}, {}),
    "bf16": ({}, {"precision": {"bf16": True}}),
    "fp16": ({}, {"precision": {"fp16": True, "initial_loss_scale": 2.0**12}}),
    "bf16, fp32 residual": ({}, {"precision": {"bf16": True, "fp32_residual_connection": True}}),
}


@pytest.mark.gate(rows=0, also=["Muon"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_trains_as_one_process_does(name):
    numbers, layout = SETTINGS[name]
    is_partitioned = "partition_activations" in layout.get("training", {})
    parallel = {"parallel": {"sequence_parallel": not is_partitioned}}
    precision = next(iter(layout.get("precision", {"fp32": True})))
    row = Row(tp=2, dp=2, zero=1, precision=precision)
    assert_same_numbers(row, 6, merged({"model": UNTIED}, numbers), merged(parallel, layout))


def test_8_bit_adam_trains_as_one_process_does():
    """Data-parallel ranks must quantize alike. Only losses are compared: a moment that is rounded to a
    neighboring code changes a grad norm by more than 1e-5, with these layers and without them."""
    sizes = {"mtp_num_layers": 1, "hidden_size": 64, "kv_channels": 16}
    changes = {"model": UNTIED | sizes, "optimizer": {"use_bnb_optimizer": True}}
    (wanted,) = run_world(1, train_layout, Row(micro_batch=2), 6, **changes)
    for history in run_world(2, train_layout, Row(dp=2, zero=1), 6, **changes):
        assert relative_errors(history, wanted)[0] <= FP32_BOUND


def loss_of_evaluation(row, model):
    engine = build_engine(config_of(row, model=model))
    weights = dict(engine.module.named_parameters())
    loss = evaluate(engine, micro_batches(engine, 0), GLOBAL_BATCH // row.micro_batch).item()
    routers = [module for module in engine.module.modules() if isinstance(module, Router)]
    return loss, {name: p.detach().clone() for name, p in weights.items()}, len(routers)


def test_an_evaluation_has_the_loss_of_the_main_model():
    row = Row(micro_batch=2)
    (with_layers, weights, routers), (alone, others, fewer) = (
        run_world(1, loss_of_evaluation, row, model)[0] for model in (EXPERTS, GLM)
    )
    assert all(torch.equal(weights[name], value) for name, value in others.items())
    assert with_layers == alone and routers == fewer + 1


SAVE, OPEN = Row(pp=2, dp=2, zero=1, micro_batch=2), Row(tp=2, pp=2, micro_batch=2)


@pytest.mark.gate(rows=0, also=["universal"])
@pytest.mark.parametrize("kind", ["native", "universal", "dcp"])
def test_a_run_continues_on_another_layout(kind, tmp_path):
    changes = merged({"model": EXPERTS}, SEQUENCE_PARALLEL)
    run_world(SAVE.world_size, save_before, SAVE, tmp_path / "saved", changes)
    saved, options = tmp_path / "saved" / f"global_step{STEPS_BEFORE}", {}
    if kind != "native":
        name = saved.name + "_universal" * (kind == "universal")
        convert_checkpoint.run(["--from", str(saved), "--to", str(tmp_path / "new" / name), "--format", kind])
        options = {"checkpoint": {"universal_checkpoint": kind == "universal"}}
    folder = tmp_path / ("saved" if kind == "native" else "new")
    for _, history in run_world(OPEN.world_size, resume_midway, OPEN, folder, merged(changes, options)):
        assert max(relative_errors(history, uninterrupted(changes))) <= FP32_BOUND


def start_from(row, folder, model, **options):
    config = config_of(row, model=model, checkpoint={"load": str(folder), **options})
    checkpoint = find_checkpoint(unconnected_run(config))
    engine = build_engine(config)
    initial = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    train(engine, [9])  # other weights: the load must replace all
    load_checkpoint(engine, checkpoint, FINGERPRINT)
    loaded = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    loss = evaluate(engine, micro_batches(engine, 5), GLOBAL_BATCH // row.micro_batch // row.dp).item()
    return loss, initial, loaded, train(engine, [0])


def save_main_model(row, folder):
    engine = save_midway(row, folder, STEPS_BEFORE, model=GLM)
    return evaluate(engine, micro_batches(engine, 5), GLOBAL_BATCH // row.micro_batch).item()


def test_a_run_starts_from_a_model_without_these_layers(tmp_path):
    """The layers of multi-token prediction get their initial values. All other layers are loaded."""
    (wanted,) = run_world(1, save_main_model, Row(micro_batch=2), tmp_path)
    row = Row(pp=2, micro_batch=2)
    with pytest.raises(UserError, match="no layers for multi-token prediction, --mtp-num-layers is 1: add"):
        find_checkpoint(unconnected_run(config_of(row, model=EXPERTS, checkpoint={"load": str(tmp_path)})))
    found = run_world(row.world_size, start_from, row, tmp_path, EXPERTS, finetune=True)
    assert found[-1][0] == pytest.approx(wanted, rel=1e-6)
    names = [name for _, initial, *_ in found for name in initial if name.startswith("11.")]
    assert names
    for _, initial, loaded, _ in found:
        for name, value in initial.items():
            is_new = name.startswith("11.") or name.endswith("expert_bias")
            assert torch.equal(loaded[name], value) == is_new or value.dim() == 1, name


def layer_times(row, changes):
    run = make_run(config_of(row, **changes))
    return find_layer_times(run.config, run.mesh, VOCAB, EOD), {x.time_name for x in run.stages.layers}


@pytest.mark.parametrize("changes", [{}, PLAIN, DOCUMENTS], ids=["fused", "plain", "documents"])
def test_a_profile_has_the_time_of_a_layer_with_its_head(changes):
    """--partition-method profile measures the time of a prediction layer with its head."""
    for recompute in (False, True):
        row = Row(tp=2, recompute=recompute)
        for seconds, names in run_world(2, layer_times, row, merged({"model": UNTIED}, changes)):
            assert seconds.keys() == names
            assert seconds["MultiTokenPredictionPipe"] > seconds["LMHeadPipe"] > 0
            assert seconds["EmbeddingCopyPipe@first"] == 0
