"""Represents published measurements as runs of this program, with the kernels and the memory of the measured
program.

A row has the flags of a run of this program with the published model, layout and batch. The planner predicts
the run from layers of this program. `Program` describes the differences of the measured program: its
attention kernel, the bytes of all other kernels, and the bytes per parameter.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron.arguments import parse_args
from megatron.cluster.devices import find_gpu
from megatron.config import Config
from megatron.mpu.mesh import Mesh
from megatron.planner.layer_memory import planned_run
from megatron.planner.memory import plan_memory
from megatron.planner.network import Network, find_network
from megatron.planner.rates import NO_TENSOR_CORES, RATES, Rates, is_attention, kernel_seconds
from megatron.planner.simulation.passes import Collective, Kernel
from megatron.planner.step_time import Cluster, predict_step
from megatron.run import Run

FOLDER = Path(__file__).resolve().parent / "published"
# Memory in GB that nvidia-smi shows in addition to PyTorch's allocations (CUDA context, NCCL's and
# DeepSpeed's buffers, fragmentation). The values are fitted on lines 583 to 586 and 906 of
# chronicles-prequel.md, and lines 26 and 30 of tr3m-1B3.md.
OUTSIDE_GB = {"a100": 9.5, "v100": 3.0}
_COMMON = "--dry-run --lr 1e-4 --train-samples 1000000"
# With these settings, the layers are recorded with this program's Triton kernels.
_WITH_KERNELS = {"training.gpu": "a100-80gb"}
# With these settings, the layers are recorded with PyTorch's operations, which keep the attention scores as
# unfused attention does.
_WITHOUT_KERNELS = {"training.gpu": "v100-32gb"}
_BEFORE_HOPPER = ("v100", "a100")
_OWN_PRODUCTS, _FUSED_PRODUCTS = 7, 5
"""Number of products in the backward pass of attention: in this program's two kernels, which both recompute
the scores, and in the single kernel of the measured programs. The forward pass has two products."""


@dataclass(frozen=True)
class Program:
    """A program whose runs were published.

    flags: flags of all its runs. attention: implementations on GPUs before Hopper and on later GPUs;
    'unfused' means batched products and a fused softmax. attention_rate: the parts of the kernel's rate that
    the program reaches, for both kinds of GPUs. traffic: factor of the bytes of kernels that are neither
    products nor attention. launch_us: host time per kernel. tensor_latency_us: time that a tensor-parallel
    collective takes in addition to the network's time.

    replicated: bytes per parameter of the weights and gradients on each data-parallel rank. sharded: bytes
    per parameter of the states that ZeRO-1 shards. in_passes, in_update: additional bytes per parameter
    during the passes and during the update. kept_logit: bytes per logit that stay allocated between steps.
    """

    about: str
    flags: str = ""
    attention: tuple[str, str] = ("flash", "flash")
    attention_rate: tuple[float, float] = (1.0, 1.0)
    traffic: float = 1.0
    launch_us: float = 8.0
    tensor_latency_us: float = 0.0
    replicated: float = 0.0
    sharded: float = 0.0
    in_passes: float = 0.0
    in_update: float = 0.0
    kept_logit: float = 0.0


@dataclass(frozen=True)
class Constants:
    """The constants of a prediction, for each kind of GPU and each program."""

    rates: Mapping[str, Rates]
    programs: Mapping[str, Program]

    def get(self, name: str) -> float:
        """Returns the constant 'OWNER.FIELD', such as 'a100.products' or 'xla.traffic'. Owners that share a
        constant are separated by '+'."""
        owners, _, attribute = name.partition(".")
        return float(getattr({**self.rates, **self.programs}[owners.split("+")[0]], attribute))

    def with_value(self, name: str, value: float) -> Constants:
        """Returns a copy of the constants with a new value of one constant."""
        owners, _, attribute = name.partition(".")

        def changed(table: Mapping[str, Any]) -> dict[str, Any]:
            return {
                owner: replace(one, **{attribute: value}) if owner in owners.split("+") else one
                for owner, one in table.items()
            }

        return Constants(changed(self.rates), changed(self.programs))


def _read_programs() -> dict[str, Program]:
    tables: dict[str, dict[str, Any]] = json.loads((FOLDER / "programs.json").read_text())
    for table in tables.values():
        table |= {name: tuple(value) for name, value in table.items() if isinstance(value, list)}
    return {name: Program(**table) for name, table in tables.items()}


IN_USE = Constants(RATES, _read_programs())


@dataclass(frozen=True)
class PublishedNetwork(Network):
    """A network whose tensor-parallel collectives take longer."""

    tensor_latency_s: float = field(kw_only=True)

    def seconds(self, call: Collective, mesh: Mesh) -> float:
        return super().seconds(call, mesh) + (self.tensor_latency_s if call.group == "tensor" else 0.0)


@dataclass(frozen=True)
class PublishedCluster(Cluster):
    """The devices of a published run, with the kernels of its program."""

    rates: Rates = field(kw_only=True)
    program: Program = field(kw_only=True)

    @property
    def contention(self) -> float:
        return self.rates.contention

    def kernel_seconds(self, kernel: Kernel, dtype: str) -> float:
        if not kernel.flops:
            kernel = replace(kernel, bytes=self.program.traffic * kernel.bytes)
        if not is_attention(kernel):
            return kernel_seconds(kernel, self.gpu, self.rates, dtype)
        later = self.kind not in _BEFORE_HOPPER
        name = self.program.attention[later]
        if name == "unfused":
            return sum(kernel_seconds(part, self.gpu, self.rates, dtype) for part in self._unfused(kernel))
        assert kernel.product is not None
        queries, keys, _ = kernel.product  # recorded FLOPs count all scores, not only the causal half
        is_backward = "backward" in kernel.name
        share = _FUSED_PRODUCTS / _OWN_PRODUCTS if is_backward else 1.0
        kernel = replace(
            kernel,
            name=f"{name}_attention{'_backward' * is_backward}",
            flops=share * kernel.flops * (1 - queries / (2 * keys)),
        )
        seconds = kernel_seconds(kernel, self.gpu, self.rates, dtype)
        return seconds / self.program.attention_rate[later]

    def _unfused(self, kernel: Kernel) -> list[Kernel]:
        """Returns the kernels of unfused attention: batched products, the masked softmax in one kernel, and
        dropout. The batched products of programs of 2021, with heads of 108 and 150 elements, were as slow as
        without tensor cores."""
        assert kernel.product is not None
        queries, keys, head = kernel.product
        is_backward = "backward" in kernel.name
        recorded, count, moved = (_OWN_PRODUCTS, 4, 11) if is_backward else (2, 2, 9)
        batch = kernel.flops / recorded / (2 * queries * keys * head)
        alignment = 8 if head % 8 == 0 else NO_TENSOR_CORES
        product = Kernel(
            "bmm",
            2 * batch * queries * keys * head,
            2 * batch * (queries * head + keys * head + queries * keys),
            (queries, keys, head),
            alignment,
        )
        other = Kernel("softmax", 0.0, self.program.traffic * moved * batch * queries * keys / 2)
        return [product] * count + [other] * 2


@dataclass(frozen=True)
class Row:
    """A published measurement. is_fitted: whether the constants were fitted on it. memory_gb: memory of the
    GPU with the most memory in use, as nvidia-smi shows it."""

    source: str
    program: str
    is_fitted: bool
    seconds: float | None
    memory_gb: float | None
    out_of_memory: bool
    config: Config

    @property
    def name(self) -> str:
        """Returns the last part of the source, for example 'chronicles-prequel.md:583'."""
        return self.source.rpartition("/")[2][:40]

    @property
    def origin(self) -> str:
        """Returns the repository that published the row."""
        return self.source.split("@")[0] if "@" in self.source else "bigscience-workshop/bigscience"

    @property
    def gpu_kind(self) -> str:
        assert self.config.training.gpu is not None
        return self.config.training.gpu.partition("-")[0]

    @property
    def problem(self) -> tuple[object, ...]:
        """Returns a key that is equal for rows that differ only in layout, micro-batch and heads."""
        model, batch = self.config.model, self.config.batch.global_batch_size
        sizes = model.num_layers, model.hidden_size, model.seq_length, batch
        return self.origin, self.program, self.config.training.gpu, *sizes, self.config.parallel.world_size

    @property
    def layout(self) -> str:
        """Returns a text with the sizes of model and layout, for a table."""
        model, parallel = self.config.model, self.config.parallel
        return (
            f"{model.num_layers}x{model.hidden_size}/{model.num_attention_heads} "
            f"TP{parallel.tensor_model_parallel_size} PP{parallel.pipeline_model_parallel_size} "
            f"DP{parallel.data_parallel_size} mb{self.config.batch.micro_batch_size}"
        )

    def step_seconds(self, constants: Constants = IN_USE) -> float:
        """Returns the predicted seconds of a step."""
        gpu, network = find_gpu(self.config), find_network(self.config)
        assert gpu is not None and network is not None
        program, rates = constants.programs[self.program], constants.rates[self.gpu_kind]
        slower = PublishedNetwork(*vars(network).values(), tensor_latency_s=1e-6 * program.tensor_latency_us)
        cluster = PublishedCluster(
            self.gpu_kind, gpu, slower, 1e-6 * program.launch_us, rates=rates, program=program
        )
        run = planned_of(self.config)
        return predict_step(replace(run, config=self.config.with_settings(_WITH_KERNELS)), cluster).total

    def peak_gb(self) -> float:
        """Returns the predicted memory in GB of the GPU with the most memory in use, as nvidia-smi shows
        it."""
        stages = stage_memory(self.config, IN_USE.programs[self.program])
        return max(stage.peak for stage in stages) / 1e9 + OUTSIDE_GB[self.gpu_kind]


def read_rows(path: Path = FOLDER / "rows.csv") -> list[Row]:
    """Returns the rows of a file."""
    with path.open() as file:
        return [
            Row(
                values["source"],
                values["program"],
                values["fitted"] == "1",
                float(values["seconds"]) if values["seconds"] else None,
                float(values["memory_gb"]) if values["memory_gb"] else None,
                values["out_of_memory"] == "1",
                _config(values),
            )
            for values in csv.DictReader(file)
        ]


def _config(values: Mapping[str, str]) -> Config:
    flags = f"{_COMMON} {values['flags']} {IN_USE.programs[values['program']].flags}"
    return parse_args(flags.split(), {})


@cache
def planned_of(config: Config) -> Run:
    assert config.model.vocab_size is not None
    return planned_run(config, config.model.vocab_size)


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage: between steps, and at the peak of a step."""

    static: float
    peak: float


@cache
def stage_memory(config: Config, program: Program) -> list[StageMemory]:
    """Returns the memory of one rank of each stage: the activations and temporary tensors that are planned
    for this program, and the bytes per parameter of the published program."""
    run, parallel = planned_of(config), config.parallel
    found = []
    kernels = _WITHOUT_KERNELS if "unfused" in program.attention else _WITH_KERNELS
    for stage, planned in enumerate(plan_memory(replace(run, config=config.with_settings(kernels)))):
        parameters = run.stages.stage_parameters(stage)
        static = parameters * (program.replicated + program.sharded / parallel.data_parallel_size)
        if stage == parallel.num_stages - 1:
            tokens = config.batch.micro_batch_size * config.model.seq_length
            static += program.kept_logit * tokens * run.padded_vocab_size / run.mesh.tp_size
        in_passes = planned.total - planned.state + parameters * program.in_passes
        found.append(StageMemory(static, static + max(in_passes, parameters * program.in_update)))
    return found


def read_stages() -> list[tuple[dict[str, str], Config]]:
    """Returns the rows of published/stages.csv, and the configurations of their flags."""
    with (FOLDER / "stages.csv").open() as file:
        return [(values, _config(values)) for values in csv.DictReader(file)]
