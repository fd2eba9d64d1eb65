"""Pieces of parameters that are sharded over any axes are written in every format."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.files import HashedFile
from megatron.checkpoint.formats.dcp import DcpFolder
from megatron.checkpoint.formats.dcp_writer import Chunks, DcpFile, DcpWriter, save_piece
from megatron.checkpoint.formats.native_writer import NativeWriter
from megatron.checkpoint.formats.universal_info import spec_record
from megatron.errors import UserError
from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import ParameterSpec, Shard
from megatron.mpu.parameters import shard_of
from megatron.mpu.pieces import Piece

SPECS = {
    "two axes": ParameterSpec((4, 6, 8), (Shard(0, "cp"), Shard(2))),
    "two axes, gated": ParameterSpec((4, 8, 3), (Shard(0, "cp"), Shard(1, "tp", 2))),
    "experts": ParameterSpec((12, 5), (Shard(0, "ep"),)),
    "padded": ParameterSpec((8, 3), (Shard(0),), num_valid_rows=7),
    "replicated": ParameterSpec((5,)),
}
AXES = [Axis(name, size=2) for name in ("cp", "tp", "ep")]
STEP = 3.0


@pytest.mark.parametrize("partitions", [1, 3])
def test_pieces_of_any_sharding_make_the_full_parameters_of_a_dcp_folder(
    partitions: int, tmp_path: Path
) -> None:
    """ZeRO's partitions end inside rows. torch's loader checks that the chunks do not overlap."""
    wholes = {name: torch.randn(spec.global_shape) for name, spec in SPECS.items()}
    tables = []
    for partition in range(partitions):
        archives, chunks = DcpFile(f"__{partition}_0.distcp"), Chunks()
        file = HashedFile(tmp_path / archives.name)
        for name, spec in SPECS.items():
            for axes in spec.all_shards(AXES):
                flat = shard_of(wholes[name], spec, axes).reshape(-1)
                start, stop = (len(flat) * place // partitions for place in (partition, partition + 1))
                values = {"fp32": flat[start:stop], "exp_avg": -flat[start:stop]}
                save_piece(Piece(name, spec, axes, start, stop, values, STEP), archives, chunks, file)
        file.close()
        tables.append((chunks, None))
    digests = {state: dict.fromkeys(SPECS, "") for state in ("fp32", "exp_avg")}
    run = {
        "parameters": {name: spec_record(spec) for name, spec in SPECS.items()},
        "certificate": {"digests": digests},
        "files": {},
    }
    writer = DcpWriter(tmp_path)
    assert writer.missing(run, {}, tables) == []
    assert writer.missing(run, {}, tables[1:]) != []
    writer.finish(run, tables)
    stored = DcpFolder(tmp_path)
    assert len(stored.tensors) == 3 * len(SPECS)
    for name, whole in wholes.items():
        valid = whole[: SPECS[name].valid_shape[0]]
        assert torch.equal(stored.read(name), valid)
        assert torch.equal(stored.read(f"optimizer.state.{name}.exp_avg"), -valid)
        assert stored.read(f"optimizer.state.{name}.step") == STEP
        assert sum(prod(chunk.shape) for chunk in stored.tensors[name].chunks) == valid.numel()


def test_deepspeeds_files_refuse_other_axes_than_tp() -> None:
    NativeWriter.check_sharding({name: SPECS[name] for name in ("padded", "replicated")})
    with pytest.raises(UserError, match="two axes is sharded over cp and tp, .*: use the format dcp"):
        NativeWriter.check_sharding(SPECS)
