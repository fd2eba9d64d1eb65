"""Universal checkpoints are written as DeepSpeed writes them, and are read from every framework."""

import argparse
import json
import shutil
import types
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from megatron.checkpoint.conversion.source import open_source
from megatron.checkpoint.discovery import find_universal, open_checkpoint
from megatron.checkpoint.files import add_checksum, describe_file
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.formats.universal import UniversalReader
from megatron.checkpoint.formats.universal_writer import UniversalWriter
from megatron.checkpoint.manager import load_checkpoint
from megatron.checkpoint.record import describe_start
from megatron.checkpoint.selection import find_checkpoint, select_valid_checkpoint
from megatron.errors import UserError
from megatron.model.inference.single_process import model_specs
from megatron.mpu.mesh import Axis
from megatron.mpu.pieces import Piece
from tests.distributed.resharding import SHAPES, STEPS_BEFORE, resume_midway, save_before, uninterrupted
from tests.distributed.test_model_variants import LLAMA, OLMO2_WINDOW
from tests.support.checkpoints import FINGERPRINT, make_manager, state_after
from tests.support.conversion import to_universal
from tests.support.layouts import (
    EOD,
    FP32_BOUND,
    VOCAB,
    Row,
    build_engine,
    config_of,
    relative_errors,
    train,
    unconnected_run,
)
from tests.support.pool import WorldError, run_world
from tests.unit.checkpoint.native_folder import change_run, flip_a_byte
from tests.unit.checkpoint.test_torch_files import harm

WORDS = "tied_modules.embed.word_embeddings.weight"
GATED = {"model": {"glu_activation": "swiglu"}}
# As BLOOM: ALiBi instead of a table of positions, and a norm after the word embedding.
BLOOM = {"model": {"embed_layernorm": True, "position_embedding_type": "alibi"}}
UNIVERSAL = {"checkpoint": {"universal_checkpoint": True}}
THEIR_ROWS = 128
"""Number of rows of BLOOM's word embedding, padding included."""


_written = {}


def saved(folder, row, changes):
    """Returns the native checkpoint of step 5 that a layout saves. Each checkpoint is written once and copied
    for each test."""
    key = f"{row} {changes}"
    if key not in _written:
        _written[key] = TemporaryDirectory()
        run_world(row.world_size, save_before, row, Path(_written[key].name), changes)
    shutil.copytree(_written[key].name, folder, dirs_exist_ok=True)
    return folder / f"global_step{STEPS_BEFORE}"


def converted(source, target, **options):
    return list(to_universal(open_source(source), target, **options))


def assert_resumes_everywhere(folder, changes, shapes=("1 process", "pp4 dp2", "tp4 dp2")):
    expected = uninterrupted(changes)
    for row in (SHAPES[shape] for shape in shapes):
        ranks = run_world(row.world_size, resume_midway, row, folder, {**changes, **UNIVERSAL})
        for state, history in ranks:
            assert state == state_after(STEPS_BEFORE)
            loss_error, norm_error = relative_errors(history, expected)
            assert loss_error <= FP32_BOUND and norm_error <= FP32_BOUND


def with_optimizer(name):
    return "tp2 pp2 dp2", {**GATED, "optimizer": {"optimizer": name, "clip_grad": 1.0}}


# Name -> (the layout that saves, the model). The Llama has more TP ranks than query groups, and an untied
# head. The OLMo 2 has norms of queries and keys, and norms after attention and MLP.
SAVED = {name: with_optimizer(name) for name in ("adam", "sgd", "lion", "muon")}
SAVED |= {"llama": ("tp4 dp2", {"model": LLAMA}), "olmo 2": ("tp2 pp2 dp2", {"model": OLMO2_WINDOW})}
SHAPES_IN_FILES = {
    "llama": {"9.lm_head.weight": (VOCAB, 32), "3.self_attention.query_key_value.weight": (64, 32)},
    "olmo 2": {"3.self_attention.q_layernorm.weight": (32,), "3.post_mlp_layernorm.weight": (32,)},
}


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", SAVED)
def test_a_universal_checkpoint_opens_on_every_layout(name, tmp_path):
    shape, changes = SAVED[name]
    source, target = saved(tmp_path / "native", SHAPES[shape], changes), tmp_path / "global_step5_universal"
    names = converted(source, target, workers=2)
    assert sorted(names) == sorted(path.name for path in (target / "zero").iterdir() if path.is_dir())
    assert (tmp_path / "latest_universal").read_text() == target.name
    for parameter, size in {WORDS: (VOCAB, 32), **SHAPES_IN_FILES.get(name, {})}.items():
        stored = torch.load(target / "zero" / parameter / "fp32.pt")
        assert stored["param"].shape == size and ("vocab_tensor" in stored) == (size[0] == VOCAB)
    assert converted(source, target) == []  # an earlier command has converted it
    reader = open_reader(open_checkpoint(target))
    has_steps = [bool(reader.optimizer_scalars(parameter)) for parameter in names]
    assert any(has_steps) == (name not in ("sgd", "lion")) and all(has_steps) == (
        name in ("adam", *SHAPES_IN_FILES)
    )
    assert_resumes_everywhere(tmp_path, changes)


