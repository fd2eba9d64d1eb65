"""Tests the iterations of a profile, its summary, and traces that are not complete."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType

from megatron.arguments import read_command_line
from megatron.cluster.exit_codes import SharedUserError
from megatron.errors import UserError
from megatron.training.profiler import StepProfiler, _write_trace, check_profile, summary
from megatron.training.stability import range_to_skip
from tests.support.layouts import VOCAB, unconnected_run
from tests.unit.config.command_lines import SMALL


@dataclass
class Interval:
    start: float
    end: float

    def elapsed_us(self) -> float:
        return self.end - self.start


@dataclass
class Event:
    """A kernel, as an event of PyTorch's profiler. Times are in microseconds."""

    name: str
    time_range: Interval
    device_type: DeviceType = DeviceType.CUDA
    is_user_annotation: bool = False


def test_kernels_are_summed_by_name_and_gaps_are_those_of_all_streams() -> None:
    times = {"gemm": [(0, 4000), (5000, 9000)], "norm": [(3000, 3500), (9500, 10000)], "copy": [(8000, 8500)]}
    events = [Event(name, Interval(*pair)) for name, pairs in times.items() for pair in pairs]
    events += [Event(f"kernel {i}", Interval(1000, 1001 + i)) for i in range(20)]
    events.append(Event("a range", Interval(0, 20000), is_user_annotation=True))
    events.append(Event("aten::mm", Interval(0, 20000), DeviceType.CPU))
    header, *rows, last = summary(events, 2, on_gpu=True).splitlines()
    assert header.split() == ["kernel", "calls", "ms", "%"] and len(rows) == 10
    total = 8000 + 1000 + 500 + sum(range(1, 21))
    assert rows[0].split() == ["gemm", "1", "4.000", f"{100 * 8000 / total:.1f}"]
    assert rows[1].split() == ["norm", "1", "0.500", f"{100 * 1000 / total:.1f}"]
    assert rows[2].split() == ["copy", "0.5", "0.250", f"{100 * 500 / total:.1f}"]
    assert last == (
        f"per iteration, {total / 2000:.1f} ms of kernels; no kernel ran during 15.0 % of 5.0 ms; longest "
        "gaps: 1.000, 0.500 ms"
    )


def test_without_kernels_the_summary_says_so() -> None:
    assert summary([], 1, on_gpu=True) == "no kernel ran"


@pytest.mark.parametrize("content", ["", '{"traceEvents": [{"name"', None])
def test_an_incomplete_trace_is_an_error_and_leaves_no_file(content: str | None, tmp_path: Path) -> None:
    def export(path: str) -> None:
        if content is not None:
            Path(path).write_text(content)

    path = tmp_path / "folder" / "trace.json"
    with pytest.raises(OSError, match="incomplete|No such file"):
        _write_trace(export, path)
    assert list(path.parent.iterdir()) == []
    _write_trace(lambda path: Path(path).write_text('{"traceEvents": []}\n'), path)
    assert [path.name for path in path.parent.iterdir()] == ["trace.json"]


def profiled(flags: str, iterations: Iterable[int], folder: Path) -> list[str]:
    """Runs a product in each of the iterations that are not skipped. Returns the printed lines."""
    chosen = f"--profile --use-pytorch-profiler --tensorboard-dir {folder} --vocab-size {VOCAB} --dry-run"
    config = read_command_line([*SMALL, *chosen.split(), *flags.split()], {}).config
    run, texts = unconnected_run(config), list[str]()
    check_profile(run)
    with StepProfiler(run, texts.append) as profiler:
        for number in iterations:
            with profiler.iteration(number):
                if not range_to_skip(run, number - 1):
                    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    return "\n".join(texts).splitlines()


@pytest.mark.parametrize("last", [0, 9, 10])
def test_a_run_that_ends_before_the_first_profiled_iteration_says_so(last: int, tmp_path: Path) -> None:
    lines = profiled("", range(1, last + 1), tmp_path)
    assert lines == ["--profile: the run ended before iteration 11: nothing was profiled"]
    assert list(tmp_path.iterdir()) == []


def test_skipped_iterations_are_not_counted(tmp_path: Path) -> None:
    chosen = "--profile-step-start 2 --profile-step-end 8 --skip-train-iteration-range"
    lines = profiled(f"{chosen} 4-5 7-9", (1, 2, 3, 4, 6, 7, 10), tmp_path)
    (trace,) = tmp_path.iterdir()
    assert trace.name == "rank_0_iterations_3_to_6.pt.trace.json"
    assert lines[0] == f"profile of iterations 3 to 6: {trace}"
    (product,) = (line.split() for line in lines if line.startswith("aten::mm "))
    assert product[1] == "1"


@pytest.mark.parametrize("iterations", [(9, 10, 11, 13), (10, 11, 13), (11, 13)])
def test_a_profile_of_skipped_iterations_says_so(iterations: tuple[int, ...], tmp_path: Path) -> None:
    lines = profiled("--skip-train-iteration-range 11-12", iterations, tmp_path)
    assert lines == ["--profile: iteration 12 is over: nothing was profiled"]


def test_a_start_after_the_last_iteration_is_an_error_of_the_flags() -> None:
    flags = "--profile --use-pytorch-profiler --tensorboard-dir a --dry-run --train-iters".split()
    small = [*SMALL]
    at = small.index("--train-samples")
    del small[at : at + 2]
    with pytest.raises(UserError, match="--profile-step-start 10 with --train-iters 10: the run ends"):
        read_command_line([*small, *flags, "10"], {})
    read_command_line([*small, *flags, "11"], {})


def test_a_start_after_the_last_iteration_of_a_run_in_samples_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SharedUserError, match="--profile-step-start 100: the run ends with iteration 100"):
        profiled("--profile-step-start 100 --profile-step-end 102", (), tmp_path)


def test_times_of_zero_are_no_error() -> None:
    table = summary([Event("gemm", Interval(5, 5))], 1, on_gpu=True)
    assert "no kernel ran during 0.0 % of 0.0 ms" in table


def test_every_error_of_a_profiler_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("already running")

    monkeypatch.setattr(torch.profiler.profile, "start", fail)
    lines = profiled("", range(1, 13), tmp_path)
    assert lines == ["WARNING: the profile failed (already running); the run continues"]
