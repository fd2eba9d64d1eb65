"""One job owns a --save folder. A fake clock replaces time: `sleep` advances it and lets other jobs act."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from megatron.checkpoint.lineage import owner
from megatron.checkpoint.lineage.owner import ClaimFolder, Owner, Timing, acquire, hold_folder
from megatron.errors import UserError


class World:
    """A clock that only `sleep` moves, and the events of each instant."""

    def __init__(self):
        self.now, self.events, self.said = 0.0, {}, []
        self.timing = Timing(
            heartbeat_s=10.0, stale_after_s=60.0, poll_s=1.0, sleep=self.sleep, now=lambda: self.now
        )

    def sleep(self, seconds):
        self.now += seconds
        for at in sorted(at for at in self.events if at <= self.now):
            self.events.pop(at)()

    def acquire(self, folder, job):
        return acquire(ClaimFolder(folder), job, self.said.append, self.timing)


def job(host="n1", number="", restart="0", machine=None):
    """Returns an owner that is this process, or with `machine` a process on another machine."""
    env = {"SLURM_JOB_ID": number, "SLURM_RESTART_COUNT": restart}
    found = Owner.of_this_process(host, env)
    return found if machine is None else replace(found, machine=machine)


def ended_process():
    """Returns id and start time of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()[19]
    process.communicate(b"\n")
    return {"pid": process.pid, "process_start": start}


def owner_numbers(folder):
    """Returns the numbers of the owner files, in order."""
    return sorted(int(path.name.split("-")[1].removesuffix(".json")) for path in folder.glob("owner-*"))


def owner_file(folder):
    (path,) = folder.glob("owner-*")
    return path


def before_claim(monkeypatch, *events):
    """Suspends a job after it has listed the folder and before it makes its claim. Meanwhile the next of the
    events takes place: the first event at the first claim, and so on."""
    claim, upcoming = owner._claim, iter(events)

    def late_claim(*args):
        next(upcoming, lambda: None)()
        return claim(*args)

    monkeypatch.setattr(owner, "_claim", late_claim)


def test_a_second_job_on_the_same_machine_is_refused_at_once_with_the_name_of_the_first(tmp_path):
    world = World()
    world.acquire(tmp_path, job("n1", "71"))
    with pytest.raises(UserError, match=r"in use by Slurm job 71 on n1 \(process \d+, since \d{4}-"):
        world.acquire(tmp_path, job("n1", "72"))
    assert world.now == 0.0 and owner_numbers(tmp_path) == [1]


def test_an_active_owner_elsewhere_is_known_by_its_next_heartbeat_whatever_its_clock_says(tmp_path):
    world = World()
    first = world.acquire(tmp_path, replace(job("n1", "71", machine="A"), seen="1999-01-01 00:00:00"))
    world.events[10.0] = first.write_heartbeat
    with pytest.raises(UserError, match="Slurm job 71 on n1"):
        world.acquire(tmp_path, job("n2", "72", machine="B"))
    assert 10.0 <= world.now <= 12.0
    assert "waiting up to 60 s" in world.said[0] and len(world.said) == 1
    assert first.problem() is None


def test_an_owner_elsewhere_without_a_heartbeat_is_taken_over_after_a_minute(tmp_path):
    world = World()
    first = world.acquire(tmp_path, job("n1", "71", machine="A"))
    second = world.acquire(tmp_path, job("n2", "72", machine="B"))
    assert 60.0 <= world.now <= 62.0
    assert (
        "taken over from Slurm job 71 on n1" in world.said[-1] and "no heartbeat for 60 s" in world.said[-1]
    )
    assert second.problem() is None
    assert "was taken over by Slurm job 72 on n2" in first.problem()
    assert not first.write_heartbeat()
    first.release()
    assert second.problem() is None and owner_numbers(tmp_path) == [2]


@pytest.mark.parametrize("why", ["process has ended", "process id was reused", "requeued"])
def test_an_owner_that_cannot_be_active_is_taken_over_at_once(why, tmp_path):
    old, new, said = job("n1"), job("n1"), "its process has ended"
    if why == "requeued":  # by Slurm, on another node
        old, new, said = job("n1", "71", "0", machine="A"), job("n2", "71", "1", machine="B"), "requeued"
    else:
        old = replace(old, **(ended_process() if why == "process has ended" else {"process_start": "1"}))
    world = World()
    world.acquire(tmp_path, old)
    world.acquire(tmp_path, new)
    assert world.now == 0.0 and said in world.said[0]


