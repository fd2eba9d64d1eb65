"""DeepSpeed's public methods on this program's engine and module: each method does what DeepSpeed documents,
or raises one error before it changes anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor

from megatron.deepspeed_names import restrict
from megatron.engine.pipeline_engine import GPTEngine
from megatron.errors import UserError
from megatron.mpu.parameters import main_grad_of
from tests.support.checkpoints import make_manager, state_after
from tests.support.layouts import (
    CLIP,
    GLOBAL_BATCH,
    RATE,
    SEQ,
    Row,
    build_engine,
    config_of,
    evaluate,
    micro_batches,
    train,
    train_layout,
)
from tests.support.pool import run_world

INTERLEAVED = {"parallel": {"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 2}}
ROWS: dict[str, tuple[Row, dict[str, Any]]] = {
    "ZeRO-3": (Row(dp=2, zero=3, precision="bf16"), {}),
    "interleaved": (Row(pp=2, zero=1, precision="fp16"), INTERLEAVED),
    "CP": (Row(cp=2, zero=2), {}),
}


def of_deepspeed_config(name: str) -> Callable[[GPTEngine], bool]:
    """Returns a check that a method returns the value of DeepSpeed's method, if DeepSpeed is configured like
    the run."""

    def check(engine: GPTEngine) -> bool:
        config, mesh = engine.run.config, engine.mesh
        precision = config.precision
        settings = {
            "train_micro_batch_size_per_gpu": config.batch.micro_batch_size,
            "train_batch_size": GLOBAL_BATCH,
            "gradient_accumulation_steps": GLOBAL_BATCH // (config.batch.micro_batch_size * mesh.dp_size),
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": config.parallel.zero_stage},
            "fp16": {"enabled": precision.fp16},
            "bf16": {"enabled": precision.bf16},
            "data_types": {"grad_accum_dtype": "fp32"},
        }
        theirs = DeepSpeedEngine.__new__(DeepSpeedEngine)
        theirs.__dict__["_config"] = DeepSpeedConfig(settings, _Replicas(mesh.dp_size))
        return bool(getattr(engine, name)() == getattr(theirs, name)())

    return check


class _Replicas:
    """A Megatron `mpu` object with `size` data-parallel ranks."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_data_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_world_size(self) -> int:
        return 1


def equals(name: str, value: Callable[[GPTEngine], Any]) -> Callable[[GPTEngine], bool]:
    return lambda engine: bool(getattr(engine, name)() == value(engine))


def zero_grad_works(engine: GPTEngine) -> bool:
    for flat in engine.optimizer.flat:
        flat.local_gradients.fill_(1.0)
    engine.zero_grad()
    for flat in engine.optimizer.flat:
        flat.complete_gradients()  # until then the values may be undefined
    return not any(flat.owned_grad(p).any() for flat in engine.optimizer.flat for p in flat.parameters)


def modes_work(engine: GPTEngine) -> bool:
    engine.eval()
    was_evaluating = not engine.module.training
    engine.train()
    return was_evaluating and engine.module.training


def eval_batch_works(engine: GPTEngine) -> bool:
    """Checks `eval_batch` with default arguments. `evaluate_as_deepspeed` checks the other arguments."""
    count = engine.gradient_accumulation_steps()
    loss, expected = (
        engine.eval_batch(micro_batches(engine, 5)),
        evaluate(engine, micro_batches(engine, 5), count),
    )
    torch.testing.assert_close(
        loss.reshape(()), expected
    )  # means of micro-batches and of tokens round differently
    return True


def ends_twice(engine: GPTEngine) -> bool:
    return engine.destroy() is None and engine.destroy() is None


