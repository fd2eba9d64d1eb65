"""Files of torch.save are read as torch reads them, without running code, and are written so that torch can
read them."""

import argparse
import os
import pickle
import random
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint.formats.archive_writer import write_archive
from megatron.checkpoint.formats.torch_archive import Stub, read_file
from megatron.errors import UserError


class ReducedTo:
    """An object that is pickled as a call."""

    def __init__(self, function, args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def harm(mark: Path) -> ReducedTo:
    """Returns an object whose pickle harms a careless reader: it creates a file."""
    return ReducedTo(os.system, (f"touch {mark}",))


class External:
    """A class that no Megatron program uses."""


def test_tensors_of_every_type_and_layout_are_read_as_torch_reads_them(tmp_path):
    whole = torch.arange(48.0).view(6, 8)
    content = {
        "slice": whole[1:3, 2:7],
        "transposed": whole.t(),
        "shared": whole,
        "scalar": torch.tensor(5.0),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        **{
            str(dtype): torch.arange(4).to(dtype)
            for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool)
        },
    }
    torch.save(
        {"nested": [content, (1, "two", None)], "ordered": OrderedDict(a=torch.zeros(2))}, tmp_path / "f"
    )
    read = read_file(tmp_path / "f")
    assert read["nested"][1] == (1, "two", None) and list(read["ordered"]) == ["a"]
    for name, tensor in content.items():
        assert read["nested"][0][name].dtype == tensor.dtype
        assert torch.equal(read["nested"][0][name], tensor), name
    assert read_file(tmp_path / "f")["nested"][0]["scalar"].item() == 5.0


def test_objects_of_megatron_programs_become_stubs(tmp_path, their_positions):
    args = argparse.Namespace(
        lr=6e-5, position_embedding_type=their_positions.alibi, params_dtype=torch.bfloat16
    )
    content = {
        "args": args,
        "path": tmp_path,
        "scalar": np.float64(0.5),
        "np_rng_state": np.random.get_state(),
        "random_rng_state": random.getstate(),
        "torch_rng_state": torch.get_rng_state(),
        "param_shapes": torch.Size([2, 3]),
    }
    torch.save(content, tmp_path / "f")
    read = read_file(tmp_path / "f")
    assert read["args"].lr == 6e-5 and read["args"].params_dtype == "bfloat16"
    position = read["args"].position_embedding_type
    assert isinstance(position, Stub) and position.constructor_args == (3,)
    assert type(position).__name__ == "megatron.enums.PositionEmbeddingType"
    assert read["random_rng_state"] == random.getstate() and read["param_shapes"] == (2, 3)
    assert isinstance(read["scalar"], Stub)


@pytest.mark.parametrize("where", ["alone", "in a dict", "in args", "as a tensor's hook"])
def test_no_code_of_a_file_is_run(where, tmp_path):
    mark, path = tmp_path / "harm", tmp_path / "file.pt"
    content = {
        "alone": harm(mark),
        "in a dict": {"param": torch.ones(2), "cat_dim": harm(mark)},
        "in args": {"args": argparse.Namespace(iteration=harm(mark))},
        "as a tensor's hook": {"param": torch.ones(2), "more": OrderedDict(x=[harm(mark)])},
    }[where]
    torch.save(content, path)
    with pytest.raises(
        UserError, match=rf"{path} cannot be read: it names \w+\.system, .* None of its code was run"
    ):
        read_file(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the file does no harm at all"


@pytest.mark.parametrize("value", [External(), External, print, getattr, np.load, torch.load])
def test_what_no_checkpoint_needs_is_refused_by_name(value, tmp_path):
    torch.save({"x": value}, tmp_path / "f")
    name = getattr(value, "__name__", "External")
    with pytest.raises(UserError, match=rf"it names [\w.]+\.{name}"):
        read_file(tmp_path / "f")


def test_a_pickle_cannot_change_what_it_is_given(tmp_path):
    """The pickle gets a known function and a known class with GLOBAL, and puts new attributes into them with
    BUILD."""
    for module, name in (("torch._utils", "_rebuild_tensor_v2"), ("argparse", "Namespace")):
        pickled = f"\x80\x02c{module}\n{name}\n}}X\x06\x00\x00\x00originX\x01\x00\x00\x00xsb.".encode(
            "latin1"
        )
        with zipfile.ZipFile(tmp_path / "f", "w") as archive:
            archive.writestr("a/data.pkl", pickled)
            archive.writestr("a/version", "3\n")
        with pytest.raises(UserError, match="cannot be read"):
            read_file(tmp_path / "f")


def pickled_tensor(path, build, on):
    """Writes the file of a tensor of 4 elements. Its pickle changes an object's state with the opcode BUILD.
    build: the argument of BUILD. on: the changed object, 'tensor' or 'storage'."""
    write_archive(path, torch.empty(4, device="meta"), [np.ones(4, np.float32)])
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in members if name.endswith("data.pkl"))
    state = pickle.dumps(build, protocol=2)[2:-1] + b"b"
    content = members[name]
    # The opcode Q ends the storage, R is the call that makes the tensor.
    end = content.rindex(b"R") + 1 if on == "tensor" else content.index(b"Q") + 1
    members[name] = content[:end] + state + content[end:]
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)


