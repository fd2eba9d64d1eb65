"""A run continues from a checkpoint of Megatron-Core with Megatron-Core's losses, on every layout.
megatron-core itself wrote the assets with TP 2 and PP 2 (`tests/reference/write_torch_dist.py`)."""

import json
import pickle
import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.formats.dcp import DcpFolder
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.formats.torch_dist import read_common
from megatron.checkpoint.manager import load_checkpoint
from megatron.checkpoint.record import TrainingState
from megatron.checkpoint.selection import find_checkpoint
from megatron.commands import convert_checkpoint
from megatron.config import Config
from megatron.data.loader import MicroBatch
from megatron.errors import UserError
from tests.distributed.test_model_variants import LLAMA
from tests.support.assets import unpack
from tests.support.checkpoints import FINGERPRINT
from tests.support.layouts import Row, build_engine, config_of, unconnected_run
from tests.support.pool import run_world

VOCAB, BATCH, SEQ = 64, 4, 32
MODEL = {**LLAMA, "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64}
# Checkpoints of bf16 models with DP 2: of the mixed-precision optimizer (first) and of the distributed
# optimizer.
SMALL = ("torch_dist_float16", "torch_dist_reshardable", "torch_dist_model_space")
SMALL_MODEL = {"hidden_size": 16, "ffn_hidden_size": 32, "kv_channels": 4}
EXPERTS = {
    **{**SMALL_MODEL, "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 24},
    **{"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01},
}
MIXED = {
    **{**EXPERTS, "num_layers": 4, "moe_layer_freq": ("D", "E"), "moe_router_topk": 4},
    **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    **{"moe_router_bias_update_rate": 0.01, "moe_router_topk_scaling_factor": 2.5},
    **{"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    **{"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True},
}
MTP = {**SMALL_MODEL, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}
# Checkpoints of a HybridModel, without and with experts. Version 0.19 wrote the second, without common.pt.
HYBRID = ("torch_dist_hybrid", "torch_dist_hybrid_experts")
LATENT = {
    **{"group_query_attention": False, "num_query_groups": 1, "multi_latent_attention": True},
    **{"q_lora_rank": 12, "kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 6},
    **{"qk_layernorm": True, "rope_scaling_type": "yarn", "rope_scaling_factor": 4.0},
    **{"rope_original_max_position_embeddings": 16, "rope_beta_slow": 0.5, "rope_beta_fast": 2.0},
    **{"mscale": 0.7, "mscale_all_dim": 1.3},
}
MODELS = {
    **dict.fromkeys((*SMALL, HYBRID[0]), SMALL_MODEL),
    "torch_dist_attention": {
        **{"softmax_type": "learnable", "attention_output_gate": True, "no_rope_freq": ("R", "N")},
    },
    **{"torch_dist_latent": LATENT, "torch_dist_mtp": MTP},
    **{"torch_dist_llama": {}, "torch_dist_experts": EXPERTS, "torch_dist_experts_mixed": MIXED},
    HYBRID[1]: {**EXPERTS, "num_layers": 4, "moe_layer_freq": ("D", "E")},
}
OPTIMIZER = {"adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.0, "clip_grad": 0.0}


@pytest.fixture
def core(tmp_path: Path) -> Path:
    return unpack("torch_dist_llama", tmp_path)


def config_for(row: Row, folder: Path, ep: int = 1, **model: object) -> Config:
    batch = {"micro_batch_size": row.micro_batch, "global_batch_size": BATCH}
    parallel = {"expert_model_parallel_size": ep, "sequence_parallel": ep > 1 and row.tp > 1}
    sections = {"model": MODEL | model, "optimizer": OPTIMIZER, "batch": batch, "parallel": parallel}
    return config_of(row, **sections, checkpoint={"load": str(folder)})


def resume(
    row: Row, core: Path, folder: Path | None = None, ep: int = 1, **model: Any
) -> tuple[TrainingState, list[float]]:
    """Loads a checkpoint (default: Megatron-Core's) and takes the next steps on its batches."""
    config = config_for(row, folder or core, ep, **MODELS[core.name] | model)
    expected = json.loads((core / "expected.json").read_text())
    checkpoint = find_checkpoint(unconnected_run(config, VOCAB))
    engine = build_engine(config, vocab_size=VOCAB)
    load_checkpoint(engine, checkpoint, FINGERPRINT)
    size, mesh, losses = row.micro_batch, engine.mesh, []
    for batch in torch.tensor(expected["tokens"])[expected["steps"] :]:
        firsts = range(mesh.dp.rank * size, BATCH, mesh.dp_size * size)
        micro_batches = (MicroBatch.from_rows(batch[first : first + size], first) for first in firsts)
        with engine.module.metrics.recording():
            losses.append(engine.train_step(micro_batches, BATCH, expected["lr"]).item())
        if "mtp_losses" in expected:
            found = engine.module.metrics.collect(torch.device("cpu"))
            losses += [found["mtp_1 loss"], found["mtp_2 loss"]]
    return checkpoint.state, losses


@pytest.mark.gate(rows=3)
@pytest.mark.parametrize(
    "name, row",
    [
        *product(("torch_dist_llama", "torch_dist_attention"), (Row(micro_batch=4), Row(tp=2, dp=2, zero=1))),
        ("torch_dist_latent", Row(tp=2, cp=2, micro_batch=2)),
        *product(
            ("torch_dist_llama", "torch_dist_attention"),
            (Row(tp=2, pp=2, micro_batch=2), Row(pp=2, dp=2, zero=1)),
        ),
        ("torch_dist_latent", Row(pp=2, micro_batch=2)),
    ],
    ids=str,
)
def test_the_next_losses_are_those_of_megatron_core(name: str, row: Row, tmp_path: Path) -> None:
    core = unpack(name, tmp_path)
    content = json.loads((core / "expected.json").read_text())
    expected = content["losses"][content["steps"] :]
    for state, losses in run_world(row.world_size, resume, row, core):
        assert state == TrainingState(3, 3 * BATCH, 3 * BATCH * SEQ)
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.gate(rows=3)
@pytest.mark.parametrize(
    "row, name",
    [
        *zip((Row(tp=2), Row(pp=2, micro_batch=2), Row(tp=2, dp=2, zero=1)), SMALL, strict=True),
        *zip((Row(tp=2, pp=2), Row(dp=2, zero=1), Row(micro_batch=4)), SMALL, strict=True),
        *zip((Row(dp=2, zero=1), Row(tp=2), Row(tp=2, pp=2)), SMALL, strict=True),
    ],
    ids=str,
)
def test_the_next_losses_follow_from_the_main_parameters(row: Row, name: str, tmp_path: Path) -> None:
    """Fails if training starts from the bf16 weights: their losses differ by 2e-4. In one of the checkpoints
    the distributed optimizer's state is flattened."""
    core = unpack(name, tmp_path)
    content = json.loads((core / "expected.json").read_text())
    expected = content["losses"][content["steps"] :]
    assert expected != pytest.approx(content["own_losses"], rel=1e-4)
    for state, losses in run_world(row.world_size, resume, row, core):
        assert state == TrainingState(3, 3 * BATCH, 3 * BATCH * SEQ)
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize(
    "name, row, ep",
    [
        ("torch_dist_experts", Row(dp=2, zero=1), 2),
        ("torch_dist_experts_mixed", Row(tp=2, dp=2), 4),
        ("torch_dist_experts", Row(tp=2, pp=2), 2),
        ("torch_dist_experts_mixed", Row(micro_batch=4), 1),
        ("torch_dist_hybrid_experts", Row(dp=2, zero=1), 2),
        ("torch_dist_hybrid_experts", Row(tp=2, pp=2), 2),
        ("torch_dist_hybrid_experts", Row(micro_batch=4), 1),
        ("torch_dist_hybrid", Row(tp=2, pp=2), 1),
        ("torch_dist_hybrid", Row(dp=2, zero=1), 1),
        ("torch_dist_hybrid", Row(micro_batch=4), 1),
    ],
    ids=str,
)
def test_the_next_losses_of_experts_are_those_of_megatron_core(
    name: str, row: Row, ep: int, tmp_path: Path
) -> None:
    """The checkpoint is read directly, and after a conversion to DCP. The losses depend on the router, the
    experts' bias, and the gradients of balance loss and z-loss."""
    core, folder = unpack(name, tmp_path), tmp_path / "dcp" / "global_step3"
    convert_checkpoint.run(["--from", str(core), "--to", str(folder), "--format", "dcp"])
    content = json.loads((core / "expected.json").read_text())
    expected = content["losses"][content["steps"] :]
    assert name == HYBRID[0] or expected != pytest.approx(content["own_losses"], rel=1e-4)
    for source in (core, folder):
        for state, losses in run_world(row.world_size, resume, row, core, source, ep):
            assert state == TrainingState(3, 3 * BATCH, 3 * BATCH * SEQ)
            assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("row", [Row(tp=2, pp=2, micro_batch=2), Row(micro_batch=4), Row(dp=2, zero=1)])
def test_the_next_losses_of_multi_token_prediction_are_those_of_megatron_core(
    row: Row, tmp_path: Path
) -> None:
    """Compares the losses of the main model and of each prediction depth."""
    core = unpack("torch_dist_mtp", tmp_path)
    content = json.loads((core / "expected.json").read_text())
    both = zip(content["losses"], content["mtp_losses"], strict=True)
    expected = [loss for main, others in both for loss in (main, *others)][3 * content["steps"] :]
    for _, losses in run_world(row.world_size, resume, row, core):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["native", "dcp"])
def test_a_run_continues_with_the_balance_loss_of_the_converted_arguments(kind: str, tmp_path: Path) -> None:
    """Megatron-Core does not save the tokens per expert of the previous step, so global_aux_loss begins with
    a balanced load."""
    core, folder = unpack("torch_dist_experts_mixed", tmp_path), tmp_path / "converted" / "global_step3"
    common = torch.load(core / "common.pt", weights_only=False)
    common["args"].moe_router_load_balancing_type = "global_aux_loss"
    torch.save(common, core / "common.pt")
    convert_checkpoint.run(["--from", str(core), "--to", str(folder), "--format", kind])
    balance = {"moe_router_load_balancing_type": "global_aux_loss"}
    assert open_checkpoint(folder).config.model.moe_router_load_balancing_type == "global_aux_loss"
    content = json.loads((core / "expected.json").read_text())
    for _, losses in run_world(1, resume, Row(micro_batch=4), core, folder, 1, **balance):
        assert losses[0] == pytest.approx(content["losses"][content["steps"]], rel=1e-5)


def test_a_conversion_needs_no_run(core: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Converts Megatron-Core -> native -> Hugging Face, for the model that Megatron-Core's arguments
    describe."""
    native = tmp_path / "native" / "global_step3"
    convert_checkpoint.run(["--from", str(core), "--to", str(native)])
    expected = json.loads((core / "expected.json").read_text())
    ((state, losses),) = run_world(1, resume, Row(micro_batch=4), core, native)
    assert state == TrainingState(3, 3 * BATCH, 3 * BATCH * SEQ)
    assert losses == pytest.approx(expected["losses"][expected["steps"] :], rel=1e-5)
    words = ["--from", str(native), "--to", str(tmp_path / "model"), "--format", "huggingface"]
    convert_checkpoint.run(words)
    assert "LlamaForCausalLM in fp32, iteration 3" in capsys.readouterr().out
    tokens = torch.tensor(expected["tokens"])[0, :1, :SEQ]
    logits = LlamaForCausalLM.from_pretrained(tmp_path / "model")(tokens).logits
    assert torch.isfinite(logits).all() and logits.shape[-1] == VOCAB


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"num_experts": 8}, "lacks .* parameters, among them 3.mlp.experts"),
        ({"num_experts": 8, "moe_latent_size": 16}, "moe_latent_size is 16 with num_experts, expected None"),
        ({"ffn_hidden_size": 96}, "holds another model|has shape|expected"),
        ({"num_layers": 1 << 15}, "its arguments describe 32,768 layers, and it holds 15 parameters"),
        ({"num_layers": None}, "its arguments describe no model of this program|lack num_layers"),
    ],
)
def test_arguments_that_do_not_describe_the_tensors_stop_a_conversion(
    change: dict[str, object], sentence: str, core: Path, tmp_path: Path
) -> None:
    common = torch.load(core / "common.pt", weights_only=False)
    for name, value in change.items():
        setattr(common["args"], name, value)
    torch.save(common, core / "common.pt")
    target = tmp_path / "native" / "global_step3"
    with pytest.raises(UserError, match=sentence):
        convert_checkpoint.run(["--from", str(core), "--to", str(target)])
    assert not target.exists()


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_what_megatron_core_wrote(name: str, tmp_path: Path) -> None:
    """Converts Megatron-Core -> native -> Megatron-Core. Names, shapes, bits of weights, main parameters and
    moments, objects, and the entries of common.pt are equal. The written checkpoint also has the states of
    the native one, and the names that the distributed optimizer expects."""
    core = unpack(name, tmp_path)
    native, folder = tmp_path / "global_step3", tmp_path / "torch_dist"
    convert_checkpoint.run(["--from", str(core), "--to", str(native)])
    words = ["--from", str(native), "--to", str(folder), "--format", "torch_dist"]
    convert_checkpoint.run(words + ["--hybrid-model"] * (name in HYBRID))
    ours, theirs = DcpFolder(folder), DcpFolder(core)
    names = {key: name_in_default_version(key, name) for key in theirs.tensors}
    distributed = {
        f"optimizer.state.param.{key}"
        for key in names.values()
        if not key.startswith("optimizer.") and not key.endswith("expert_bias")
    }
    assert distributed <= ours.tensors.keys() and {*names.values()} <= ours.tensors.keys()
    for key, stored in theirs.tensors.items():
        if ours.tensor(names[key]).shape == stored.shape:  # the test above compares flattened tensors
            assert torch.equal(ours.read(names[key]), theirs.read(key)), key
    for key in distributed:
        weight = ours.read(key.removeprefix("optimizer.state.param."))
        assert torch.equal(ours.read(key).to(weight.dtype), weight), key
    back, kept = (open_reader(open_checkpoint(path)) for path in (folder, native))
    assert {*back.stored_names} == {*kept.stored_names}
    for parameter, state in product(kept.stored_names, (VALUES, "exp_avg", "exp_avg_sq")):
        if state in kept.state_names(parameter):
            assert torch.equal(back.read(parameter, state), kept.read(parameter, state)), (parameter, state)
    assert objects_of(theirs) <= objects_of(ours) | {"common_state/shard_0_1"}
    one, other = map(read_common, (folder, core))
    # Entries of `fully_sharded_model_space`, a format that is not written.
    old = {"param_state", "param_state_sharding_type"} if name == "torch_dist_model_space" else set()
    assert lacking(one["optimizer"], other["optimizer"]) <= old
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    assert one["content_metadata"] == metadata
    assert (one["iteration"], vars(one["args"])["padded_vocab_size"]) == (3, VOCAB)
    assert one["args"].consumed_train_samples == one["opt_param_scheduler"]["num_steps"] == 3 * BATCH
    # The arguments also have the names and values that Megatron-LM reads with --use-checkpoint-args.
    assert lacking(vars(one["args"]), vars(other["args"])) <= {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
    }
    taken = {"add_position_embedding": True, "apply_layernorm_1p": False, "squared_relu": False}
    assert taken.items() <= vars(one["args"]).items()


def objects_of(folder: DcpFolder) -> set[str]:
    """Returns the names of objects, except for objects of the distributed optimizer of version 0.13."""
    return {name for name in folder.objects if not name.startswith("optimizer.")}


def name_in_default_version(key: str, name: str) -> str:
    """Returns the name that Transformer Engine and the newest Megatron-LM give a tensor: the norm before
    experts is not part of the first matrix, and optimizers have no numbers."""
    if name == "torch_dist_experts":
        key = key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    if name == "torch_dist_latent":
        key = key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        key = re.sub(r"\.(q|kv)_layernorm\.", r".linear_\1_up_proj.layer_norm_", key)
    return key.removeprefix("chained_0.").removeprefix("chained_1.")


@pytest.mark.parametrize("way", [(), ("dcp",)])
@pytest.mark.parametrize("name", ["torch_dist_llama", "torch_dist_reshardable"])
def test_the_schedule_travels_to_native_and_back(name: str, way: tuple[str, ...], tmp_path: Path) -> None:
    """The learning rates of the groups and the scheduler's state survive the conversion. The native
    checkpoint's flags contain them."""
    core = unpack(name, tmp_path)
    common = torch.load(core / "common.pt", weights_only=False)
    rates = {"max_lr": 3e-3, "min_lr": 3e-4}
    scheduler = rates | {"lr_warmup_steps": 40, "num_steps": 3 * BATCH, "lr_decay_style": "cosine"}
    scheduler |= {"lr_decay_steps": 400, "start_wd": 0.0, "end_wd": 0.1, "wd_incr_style": "linear"}
    common["opt_param_scheduler"] = scheduler | {"wd_incr_steps": 400}
    vars(common["args"]).update(lr=3e-3, min_lr=3e-4, lr_decay_style="cosine", lr_decay_iters=100)
    for group in groups_of(common):
        group |= rates | {"lr": 9e-4, "weight_decay": 0.003 * group["wd_mult"]}
    torch.save(common, core / "common.pt")
    folders = [core, *(tmp_path / kind / "global_step3" for kind in ("native", *way, "torch_dist"))]
    for source, target in pairwise(folders):
        words = ["--from", str(source), "--to", str(target), "--format", target.parent.name]
        convert_checkpoint.run(words)
    written = torch.load(folders[-1] / "common.pt", weights_only=False)
    assert written["opt_param_scheduler"] == common["opt_param_scheduler"]
    assert lacking(groups_of(written), groups_of(common)) == set()
    schedule = open_checkpoint(folders[1]).config.schedule
    assert (schedule.lr, schedule.min_lr, schedule.lr_decay_style) == (3e-3, 3e-4, "cosine")


def groups_of(common: dict[str, Any]) -> list[dict[str, Any]]:
    state = common["optimizer"]
    return state.get("optimizer", state)["param_groups"]


def lacking(ours: Any, theirs: Any) -> set[str]:
    """Returns the keys of nested entries that are missing or different in `ours`."""
    if not isinstance(theirs, dict):
        # Megatron-Core has no group for the biases of experts if experts have no biases.
        assert len(ours) >= len(theirs) and all(one["is_expert_parallel"] for one in ours[len(theirs) :])
        pairs = zip(ours, theirs, strict=False)
        return set().union(*(lacking(one, other) for one, other in pairs))
    keys = {key for key in theirs if key not in ours}
    for key in theirs.keys() & ours.keys():
        if isinstance(theirs[key], dict) or key == "param_groups":
            keys |= lacking(ours[key], theirs[key])
        elif ours[key] != theirs[key]:
            keys.add(key)
    return keys


def test_moments_by_bucket_are_refused(core: Path) -> None:
    """Without the names of their parameters the moments could only start fresh."""
    path = core / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    bucket = (
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_"
    )

    def renamed(name: str) -> str:
        return name.replace("optimizer.state.", bucket)

    tensors, places = metadata.state_dict_metadata, metadata.storage_data
    metadata.state_dict_metadata = {renamed(name): entry for name, entry in tensors.items()}
    metadata.storage_data = {replace(index, fqn=renamed(index.fqn)): place for index, place in places.items()}
    path.write_bytes(pickle.dumps(metadata))
    words = "by bucket .dp_reshardable.,.* start pretrain_gpt.py from it with --no-load-optim"
    with pytest.raises(UserError, match=words):
        find_checkpoint(unconnected_run(config_for(Row(), core), VOCAB))
    with pytest.raises(UserError, match=words):
        convert_checkpoint.run(["--from", str(core), "--to", str(core.parent / "native" / "global_step3")])
    config = config_for(Row(), core)
    config = replace(config, checkpoint=replace(config.checkpoint, no_load_optim=True))
    checkpoint = find_checkpoint(unconnected_run(config, VOCAB))
    assert checkpoint is not None and checkpoint.state.iteration == 3


def test_a_different_model_is_refused(core: Path) -> None:
    with pytest.raises(UserError, match="--ffn-hidden-size was 64, is 96"):
        find_checkpoint(unconnected_run(config_for(Row(), core, ffn_hidden_size=96), VOCAB))
    with pytest.raises(UserError, match="the vocabulary had 64 rows with padding, and has 65 tokens"):
        find_checkpoint(unconnected_run(config_for(Row(), core), 65))
