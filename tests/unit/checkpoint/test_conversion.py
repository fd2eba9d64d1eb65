"""Conversions between formats: all states of all parameters keep their bits, and no code is executed."""

from __future__ import annotations

import errno
import os
import pickle
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from megatron.checkpoint.conversion import pipeline
from megatron.checkpoint.conversion.source import open_any
from megatron.checkpoint.digests import fragment_digests
from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.files import describe_file
from megatron.checkpoint.formats import dcp, dcp_writer, native_writer, torch_dist_writer
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.registry import FORMATS, CheckpointFormat, open_reader
from megatron.checkpoint.formats.torch_dist_writer import TorchDistWriter
from megatron.checkpoint.formats.universal_writer import UniversalWriter
from megatron.checkpoint.formats.writing import CheckpointWriter
from megatron.checkpoint.inspect import inspect_checkpoint
from megatron.commands import convert_checkpoint
from megatron.errors import UserError
from megatron.files import HostileFileError
from megatron.mpu.mesh import Axis
from megatron.mpu.pieces import Piece
from tests.distributed.test_latent_attention import YARN as LATENT_YARN
from tests.end_to_end.clone import commands_in
from tests.end_to_end.command import ROOT
from tests.support import HANG_TIMEOUT_S
from tests.support.assets import unpack
from tests.support.layouts import Row, config_of
from tests.unit.checkpoint import megatron_deepspeed_folder
from tests.unit.checkpoint.hugging_face_folder import GLM4_MOE, MIXTRAL
from tests.unit.checkpoint.native_folder import change_run, convert, flip_a_byte, random_wholes, write_native
from tests.unit.hostile import checked_sentence, refusal

GATED = {"glu_activation": "swiglu", "group_query_attention": True, "num_query_groups": 2}
ATTENTION = {"attention_output_gate": True, "softmax_type": "learnable"}
# Padded vocabulary, fused parts, grouped queries, gates and sinks, untied head, replicas of ZeRO, bf16.
CONFIGS = {
    "tied": config_of(Row(tp=2, pp=2, dp=2, zero=1, precision="bf16")),
    "untied": config_of(
        Row(tp=2, zero=0), model={**GATED, **ATTENTION, "untie_embeddings_and_output_weights": True}
    ),
}
# The models cover stacked layers, and layers of two kinds with the experts' bias.
EXPERT_CONFIGS = {
    "experts": config_of(Row(tp=2, zero=1, precision="bf16"), model=MIXTRAL),
    "experts, dense": config_of(Row(tp=2, pp=2, dp=2, zero=1), model=GLM4_MOE),
    "latent": config_of(Row(tp=2, pp=2), model=LATENT_YARN),
}


