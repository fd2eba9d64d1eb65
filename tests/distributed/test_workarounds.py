"""Tests the workarounds in `megatron/engine/workarounds.py` that no other test covers."""

import inspect
import os
import subprocess
import sys
from datetime import timedelta

import deepspeed.ops
import pytest
import torch
import torch.distributed as dist
from deepspeed.comm.torch import build_shm_op
from deepspeed.runtime.pipe import schedule
from torch.distributed import distributed_c10d

from megatron.engine.pipeline_engine import GPTEngine
from megatron.engine.workarounds import disable_shm_comm_jit, set_default_group_timeout
from megatron.model import gpt_model
from megatron.model.inference.single_process import GPTModel
from megatron.model.pipeline_module import GPTModelPipe
from megatron.mpu.mesh import ONE_RANK
from megatron.mpu.vector_math import initialize_vector_math
from megatron.pipeline import layer_times
from tests.end_to_end.command import ROOT, environment
from tests.support import HANG_TIMEOUT_S
from tests.support.layouts import EOD, VOCAB, Row, build_engine, config_of, train
from tests.support.pool import run_world

JOIN = """
import torch
import torch.distributed as dist
from megatron.cluster.processes import init_distributed, destroy_distributed
from tests.support.layouts import EOD, VOCAB, Row, config_of
init_distributed(config_of(Row()))
print(torch.get_float32_matmul_precision(), dist.distributed_c10d._get_default_store().timeout)
destroy_distributed()
"""


@pytest.mark.full
def test_the_process_group_compiles_nothing_its_store_waits_and_products_are_ieee(tmp_path):
    """Entry 8: without the workaround DeepSpeed builds its shared-memory operator in this folder for half a
    minute."""
    found = subprocess.run(
        [sys.executable, "-c", JOIN],
        cwd=ROOT,
        env=environment() | {"TORCH_EXTENSIONS_DIR": str(tmp_path), "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"},
        check=True,
        timeout=HANG_TIMEOUT_S,
        capture_output=True,
        text=True,
    )
    assert list(tmp_path.rglob("*")) == []
    # NCCL fetches its ids from the store, so the store must wait as long as the process groups.
    assert found.stdout.splitlines()[-1] == "highest 2:00:00"


def test_deepspeed_neither_probes_nor_builds_its_operators(monkeypatch):
    """Entry 8: without the workaround DeepSpeed runs compilers at every start to find which operators it
    could build."""
    monkeypatch.setitem(vars(deepspeed.ops), "__compatible_ops__", {})  # restored afterwards
    del vars(deepspeed.ops)["__compatible_ops__"]
    monkeypatch.setattr(deepspeed.ops, "_probe_compatible_ops", lambda: pytest.fail("a probe"))
    disable_shm_comm_jit()
    assert build_shm_op() is None


@pytest.mark.parametrize(
    "instruction",
    [schedule.ForwardPass, schedule.BackwardPass, schedule.ReduceGrads, schedule.ReduceTiedGrads],
)
def test_the_schedule_runs_our_code_for_an_instruction(instruction):
    """Entry 6: the table must contain the engine's own method of that name, not DeepSpeed's."""
    method = GPTEngine._INSTRUCTION_MAP[instruction]
    assert method.__wrapped__ is getattr(GPTEngine, method.__name__)
    assert method.__module__.startswith("megatron.")


def gradients_share_memory(steps):
    engine = build_engine(config_of(Row(micro_batch=4)))
    train(engine, range(steps))
    engine.zero_grad()
    parameters = list(engine.module.parameters())
    return all(p.grad is p.main_grad and not p.grad.any() for p in parameters)


@pytest.mark.parametrize("steps", [0, 2])
def test_an_fp32_gradient_stays_a_view_of_the_flat_buffer(steps):
    """Entry 7: if `.grad` were deleted, the gradients of the next step would not reach the optimizer."""
    assert run_world(1, gradients_share_memory, steps) == [True]