IS_OFF = (
    "autotuning_enabled data_efficiency_enabled dump_state flops_profiler_enabled is_deepcompile_active "
    "is_deepcompile_enabled load_universal_checkpoint memory_breakdown random_ltd_enabled "
    "torch_autocast_enabled wall_clock_breakdown curriculum_learning_enabled"
)
OF_THE_CONFIG = (
    "bfloat16_enabled checkpoint_tag_validation_enabled checkpoint_tag_validation_fail fp16_enabled "
    "get_data_types gradient_accumulation_steps gradient_clipping loss_scale train_batch_size "
    "train_micro_batch_size_per_gpu zero_cpu_offload zero_optimization "
    "zero_optimization_partition_gradients zero_optimization_partition_weights zero_optimization_stage"
)
ENGINE: dict[str, Callable[[GPTEngine], bool]] = {
    **{name: equals(name, lambda engine: False) for name in IS_OFF.split()},
    **{name: of_deepspeed_config(name) for name in OF_THE_CONFIG.split()},
    "collect_python_gc": lambda engine: engine.collect_python_gc() >= 0,
    "communication_data_type": lambda engine: engine.communication_data_type == torch.float32,
    "destroy": ends_twice,
    "dynamic_loss_scale": equals("dynamic_loss_scale", lambda engine: engine.run.config.precision.fp16),
    "eval": modes_work,
    "eval_batch": eval_batch_works,
    "get_additional_losses": equals("get_additional_losses", lambda engine: None),
    "get_batch_info": equals(
        "get_batch_info", lambda engine: (GLOBAL_BATCH, 1, GLOBAL_BATCH // engine.mesh.dp_size)
    ),
    "get_data_parallel_rank": equals("get_data_parallel_rank", lambda engine: engine.mesh.dp.rank),
    "get_global_grad_norm": equals("get_global_grad_norm", lambda engine: engine.optimizer.grad_norm),
    "get_lr": equals("get_lr", lambda engine: [RATE] * len(engine.optimizer.param_groups)),
    "get_model_parallel_rank": equals("get_model_parallel_rank", lambda engine: 0),
    "get_mom": equals("get_mom", lambda engine: [(0.9, 0.999)] * len(engine.optimizer.param_groups)),
    "get_pipeline_parallel_rank": equals("get_pipeline_parallel_rank", lambda engine: engine.mesh.pp.rank),
    "get_tensor_parallel_rank": equals("get_tensor_parallel_rank", lambda engine: 0),
    "is_compiled": lambda engine: engine.is_compiled is False,
    "is_first_stage": equals("is_first_stage", lambda engine: engine.mesh.pp.rank == 0),
    "is_gradient_accumulation_boundary": equals("is_gradient_accumulation_boundary", lambda engine: False),
    "is_last_stage": equals("is_last_stage", lambda engine: engine.mesh.pp.rank == engine.mesh.pp_size - 1),
    "optimizer_name": equals("optimizer_name", lambda engine: "AdamW"),
    "steps_per_print": equals("steps_per_print", lambda engine: None),
    "train": modes_work,
    "was_step_applied": equals("was_step_applied", lambda engine: True),
    "zero_grad": zero_grad_works,
}
"""For each supported method, a check that runs after one step."""


MODULE: dict[str, Callable[[GPTEngine], bool]] = {
    "forward": lambda engine: True,  # every step calls it
    "get_additional_losses": lambda engine: engine.module.get_additional_losses() is None,
    "get_tied_weights_and_groups": lambda engine: all(
        weight in set(engine.module.parameters()) for weight, _ in engine.module.get_tied_weights_and_groups()
    ),
    "mpu": lambda engine: engine.module.mpu().get_pipe_parallel_rank() == engine.mesh.pp.rank,
    "num_pipeline_stages": lambda engine: engine.module.num_pipeline_stages() == engine.mesh.pp_size,
    "partitions": lambda engine: engine.module.partitions() == engine.module.stage_bounds,
    "stage_owner": lambda engine: all(
        engine.module.stage_owner(index) == engine.mesh.pp.rank for index in engine.module.layers
    ),
    "topology": lambda engine: engine.module.topology().world_size() == dist.get_world_size(),
}


def public_methods(*kinds: type) -> list[str]:
    return [
        name
        for kind in kinds
        for name, value in vars(kind).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, (property, staticmethod)))
    ]


def call_all(row: Row, changes: dict[str, Any]) -> tuple[list[str], bool]:
    """Returns (methods that do not behave as expected, whether training then continues to the losses of a run
    without these calls)."""
    expected = train(build_engine(config_of(row, **changes)), range(3))
    engine = build_engine(config_of(row, **changes))
    history, wrong = train(engine, [0]), []
    last = sorted(ENGINE, key=lambda name: name == "destroy")
    wrong += [name for name in last[:-1] if not ENGINE[name](engine)]
    wrong += [name for name in MODULE if not MODULE[name](engine)]
    refused = [
        *((engine, name) for name in public_methods(DeepSpeedEngine, PipelineEngine) if name not in ENGINE),
        *((engine.module, name) for name in public_methods(PipelineModule) if name not in MODULE),
        *((engine, name) for name in ("half", "to", "load_state_dict", "save_state_dict", "load_state_dir")),
        *((engine.module, name) for name in ("half", "to", "load_state_dict", "zero_grad", "requires_grad_")),
    ]
    for owner, name in refused:
        try:
            getattr(owner, name)()
        except UserError as error:
            wrong += [] if f".{name} is not supported: " in str(error) else [str(error)]
            continue
        except Exception as error:
            wrong.append(repr(error))
        wrong.append(name)
    history += train(engine, [1, 2])
    wrong += [] if ENGINE["destroy"](engine) else ["destroy"]
    return wrong, history == expected


@pytest.mark.parametrize("case", ROWS)
def test_each_public_method_works_or_raises_before_anything_changes(case: str) -> None:
    row, changes = ROWS[case]
    assert run_world(2, call_all, row, changes) == [([], True)] * 2


def test_the_tables_have_only_methods_of_deepspeed() -> None:
    assert set(ENGINE) <= set(public_methods(DeepSpeedEngine, PipelineEngine))
    assert set(MODULE) <= set(public_methods(PipelineModule))