@pytest.mark.full
def test_a_universal_checkpoint_of_interleaved_stages_opens_on_every_layout_and_on_them(tmp_path):
    interleaved = {"parallel": {"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 2}}
    source = saved(tmp_path / "native", SHAPES["tp2 pp2"], interleaved)
    converted(source, tmp_path / "global_step5_universal")
    assert_resumes_everywhere(tmp_path, {})
    row = SHAPES["tp2 pp2 dp2"]
    ranks = run_world(row.world_size, resume_midway, row, tmp_path, {**interleaved, **UNIVERSAL})
    for _, history in ranks:
        assert max(relative_errors(history, uninterrupted({}))) <= FP32_BOUND


def start_with_new_moments(row, folder, trained_before):
    config = config_of(row, checkpoint={"load": str(folder), "universal_checkpoint": True})
    checkpoint = find_checkpoint(unconnected_run(config))
    engine = build_engine(config)
    train(engine, trained_before)
    load_checkpoint(engine, checkpoint, FINGERPRINT)
    return train(engine, range(3))


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("row", [Row(), Row(dp=2, zero=1, precision="bf16")])
def test_without_moments_the_optimizer_starts_with_new_ones(row, tmp_path):
    """The optimizer's step also starts at 0. An engine that trained on other data before the load has the
    losses of a new engine."""
    target = tmp_path / "global_step5_universal"
    converted(saved(tmp_path / "native", Row(), {}), target)
    for pattern in ("exp_avg.pt", "exp_avg_sq.pt", "step.pt"):
        for path in target.glob(f"zero/*/{pattern}"):
            path.unlink()
    run = json.loads((target / "run.json").read_text())
    files = {name: entry for name, entry in run["files"].items() if (target / name).exists()}
    change_run(target, lambda run: (run.pop("certificate"), run.update(files=files)))
    histories = [
        run_world(row.world_size, start_with_new_moments, row, tmp_path, before)[0] for before in ([], [9, 8])
    ]
    assert histories[0] == histories[1]


def test_write_parameter_writes_the_files_of_a_conversion(tmp_path):
    source = saved(tmp_path, Row(), BLOOM)
    converted(source, tmp_path / "whole")
    (tmp_path / "parts").mkdir()
    written = UniversalReader(find_universal(tmp_path / "whole"))
    writer = UniversalWriter(tmp_path / "parts", written)
    for name in written.specs:
        writer.write_parameter(name, writer.pieces(name, verify=True))
        for path in (tmp_path / "parts" / "zero" / name).iterdir():
            assert path.read_bytes() == (tmp_path / "whole" / "zero" / name / path.name).read_bytes()


# --- DeepSpeed's converter ---


def convert_as_deepspeed(source, target):
    from deepspeed.checkpoint.ds_to_universal import main

    target.mkdir()
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    flags = {"keep_temp_folder": False, "strict": True, "inject_missing_state": False}
    main(argparse.Namespace(input_folder=str(source), output_folder=str(target), **workers, **flags))


def torch_files_in(folder):
    return {
        str(path.relative_to(folder)): torch.load(path, weights_only=False) for path in folder.rglob("*.pt")
    }


def is_equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return one == other


@pytest.mark.full
@pytest.mark.parametrize("changes", [GATED, BLOOM], ids=["gated", "bloom"])
def test_the_files_are_those_that_deepspeeds_converter_makes(changes, tmp_path):
    source = saved(tmp_path, Row(tp=2, pp=2, zero=1), changes)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    converted(source, ours, workers=3)
    run_world(1, convert_as_deepspeed, source, theirs)
    own, expected = torch_files_in(ours), torch_files_in(theirs)
    # DeepSpeed's loader expects an object of its own class under that name, so this program uses a different
    # name.
    scale = own["zero/optimizer_state.pt"].pop("loss_scaler_state")
    assert scale == expected["zero/optimizer_state.pt"].pop("loss_scaler")
    assert own.keys() == expected.keys()
    assert [name for name in own if not is_equal(own[name], expected[name])] == []
    (tmp_path / "latest_universal").write_text("theirs")
    assert_resumes_everywhere(tmp_path, changes, ["tp2 pp2"])


def load_as_deepspeed(folder, tp_rank):
    """Returns the names of the parameters that DeepSpeed's loader reads differently, on one of two ranks."""
    from deepspeed.checkpoint.universal_checkpoint import enable_universal_checkpoint

    parameters, wrong = UniversalReader(find_universal(folder)), []
    specs = model_specs(config_of(Row(tp=2), **GATED), VOCAB, EOD)
    for name, spec in specs.items():
        values, moments, _ = parameters.read_parameter(Piece.of_shard(name, spec, [Axis("tp", tp_rank, 2)]))
        shape = list(spec.global_shape)
        if spec.sharding:
            shape[spec.sharding[0].dim] //= 2
        parameter, target = torch.nn.Parameter(torch.zeros(shape)), torch.zeros(values.numel())
        parameter._hp_mapping = types.SimpleNamespace(
            lp_fragment_address=types.SimpleNamespace(start=0, numel=values.numel()),
            get_hp_fragment=lambda target=target: target,
        )
        enable_universal_checkpoint([parameter])
        step = parameter.load_hp_checkpoint_state(str(folder / "zero" / name), tp_rank, 2)
        loaded = {"": target, **parameter._hp_mapping.optim_fragment}
        expected = {"": values, **{key: read(None) for key, read in moments.items()}}
        if step != STEPS_BEFORE or not is_equal(loaded, expected):
            wrong.append(name)
    return wrong


@pytest.mark.full
def test_deepspeeds_own_loader_reads_it(tmp_path):
    converted(saved(tmp_path, Row(tp=2, zero=1), GATED), tmp_path / "universal")
    for tp_rank in (0, 1):
        assert run_world(1, load_as_deepspeed, tmp_path / "universal", tp_rank) == [[]]


@pytest.mark.full
def test_a_native_checkpoint_of_another_program_is_converted(tmp_path):
    """A checkpoint of Megatron-DeepSpeed has no run.json, and its patterns have no anchors."""
    source = saved(tmp_path, Row(tp=2, pp=2, zero=1), GATED)
    converted(source, tmp_path / "ours")
    (source / "run.json").unlink()
    for path in source.glob("mp_rank_*"):
        state = torch.load(path, weights_only=False)
        info = state["universal_checkpoint_info"]
        del info["parameter_with_column_parallelism_patterns"]
        for patterns in info.values():
            if isinstance(patterns, list):
                patterns[:] = [pattern.strip("^$") for pattern in patterns]
        torch.save(state, path)
    converted(source, tmp_path / "theirs")
    assert not (tmp_path / "theirs" / "run.json").exists()
    own, expected = torch_files_in(tmp_path / "ours" / "zero"), torch_files_in(tmp_path / "theirs" / "zero")
    assert is_equal(own, expected)
    assert find_universal(tmp_path / "theirs").state == state_after(STEPS_BEFORE)


# --- other programs' checkpoints ---


def write_as_bloom(folder, source, positions):
    """Writes what BigScience's converter wrote in 2022, as in BLOOM's public files. source: a universal
    checkpoint with the values and moments. `latest_universal` names the written checkpoint."""
    path = folder / "global_step5_universal"
    for parameter in (folder_ for folder_ in (source / "zero").iterdir() if folder_.is_dir()):
        (path / "zero" / parameter.name).mkdir(parents=True)
        for name in ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"):
            entry = torch.load(parameter / name)
            whole = entry["param"]
            row_parallel = parameter.name.endswith(
                ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight")
            )
            theirs = {"cat_dim": int(row_parallel), "param": whole}
            if parameter.name == WORDS:
                padding = torch.full((THEIR_ROWS - VOCAB, whole.shape[1]), 7.0)
                theirs["param"] = torch.cat([whole, padding])
                theirs["vocab_divisibility_padding_tensor"] = padding[0].clone()
            torch.save(theirs, path / "zero" / parameter.name / name)
    state = state_after(STEPS_BEFORE)
    args = {
        **{"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 128},
        **{"layernorm_epsilon": 1e-5, "embed_layernorm": True, "glu_activation": None, "kv_channels": 8},
        **{"consumed_train_samples": state.consumed_samples, "consumed_train_tokens": state.consumed_tokens},
        **{
            "position_embedding_type": positions.alibi,
            "params_dtype": torch.bfloat16,
            "padded_vocab_size": 128,
        },
        **{"global_batch_size": 8, "iteration": STEPS_BEFORE, "data_path": ["/data/oscar"]},
    }
    for rank in range(4):
        content = {
            "module": None,
            "buffer_names": [],
            "optimizer": None,
            "lr_scheduler": {
                "max_lr": 6e-5,
                "num_steps": 40,
                "decay_style": "cosine",
                "end_wd": np.float64(0.1),
            },
            "iteration": STEPS_BEFORE,
            "tokens": state.consumed_tokens,
            "checkpoint_version": 3.0,
            "ds_version": "0.6.6+gec58beac",
            "args": argparse.Namespace(**args, rank=rank, local_rank=rank % 8),
            "random_rng_state": (3, (1, 2, 3), None),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "rng_tracker_states": {"model-parallel-rng": torch.ones(4, dtype=torch.bfloat16) * rank},
        }
        torch.save(content, path / f"mp_rank_{rank:02d}_model_states.pt")
    (folder / "latest_universal").write_text(path.name)
    return path


@pytest.fixture(scope="module")
def own_of_bloom(tmp_path_factory):
    """Returns a folder with a native checkpoint of BLOOM's model and its universal form."""
    folder = tmp_path_factory.mktemp("bloom")
    converted(saved(folder / "native", Row(zero=1), BLOOM), folder / "own")
    return folder


@pytest.fixture
def blooms(own_of_bloom, tmp_path, their_positions):
    """Returns a folder with a universal checkpoint like BLOOM's."""
    shutil.copytree(own_of_bloom, tmp_path, dirs_exist_ok=True)
    write_as_bloom(tmp_path, tmp_path / "own", their_positions)
    return tmp_path


def find(folder, vocab=VOCAB, **changes):
    options = {**BLOOM, **changes, "checkpoint": {"load": str(folder), **UNIVERSAL["checkpoint"]}}
    return find_checkpoint(unconnected_run(config_of(Row(), **options), vocab))


def select(folder):
    """Returns the error with which a rank rejects the folder's checkpoints."""
    options = {**BLOOM, "checkpoint": {"load": str(folder), **UNIVERSAL["checkpoint"]}}
    try:
        select_valid_checkpoint(find(folder), unconnected_run(config_of(Row(), **options)))
    except UserError as error:
        return str(error)
    return None


def test_a_damaged_file_of_another_programs_checkpoint_is_named_before_it_is_loaded(blooms):
    assert run_world(2, select, blooms) == [None, None]
    flip_a_byte(blooms / "global_step5_universal" / "zero" / "8.bias" / "exp_avg.pt")
    for sentence in run_world(2, select, blooms):
        assert "8.bias/exp_avg.pt is damaged: it does not match its checksum; pass another" in sentence


@pytest.mark.full
def test_blooms_checkpoint_resumes_on_every_layout(blooms):
    checkpoint = find(blooms)
    line = describe_start(checkpoint, str(blooms))
    assert "Its data, dropout and schedule were not compared" in line
    assert "no step.pt: the optimizer's step is taken to be the iteration, 5" in line
    assert_resumes_everywhere(blooms, BLOOM, ["tp2 pp2", "pp4 dp2"])


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_layers": 6}, r"num-layers was 4, is 6; it lacks 26 parameters"),
        ({"num_attention_heads": 8, "kv_channels": 4}, "num-attention-heads was 4, is 8"),
        ({"position_embedding_type": "rotary"}, "position-embedding-type was alibi, is rotary"),
        ({"embed_layernorm": False}, "it also has 2 parameters, .*word_embeddings.norm.bias"),
    ],
)
def test_another_programs_checkpoint_of_another_model_is_refused_by_name(changes, words, blooms):
    with pytest.raises(UserError, match=words):
        find(blooms, model={**BLOOM["model"], **changes})


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("file", ["exp_avg_sq.pt", "fp32.pt"])
def test_an_incomplete_copy_is_refused_by_name(file, blooms):
    (blooms / "global_step5_universal" / "zero" / "8.bias" / file).unlink()
    with pytest.raises(UserError, match=f"8.bias has no {file}, which other parameters have"):
        find(blooms)


def test_a_smaller_vocabulary_is_refused_even_if_the_rows_suffice(blooms, monkeypatch):
    monkeypatch.setattr("megatron.checkpoint.formats.universal._MOST_PADDING", 1)
    words = blooms / "global_step5_universal" / "zero" / WORDS / "fp32.pt"
    content = torch.load(words)
    torch.save({**content, "param": torch.zeros(2000, 32)}, words)
    with pytest.raises(UserError, match="the vocabulary had 2000 rows with padding, and has 101 tokens"):
        find(blooms)


def start_and_save(row, load, save, step):
    """Starts from a universal checkpoint, or from the run's newer checkpoint, and saves once. Returns the
    iteration of the start."""
    options = {"load": str(load), "save": str(save), "universal_checkpoint": True}
    config = config_of(row, checkpoint=options)
    engine = build_engine(config)
    checkpoint = find_checkpoint(unconnected_run(config))
    manager = make_manager(engine, save)
    start = manager.restore_or_init(checkpoint, lambda text: None)
    manager.save(state_after(step))
    return start.iteration


def test_the_same_command_resumes_from_the_checkpoints_of_the_run(tmp_path):
    load, save = tmp_path / "load", tmp_path / "save"
    converted(saved(tmp_path / "native", Row(), {}), load / "universal")
    assert run_world(1, start_and_save, Row(), load, save, 7) == [5]
    assert run_world(1, start_and_save, Row(), load, save, 8) == [7]
    # A run neither loads nor replaces the checkpoints of another run in its --save folder.
    with pytest.raises(WorldError, match="holds checkpoints of another run \\(global_step5\\)"):
        run_world(1, start_and_save, Row(), load, tmp_path / "native", 6)


def test_tensors_of_other_shapes_are_refused_by_name(blooms):
    parameters = UniversalReader(find(blooms))
    changed = config_of(Row(), model={**BLOOM["model"], "ffn_hidden_size": 64})
    name = "3.mlp.dense_4h_to_h.weight"
    with pytest.raises(UserError, match=rf"{name}/fp32.pt holds .* \(32, 128\), expected \(32, 64\)"):
        parameters.read_parameter(Piece.of_shard(name, model_specs(changed, VOCAB, EOD)[name]))
    with pytest.raises(UserError, match=r"shape \(128, 32\), expected \(129, 32\)"):
        parameters.read_parameter(Piece.of_shard(WORDS, model_specs(changed, 129, EOD)[WORDS]))


def reseal(folder, run, *changed):
    """Updates the record of files in run.json after files were changed."""
    for path in changed:
        run["files"][path.name] = describe_file(path)
    (folder / "run.json").write_text(json.dumps(add_checksum(run)))


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("damage", ["args", "moment", "native"])
def test_a_checkpoint_that_would_run_code_is_refused_and_nothing_is_run(damage, blooms):
    mark = blooms / "harm"
    if damage == "args":
        path = blooms / "global_step5_universal" / "mp_rank_00_model_states.pt"
    elif damage == "moment":
        path = blooms / "global_step5_universal" / "zero" / "8.bias" / "exp_avg_sq.pt"
    else:
        path = next((blooms / "native" / "global_step5").glob("zero_pp_rank_0*"))
    torch.save({**torch.load(path, weights_only=False), "more": harm(mark)}, path)
    with pytest.raises(UserError, match=rf"{path} cannot be read: it names \w+.system"):
        if damage == "native":
            run = json.loads((path.parent / "run.json").read_text())
            reseal(path.parent, run, path)
            reader = open_source(path.parent)
            for name in reader.stored_names:
                reader.read(name, "exp_avg")
        else:
            spec = model_specs(config_of(Row(), **BLOOM), VOCAB, EOD)["8.bias"]
            _, moments, _ = UniversalReader(find(blooms)).read_parameter(Piece.of_shard("8.bias", spec))
            for read in moments.values():
                read(None)
    assert not mark.exists()


def test_a_folder_without_a_universal_checkpoint_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"no file latest_universal with a name in it: .*tools/ds_to_universal\.py"
    ):
        find(tmp_path)
    (tmp_path / "latest_universal").write_text("global_step7_universal")
    with pytest.raises(UserError, match=r"global_step7_universal is not a universal checkpoint"):
        find(tmp_path)