@pytest.fixture
def native(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = (CONFIGS | EXPERT_CONFIGS)[getattr(request, "param", "tied")]
    return write_native(tmp_path / "native", config, random_wholes(config))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes chunks small, so that tensors have several chunks and files, as in large models."""
    monkeypatch.setattr(dcp_writer, "CHUNK_BYTES", 1 << 11)
    monkeypatch.setattr(torch_dist_writer, "CHUNK_BYTES", 1 << 11)
    monkeypatch.setattr(dcp, "_BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(dcp_writer, "_FILE_BYTES", 1 << 14)


def states_of(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    reader = open_reader(open_checkpoint(folder))
    states = {
        (name, kind): reader.read_unpadded(name, kind)
        for name in reader.names
        for kind in reader.state_names(name)
    }
    steps = {(name, "step"): torch.as_tensor(reader.optimizer_scalars(name)["step"]) for name in reader.names}
    assert reader.verify()[1] == []
    return states | steps


def assert_equal(ours: dict[Any, torch.Tensor], theirs: dict[Any, torch.Tensor]) -> None:
    assert list(ours) == list(theirs)
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key


@pytest.mark.gate(
    rows=1, also=["way1-untied", "way2-tied", "way3-untied", "way2-experts", "way3-experts, dense"]
)
@pytest.mark.parametrize("native", [*CONFIGS, *EXPERT_CONFIGS], indirect=True)
@pytest.mark.parametrize(
    "way", [("dcp",), ("torch_dist",), ("universal", "dcp"), ("torch_dist", "universal")]
)
def test_a_checkpoint_that_returns_to_the_native_format_has_its_bits(
    way: tuple[str, ...], native: Path, tmp_path: Path, small_chunks: None
) -> None:
    names = ["native", *way, "native"]
    folders = [native, *(tmp_path / f"{number}_{name}" for number, name in enumerate(names[1:]))]
    for (source, target), name in zip(pairwise(folders), names[1:], strict=True):
        convert(source, target, name)
        assert_equal(states_of(target), states_of(native))
    for layer in native.glob("layer_*"):
        before, after = (torch.load(folder / layer.name) for folder in (native, folders[-1]))
        assert before.keys() == after.keys()
        for key, weight in before.items():
            used = weight != 7.0  # the padding of the vocabulary
            assert torch.equal(weight[used], after[key][used]), (layer.name, key)


@pytest.mark.parametrize("moments", [("exp_avg",), ("momentum_buffer",)])
def test_lions_and_muons_moments_are_refused_for_megatron_core(
    moments: tuple[str, ...], native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = open_reader(open_checkpoint(native))
    monkeypatch.setattr(type(reader), "state_names", lambda *_: [VALUES, *moments])
    with pytest.raises(UserError, match=f"has {moments[0]}: only Adam's .*: use --format dcp"):
        TorchDistWriter(tmp_path, reader)


@pytest.mark.parametrize("native", [*CONFIGS, *EXPERT_CONFIGS], indirect=True)
def test_a_rank_of_any_layout_reads_its_shard_of_a_dcp_checkpoint(
    native: Path, tmp_path: Path, small_chunks: None
) -> None:
    folder = convert(native, tmp_path / "dcp", "dcp")
    ours, theirs = (open_reader(open_checkpoint(path)) for path in (folder, native))
    for name, spec in theirs.specs.items():
        axis = "ep" if "ep" in spec.axis_names else "tp"
        whole = theirs.read(name, "exp_avg")
        for size in (1, 2):
            for rank in range(size):
                args = Piece.of_shard(name, spec, [Axis(axis, rank, size)]), "exp_avg"
                assert torch.equal(ours.read_piece(*args), theirs.read_piece(*args)), args
                if axis == "ep":
                    experts = whole.chunk(size)[rank].reshape(-1)
                    assert torch.equal(ours.read_piece(*args), experts), args


def test_an_inspection_names_a_missing_file_once(native: Path, tmp_path: Path, small_chunks: None) -> None:
    folder = convert(native, tmp_path / "dcp", "dcp")
    lost = min(folder.glob("*.distcp"))
    lost.unlink()
    for verify in (False, True):
        assert inspect_checkpoint(folder, verify).problems == [f"missing: {lost.name}"]


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("native", ["untied", "tied"], indirect=True)
def test_pytorch_alone_opens_a_dcp_checkpoint(native: Path, tmp_path: Path, small_chunks: None) -> None:
    folder, output = convert(native, tmp_path / "dcp", "dcp"), tmp_path / "x.pt"
    command = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils"]
    subprocess.run([*command, "dcp_to_torch", str(folder), str(output)], check=True, cwd=tmp_path)
    content = torch.load(output)
    found = {
        key: content[key[0]] if key[1] == "fp32" else content["optimizer"][f"state.{key[0]}.{key[1]}"]
        for key in states_of(native)
    }
    assert_equal(found, states_of(native))
    assert len(content) - 1 + len(content["optimizer"]) == len(found)


def test_the_commands_of_the_pages_run(native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    native = native.rename(tmp_path / "checkpoints")
    (tmp_path / "core").mkdir()
    core = unpack("torch_dist_llama", tmp_path).rename(tmp_path / "core" / "iter_0000100")
    (tmp_path / "hybrid").mkdir()
    unpack("torch_dist_hybrid", tmp_path).rename(tmp_path / "hybrid" / "iter_0000100")
    megatron_deepspeed_folder.unpack(tmp_path)
    (tmp_path / "swiglu").rename(tmp_path / "theirs")
    for command in commands_in("docs/external_checkpoints.md") + commands_in("docs/conversion.md"):
        _, *words = command.split()
        # Runs in this process, since a new one would import torch and DeepSpeed again.
        if words[0] == "-m":
            monkeypatch.setattr(sys, "argv", words[1:])
            runpy.run_module(words[1], run_name="__main__")
        else:
            import_module(f"megatron.commands.{Path(words[0]).stem}").main(words[1:])
        if command.endswith("--format torchtitan"):
            shutil.copy(tmp_path / "model" / "config.json", tmp_path / "titan")
    for name in ("dcp", "global_step6", "global_step6_universal"):
        assert_equal(states_of(tmp_path / "exported" / name), states_of(native))
    assert len(torch.load(tmp_path / "exported" / "states.pt")) > 1
    states = dict(sorted(states_of(core).items()))
    assert_equal(dict(sorted(states_of(tmp_path / "core_again" / "iter_0000100").items())), states)
    theirs = (tmp_path / "theirs" / "global_step3_universal", tmp_path / "from_theirs" / "global_step3")
    assert_equal(*(dict(sorted(states_of(folder).items())) for folder in theirs))
    for name in ("from_titan", "from_model"):
        reader = open_reader(open_checkpoint(tmp_path / name / "global_step0_universal"))
        assert {(key, VALUES) for key in reader.stored_names} == {key for key in states if key[1] == VALUES}
        assert all(torch.equal(reader.read(key, VALUES), states[key, VALUES]) for key in reader.stored_names)


DAMAGED_FILES = {"native": "*mp_rank_00_*_states.pt", "universal": "zero/8.weight/fp32.pt"}


@pytest.mark.parametrize("name", ("native", "universal", "dcp"))
def test_damage_stops_a_conversion(name: str, native: Path, tmp_path: Path) -> None:
    source = native if name == "native" else convert(native, tmp_path / "source", name)
    if name == "dcp":
        change_a_value(source)
    else:
        flip_a_byte(max(source.glob(DAMAGED_FILES[name]), key=lambda path: path.stat().st_size))
    target = {"universal": "dcp", "dcp": "universal", "native": "dcp"}[name]
    with pytest.raises(UserError, match="is damaged: its digest differs"):
        convert(source, tmp_path / "target", target)
    assert not (tmp_path / "target").exists()
    convert(source, tmp_path / "target", target, "--no-verify-digests")


def test_checksums_of_files_stop_a_conversion_without_digests(tmp_path: Path) -> None:
    megatron_deepspeed_folder.unpack(tmp_path)
    source = tmp_path / "learned" / "global_step3_universal"
    flip_a_byte(source / "zero" / "4.weight" / "exp_avg.pt")
    with pytest.raises(UserError, match="4.weight/exp_avg.pt is damaged: it does not match its checksum"):
        convert(source, tmp_path / "target", "dcp")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("native", [*CONFIGS, "experts"], indirect=True)
def test_states_are_compared_if_files_have_no_digests(native: Path, tmp_path: Path) -> None:
    """A conversion of a checkpoint with digests of all states records no SHA-256 of the data files. The
    digests of the states must then find damage. In a model with experts the damaged tensor is an expert's."""
    reader = open_reader(open_checkpoint(native))
    digests: dict[str, dict[str, str]] = {}
    for (name, kind), state in states_of(native).items():
        if kind != "step":
            whole = {"": state.reshape(-1)}
            digest = fragment_digests(reader.specs[name], (), 0, whole)[""]
            digests.setdefault(kind, {})[name] = f"{digest:016x}"
    change_run(native, lambda run: run["certificate"].update(digests=digests))
    folder = convert(native, tmp_path / "dcp", "dcp")
    files = open_checkpoint(folder).run["files"]
    assert {name for name in files if "sha256" in files[name]} == {".metadata"}
    assert open_reader(open_checkpoint(folder)).verify() == (1 + 3 * len(reader.specs), [])
    name = change_a_value(folder)
    assert (".experts." in name) == any(".experts." in parameter for parameter in reader.specs)
    (problem,) = open_reader(open_checkpoint(folder)).verify()[1]
    assert f"fp32 of {name} is damaged: its digest differs" in problem
    with pytest.raises(UserError, match="is damaged: its digest differs"):
        convert(folder, tmp_path / "target", "native")


def change_a_value(folder: Path) -> str:
    """Changes one value of a tensor (of an expert if there are experts). Returns the tensor's name."""
    reader = open_reader(open_checkpoint(folder))
    assert isinstance(reader, dcp.DcpReader)
    name = min(sorted(reader.stored_names), key=lambda name: ".experts." not in name)
    tensor = reader.stored.tensors[name]
    chunk = tensor.chunks[0]
    path = folder / chunk.file
    content = bytearray(path.read_bytes())
    value = reader.stored.read(name).flatten()[:4].numpy().tobytes()
    place = content.index(value, chunk.start)
    content[place] ^= 1
    path.write_bytes(content)
    return name


# --- conversions that fail or continue ---


def left_of(target: Path) -> list[str]:
    """Returns what a conversion to `target` has left, by the suffixes of the names."""
    return sorted(path.name.removeprefix(target.name) for path in target.parent.glob(f"{target.name}*"))


def first_parameter(native: Path, target: Path) -> str:
    """Interrupts a conversion to the universal format after one parameter. Returns the parameter's name."""
    conversion = pipeline.convert(open_any(native), UniversalWriter, target, workers=1)
    name = next(conversion)
    conversion.close()
    return name


def test_space_is_needed_for_what_is_not_on_the_disk(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, partial = tmp_path / "target", tmp_path / "target.partial"
    first_parameter(native, target)
    missing = sum(UniversalWriter(partial, open_any(native)).parameter_bytes().values())
    # A different process writes this part.
    (partial / "unfinished" / "other").mkdir(parents=True)
    (partial / "unfinished" / "other" / "fp32.pt").write_bytes(bytes(1000))

    def convert_with(free: int) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
        convert(native, target, "universal")

    with pytest.raises(UserError, match="GB free and"):
        convert_with(missing - 1001)
    convert_with(missing - 1000)


def test_a_conversion_that_fails_leaves_only_what_can_continue(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    damaged = max(native.glob(DAMAGED_FILES["native"]), key=lambda path: path.stat().st_size)
    content = damaged.read_bytes()
    flip_a_byte(damaged)
    with pytest.raises(UserError, match="is damaged"):  # before the folder is created
        convert(native, target, "universal")
    assert left_of(target) == []
    damaged.write_bytes(content)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
        with pytest.raises(UserError, match="GB free"):  # before the first parameter
            convert(native, target, "universal")
    assert left_of(target) == []
    name = first_parameter(native, target)
    flip_a_byte(damaged)
    with pytest.raises(UserError, match="is damaged"):
        convert(native, target, "universal")
    assert left_of(target) == [".partial"]
    damaged.write_bytes(content)
    before = (tmp_path / "target.partial" / "zero" / name / "fp32.pt").stat().st_mtime_ns
    convert(native, target, "universal")
    assert (target / "zero" / name / "fp32.pt").stat().st_mtime_ns == before and left_of(target) == [""]


WORKS = """
import sys
from pathlib import Path
from megatron.checkpoint.conversion.shared_work import SharedWork

with SharedWork(Path(sys.argv[1]), 1, 2):
    print("works", flush=True)
    input()
    sys.exit(1)
"""


def test_the_last_of_the_tasks_that_fail_removes_what_cannot_continue(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    command = [sys.executable, "-c", WORKS, str(tmp_path / "target.partial")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=ROOT, **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == "works\n"
        with pytest.raises(UserError, match="GB free"):
            convert(native, target, "universal")
        assert left_of(target) == [".partial", ".partial.locks"]
        other.communicate("\n", timeout=HANG_TIMEOUT_S)
    assert left_of(target) == [".partial"]  # the process of WORKS does not remove the folder
    with pytest.raises(UserError, match="GB free"):
        convert(native, target, "universal")
    assert left_of(target) == []


def one_piece(pieces: Iterator[Piece]) -> Iterator[Piece]:
    yield next(pieces)
    fail()


def fail(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["native", "universal", "dcp", "torch_dist", "native at once"])
def test_no_file_is_open_when_a_failed_conversion_removes_its_folder(
    name: str, native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS renames an open file instead of deleting it: then the folder could not be removed."""
    target, removed = tmp_path / "target", []
    remove = shutil.rmtree

    def record(path: Path, *args: Any, **kwargs: Any) -> None:
        if Path(path).name == "target.partial":
            descriptors = (Path(file) for file in os.scandir("/proc/self/fd"))
            opened = (os.readlink(file) for file in descriptors if file.is_symlink())
            removed.append([file for file in opened if file.startswith(f"{path}/")])
        remove(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", record)
    if name == "native at once":  # the native writer creates all files first
        monkeypatch.setattr(native_writer, "client_state", fail)
    else:
        whole = CheckpointWriter.source_pieces
        monkeypatch.setattr(CheckpointWriter, "source_pieces", lambda *args: one_piece(whole(*args)))
    with pytest.raises(UserError):
        convert(native, target, name.split()[0])
    assert removed == [[]] and left_of(target) == []


# --- hostile and damaged folders ---


class Attack:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch attacked",)


def change_metadata(folder: Path, change: Callable[[Metadata], object]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    # An attacker who changes the table can change its record, too.
    change_run(folder, lambda run: run["files"].update({path.name: describe_file(path)}))


def first_chunks(metadata: Metadata) -> list[ChunkStorageMetadata]:
    return next(iter(metadata.state_dict_metadata.values())).chunks  # type: ignore[union-attr]


def first_place(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.values()))


HUGE = torch.Size([1 << 60])
DAMAGES: dict[str, tuple[Callable[[Metadata], object], type[UserError], str]] = {
    "code": (lambda m: setattr(m, "planner_data", Attack()), HostileFileError, "names posix.system"),
    "path": (lambda m: setattr(first_place(m), "relative_path", "../x"), HostileFileError, "names a file"),
    "huge": (lambda m: setattr(first_chunks(m)[0], "sizes", HUGE), UserError, "not laid out"),
    "missing chunk": (lambda m: first_chunks(m).clear(), UserError, "not laid out"),
    "offset": (lambda m: setattr(first_place(m), "offset", -1), UserError, "not laid out"),
    "other chunk": (lambda m: setattr(first_place(m), "offset", 1 << 40), UserError, "cannot be read"),
    "no table": (lambda m: setattr(m, "storage_data", None), UserError, "not laid out"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_metadata_is_refused_in_one_sentence(
    kind: str, native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = convert(native, tmp_path / "dcp", "dcp")
    change, error, text = DAMAGES[kind]
    change_metadata(folder, change)
    sentence = refusal(lambda: states_of(folder), error)
    assert text in sentence and str(folder) in sentence
    assert not (tmp_path / "attacked").exists()


def test_truncated_metadata_is_refused_in_one_sentence(native: Path, tmp_path: Path) -> None:
    folder = convert(native, tmp_path / "dcp", "dcp")
    whole = (folder / ".metadata").read_bytes()
    for length in range(0, len(whole), 997):
        (folder / ".metadata").write_bytes(whole[:length])
        with pytest.raises(UserError) as caught:
            states_of(folder)
        assert ".metadata" in checked_sentence(caught.value)


@pytest.mark.parametrize("name", ["native", "torch_dist"])
def test_parameters_that_the_model_does_not_have_are_left_out(
    name: str, native: Path, tmp_path: Path
) -> None:
    universal = convert(native, tmp_path / "universal", "universal")
    parameters = universal / "zero"
    shutil.copytree(next(parameters.glob("*.bias")), parameters / "99.bias")
    assert_equal(states_of(convert(universal, tmp_path / "target", name)), states_of(native))


def test_the_first_of_several_tasks_writes_a_format_that_one_process_writes(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (1, 0):
        for name, value in (("STEP_ID", "0"), ("NTASKS", "2"), ("PROCID", str(rank))):
            monkeypatch.setenv(f"SLURM_{name}", value)
        convert_checkpoint.run(["--from", str(native), "--to", str(tmp_path / "dcp"), "--format", "dcp"])
        assert (tmp_path / "dcp").exists() == (rank == 0)
    assert capsys.readouterr().out.count(" parameters of ") == 1


def test_a_format_that_is_only_read_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    only_read = CheckpointFormat("as in CONTRIBUTING.md", "megatron.checkpoint.formats.dcp:DcpReader")
    monkeypatch.setattr(convert_checkpoint, "FORMATS", {**FORMATS, "only_read": only_read})
    with pytest.raises(UserError, match="invalid choice: .only_read"):
        convert_checkpoint.run(["--from", ".", "--to", "target", "--format", "only_read"])


def test_a_user_s_mistakes_name_what_to_change(native: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        convert(tmp_path / "none", tmp_path / "target", "dcp")
    convert(native, tmp_path / "target", "dcp")
    with pytest.raises(UserError, match="exists already: remove it, or give another folder"):
        convert(native, tmp_path / "target", "dcp")
    next((tmp_path / "target").glob("*.distcp")).unlink()
    with pytest.raises(UserError, match=r"distcp is missing"):
        convert(tmp_path / "target", tmp_path / "other", "native")
