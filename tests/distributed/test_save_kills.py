"""The benchmark of 200 kills runs with 4 kills, and no resume fails."""

import pytest

from tests.support.kills import run_kill_test

KINDS = {
    "in the background": {"async_save": True},
    "at once": {},
    "on local disks, one of them lost": {"local_save": True},
    "as DCP in the background": {"async_save": True, "save_format": "dcp"},
    "as DCP beside local saves": {"local_save": True, "save_format": "dcp"},
}


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_while_it_saves_resumes_without_loss(kind, tmp_path):
    outcome = run_kill_test(tmp_path, kills=4, seed=1, **KINDS[kind])
    # Timing decides how many of the kills hit an unfinished save, so their number is not checked.
    assert outcome.failures == [] and outcome.kills == 4
