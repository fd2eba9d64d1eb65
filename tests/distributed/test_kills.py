"""The benchmark of 200 kills, in small: it runs, and finds no fault."""

from benchmarks.kills import kill_again_and_again


def test_a_run_that_is_killed_while_it_saves_resumes_without_loss(tmp_path):
    outcome = kill_again_and_again(tmp_path, kills=4, seed=1)
    # How many of the kills hit an unfinished save is a matter of timing, so nothing is asked of it.
    assert outcome.faults == [] and outcome.kills == 4
