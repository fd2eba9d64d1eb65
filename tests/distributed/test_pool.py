import os
import time

import pytest

from tests.support import pool
from tests.support.pool import WorldError, run_world


def ranks_and_sum():
    import deepspeed.comm
    import torch

    total = torch.tensor([float(deepspeed.comm.get_rank())])
    deepspeed.comm.all_reduce(total)
    return deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), int(os.environ["RANK"]), total.item()


def train_a_pipeline(stages):
    """Returns the losses of two steps of a DeepSpeed pipeline, which leaves state in many of
    DeepSpeed's modules."""
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(1)
    layers = [torch.nn.Linear(4, 4) for _ in range(4)]
    os.environ["LEFT_BEHIND"] = "1"
    module = PipelineModule(
        layers, num_stages=stages, loss_fn=torch.nn.functional.mse_loss, activation_checkpoint_interval=1
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        # 0 turns clipping off. DeepSpeed's default clips, and computes the norm differently on different
        # layouts.
        config={"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0},
    )
    data = iter([(torch.full((1, 4), 0.5), torch.ones(1, 4))] * 8)
    return [engine.train_batch(data).item() for _ in range(2)]


def environment():
    return os.environ.get("LEFT_BEHIND")


def fail_on_rank(bad_rank):
    import torch
    import torch.distributed

    if torch.distributed.get_rank() == bad_rank:
        raise KeyError("no such thing")
    torch.distributed.all_reduce(torch.ones(1))


def hang_on_rank(bad_rank):
    import torch.distributed

    if torch.distributed.get_rank() == bad_rank:
        time.sleep(1000)


def die_on_rank(bad_rank):
    if int(os.environ["RANK"]) == bad_rank:
        os._exit(7)


def test_worlds_of_any_size_follow_one_another():
    for size in (2, 4, 1, 3, 2):
        total = size * (size - 1) / 2
        assert run_world(size, ranks_and_sum) == [(rank, size, rank, total) for rank in range(size)]


def test_deepspeed_engines_of_several_layouts_follow_one_another():
    losses = {
        (size, stages): run_world(size, train_a_pipeline, stages) for size, stages in ((2, 2), (1, 1), (4, 2))
    }
    assert len({tuple(result) for results in losses.values() for result in results}) == 1, losses
    assert run_world(2, environment) == [None, None]


def test_an_exception_names_its_rank_and_keeps_its_type_and_traceback():
    with pytest.raises(WorldError, match="rank 1 failed first") as error:
        run_world(3, fail_on_rank, 1)
    assert isinstance(error.value.__cause__, KeyError)
    assert "fail_on_rank" in str(error.value)
    assert len(run_world(3, ranks_and_sum)) == 3


def test_a_hang_names_the_ranks_and_where_they_are():
    run_world(2, ranks_and_sum)  # starts the workers before the time is measured
    for timeout in (1.0, 30.0):  # a slow machine may not have begun after the first timeout
        with pytest.raises(
            WorldError, match=rf"ranks \[0, 1\] have not answered within {timeout} s"
        ) as error:
            run_world(2, hang_on_rank, 1, timeout=timeout)
        if "in hang_on_rank" in str(error.value):
            break
    assert "in hang_on_rank" in str(error.value)
    assert len(run_world(2, ranks_and_sum)) == 2


def test_a_dead_worker_is_reported_with_its_exit_code():
    with pytest.raises(WorldError, match="rank 0 failed first:\nthe process died, exit code 7"):
        run_world(2, die_on_rank, 0)
    assert len(run_world(2, ranks_and_sum)) == 2


def test_a_world_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match="9 ranks"):
        run_world(9, ranks_and_sum)


def test_a_worker_that_was_killed_between_two_cases_is_reported_once():
    run_world(2, ranks_and_sum)
    worker, _ = pool._pool._workers[1]
    worker.kill()
    worker.join()
    with pytest.raises(WorldError, match="a test before this one killed a worker of the pool: .*SIGKILL"):
        run_world(1, ranks_and_sum)
    assert len(run_world(2, ranks_and_sum)) == 2
