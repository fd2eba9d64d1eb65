"""docs/troubleshooting.md and docs/metrics.md quote what the program prints."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Mapping
from functools import cache

import pytest

from megatron.arguments import read_command_line
from megatron.checkpoint.record import TrainingState
from megatron.config import ConfigError, LoggingConfig
from megatron.training.log_lines import parse_log_line
from megatron.training.metrics import MetricsLogger, StepRecord, Throughput
from tests.end_to_end.command import ROOT
from tests.end_to_end.flags import ABSOLUTE, MODEL, SHORT

TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
METRICS = (ROOT / "docs" / "metrics.md").read_text()
QUOTED = "".join(re.findall(r"^```text\n(.*?)^```", TROUBLESHOOTING, re.DOTALL | re.MULTILINE)).splitlines()

# A message with fewer constant characters cannot be identified.
MIN_CONSTANT_CHARACTERS = 20
# The alternatives of a message with conditional parts are multiplied, up to this number.
MAX_ALTERNATIVES = 16

# --- lines of troubleshooting.md ---

# A message: its constant parts, between which values are inserted.
Template = tuple[str, ...]


def templates_of(node: ast.expr) -> list[Template]:
    """Returns the templates of a string expression. An expression of a different kind is a value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [(node.value,)]
    if isinstance(node, ast.IfExp):
        return templates_of(node.body) + templates_of(node.orelse)
    if isinstance(node, ast.FormattedValue):
        return templates_of(node.value) if isinstance(node.value, ast.IfExp) else [("", "")]
    parts: list[ast.expr] = []
    if isinstance(node, ast.JoinedStr):
        parts = node.values
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [node.left, node.right]
    joined: list[Template] = [("",)] if parts else [("", "")]
    for part in parts:
        joined = [
            (*left[:-1], left[-1] + right[0], *right[1:]) for left in joined for right in templates_of(part)
        ][:MAX_ALTERNATIVES]
    return joined


@cache
def messages() -> list[Template]:
    """Returns the messages in the sources that have enough constant characters."""
    found = []
    for path in sorted((ROOT / "megatron").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                continue
            for template in templates_of(node):
                if sum(map(len, template)) >= MIN_CONSTANT_CHARACTERS:
                    found.append(template)
    return found


def part_of_a_message(line: str) -> float:
    """Returns the largest fraction of the line that one message of the program can produce."""
    possible = (template for template in messages() if all(part in line for part in template))
    matches = [re.search(".+?".join(map(re.escape, template)), line) for template in possible]
    return max((len(match[0]) for match in matches if match), default=0) / len(line)


def test_the_page_quotes_many_lines() -> None:
    assert len(QUOTED) > 30


def produced(flags: str) -> str:
    """Returns the line about the first flag in the error of a command with wrong flags."""
    with pytest.raises(ConfigError) as error:
        read_command_line([*MODEL, *ABSOLUTE, *SHORT, *flags.split()], {})
    (line,) = (line.strip() for line in str(error.value).splitlines() if flags.split()[0] in line)
    return f"error: {line}"


PRODUCED = [produced(flags) for flags in ("--hiden-size 8", "--ds-sequence-parallel-size 2")]


@pytest.mark.parametrize("line", [line for line in QUOTED if line not in PRODUCED])
def test_a_quoted_line_is_a_message_of_the_program(line: str) -> None:
    assert part_of_a_message(line) >= 1 / 3, "no message of the program has the constant parts of this line"


def test_a_line_that_the_program_never_prints_is_found() -> None:
    line = "error: checkpoint runs/a/global_step300 holds a different network: hidden_size was 1024, is 2048"
    assert part_of_a_message(line) < 1 / 3


def test_the_quoted_errors_of_flags_are_what_the_program_prints() -> None:
    assert set(PRODUCED) <= set(QUOTED)


# --- metrics.md ---


class RecordingWriter:
    """Keeps the tags of the values that it is given."""

    def __init__(self) -> None:
        self.tags: list[str] = []

    def write(self, values: Mapping[str, float], state: TrainingState, when: float) -> None:
        """See `Writer`."""
        self.tags += values

    def flush(self) -> None:
        """See `Writer`."""

    def close(self) -> None:
        """See `Writer`."""


@pytest.fixture(scope="module")
def logged() -> tuple[str, set[str]]:
    """Returns the console output and the tags of a run with everything that a run can log."""
    writer, console = RecordingWriter(), io.StringIO()
    logging = LoggingConfig(
        log_interval=1,
        log_timers_to_tensorboard=True,
        log_batch_size_to_tensorboard=True,
        log_validation_ppl_to_tensorboard=True,
    )
    throughput = Throughput(lambda tokens: 1.0, world_size=1, data_parallel_size=1, has_curriculum=True)
    metrics = MetricsLogger(logging, throughput, stream=console, writers=[writer])
    state = TrainingState(1, 4, 512)
    metrics.log_step(StepRecord(state, 2, 1e-3, 4, 128, 5.0, 1.0, 4096.0, False, 0.5, {"NAME": 1.0}))
    for name in ("validation", "DATA"):
        metrics.log_validation(state, 5.0, name)
    metrics.log_tasks(state, {"TASK": {"METRIC": 0.5}})
    metrics.close()
    return console.getvalue(), set(writer.tags)


def first_cells(heading: str) -> list[str]:
    """Returns the code in the first cells of the table in a section of metrics.md."""
    section = METRICS.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return [code for cell in cells for code in re.findall(r"`([^`]*)`", cell)]


def test_the_table_of_tags_is_complete(logged: tuple[str, set[str]]) -> None:
    tags = first_cells("TensorBoard tags")
    assert len(tags) == len(set(tags)) and set(tags) == logged[1]


def test_the_table_of_the_console_line_has_its_fields_in_order(logged: tuple[str, set[str]]) -> None:
    line = logged[0].splitlines()[0]
    fields = [field.rpartition(":")[0].strip() or "iteration" for field in line.split("|")[:-1]]
    assert fields[0] == "iteration" and "NAME" in fields
    assert first_cells("The console line") == [field for field in fields if field != "NAME"]


def test_the_lines_of_the_page_are_parsed() -> None:
    lines = re.findall(r"^```text\n(.*?)^```", METRICS, re.DOTALL | re.MULTILINE)
    assert [(parse_log_line(line) or {}).get("kind") for line in lines] == ["training", "validation"]
