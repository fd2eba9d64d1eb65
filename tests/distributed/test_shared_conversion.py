"""Several tasks share a conversion to a universal checkpoint. They are killed, start late, or change
in number."""

import json
import random
import subprocess
import sys

import pytest

from tests.distributed.test_conversion import change_a_copy
from tests.distributed.test_universal import converted, saved
from tests.end_to_end.command import ROOT, environment
from tests.support import HANG_TIMEOUT_S
from tests.support.forked import run_script
from tests.support.layouts import Row

TASKS = ROOT / "tests" / "distributed" / "conversion_tasks.py"


def convert_in_tasks(flags, num_tasks, victims=None, ends_others=True, late=False):
    """Runs a conversion in `num_tasks` tasks. Returns (exit codes by rank, output, errors). victims: rank ->
    number of the block of parameters at which the task is killed. ends_others: whether the end of a task with
    an error kills the other tasks. late: whether the last task starts after the others have ended."""
    variables = {name: value for name, value in environment().items() if not name.startswith("SLURM")}
    plan = json.dumps([num_tasks, victims or {}, ends_others, int(late)])
    run = run_script(TASKS, [*flags, plan], variables, 0)
    *errors, codes = run.stderr.splitlines()
    return json.loads(codes), run.stdout, "\n".join(errors)


def results_in(output):
    """Returns the lines without the note of a rank 0 that started after the other ranks were done."""
    return [line for line in output.splitlines() if "an earlier command has converted" not in line]


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_killed_tasks_continue_in_any_number_and_write_the_bytes_of_one_process(tmp_path):
    source, target = saved(tmp_path, Row(tp=2, zero=1), {}), tmp_path / "universal"
    converted(source, tmp_path / "at once")
    flags = ["--input_folder", str(source), "--output_folder", str(target), "--num_extract_workers", "2"]
    # Each of the command's two names continues a conversion that the other name began.
    other = ["--from", str(source), "--to", str(target), "--format", "universal", "--workers", "2"]
    choose = random.Random(28)
    # With two workers, a parameter of three blocks is complete before the tenth block of all parameters is
    # read.
    assert convert_in_tasks(flags, 1, {0: 10})[0] == {"0": -9}
    for num_tasks in (3, 2, 4):
        # Each task is killed after fewer blocks than the checkpoint has, so none can finish the conversion.
        victims = {rank: choose.randrange(1, 8) for rank in range(num_tasks)}
        codes, output, _ = convert_in_tasks(other if num_tasks == 2 else flags, num_tasks, victims)
        assert set(codes.values()) == {-9} and not target.exists() and output == ""
    # Two of three tasks die, unless the third was much faster. The third task takes over their parameters.
    codes, output, errors = convert_in_tasks(flags, 3, {0: 2, 2: 3}, ends_others=False)
    assert codes["1"] == 0 and set(codes.values()) <= {0, -9} and errors == ""
    (line,) = results_in(output)
    num_parameters = len(list((target / "zero").iterdir())) - 1
    assert line.startswith(f"{target}: {num_parameters} parameters, ") and "by an earlier" in line
    assert files_in(target) == files_in(tmp_path / "at once")
    assert (tmp_path / "latest_universal").read_text() == "universal"
    left = {path.name for path in tmp_path.iterdir()}
    assert not left & {"universal.partial", "universal.partial.locks"}


@pytest.mark.full
def test_more_tasks_than_parameters_and_a_late_one_print_one_result(tmp_path):
    source, target = saved(tmp_path, Row(tp=2), {}), tmp_path / "universal"
    change_a_copy(source)
    flags = ["--input_folder", str(source), "--output_folder", str(target)]
    codes, _, errors = convert_in_tasks(flags, 2)
    assert 2 in codes.values() and "replicas of 8.weight on the TP ranks differ by up to 5.00e-01" in errors
    codes, output, errors = convert_in_tasks([*flags, "--allow-replica-mismatch"], 40, late=True)
    assert errors == "" and set(codes.values()) == {0} and len(codes) == 39
    difference, result = results_in(output)
    assert difference == "8.weight: replicas on TP ranks differed by up to 5.00e-01; their mean is used"
    assert result.startswith(f"{target}: ")
    converted(source, tmp_path / "at once", allow_replica_mismatch=True)
    assert files_in(target) == files_in(tmp_path / "at once")
    left = {path.name for path in tmp_path.iterdir()}
    assert not left & {"universal.partial", "universal.partial.locks"}


DAMAGED = """
import sys
from pathlib import Path
from megatron.checkpoint.conversion.shared_work import SharedWork

with SharedWork(Path(sys.argv[1]), int(sys.argv[2]), 2) as shared:
    print(sorted(shared.share("file", ["a", "b"], str, 1, lambda _: False)))
"""


def test_tasks_do_not_wait_for_files_that_others_have_found_damaged(tmp_path):
    commands = [[sys.executable, "-c", DAMAGED, str(tmp_path / "locks"), rank] for rank in "01"]
    tasks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for command in commands]
    for task in tasks:
        assert task.communicate(timeout=HANG_TIMEOUT_S)[0] == "['a', 'b']\n"
