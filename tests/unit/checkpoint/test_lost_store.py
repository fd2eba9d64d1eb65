"""A save in the background fails if its store is gone because torch's launcher, which hosts the store,
was killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.checkpoint.formats.native_writer import NativeWriter
from megatron.checkpoint.record import TrainingState
from megatron.checkpoint.saving.background import BackgroundSave, BackgroundSaves, RankResult


class LostStore:
    def set(self, *_: object) -> None:
        raise dist.DistNetworkError("failed to send, got error: Broken pipe")

    check = get = delete_key = set


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_store_is_an_error_of_the_next_step_and_of_the_next_save(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    saves = BackgroundSaves(None, LostStore(), lambda: None)
    assert list(saves.take_outcomes()) == []
    facts = TrainingState(iteration=2), {}, 0.0, NativeWriter(tmp_path / "saving"), tmp_path
    save = BackgroundSave(*facts, complete=lambda save, results: save.ended())
    saves.in_flight = save
    saves._finish_files(save, 1, None, RankResult({}, None, None, ""))
    assert save.is_reported.is_set() and save.has_ended.is_set() is (rank == 0)
    assert (save.outcome is not None and "Broken pipe" in save.outcome.problem) is (rank == 0)
    for use in (lambda: list(saves.take_outcomes()), saves.finish):
        with pytest.raises(RuntimeError, match=r"the store of the processes, .* is lost \(.*Broken pipe"):
            use()
