"""A test must leave the state of the process as it found it."""

from __future__ import annotations

import gc
import resource
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.support.process_state import process_state


def test_a_change_of_each_part_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = process_state()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as undo:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        undo.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        undo.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, signal.SIG_IGN))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        undo.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        gc.disable()
        undo.callback(gc.enable)
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(torch.get_num_threads() + 1)
        undo.callback(torch.set_grad_enabled, True)
        torch.set_grad_enabled(False)
        undo.callback(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(True)
        after = process_state()
        same = {part for part in before if after[part] == before[part]}
    monkeypatch.undo()
    assert same == {"process group"} and process_state() == before