@pytest.mark.parametrize("ends", [True, False])
def test_a_restart_in_the_same_job_waits_for_the_old_process_to_end_and_then_gives_up(ends, tmp_path):
    world = World()
    first = world.acquire(tmp_path, job("n1", "71", machine="A"))
    world.events |= {10.0 * n: first.write_heartbeat for n in range(1, 3 if ends else 20)}
    if ends:
        world.acquire(tmp_path, job("n2", "71", machine="B"))
        assert 80.0 <= world.now <= 82.0
        return
    with pytest.raises(UserError, match="in use by Slurm job 71"):
        world.acquire(tmp_path, job("n2", "71", machine="B"))
    assert 60.0 <= world.now <= 72.0


@pytest.mark.parametrize("content", [b"", b"{", b'{"token": 1}', b"\xff" * 5000, b"[" * 100_000, None])
def test_an_empty_or_hostile_owner_file_is_watched_and_taken_over(content, tmp_path):
    """With content None the file is a pipe, on which a reader would wait."""
    path = tmp_path / "owner-000007.json"
    os.mkfifo(path) if content is None else path.write_bytes(content)
    world = World()
    held = world.acquire(tmp_path, job())
    assert 60.0 <= world.now <= 62.0 and held.problem() is None and owner_numbers(tmp_path) == [8]


def test_a_folder_that_was_released_is_free(tmp_path):
    world = World()
    world.acquire(tmp_path, job("n1")).release()
    assert owner_numbers(tmp_path) == []
    world.acquire(tmp_path, job("n1"))
    assert world.said == [] and world.now == 0.0


def test_of_two_jobs_that_find_the_claim_stale_at_once_one_gets_the_folder(tmp_path):
    """The second job claims the folder after the first job has listed it and before the first job makes its
    claim."""
    world = World()
    world.acquire(tmp_path, job("n0", machine="Z"))
    taken = []
    clock = iter(range(0, 10_000, 30))
    patient = Timing(sleep=lambda _: None, now=lambda: next(clock))
    arguments = (ClaimFolder(tmp_path), job("n1", "71", machine="A"), print, patient)
    world.events[60.0] = lambda: taken.append(acquire(*arguments))
    world.events[70.0] = lambda: taken[0].write_heartbeat()
    with pytest.raises(UserError, match="Slurm job 71 on n1"):
        world.acquire(tmp_path, job("n2", "72", machine="B"))
    assert taken[0].problem() is None


def test_of_many_jobs_that_start_at_once_exactly_one_owns_the_folder(tmp_path):
    barrier, owned, refused = threading.Barrier(8), [], []

    def start():
        barrier.wait()
        try:
            owned.append(acquire(ClaimFolder(tmp_path), job("n1"), print, Timing(poll_s=0.01)))
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(owned) == 1 and len(refused) == 7
    assert owned[0].problem() is None


def test_a_removed_owner_file_stops_the_job(tmp_path):
    held = World().acquire(tmp_path, job("n1"))
    path = owner_file(tmp_path)
    path.unlink()
    assert f"lost its {path.name}" in held.problem()
    assert not held.write_heartbeat() and owner_numbers(tmp_path) == []


def test_the_block_that_holds_a_folder_writes_heartbeats_and_releases_it_after_an_error(tmp_path):
    with pytest.raises(KeyError), hold_folder(ClaimFolder(tmp_path), "n1", print) as held:
        held.set_run_id("ab" * 16)
        record = json.loads(owner_file(tmp_path).read_text())
        assert record["run_id"] == "ab" * 16 and record["pid"] == os.getpid() and record["beats"] == 1
        raise KeyError
    assert owner_numbers(tmp_path) == []


def test_a_job_that_lost_the_folder_never_regains_it_even_if_numbers_restart(tmp_path):
    """The first job wakes up after its successor has ended. The third job has the number that the first job
    had."""
    world = World()
    first = world.acquire(tmp_path, job("n1", "71", machine="A"))
    world.acquire(tmp_path, job("n2", "72", machine="B")).release()
    third = world.acquire(tmp_path, job("n3", "73", machine="C"))
    content = owner_file(tmp_path).read_bytes()
    assert owner_numbers(tmp_path) == [1]
    assert first.lost_reason is None  # `lost_reason` reads no file
    assert not first.write_heartbeat()
    assert "taken over by Slurm job 73 on n3" in first.lost_reason and first.problem() == first.lost_reason
    first.release()
    assert owner_file(tmp_path).read_bytes() == content
    assert third.problem() is None and third.write_heartbeat() and third.lost_reason is None
    third.release()
    assert not first.write_heartbeat() and first.problem() is not None and owner_numbers(tmp_path) == []


def test_a_taker_whose_predecessors_file_cannot_be_removed_is_the_owner(tmp_path):
    world = World()
    first = world.acquire(tmp_path, job("n1", "71", machine="A"))
    path, content = owner_file(tmp_path), owner_file(tmp_path).read_bytes()
    second = world.acquire(tmp_path, job("n2", "72", machine="B"))
    path.write_bytes(content)
    assert owner_numbers(tmp_path) == [1, 2]
    assert "taken over by Slurm job 72 on n2" in first.problem() and second.problem() is None


