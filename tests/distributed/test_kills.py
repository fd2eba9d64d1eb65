"""The benchmark of 200 kills, in small: it runs, and finds no fault."""

from benchmarks.kills import kill_again_and_again


def test_a_run_that_is_killed_while_it_saves_resumes_without_loss(tmp_path):
    outcome = kill_again_and_again(tmp_path, kills=4, seed=1)
    assert outcome.faults == []
    assert outcome.kills == 4 and outcome.good_resumes >= 2 and outcome.unfinished >= 1
