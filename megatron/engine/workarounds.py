"""All workarounds for defects of DeepSpeed and torch.

Each entry was observed with DeepSpeed 0.19.8, and names a test that fails without the workaround. The test is
in tests/distributed/test_optimizer.py unless the entry names a different file.

1. fp32, ZeRO-0, pipeline, clipping: `clip_grad_norm_` counts the tied embedding on both of its stages, and
   no grad norm is reported (the family of DeepSpeed 1839):
   test_the_norm_counts_tied_and_replicated_parameters_once, test_a_clipped_step_is_as_long_as_the_flag_says.
2. fp16, ZeRO-0, pipeline: `FP16_UnfusedOptimizer` takes a different first step from ZeRO-1, counts the tied
   weight twice, and clipping changes nothing: test_both_zero_stages_take_the_same_steps and the tests of 1.
3. bf16, ZeRO-1, pipeline: gradients accumulate in bf16 by default; with ZeRO-0, fp32 accumulation
   is rejected ("unsupported mix"): test_many_micro_batches_add_up_in_fp32.
4. A stage that holds only an embedding hangs under ZeRO-1 (DeepSpeed 1522): it has fewer parameter groups, so
   it makes fewer collective calls for the grad norm than other stages (docs/upstream has a patch):
   tests/distributed/test_stages.py.
5. fp16 is rejected on a CPU ("not supported on your device"), though PyTorch computes it:
   tests/distributed/test_layout_parity.py, test_bf16_and_fp16_follow_the_fp32_loss.
   1 to 5: DeepSpeed is configured for fp32 without clipping, and `MixedPrecisionOptimizer` replaces its
   optimizer wrappers.
6. `PipelineEngine` looks up the method of a schedule instruction in a table of its own class, so overrides
   have no effect: the table is rebuilt. tests/distributed/test_workarounds.py
7. `zero_grad` deletes `.grad`, which for fp32 is a view of the flat buffer.
   tests/distributed/test_workarounds.py
8. On a CPU, making the process group compiles a shared-memory all-reduce that only inference uses, with a
   lock file that a killed job leaves behind (the family of Megatron-LM 82, BigScience 174).
   tests/distributed/test_workarounds.py
9, 10, 16, 17. Removed: `engine.executor` replaces DeepSpeed's messages and its `DualPipeVEngine`.
11. With checkpoint_in_cpu on a CPU the "copy" is the tensor itself, and DeepSpeed frees it (on a CPU,
   `model/pipeline_module.py` does not use DeepSpeed's implementation). tests/distributed/test_recompute.py
12. `ThroughputTimer` synchronizes with the device in each micro-batch's forward pass; `deepspeed_config.py`
   turns it off. tests/unit/config/test_deepspeed_config.py
13. The schedule sums the gradients of tied copies over stages before it sums all gradients over replicas. The
   two stages sum them in buffers of different lengths, in different orders, and with 3 replicas or more the
   copies diverge. This repository sums over stages last. tests/distributed/test_tied_copies.py
14. torch 2.13 on CPUs: the first `torch.exp` of a process, if several threads run it, has relative errors of
   1e-4 in half of its rows, in a few of 100 processes: the threads race to initialize MKL's vector math.
   Seen with `exp`; the library's other functions that models use are initialized together with it.
   `mpu/vector_math.py` does it when a model is built. tests/distributed/test_workarounds.py
15. The groups that DeepSpeed creates (data, tensor, pipeline) do not inherit the timeout of the default
   group: with NCCL a collective that waits for more than 600 s, as in a long step or save, ends the process.
   tests/distributed/test_workarounds.py
18. `PipelineEngine` makes the buffer for the step's loss on the host and copies it to the device: the host
   waits once per step. The workaround makes it on the device.
   tests/simulated/test_layouts.py
19. At its start the engine broadcasts every parameter over the axis `data`. That would overwrite weights that
   are sharded over this axis, and fails for weights without memory (ZeRO-3). The workaround broadcasts a
   weight to its replicas. tests/distributed/test_two_axes.py, tests/distributed/test_zero.py
20. `train_batch` measures each step with two device events and keeps them until DeepSpeed prints its timers,
   which this repository turns off. The workaround frees them after the step.
   tests/distributed/test_workarounds.py
21. The pipeline's grid creates process groups of its own. With NCCL a group that is used has a communicator,
   whose buffers take hundreds of MB on each device. The grid gets the groups of the mesh instead.
   tests/simulated/test_layouts.py
22. At its start the pipeline engine sends a message to each neighbor in the default group, which with NCCL
   makes a communicator for each pair of ranks. While the engine is built, `engine.executor` reports each rank
   as both the first and the last stage, which has no neighbors. tests/simulated/test_layouts.py
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import deepspeed.comm
import deepspeed.ops
import deepspeed.runtime.pipe.engine as pipe_engine
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.distributed import distributed_c10d

from megatron.engine.profiler_ranges import in_profiler_range
from megatron.mpu.mesh import Mesh
from megatron.mpu.parameters import has_memory, spec_of
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer

_SHARED_MEMORY_OP = "deepspeed_shm_comm"


def disable_shm_comm_jit() -> None:
    """Works around entry 8. It must be called before the process group is created."""
    # This sets the table without reading it: a read would run compilers to find which operators can be built.
    vars(deepspeed.ops)["__compatible_ops__"] = {_SHARED_MEMORY_OP: False}


def set_default_group_timeout(timeout: timedelta) -> None:
    """Works around entry 15. It must be called before the process group is created."""
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout


@contextmanager
def groups_of_mesh(mesh: Mesh) -> Iterator[None]:
    """Returns a context that works around entry 21. The model must be built within it."""
    new_group = deepspeed.comm.new_group

    def existing_or_new(ranks: Sequence[int]) -> dist.ProcessGroup:
        return mesh.groups.get(tuple(ranks)) or new_group(ranks)

    deepspeed.comm.new_group = existing_or_new
    try:
        yield
    finally:
        deepspeed.comm.new_group = new_group


class PatchedPipelineEngine(PipelineEngine):
    """DeepSpeed's pipeline engine with `MixedPrecisionOptimizer`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Works around entry 6: instructions call the methods of the subclass."""
        super().__init_subclass__(**kwargs)
        table: dict = {}
        for base in reversed(cls.__mro__):
            table |= base.__dict__.get("_INSTRUCTION_MAP", {})
        cls._INSTRUCTION_MAP = {
            kind: in_profiler_range(kind.__name__, getattr(cls, method.__name__))
            for kind, method in table.items()
        }

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> MixedPrecisionOptimizer:
        """Wraps the plain optimizer. The engine's module and process groups exist before this call."""
        raise NotImplementedError

    def _broadcast_model(self) -> None:
        """Works around entry 19: broadcasts each parameter to its replicas."""
        for parameter in self.module.parameters():
            axis = self.module.mesh.reduced_over(spec_of(parameter))
            if axis.size > 1 and has_memory(parameter):
                dist.broadcast(parameter.data, group=axis.group, group_src=0)

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """Works around entry 20: frees the step's device events."""
        loss = super().train_batch(data_iter)
        self.timers(pipe_engine.TRAIN_BATCH_TIMER).reset()
        return loss

    def _configure_optimizer(self, client_optimizer: torch.optim.Optimizer, model_parameters: list) -> None:
        self.basic_optimizer = client_optimizer
        self.optimizer = self.wrap_optimizer(client_optimizer)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def _exec_reduce_tied_grads(self) -> None:
        """Does nothing (entry 13): `_exec_reduce_grads`, the next instruction of every schedule, reduces
        them."""

    def _exec_reduce_grads(self) -> None:
        if self.is_last_stage():
            self.optimizer.register_loss(self.total_loss)
        self.optimizer.reduce_gradients()