@pytest.mark.parametrize("on", ["tensor", "storage"])
@pytest.mark.parametrize(
    "build",
    [
        {"_checkpoint_offset": 0},
        {"shape": (1000,), "file": "x"},
        (None, {"_checkpoint_offset": 0}),
        ["/etc/hostname", "float32", 0, (1,), (1,)],
    ],
)
def test_a_pickle_cannot_move_a_tensor_to_other_bytes(build, on, tmp_path):
    pickled_tensor(tmp_path / "f", build, on)
    try:
        assert torch.equal(read_file(tmp_path / "f"), torch.ones(4))
    except UserError as error:
        assert "f cannot be read" in str(error)


def test_a_fake_storage_is_refused(tmp_path):
    """The fake is a Namespace with all attributes of a storage, including a file that a careless loader would
    read."""
    fake = argparse.Namespace(file="/etc/hostname", dtype="float32", begin=0, length=4)
    rebuild = ReducedTo(torch._utils._rebuild_tensor_v2, (fake, 0, (1,), (1,), False, OrderedDict()))
    with zipfile.ZipFile(tmp_path / "f", "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps(rebuild, protocol=2))
        archive.writestr("a/version", "3\n")
    with pytest.raises(UserError, match="f cannot be read"):
        read_file(tmp_path / "f")


def test_a_compressed_or_huge_pickle_is_not_unpacked(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "f", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02N." + bytes(1 << 20))
    with pytest.raises(UserError, match="data.pkl is compressed"):
        read_file(tmp_path / "f")
    write_archive(tmp_path / "f", list(range(1000)))
    monkeypatch.setattr("megatron.checkpoint.formats.torch_archive._MAX_PICKLE_BYTES", 1000)
    with pytest.raises(UserError, match="its data.pkl has .* bytes, expected 1,000 at most"):
        read_file(tmp_path / "f")


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named(keep, tmp_path):
    path = tmp_path / "f.pt"
    torch.save({"param": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(UserError, match=rf"{path} cannot be read \(.*use an older checkpoint"):
        read_file(path)


@pytest.mark.parametrize("mmap", [False, True])
def test_what_is_written_is_read_by_torch_and_by_unzip(mmap, tmp_path):
    values = torch.randn(7, 5)
    path = tmp_path / "fp32.pt"
    content = {"cat_dim": 1, "vocab_tensor": True, "param": torch.empty(7, 5, device="meta")}
    write_archive(path, content, [values[:3].numpy(), values[3:].numpy()])
    read = torch.load(path, weights_only=True, mmap=mmap)
    assert torch.equal(read.pop("param"), values) and read == {"cat_dim": 1, "vocab_tensor": True}
    assert read_file(path)["param"].data_ptr() % 64 == 0
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    write_archive(tmp_path / "step.pt", torch.empty((), device="meta"), [np.float32(5)])
    assert torch.equal(torch.load(tmp_path / "step.pt", weights_only=True, mmap=mmap), torch.tensor(5.0))
    plain = {"a": [1, 2.5, None, ("x",)], "b": OrderedDict(c=True)}
    write_archive(tmp_path / "plain.pt", plain)
    assert torch.load(tmp_path / "plain.pt", weights_only=True) == plain
    assert read_file(tmp_path / "plain.pt") == plain
