"""Runs tasks of lm-evaluation-harness on the model during training, in the layout of the run.

Rank 0 runs the harness, and the other ranks compute with it (`DistributedGPT`). The training state does not
change: the model draws no random numbers in evaluation mode, and the generators that the harness seeds are
restored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from megatron.arguments.data_checks import no_harness
from megatron.config import Config
from megatron.engine.pipeline_engine import GPTEngine
from megatron.model.inference.distributed import DistributedGPT, InferenceStopped
from megatron.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from megatron.training.harness.model import Results, Tasks


def load_tasks(config: Config) -> Tasks | None:
    """Returns the tasks of the flags with their data, or None without tasks. Raises ConfigError if they
    cannot be loaded."""
    training = config.training
    if not training.eval_harness_tasks:
        return None
    try:
        # The import is late, because lm_eval is optional.
        from megatron.training.harness.model import Tasks
    except ImportError as error:
        raise no_harness("--eval-harness-tasks", str(error)) from error
    return Tasks(
        training.eval_harness_tasks,
        training.eval_harness_tasks_path,
        training.eval_harness_limit,
        build_tokenizer(config.data, config.model.vocab_size, parse_special=True),  # as the harness does
        config.model.seq_length,
    )


def run_tasks(
    engine: GPTEngine,
    tasks: Tasks | None,
    stop_requested: Callable[[], bool],
    heartbeat: Callable[[], None],
    print_fn: Callable[[str], object],
) -> Results | None:
    """Runs the tasks on the weights of an engine. Collective.

    Returns the results on rank 0 and {} on all other ranks; {} on rank 0 if the harness fails (the error is
    printed); None if the tasks were stopped. tasks: None on all ranks except rank 0. stop_requested,
    heartbeat: see `DistributedGPT`.
    """

    def begin_micro_batch() -> None:
        heartbeat()
        engine.optimizer.unit_overlap.begin_micro_batch()

    config = engine.run.config
    size = config.batch.micro_batch_size
    model = DistributedGPT(engine.module, engine.mesh, size, stop_requested, begin_micro_batch)
    engine.optimizer.wait_for_params()
    engine.module.eval()
    # torch.compile would recompile for each text length.
    eager = torch.compiler.set_stance("force_eager") if config.training.compile else nullcontext()
    try:
        with eager, _random_state_kept():
            if engine.global_rank:
                model.serve()
                return {}
            assert tasks is not None, "rank 0 has loaded the tasks"
            return _run_on_rank_0(model, tasks, print_fn)
    except InferenceStopped:
        return None
    finally:
        engine.module.context.cache.clear()
        engine.module.train()


def _run_on_rank_0(model: DistributedGPT, tasks: Tasks, print_fn: Callable[[str], object]) -> Results:
    results: Results = {}
    try:
        results = tasks.run(model, model.batch_size)
    # A metric of a task may fail with any error, which must not end a training run.
    except Exception as error:
        if model.is_responding:
            raise  # a collective that failed on all ranks, or the request to stop
        print_fn(f"WARNING: --eval-harness-tasks failed ({type(error).__name__}: {error})")
    model.stop()
    return results


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Restores the random generators of Python, NumPy and torch, which the harness seeds."""
    accelerator = get_accelerator()
    devices = [] if accelerator.device_name() == "cpu" else [accelerator.current_device()]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