def test_a_job_that_was_suspended_before_its_claim_does_not_take_the_folder_of_an_active_one(
    tmp_path, monkeypatch
):
    """The owner of the stale claim has had two successors. The second successor has number 1 again."""
    world, elsewhere = World(), World()
    world.acquire(tmp_path, replace(job("n0"), **ended_process()))
    active = []

    def succeed_twice():
        elsewhere.acquire(tmp_path, job("n1", "71", machine="A")).release()
        active.append(elsewhere.acquire(tmp_path, job("n2", "72", machine="B")))
        world.events[5.0] = active[0].write_heartbeat

    before_claim(monkeypatch, succeed_twice)
    with pytest.raises(UserError, match="in use by Slurm job 72 on n2"):
        world.acquire(tmp_path, job("n3", "73", machine="C"))
    assert active[0].problem() is None and active[0].lost_reason is None and owner_numbers(tmp_path) == [1]


def test_a_job_that_sees_an_old_list_of_the_folder_withdraws_from_its_claim(tmp_path, monkeypatch):
    world, names = World(), ClaimFolder.names
    first = world.acquire(tmp_path, job("n1", "71", machine="A"))
    world.events[5.0] = first.write_heartbeat
    old = iter([[]])
    monkeypatch.setattr(ClaimFolder, "names", lambda folder: next(old, None) or names(folder))
    with pytest.raises(UserError, match="in use by Slurm job 71 on n1"):
        world.acquire(tmp_path, job("n2", "72", machine="B"))
    assert first.problem() is None and owner_numbers(tmp_path) == [1]


@pytest.mark.parametrize(("token", "own_stays"), [("0" * 32, True), ("f" * 32, False)])
def test_of_two_claims_made_at_once_the_higher_waits_and_the_lower_withdraws(
    token, own_stays, tmp_path, monkeypatch
):
    other = tmp_path / f"owner-000001-{token}.json"
    world = World()
    before_claim(monkeypatch, other.touch)
    during = []
    world.events[3.0] = lambda: during.extend(owner_numbers(tmp_path))
    world.events[5.0] = other.unlink
    held = world.acquire(tmp_path, job("n1", machine="A"))
    assert len(during) == 1 + own_stays and 5.0 <= world.now <= 7.0
    assert held.problem() is None and owner_numbers(tmp_path) == [1]


def test_a_claim_whose_job_died_before_it_was_filled_is_removed_after_a_minute(tmp_path, monkeypatch):
    world = World()
    before_claim(monkeypatch, (tmp_path / f"owner-000001-{'0' * 32}.json").touch)
    held = world.acquire(tmp_path, job("n1", machine="A"))
    assert 60.0 <= world.now <= 62.0 and held.problem() is None and owner_numbers(tmp_path) == [1]


def test_a_claim_that_was_removed_before_it_was_filled_is_repeated(tmp_path, monkeypatch):
    """Removes the empty claim, as a job does that has watched it for a minute. That job has ended since."""
    world, write, removed = World(), ClaimFolder.write, []

    def write_late(folder, name, content):
        if not removed:
            removed.append(name)
            folder.remove(name)
        write(folder, name, content)

    monkeypatch.setattr(ClaimFolder, "write", write_late)
    held = world.acquire(tmp_path, job("n1"))
    assert held.problem() is None and removed and owner_numbers(tmp_path) == [1]


def test_a_job_that_gives_up_leaves_no_claim(tmp_path, monkeypatch):
    world = World()

    def interrupt():
        raise KeyboardInterrupt

    before_claim(monkeypatch, (tmp_path / f"owner-000001-{'0' * 32}.json").touch)
    world.events[5.0] = interrupt
    with pytest.raises(KeyboardInterrupt):
        world.acquire(tmp_path, job("n1", machine="A"))
    assert owner_file(tmp_path).name.endswith(f"{'0' * 32}.json")


def test_an_owner_file_of_an_earlier_version_counts(tmp_path):
    world = World()
    world.acquire(tmp_path, job("n1", "71"))
    owner_file(tmp_path).rename(tmp_path / "owner-000001.json")
    with pytest.raises(UserError, match="in use by Slurm job 71 on n1"):
        world.acquire(tmp_path, job("n1", "72"))


def test_a_hostile_owner_file_with_the_last_number_is_named(tmp_path):
    world = World()
    (tmp_path / "owner-999999999999.json").write_text("{}")
    with pytest.raises(UserError, match=r"owner-999999999999\.json has the last possible number.*remove"):
        world.acquire(tmp_path, job("n1"))
    assert os.listdir(tmp_path) == ["owner-999999999999.json"]
