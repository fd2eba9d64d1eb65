"""Published measurements of 2023 and later as runs of the programs: rows of a CSV file.

What a row does not state is filled in only by the rules of this module:

    vocabulary             the public model's, by its name or the sizes of its MLP
    sequence parallelism   with tensor parallelism
    ZeRO stage             3 for programs that shard weights, else 1
    recomputation          MaxText: 'selective'; others: none if the prediction then fits the GPU, else full
    precision              bf16
    virtual stages         1

A row is skipped, and counted with the reason, if it states too little, or if the classes of programs do not
describe a feature of the run. Rows that are marked as dubious are counted separately.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.published_programs.classes import (
    FSDP_COMPILED,
    FSDP_EAGER,
    NANOTRON,
    TRANSFORMER_ENGINE,
    XLA,
    Constants,
)
from benchmarks.published_programs.layer_passes import OTHERS, WIDE_PRODUCT
from benchmarks.published_programs.memory import peak_bytes
from benchmarks.published_programs.shapes import Layout, Model, Program
from benchmarks.published_programs.steps import Machine, Run
from megatron.config.registries import GPUS
from megatron.planner.network import KINDS
from megatron.units import GIB

_PROGRAMS = (
    ("nanotron", NANOTRON),
    ("mosaicml", FSDP_EAGER),
    ("torchtitan", FSDP_COMPILED),
    ("maxtext", XLA),
    ("pax", XLA),
    ("nemo", TRANSFORMER_ENGINE),
    ("megatron", TRANSFORMER_ENGINE),
)
_VOCABULARIES = (
    ("405b", 51200),  # with the GPT-2 tokenizer instead of the model's
    ("llama 3", 128256),
    ("llama-3", 128256),
    ("llama 2", 32000),
    ("llama-2", 32000),
    ("nemotron", 256000),
    ("qwen", 151936),
    ("gpt", 51200),
)
_OF_MLP = {
    (4096, 14336): 128256,  # Llama 3 8B
    (8192, 28672): 128256,  # Llama 3 70B
    (16384, 53248): 128256,  # Llama 3.1 405B
    (4096, 12288): 151936,  # Qwen3 8B
    (5120, 25600): 151936,  # Qwen3 32B
    (8192, 29568): 151936,  # Qwen2.5 72B
    (6144, 24576): 256000,  # Nemotron-4 15B
    (18432, 73728): 256000,  # Nemotron-4 340B
    (12288, 49152): 51200,  # GPT-3 175B
}
_NEEDED = (
    "gpu",
    "gpus",
    "layers",
    "hidden_size",
    "ffn_hidden_size",
    "attention_heads",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "tensor_parallel",
    "pipeline_parallel",
)
# H100s of one cluster: 2.4 TB/s and 500 W.
_LIMITED = ("h100-94gb", "h100-96gb")
_LIMITED_BANDWIDTH = 2.4e12
_VOCABULARY_MULTIPLE = 128
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
_USUAL_PRECISION = "bf16"


@dataclass(frozen=True)
class PublishedRow:
    """A published measurement.

    source: repository, commit, file and line. title: the program as the source names it. program: its class.
    changes: fields in which the version of the program differs from its class. layout: recomputation is '' if
    the row does not state it. memory_bytes: the peak.
    """

    source: str
    title: str
    program: str
    changes: tuple[tuple[str, Any], ...]
    gpu: str
    dtype: str
    model: Model
    layout: Layout
    seconds: float
    memory_bytes: float | None
    is_dubious: bool

    @property
    def origin(self) -> str:
        """The repository that published the row."""
        return self.source.split("@")[0].split(":")[0].split(" ")[0]

    @property
    def gpu_kind(self) -> str:
        return self.gpu.partition("-")[0]

    def run(self, constants: Constants) -> Run:
        program = replace(constants.programs[self.program], **dict(self.changes))
        run = Run(program, self.model, self.layout, self._machine(constants), self.dtype)
        if self.layout.recompute:
            return run
        run = replace(run, layout=replace(self.layout, recompute="none"))
        if peak_bytes(run) <= run.machine.gpu.memory_bytes:
            return run
        return replace(run, layout=replace(self.layout, recompute="full"))

    def _machine(self, constants: Constants) -> Machine:
        rates = constants.rates[self.gpu_kind]
        name = next(name for name in GPUS if name == self.gpu or self._is_kind_of(name))
        gpu = GPUS.load(name)
        if self.gpu in _LIMITED:
            gpu = replace(gpu, bandwidth=_LIMITED_BANDWIDTH)
            rates = replace(rates, products=rates.products * constants.limited_products)
        return Machine(gpu, rates, KINDS[self.gpu_kind], self.gpu_kind not in ("v100", "a100"))

    def _is_kind_of(self, name: str) -> bool:
        """Returns whether a GPU of this name is of the row's kind, for a memory size that is not in the
        table."""
        return self.gpu not in GPUS and name.startswith(self.gpu_kind + "-")


@dataclass(frozen=True)
class SkippedRow:
    """A row that cannot be predicted."""

    source: str
    reason: str


def read_rows(path: Path) -> tuple[list[PublishedRow], list[SkippedRow]]:
    """Returns the rows of a file, and those that cannot be predicted."""
    with path.open() as file:
        rows = [_row(values) for values in csv.DictReader(file)]
    return (
        [row for row in rows if isinstance(row, PublishedRow)],
        [row for row in rows if isinstance(row, SkippedRow)],
    )


def _row(values: dict[str, str]) -> PublishedRow | SkippedRow:
    source, name = values["source"], values["program"].lower()
    program = _named(_PROGRAMS, name)
    if program is None:
        return SkippedRow(source, "a program without a class")
    reason = _reason_to_skip(values, program)
    if reason is not None:
        return SkippedRow(source, reason)
    model, layout = _model(values), _layout(values, program)
    if layout.data * layout.tensor * layout.pipeline * layout.context != layout.gpus:
        return SkippedRow(source, "a layout that does not divide the GPUs")
    if layout.micro_batches * layout.micro_batch * layout.data != layout.global_batch:
        return SkippedRow(source, "a layout that does not divide the batch")
    memory = values["memory_gb_max_allocated"]
    unit = GIB if program in (NANOTRON, FSDP_COMPILED) else 1e9
    return PublishedRow(
        source,
        values["program"],
        program.name,
        tuple(_changes(values, program).items()),
        values["gpu"],
        values["precision"] or _USUAL_PRECISION,
        model,
        layout,
        _seconds(values, layout),
        float(memory) * unit if memory else None,
        "DUBIOUS" in values["remarks"],
    )


def _named(table: Iterable[tuple[str, Any]], name: str) -> Any:
    """Returns the value of the first word in the table that the name contains."""
    return next((value for word, value in table if word in name), None)


def _reason_to_skip(values: dict[str, str], program: Program) -> str | None:
    missing = [name for name in _NEEDED if not values[name]]
    if missing:
        return f"{', '.join(missing)} not stated"
    if (precision := values["precision"] or _USUAL_PRECISION) not in _PRECISIONS:
        return f"{precision}, whose rates are not known"
    if values["recompute"] not in ("", "none", "selective", "full"):
        return f"recompute is {values['recompute']}"
    if _vocabulary(values) is None:
        return "vocab_size not stated"
    if not values["seconds_per_iteration"] and not values["tokens_per_second_per_gpu"]:
        return "time not stated"
    kind = values["gpu"].partition("-")[0]
    if kind not in KINDS:
        return f"a GPU that is not in the table: {values['gpu']}"
    if (program.shards_weights or values["zero_stage"] == "3") and values["pipeline_parallel"] != "1":
        return "a pipeline with sharded weights"
    return None


def _number(values: dict[str, str], name: str, default: int = 0) -> int:
    return int(float(values[name])) if values[name] else default


def _vocabulary(values: dict[str, str]) -> int | None:
    """Returns the size of the vocabulary that is stated, or the public model's."""
    if values["vocab_size"]:
        return _number(values, "vocab_size")
    by_name: int | None = _named(_VOCABULARIES, values["program"].lower())
    return by_name or _OF_MLP.get((_number(values, "hidden_size"), _number(values, "ffn_hidden_size")))


