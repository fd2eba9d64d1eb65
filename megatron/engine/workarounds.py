"""Where DeepSpeed does otherwise than this repo promises, and what is done instead; nowhere else.

Each entry was seen with DeepSpeed 0.19.8; the test beside it fails when the workaround is taken away.

1. fp32, ZeRO-0, pipeline, clipping: `clip_grad_norm_` counts the tied embedding on both of its stages, and
   no grad norm is reported (the family of DeepSpeed 1839).
2. fp16, ZeRO-0, pipeline: `FP16_UnfusedOptimizer` takes another first step than ZeRO-1, counts the tied
   weight twice, and clipping changes nothing.
3. bf16, ZeRO-1, pipeline: gradients accumulate in bf16 unless told otherwise; with ZeRO-0, fp32 accumulation
   is refused ("unsupported mix").
4. A stage that holds an embedding only hangs under ZeRO-1 (DeepSpeed 1522): its gradients are reduced by
   hooks that make other calls on other stages.
5. fp16 is refused on a CPU ("not supported on your device"), though PyTorch computes it.
   1 to 5: DeepSpeed is told of an fp32 run without clipping, and `MixedPrecisionOptimizer` takes the place
   of its optimizer wrappers: tests/distributed/test_layout_parity.py, tests/distributed/test_optimizer.py.
6. `PipelineEngine` finds the code of a schedule's instruction in a table of its own class, past any override:
   the table is made anew here.
7. `zero_grad` drops `.grad`, which for fp32 is a view of the flat buffer.
8. On a CPU, making the process group compiles a shared-memory all-reduce that only inference uses, with a
   lock file that a killed job leaves behind (the family of Megatron-LM 82, BigScience 174).
"""

from typing import ClassVar

import deepspeed.ops
import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer

_SHARED_MEMORY_OP = "deepspeed_shm_comm"


def compile_nothing_at_start() -> None:
    """Entry 8. To be called before the process group is made."""
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY_OP] = False


class SameNumbersPipelineEngine(PipelineEngine):
    """DeepSpeed's pipeline engine around `MixedPrecisionOptimizer`."""

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> MixedPrecisionOptimizer:
        """Makes the run's optimizer of the plain one; the engine's module and groups exist by now."""
        raise NotImplementedError

    def _configure_optimizer(self, client_optimizer: torch.optim.Optimizer, model_parameters: list) -> None:
        self.basic_optimizer = client_optimizer
        self.optimizer = self.wrap_optimizer(client_optimizer)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def _exec_reduce_tied_grads(self) -> None:
        self.optimizer.reduce_tied_gradients()

    def _exec_reduce_grads(self) -> None:
        self.optimizer.reduce_gradients()

    def _exec_backward_pass(self, buffer_id: int) -> None:
        # Only the last stage has a loss to scale; the others receive gradients that are scaled already.
        if self.is_last_stage():
            self.loss = self.loss * self.optimizer.scaler.scale
        super()._exec_backward_pass(buffer_id)

    _INSTRUCTION_MAP: ClassVar = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
        schedule.ReduceGrads: _exec_reduce_grads,
        schedule.BackwardPass: _exec_backward_pass,
    }
