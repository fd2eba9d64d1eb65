"""A resumed run equals the uninterrupted run. Incompatible checkpoints are rejected by name."""

import errno
import json
import os
import re
import shutil
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.discovery import find_latest
from megatron.checkpoint.formats.native import LayerFiles
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.manager import SaveError, load_checkpoint
from megatron.checkpoint.record import TrainingState
from megatron.checkpoint.selection import find_checkpoint, select_valid_checkpoint
from megatron.data.gpt_dataset import VOCABULARY_KEY
from megatron.errors import UserError
from tests.support.checkpoints import FINGERPRINT, make_manager, save_midway, state_after
from tests.support.layouts import (
    EOD,
    FP32_BOUND,
    VOCAB,
    Row,
    build_engine,
    build_model,
    config_of,
    full_weights,
    relative_errors,
    train,
    unconnected_run,
    weights_of,
)
from tests.support.pool import run_world
from tests.unit.checkpoint.native_folder import change_run, flip_a_byte

LAYOUTS = {
    "one process": Row(micro_batch=4),
    "TP 2": Row(tp=2, micro_batch=4),
    "PP 2": Row(pp=2, micro_batch=4),
    "DP 2": Row(dp=2, micro_batch=4),
    "TP 2 x PP 2": Row(tp=2, pp=2, micro_batch=4),
}
# A small model with dropout, whose masks must repeat. The loss scale overflows at first, and grows soon.
CHANGES = {
    "model": {"num_layers": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "precision": {"initial_loss_scale": 2.0**24, "hysteresis": 1, "loss_scale_window": 2},
}


def config_for(row, optimizer):
    return config_of(row, optimizer={"optimizer": optimizer}, **CHANGES)


def outcome(engine, steps):
    """Returns losses and norms of the steps, then everything on which the rest of the run depends."""
    history = train(engine, steps)
    scaler = engine.optimizer.scaler.state_dict()
    moments = [
        value
        for state in engine.optimizer.optimizer.state.values()
        for key, value in sorted(state.items())
        if isinstance(value, torch.Tensor)
    ]
    masters = [flat.master.detach().clone() for flat in engine.optimizer.flat]
    return history, scaler, moments + masters, weights_of(engine).shards


def save_and_continue(row, optimizer, folder):
    engine = save_midway(row, folder, 3, optimizer={"optimizer": optimizer}, **CHANGES)
    return outcome(engine, range(3, 6))


def resume_and_continue(row, optimizer, folder):
    engine = build_engine(config_for(row, optimizer))
    train(engine, [9])  # differs from a fresh engine: the load must replace all
    checkpoint = find_latest(folder)
    load_checkpoint(engine, checkpoint, FINGERPRINT)
    return checkpoint.state, outcome(engine, range(3, 6))


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize(
    "optimizer, precision, zero",
    [("adam", precision, zero) for precision in ("fp32", "bf16", "fp16") for zero in (0, 1)]
    + [("sgd", "bf16", 0), ("sgd", "fp32", 1), ("lion", "bf16", 1), ("muon", "bf16", 1), ("muon", "fp32", 0)],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(
    layout, optimizer, precision, zero, tmp_path
):
    row = replace(LAYOUTS[layout], precision=precision, zero=zero)
    uninterrupted = run_world(row.world_size, save_and_continue, row, optimizer, tmp_path)
    resumed = run_world(row.world_size, resume_and_continue, row, optimizer, tmp_path)
    assert_equal_to_the_last_bit(resumed, uninterrupted)


def assert_equal_to_the_last_bit(resumed, uninterrupted):
    """Compares training state, losses, norms, loss scale, moments, master weights and weights of all
    ranks."""
    for (state, after), expected in zip(resumed, uninterrupted, strict=True):
        assert state == state_after(3)
        assert after[:2] == expected[:2], "losses, norms or the loss scale differ"
        assert len(after[2]) == len(expected[2]) >= 2
        assert all(torch.equal(a, b) for a, b in zip(after[2], expected[2], strict=True)), "moments, masters"
        assert all(torch.equal(after[3][name], expected[3][name]) for name in expected[3]), "weights"


@pytest.mark.parametrize("precision, zero", [("fp32", 1), ("bf16", 0)])
def test_a_run_of_four_replicas_resumes_to_the_last_bit(precision, zero, tmp_path):
    row = Row(pp=2, dp=4, micro_batch=1, precision=precision, zero=zero)
    uninterrupted = run_world(row.world_size, save_and_continue, row, "adam", tmp_path)
    resumed = run_world(row.world_size, resume_and_continue, row, "adam", tmp_path)
    assert_equal_to_the_last_bit(resumed, uninterrupted)


def resume_from_valid_files(row, folder):
    engine = build_engine(config_for(row, "adam"))
    checkpoint = select_valid_checkpoint(find_latest(folder), unconnected_run(engine.run.config))
    load_checkpoint(engine, checkpoint, FINGERPRINT)
    return checkpoint.unverified_note, outcome(engine, range(3, 6))


def test_with_zero_1_and_bf16_a_resume_needs_no_mp_rank_file(tmp_path):
    row = Row(pp=2, micro_batch=4, precision="bf16", zero=1)
    uninterrupted = run_world(2, save_and_continue, row, "adam", tmp_path)
    files = sorted((tmp_path / "global_step3").glob("mp_rank_*"))
    assert [file.name for file in files] == [f"mp_rank_0{rank}_model_states.pt" for rank in (0, 1)]
    for file in files:
        file.unlink()
    for (remark, after), expected in zip(
        run_world(2, resume_from_valid_files, row, tmp_path), uninterrupted, strict=True
    ):
        assert remark == f"missing, but not needed to resume: {files[0].name}, {files[1].name}"
        assert after[:2] == expected[:2]
        assert all(torch.equal(a, b) for a, b in zip(after[2], expected[2], strict=True))


# --- a different number of stages ---

EVEN = {"partition_method": "type:transformer"}
OTHER_STAGES = {
    "other bounds": {"partition_method": "stages:E,2+L"},
    "an empty stage": {"partition_method": "stages:2,0"},
    "dualpipev": {"pipeline_schedule": "dualpipev", "partition_method": "stages:E,1,1,0"},
    "interleaved": {
        "pipeline_schedule": "interleaved",
        "virtual_pipeline_stages": 2,
        "partition_method": "stages:E,1,1,0",
    },
}


def save_after(row, parallel, folder):
    engine = save_midway(row, folder, 3, parallel=parallel, model=CHANGES["model"])
    return train(engine, range(3, 6))


def resume_with(row, parallel, folder):
    config = config_of(row, parallel=parallel, checkpoint={"load": str(folder)}, model=CHANGES["model"])
    checkpoint = find_checkpoint(unconnected_run(config))
    engine = build_engine(config)
    train(engine, [9])
    load_checkpoint(engine, checkpoint, FINGERPRINT)
    return train(engine, range(3, 6))


@pytest.mark.full
@pytest.mark.parametrize("zero, precision", [(0, "fp32"), (1, "fp32"), (1, "bf16"), (0, "fp16")])
@pytest.mark.parametrize("stages", OTHER_STAGES)
@pytest.mark.parametrize("back", [False, True])
def test_a_resume_may_use_another_partition(stages, zero, precision, back, tmp_path):
    row = Row(tp=2, pp=2, dp=1 + zero, micro_batch=1, zero=zero, precision=precision)
    before, after = (OTHER_STAGES[stages], EVEN) if back else (EVEN, OTHER_STAGES[stages])
    expected = run_world(row.world_size, save_after, row, before, tmp_path)[0]
    for history in run_world(row.world_size, resume_with, row, after, tmp_path):
        loss_error, norm_error = relative_errors(history, expected)
        # Activations are rounded at a stage boundary in 16-bit runs. In fp32 a boundary changes nothing.
        assert loss_error <= (FP32_BOUND if precision == "fp32" else 2e-4)
        assert norm_error <= (FP32_BOUND if precision == "fp32" else 1e-2)


def test_run_json_records_the_stages(tmp_path):
    row = Row(pp=2)
    run_world(2, save_after, row, OTHER_STAGES["other bounds"], tmp_path)
    assert json.loads((tmp_path / "global_step3" / "run.json").read_text())["stages"] == {
        "partition_method": "stages:E,2+L",
        "pipeline_schedule": "1f1b",
        "bounds": [0, 2, 8],
    }


# --- rejected checkpoints ---


def save_untrained(row, folder):
    engine = build_engine(config_of(row))
    make_manager(engine, folder).save(state_after(1))
    return weights_of(engine)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untrained")
    run_world(1, save_untrained, Row(), folder)
    return folder


@pytest.fixture
def saved(untrained, tmp_path):
    """Returns a folder with a checkpoint of the single-process model."""
    return shutil.copytree(untrained, tmp_path, dirs_exist_ok=True)


def find(folder, row=None, vocab=VOCAB, fingerprint=FINGERPRINT, **changes):
    config = config_of(row or Row(), **{"checkpoint": {"load": str(folder)}, **changes})
    return find_checkpoint(unconnected_run(config, vocab, fingerprint))


def test_the_run_that_wrote_a_checkpoint_finds_it_and_a_fresh_one_finds_none(saved, tmp_path_factory):
    checkpoint = find(saved)
    assert checkpoint.folder == saved / "global_step1" and checkpoint.state == state_after(1)
    assert (checkpoint.vocab_size, checkpoint.eod) == (VOCAB, EOD)
    assert checkpoint.config == config_of(Row())
    assert find(tmp_path_factory.mktemp("empty")) is None


@pytest.mark.parametrize(
    "change, named",
    [
        ({"num_layers": 3}, "num_layers was 4, is 3"),
        ({"num_attention_heads": 8}, "num_attention_heads was 4, is 8"),
        ({"position_embedding_type": "rotary"}, "position_embedding_type was absolute, is rotary"),
        ({"embed_layernorm": True}, "embed_layernorm was False, is True"),
        ({"glu_activation": "swiglu"}, "glu_activation was None, is swiglu"),
    ],
)
def test_another_model_is_refused_by_name(saved, change, named):
    with pytest.raises(UserError, match=named):
        find(saved, model=change)


def test_padding_and_the_length_of_relative_positions_may_change(saved, tmp_path_factory):
    assert find(saved, model={"make_vocab_size_divisible_by": 64, "pad_vocab_size_to": 192}) is not None
    alibi = tmp_path_factory.mktemp("alibi")
    run_world(1, save_untrained, Row(positions="alibi"), alibi)
    shorter = {"seq_length": 16, "max_position_embeddings": 16}
    assert find(alibi, Row(positions="alibi"), model=shorter) is not None
    with pytest.raises(UserError, match="max_position_embeddings was 32, is 16"):
        find(saved, model=shorter)


def test_another_vocabulary_is_refused_by_name(saved):
    with pytest.raises(UserError, match="had 101 tokens, has 102"):
        find(saved, vocab=102)


def test_another_vocabulary_of_the_same_size_is_refused_even_with_other_data(saved):
    data = {**FINGERPRINT, VOCABULARY_KEY: "a" * 64}
    change_run(saved / "global_step1", lambda run: run.update(data=data))
    assert find(saved, fingerprint={**FINGERPRINT, VOCABULARY_KEY: "a" * 64}) is not None
    assert find(saved) is not None  # a run without a tokenizer
    options = {"checkpoint": {"load": str(saved), "override_data": True}}
    with pytest.raises(UserError, match="aaaaaaaaaaaa.*bbbbbbbbbbbb"):
        find(saved, fingerprint={**FINGERPRINT, VOCABULARY_KEY: "b" * 64}, **options)


def test_other_data_is_refused_by_name_and_moved_data_is_not(saved):
    with pytest.raises(UserError, match=r"tokens: \[5000\] in the checkpoint, \[6000\] now"):
        find(saved, fingerprint={**FINGERPRINT, "tokens": [6000]})
    assert find(saved, fingerprint={**FINGERPRINT, "paths": ["/elsewhere/corpus"]}) is not None
    with pytest.raises(
        UserError, match=r"another order of samples \(data_order: native .*, megatron-core now"
    ):
        find(saved, fingerprint={**FINGERPRINT, "data_order": "megatron-core"})


def test_another_number_of_epochs_is_not_called_other_data(saved):
    """A larger batch or more steps read the checkpoint's data more often, but the data are equal."""
    longer = {**FINGERPRINT, "epochs": [2], "last_epoch_apart": [True]}
    with pytest.raises(UserError) as caught:
        find(saved, fingerprint=longer, training={"train_iters": 1000})
    sentence = str(caught.value)
    assert "another number of epochs of the same data" in sentence and "other data" not in sentence
    assert re.search(r"run has [\d,]+ training samples, this run [\d,]+000:", sentence)
    with pytest.raises(UserError, match="trained on other data"):
        find(saved, fingerprint={**longer, "tokens": [6000]})


def test_a_checkpoint_that_has_consumed_nothing_starts_on_any_data(saved):
    """The checkpoint's weights are from another program or run, so the new run may choose its own
    training settings."""
    nothing = {"state": asdict(TrainingState()), "data": {}}
    change_run(saved / "global_step1", lambda run: run.update(nothing))
    assert find(saved, data={"reset_attention_mask": True}).state == TrainingState()
    with pytest.raises(UserError, match="num_layers was 4, is 3"):
        find(saved, model={"num_layers": 3})


def test_a_universal_checkpoint_is_opened_without_its_flag_only_if_there_is_no_native_one(saved):
    shutil.copytree(saved / "global_step1", saved / "global_step2_universal")
    (saved / "global_step2_universal" / "zero").mkdir()
    (saved / "latest_universal").write_text("global_step2_universal")
    assert find(saved).format == "native"
    (saved / "latest_universal").unlink()
    (saved / "global_step1").rename(saved / "global_step9_universal")
    (saved / "global_step9_universal" / "zero").mkdir()
    (saved / "latest").unlink()
    assert find(saved) is None
    (saved / "latest_universal").write_text("global_step9_universal")
    with pytest.raises(UserError, match="no native one of the run that saved to it"):
        find(saved)
    (saved / "latest.json").unlink()
    for folder in (saved, saved / "global_step9_universal"):
        assert find(folder).format == "universal"


# --- incomplete checkpoints are not found ---


def save_twice(row, folder, keep_last=None):
    """Saves checkpoints of steps 1 and 2."""
    engine = build_engine(config_of(row, checkpoint={"keep_last": keep_last}))
    manager = make_manager(engine, folder)
    for step in (0, 1):
        train(engine, [step])
        manager.save(state_after(step + 1))


def select(row, folder):
    config = config_of(row, checkpoint={"load": str(folder)})
    # Only rank 0 searches for a checkpoint.
    checkpoint = find_checkpoint(unconnected_run(config)) if dist.get_rank() == 0 else None
    try:
        selectd = select_valid_checkpoint(checkpoint, unconnected_run(config))
    except UserError as error:
        return str(error)
    return selectd.state.iteration, selectd.skip_reason


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("pattern", ["layer_05-*", "mp_rank_01_*", "zero_pp_rank_1_mp_rank_00_*"])
def test_a_flipped_byte_is_named_and_the_previous_checkpoint_resumed(pattern, tmp_path):
    row = Row(pp=2, dp=2, zero=1)
    run_world(row.world_size, save_twice, row, tmp_path)
    (damaged,) = (tmp_path / "global_step2").glob(pattern)
    flip_a_byte(damaged)
    for iteration, skip_reason in run_world(2, select, Row(tp=2), tmp_path):
        assert iteration == 1
        assert "global_step2" in skip_reason and f"{damaged.name} is damaged" in skip_reason
    flip_a_byte(next((tmp_path / "global_step1").glob(pattern)))
    for sentence in run_world(2, select, Row(tp=2), tmp_path):
        assert "global_step2" in sentence and "global_step1:" in sentence and "is damaged" in sentence


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("keep_last, kept", [(None, {"global_step1", "global_step2"}), (1, {"global_step2"})])
def test_keep_last_keeps_that_many_checkpoints(keep_last, kept, tmp_path):
    (tmp_path / "saving-global_step1").mkdir()
    universal = tmp_path / "global_step0_universal"
    (universal / "zero").mkdir(parents=True)
    (universal / "run.json").touch()
    run_world(2, save_twice, Row(pp=2), tmp_path, keep_last)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {*kept, universal.name}


def resume_and_save(row, folder, steps, keep_last):
    """Starts from the folder's checkpoint, and saves at the given steps."""
    options = {"load": str(folder), "save": str(folder), "keep_last": keep_last}
    config = config_of(row, checkpoint=options)
    checkpoint = select_valid_checkpoint(find_checkpoint(unconnected_run(config)), unconnected_run(config))
    engine = build_engine(config)
    manager = make_manager(engine, folder)
    start = manager.restore_or_init(checkpoint, lambda text: None)
    for step in steps:
        manager.save(state_after(step))
    return start.iteration


def test_only_checkpoints_of_the_lineage_are_deleted(tmp_path):
    """--keep-last deletes neither a branch abandoned by setting `latest` back, nor the target of a link."""
    run_world(1, resume_and_save, Row(), tmp_path, (1, 2, 3, 4), None)
    (tmp_path / "latest").write_text("global_step1")
    elsewhere = tmp_path / "archive"
    (tmp_path / "global_step1").rename(elsewhere)
    (tmp_path / "global_step1").symlink_to(elsewhere)
    for name in ("global_step2", "global_step3", "global_step4"):
        change_run(tmp_path / name, lambda run: run.update(lineage=[]))
    assert run_world(1, resume_and_save, Row(), tmp_path, (5, 6), 1) == [1]
    assert (elsewhere / "run.json").is_file() and not (tmp_path / "global_step1").exists()
    left = {path.name for path in tmp_path.glob("global_step*")}
    assert left == {"global_step2", "global_step3", "global_step4", "global_step6"}


def sentence_of_a_full_disk(folder, num_bytes):
    """Returns the error of a save to a disk with `num_bytes` of free space."""
    engine = build_engine(config_of(Row()))
    manager, write, left = make_manager(engine, folder), os.write, [num_bytes]

    def limited(descriptor, data):
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(descriptor, data[: left[0]])
        left[0] -= done
        return done

    os.write = limited
    try:
        manager.save(state_after(1))
    except SaveError as error:
        return str(error)
    finally:
        os.write = write


@pytest.mark.parametrize("num_bytes", [0, 100, 100_000])
def test_a_full_disk_is_named_with_the_checkpoint(num_bytes, tmp_path):
    (sentence,) = run_world(1, sentence_of_a_full_disk, tmp_path, num_bytes)
    assert sentence == f"checkpoint {tmp_path}/global_step1 cannot be written (the disk is full)"


def fail_to_save(row, folder, limit):
    """Saves while no file may be longer than `limit` bytes, as on a disk that fills up."""
    import resource
    import signal

    engine = build_engine(config_of(row))
    manager = make_manager(engine, folder)
    manager.save(state_after(1))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        manager.save(state_after(2))
    except SaveError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return None


@pytest.mark.parametrize("limit", [100, 20_000])
def test_a_limit_of_the_size_leaves_the_complete_checkpoints(limit, tmp_path):
    (sentence,) = run_world(1, fail_to_save, Row(), tmp_path, limit)
    assert sentence.startswith(f"checkpoint {tmp_path}/global_step2 cannot be written (File too large; ")
    found = find_latest(tmp_path)
    assert found.state.iteration == 1 and re.search(
        r"saving-global_step2\.\w{8} was never finished", found.skip_reason
    )
    assert run_world(1, select, Row(), tmp_path)[0][0] == 1


# --- unsharded weights ---


def save_trained(row, folder, steps):
    return weights_of(save_midway(row, folder, steps))


def whole_weights_from(folder):
    """Returns names and values of a single-process model, initially and after loading."""
    _, model = build_model(config_of(Row()))
    fresh = {name: p.detach().clone() for name, p in model.named_parameters()}
    open_reader(find_latest(folder)).load_weights(model)
    return fresh, {name: p.detach().clone() for name, p in model.named_parameters()}


def test_weights_of_an_untrained_checkpoint_equal_those_of_one_process(tmp_path):
    row = Row(tp=2, pp=2)
    run_world(row.world_size, save_trained, row, tmp_path, 0)
    ((fresh, loaded),) = run_world(1, whole_weights_from, tmp_path)
    assert fresh.keys() == loaded.keys()
    assert all(torch.equal(fresh[name], loaded[name]) for name in fresh)


def test_weights_of_a_trained_checkpoint_are_its_merged_shards(tmp_path):
    row = Row(tp=2, pp=2, micro_batch=4)
    expected = full_weights(run_world(row.world_size, save_trained, row, tmp_path, 2))
    ((fresh, loaded),) = run_world(1, whole_weights_from, tmp_path)
    word_embedding = "tied_modules.embed.word_embeddings.weight"
    assert loaded[word_embedding].shape == (104, 32) and not loaded[word_embedding][VOCAB:].any()
    loaded[word_embedding] = loaded[word_embedding][:VOCAB]
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert not torch.equal(loaded["6.mlp.dense_4h_to_h.weight"], fresh["6.mlp.dense_4h_to_h.weight"])


def load_into_another_model(folder, changes):
    _, model = build_model(config_of(Row(), model=changes))
    try:
        open_reader(find_latest(folder)).load_weights(model)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"embed_layernorm": True}, "lacks 2 parameters, among them tied_modules.embed.word_embeddings.norm"),
        ({"position_embedding_type": "alibi"}, "position_embeddings.weight, which the model does not have"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(saved, changes, named):
    (message,) = run_world(1, load_into_another_model, saved / "global_step1", changes)
    assert named in message


def test_a_folder_without_layer_files_is_named(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path} holds no layer files"):
        LayerFiles(tmp_path)