def kept_timings():
    engine = build_engine(config_of(Row(micro_batch=4)))
    train(engine, range(3))
    return [len(timer.event_timers) for timer in engine.timers.get_timers().values()]


def test_no_timing_of_a_step_is_kept():
    """Entry 20: without the workaround a GPU run keeps two events per step until it ends."""
    (kept,) = run_world(1, kept_timings)
    assert kept and not any(kept)


def losses_with_bounds(row, bounds, changes):
    return train(build_engine(config_of(row, **changes), bounds), range(3))


def test_a_stage_may_receive_fp32_and_send_bf16():
    """A stage boundary lies between the final norm, whose input is the fp32 residual, and the head."""
    changes = {"precision": {"fp32_residual_connection": True}}
    one_stage = run_world(1, losses_with_bounds, Row(precision="bf16", micro_batch=2), None, changes)[0]
    row = Row(pp=4, precision="bf16", micro_batch=2)
    four_stages = run_world(4, losses_with_bounds, row, [0, 3, 5, 9, 11], changes)[0]
    assert [loss for loss, _ in four_stages] == pytest.approx([loss for loss, _ in one_stage], rel=2e-3)


USES_OF_THE_MODEL = {
    "training": lambda config: GPTModelPipe(config, ONE_RANK, VOCAB, EOD, [0, 11]),
    "tools": lambda config: GPTModel(config, VOCAB, EOD),
    "layer times": lambda config: layer_times._measure(config, ONE_RANK, VOCAB, EOD),
}


@pytest.mark.parametrize("use", USES_OF_THE_MODEL)
def test_whatever_uses_the_model_initializes_vector_math_before_anything_computes(use, monkeypatch):
    """Entry 14: training, tools and the measurement of layer times all initialize MKL's vector math."""

    class InitializedError(Exception):
        pass

    def initialize():
        raise InitializedError

    monkeypatch.setattr(gpt_model, "initialize_vector_math", initialize)
    monkeypatch.setattr(torch, "empty", None)  # an allocated parameter would fail
    with pytest.raises(InitializedError):
        USES_OF_THE_MODEL[use](config_of(Row()))


def test_vector_math_is_initialized_on_the_cpu_by_one_element(monkeypatch):
    """Entry 14: the initialization uses the CPU even if tensors are made on a different device by default."""
    seen = []
    monkeypatch.setattr(torch, "exp", lambda x: seen.append((x.device.type, x.numel())))
    with torch.device("meta"):
        initialize_vector_math()
    assert seen == [("cpu", 1)]


FIRST_EXP = """
import torch
{function}
torch.set_num_threads(2)
initialize_vector_math()
x = torch.linspace(-8.0, 0.0, 2**18).view(64, -1)
first = torch.exp(x)
torch.set_num_threads(1)
assert torch.equal(first, torch.exp(x)), (first / torch.exp(x) - 1).abs().max()
"""


@pytest.mark.full
def test_in_100_processes_the_first_parallel_exp_is_that_of_one_thread():
    """Entry 14: without the workaround the first results of 2 to 4 of 100 processes were wrong."""
    script = FIRST_EXP.format(function=inspect.getsource(initialize_vector_math))
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    for _ in range(100):
        subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=HANG_TIMEOUT_S)


def timeouts_of_new_groups():
    before = distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout
    try:
        set_default_group_timeout(timedelta(seconds=4321))
        group = dist.new_group([0, 1])
        options = group._get_backend(torch.device("cpu")).options
        return options._timeout.total_seconds(), distributed_c10d._get_default_timeout("nccl").total_seconds()
    finally:
        distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout = before


def test_groups_of_deepspeed_have_the_timeout_of_the_run():
    """Entry 15: DeepSpeed's groups would otherwise end the process after 600 s."""
    for found in run_world(2, timeouts_of_new_groups):
        assert found == (4321.0, 4321.0)
