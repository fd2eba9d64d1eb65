"""Archives that are written through small buffers equal the files of torch.save to the byte."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.serialization import config as serialization

from megatron.checkpoint.formats.archive_writer import StagingBuffers, save_archive
from tests.support.checkpoints import all_tensors_staged

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.uint8),
    *(torch.int64, torch.bool, torch.complex64),
]


def values() -> dict[str, Any]:
    """Returns tensors of all kinds that a checkpoint may contain. Some share a storage, some use a part of a
    storage."""
    flat = torch.arange(1001.0)
    parameter = torch.nn.Parameter(torch.randn(7, 3))
    return {
        "dtypes": [torch.arange(37).to(dtype) for dtype in DTYPES],
        "views": [flat[1:500:2], flat[3:903].view(30, 30).t(), flat],
        "empty": [torch.empty(0), torch.empty(0, 5, dtype=torch.bfloat16), torch.tensor(3.0)],
        "module": torch.nn.Linear(3, 5).state_dict(),
        "parameter": (parameter, parameter.data, {"again": parameter}),
        "plain": {"step": 7, "text": "x" * 5000},
    }


def archive_of(save: Callable[[Any, Any], None], value: Any) -> bytes:
    file = io.BytesIO()
    save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("piece_bytes", [1, 3, 64, 1001, 4004, 1 << 20])
def test_an_archive_is_that_of_torch_save(piece_bytes: int) -> None:
    """The archive equals the file of torch.save for every buffer size, including buffers smaller than an
    element or larger than all tensors."""
    saved = values()
    with serialization.patch({"save.compute_crc32": False}):
        expected = archive_of(torch.save, saved)
    assert archive_of(save_archive, saved) == expected
    with all_tensors_staged(piece_bytes):
        assert archive_of(save_archive, saved) == expected


class Allocations(TorchDispatchMode):
    """Records allocations. largest: bytes of the largest storage that an operation has made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and not func._schema.is_mutable:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


class Pieces(io.BytesIO):
    """A file that records its writes. sizes: bytes of each write."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def write(self, data: Any) -> int:
        self.sizes.append(memoryview(data).nbytes)
        return super().write(data)


def test_a_save_needs_no_host_memory_in_addition_to_the_buffers() -> None:
    saved = {"large": torch.randn(10_001), "part": torch.randn(5000)[100:4000]}
    file = Pieces()
    with all_tensors_staged(512), Allocations() as allocations:
        save_archive(saved, file)
    assert file.sizes.count(512) == 40_004 // 512 + 20_000 // 512
    assert allocations.largest == 0 and max(file.sizes) < 2000  # the list of the archive's members
    with Allocations() as allocations:
        torch.empty(3)
        saved["large"].clone()
    assert allocations.largest == 40_004


@pytest.mark.parametrize("piece_bytes", [None, 2000])
def test_an_error_of_the_file_is_not_hidden(piece_bytes: int | None) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            if memoryview(data).nbytes > 1000:
                raise OSError("disk full")
            return super().write(data)

    staged = all_tensors_staged(piece_bytes) if piece_bytes is not None else nullcontext()
    with staged, pytest.raises(OSError, match="^disk full$"):
        save_archive(torch.zeros(5000), Full())


def test_an_archive_without_the_bytes_of_a_tensor_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A future torch version may skip the bytes without calling `seek`. Then a save must fail instead of
    writing an archive without them."""
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda value, file, **options: save(value, io.BytesIO(), **options))
    with pytest.raises(RuntimeError, match="wrote 0 of 1 storages"):
        save_archive({"empty": torch.empty(0), "a": torch.zeros(3)}, io.BytesIO())


class Streams(CPU_Accelerator):
    """An accelerator with streams and events that records the order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._num_events = 0

    def current_stream(self, device_index: int | None = None) -> str:
        return "the stream of training"

    @property
    def Stream(self) -> Callable[[], Any]:
        return lambda: SimpleNamespace(wait_stream=lambda stream: self.calls.append(f"after {stream}"))

    @property
    def Event(self) -> Callable[[], Any]:
        def make() -> SimpleNamespace:
            number, self._num_events = self._num_events, self._num_events + 1
            return SimpleNamespace(
                record=lambda: self.calls.append(f"copy {number}"),
                synchronize=lambda: self.calls.append(f"wait {number}"),
            )

        return make


def test_the_next_piece_is_copied_while_the_host_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Streams()
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    content, found = torch.arange(10, dtype=torch.uint8), []
    for piece in StagingBuffers(4).pieces(content):
        accelerator.calls.append("take")
        found += piece.tolist()
    assert found == content.tolist()
    order = "copy 0, copy 1, wait 0, take, copy 2, wait 1, take, wait 2, take"
    assert ", ".join(accelerator.calls) == f"after the stream of training, {order}"
    accelerator.calls.clear()
    pieces = StagingBuffers(4).pieces(content)
    next(pieces)
    pieces.close()  # as after a file error: no copy may end later
    assert accelerator.calls[-3:] == ["copy 4", "wait 3", "wait 4"]