def test_a_method_that_a_newer_deepspeed_adds_is_refused_except_to_deepspeed() -> None:
    class Newer:
        def added(self) -> int:
            return 1

    Newer.__module__ = "deepspeed.newer"
    ours = restrict("", {})(type("Ours", (Newer,), {}))
    with pytest.raises(UserError, match=r"^Ours\.added is not supported: "):
        ours().added()
    as_deepspeed = {"__name__": "deepspeed.newer", "engine": ours()}
    assert eval("engine.added()", as_deepspeed) == 1


# --- evaluation ---


def evaluate_as_deepspeed(row: Row) -> tuple[list[tuple[int, ...]] | None, bool]:
    """Evaluates with an engine that has not trained. Returns (shapes of the outputs, whether the losses are
    right)."""
    engine = build_engine(config_of(row))
    count = engine.gradient_accumulation_steps()
    outputs = engine.eval_batch(micro_batches(engine, 0), compute_loss=False, reduce_output=None)
    losses = engine.eval_batch(micro_batches(engine, 0), reduce_output=None, bcast_loss=False)
    loss = engine.eval_batch(micro_batches(engine, 0), num_micro_batches=count)
    right = torch.allclose(loss, evaluate(engine, micro_batches(engine, 0), count), rtol=1e-6)
    if not engine.is_last_stage():
        return None, right and outputs is None and losses is None
    labels = [batch.labels for batch in micro_batches(engine, 0)]
    of_outputs = [
        torch.nn.functional.cross_entropy(x.float().flatten(0, 1)[:, :101], y.flatten())
        for x, y in zip(outputs, labels, strict=True)
    ]
    torch.testing.assert_close(torch.stack(of_outputs), torch.stack(losses))
    return [tuple(x.shape) for x in outputs], right


def test_eval_batch_returns_outputs_or_losses_as_deepspeed_documents() -> None:
    logits = (2, SEQ, 104)
    assert run_world(1, evaluate_as_deepspeed, Row(micro_batch=2)) == [([logits] * 4, True)]
    found = run_world(2, evaluate_as_deepspeed, Row(pp=2, micro_batch=2))
    assert found == [(None, True), ([logits] * 4, True)]


def give_deepspeeds_batches() -> list[tuple[float, float]]:
    engine = build_engine(config_of(Row()))
    tokens = torch.ones(1, SEQ, dtype=torch.int64)
    with pytest.raises(TypeError, match="yields tuple: expected megatron.data.loader.MicroBatch"):
        engine.eval_batch(iter([(tokens, tokens)] * GLOBAL_BATCH))
    return train(engine, range(2))


def test_a_batch_of_deepspeed_is_an_error_before_anything_changes() -> None:
    assert run_world(1, give_deepspeeds_batches) == run_world(1, train_layout, Row(), 2)


# --- steps ---


def steps_of(row: Row) -> tuple[Any, ...]:
    engine = build_engine(config_of(row))
    before = engine.get_global_grad_norm(), engine.was_step_applied()
    boundary = []

    def skip(loss: float, grad_norm: float) -> bool:
        boundary.append(engine.is_gradient_accumulation_boundary())
        return True

    train(engine, [0], skip_update_fn=skip)
    skipped = engine.was_step_applied()
    train(engine, [1])
    return before, boundary, skipped, engine.was_step_applied(), engine.global_samples


@pytest.mark.parametrize("row", [Row(), Row(cp=2)], ids=str)
def test_steps_and_samples_are_counted_as_deepspeed_documents(row: Row) -> None:
    for found in run_world(row.world_size, steps_of, row):
        assert found == ((None, False), [True], False, True, 2 * GLOBAL_BATCH)


# --- weights without memory ---


def read_everything(row: Row) -> list[tuple[float, float]]:
    """Reads and writes every tensor of the parameters between two steps. Returns the losses and grad
    norms."""
    engine = build_engine(config_of(row))
    history = train(engine, [0])
    for name, parameter in engine.module.named_parameters():
        copy, saved = parameter.clone(), engine.module.state_dict()[name]
        assert copy.shape == saved.shape == parameter.shape
        in_unit = name.split(".")[0] in engine.module.transformer_layers()
        total = main_grad_of(parameter)
        assert (total is None) == (in_unit and row.zero >= 2)
        if in_unit and row.zero == 3:
            assert bool(copy.isnan().all() and saved.isnan().all())
            with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
                parameter.copy_(copy)
        else:
            assert bool(copy.isfinite().all())
        read: list[Tensor] = [x for x in (total, parameter.grad) if x is not None]
        assert all(bool(x.isfinite().all()) for x in read)
    return history + train(engine, [1])


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_reading_weights_and_gradients_between_steps_never_ends_the_process(zero: int) -> None:
    row = Row(dp=2, zero=zero, precision="bf16", micro_batch=2)
    assert run_world(2, read_everything, row)[0] == run_world(2, train_layout, row, 2)[0]


# --- files ---


def save(folder: Path) -> None:
    make_manager(build_engine(config_of(Row(zero=1))), folder).save(state_after(1))


def test_a_save_copies_no_script_of_deepspeed(tmp_path: Path) -> None:
    run_world(1, save, tmp_path)
    assert (tmp_path / "global_step1").is_dir() and not list(tmp_path.rglob("*.py"))