def _model(values: dict[str, str]) -> Model:
    heads, hidden = _number(values, "attention_heads"), _number(values, "hidden_size")
    vocab = _vocabulary(values) or 0
    multiple = _VOCABULARY_MULTIPLE * _number(values, "tensor_parallel")
    return Model(
        layers=_number(values, "layers"),
        hidden=hidden,
        ffn=_number(values, "ffn_hidden_size"),
        heads=heads,
        groups=_number(values, "query_groups") or heads,
        head=_number(values, "head_dim") or hidden // heads,
        vocab=-(-vocab // multiple) * multiple,
        seq=_number(values, "seq_length"),
        gated=values["gated_mlp"] == "1",
        tied=values["tied_embeddings"] == "1",
        rotary=values["positions"] == "rotary",
        biases=values["biases"] == "1",
        dropout=bool(float(values["dropout"] or 0)),
    )


def _layout(values: dict[str, str], program: Program) -> Layout:
    tensor, pipeline = _number(values, "tensor_parallel"), _number(values, "pipeline_parallel")
    remarks = values["remarks"]
    unstated = "selective" if "maxtext" in values["program"].lower() else ""
    return Layout(
        gpus=_number(values, "gpus"),
        node_size=_number(values, "node_size", 8),
        tensor=tensor,
        pipeline=pipeline,
        chunks=(_number(values, "virtual_stages", 1) or 1) if pipeline > 1 else 1,
        context=_number(values, "context_parallel", 1) or 1,
        zero=_number(values, "zero_stage", 3 if program.shards_weights else 1),
        sequence_parallel=values["sequence_parallel"] == "1" if values["sequence_parallel"] else tensor > 1,
        micro_batch=_number(values, "micro_batch_size"),
        global_batch=_number(values, "global_batch_size"),
        recompute=values["recompute"] or unstated,
        # NeMo's recipes of these releases overlap tensor-parallel collectives.
        tensor_overlap="ub_tp_comm_overlap" in remarks or "NeMo 2.0 recipe" in remarks,
    )


def _changes(values: dict[str, str], program: Program) -> dict[str, Any]:
    """Returns the fields in which the row's version of the program differs from its class."""
    name, options = values["program"].lower(), values["compile_or_te"]
    changes: dict[str, Any] = {}
    if program is TRANSFORMER_ENGINE and "megatron-lm" not in name:
        # NeMo and Megatron-Bridge accumulate and reduce in bf16.
        changes |= {"gradient": 2, "reduced": 2}
    if values["zero_stage"] == "3" and not program.shards_weights:
        changes["shards_weights"] = True
    if "deterministic" in options:
        # Transformer Engine then takes FlashAttention.
        changes |= {"deterministic": True, "attention": ("flash", "flash"), "adds_gradients": False}
    if program is FSDP_COMPILED and "torch.compile" not in options:
        changes |= {"fused": False, "eager_norm": True}
    if "MP mode DEFAULT" in options:
        # Composer's mixed precision reduces in fp32.
        changes["reduced"] = 4
    if "maxtext" in name and "minimal" not in values["remarks"]:
        # These runs recompute the first product of the MLP.
        changes["selective"] = frozenset({OTHERS, WIDE_PRODUCT})
    return changes


def _seconds(values: dict[str, str], layout: Layout) -> float:
    """Returns the seconds of a step. The MFU of a row is not used."""
    if values["seconds_per_iteration"]:
        return float(values["seconds_per_iteration"])
    tokens = layout.global_batch * _number(values, "seq_length")
    return tokens / (float(values["tokens_per_second_per_gpu"]) * layout.gpus)
