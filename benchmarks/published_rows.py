"""Published measurements as configurations of this program, and the memory of the framework that ran them.

This program's planner computes the layers, the stages, the micro-batches in flight and the communication.
BigScience's Megatron-LM and Megatron-DeepSpeed (2021) differ in two ways. `Memory` describes their bytes per
parameter and temporary tensors, `benchmarks.published_programs.classes.MEGATRON_2021` their kernels.
"""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.published_programs.classes import MEGATRON_2021, Constants
from benchmarks.published_programs.shapes import Layout, Model
from benchmarks.published_programs.steps import Machine, Run
from megatron.arguments import parse_args
from megatron.cluster.devices import find_gpu
from megatron.config import Config
from megatron.config.model import padded_vocab_size
from megatron.model.layer_kinds import embedding_and_head
from megatron.pipeline.stages import StagePlan, plan_stages
from megatron.planner.in_flight import in_flight_micro_batches
from megatron.planner.network import find_network

FOLDER = Path(__file__).resolve().parent / "published"
GB, MIB = 1e9, 2**20

# A100 rows from this line of chronicles-prequel.md on are in bf16, with fp32 gradients.
FIRST_BF16_LINE = 890
# Memory that nvidia-smi shows in addition to PyTorch's allocations (CUDA context, NCCL's and DeepSpeed's
# buffers, fragmentation), fitted on rows 583 to 586 and 906 of chronicles-prequel.md, and rows 26 and 30 of
# tr3m-1B3.md.
OUTSIDE_GB = {"A100-80GB": 9.5, "V100-32GB": 3.0, "V100-16GB": 3.0}
# The fraction of the memory that a run can fill (assumed): fragmentation takes the rest.
USABLE = 0.95
# Jean Zay's nodes (http://www.idris.fr/eng/jean-zay/): devices, Gbit/s between devices, between nodes.
NODES = {"A100-80GB": (8, 2400, 400), "V100-32GB": (8, 1200, 400), "V100-16GB": (4, 1200, 400)}


@dataclass(frozen=True)
class Memory:
    """Bytes per parameter of a different framework.

    full: weights and gradients that every data-parallel rank has. sharded: bytes that ZeRO-1 divides by the
    data-parallel size. in_pass: additional bytes during the passes. in_update: additional bytes during the
    optimizer's update, when there are no activations. kept_logit: bytes per logit that stay allocated between
    steps. positions_on_head: whether the tied embedding on the last stage includes the position embeddings.
    """

    full: float
    sharded: float
    in_pass: float = 0.0
    in_update: float = 0.0
    kept_logit: float = 0.0
    positions_on_head: bool = False


# Weights and gradients in fp16; master weights and two moments in fp32, and their gradient.
FP16_ZERO1 = Memory(full=4, sharded=12, in_update=0)
# Weights in bf16, gradients in bf16 and accumulated in fp32.
BF16_ZERO1 = Memory(full=8, sharded=12)
# stage_memory.csv: 20 bytes per parameter, and fp16 gradients during the passes.
MEGATRON = Memory(full=20, sharded=0, in_pass=2)
# 14 bytes; gradients exist during the passes (fp16) and the update (fp16 and fp32).
DEEPSPEED_3D = Memory(full=14, sharded=0, in_pass=2, in_update=6, kept_logit=12, positions_on_head=True)


@dataclass(frozen=True)
class Row:
    """A published measurement."""

    source: str
    gpu: str
    config: Config
    vocab_size: int
    out_of_memory: bool
    seconds: float | None
    memory_gb: float | None
    is_bf16: bool

    @property
    def name(self) -> str:
        """File and line, for example 'chronicles-prequel.md:583'."""
        return self.source.rpartition("/")[2]

    @property
    def layout(self) -> str:
        """The sizes of model and layout, for the table."""
        model, parallel = self.config.model, self.config.parallel
        return (
            f"{model.num_layers}x{model.hidden_size}/{model.num_attention_heads} "
            f"TP{parallel.tensor_model_parallel_size} PP{parallel.pipeline_model_parallel_size} "
            f"DP{parallel.data_parallel_size} mb{self.config.batch.micro_batch_size}"
        )

    @property
    def gpu_kind(self) -> str:
        return self.gpu.partition("-")[0].lower()

    def run(self, constants: Constants) -> Run:
        config = self.config
        gpu, network = find_gpu(config), find_network(config)
        assert gpu is not None and network is not None
        size = 4 if self.is_bf16 else 2
        program = dataclasses.replace(constants.programs[MEGATRON_2021.name], gradient=size, reduced=size)
        machine = Machine(gpu, constants.rates[self.gpu_kind], network, is_hopper=False)
        layers = tuple(map(self.plan.num_transformer_layers, range(len(self.plan.rank_of_stage))))
        return Run(
            program, _model(config, self.vocab_size), _layout(config), machine, config.precision.name, layers
        )

    @property
    def memory(self) -> Memory:
        """The bytes per parameter of the measured framework."""
        return BF16_ZERO1 if self.is_bf16 else FP16_ZERO1

    @property
    def plan(self) -> StagePlan:
        return _plan(self.config, self.vocab_size)


def _model(config: Config, vocab_size: int) -> Model:
    model = config.model
    return Model(
        layers=model.num_layers,
        hidden=model.hidden_size,
        ffn=model.ffn_hidden_size,
        heads=model.num_attention_heads,
        groups=model.num_attention_heads,
        head=model.kv_channels,
        vocab=padded_vocab_size(vocab_size, model, config.parallel.tensor_model_parallel_size),
        seq=model.seq_length,
        tied=True,
        biases=True,
        dropout=True,
    )


def _layout(config: Config) -> Layout:
    parallel, batch = config.parallel, config.batch
    return Layout(
        gpus=parallel.world_size,
        node_size=parallel.node_size or 8,
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        chunks=1,
        context=1,
        zero=1,
        sequence_parallel=False,
        micro_batch=batch.micro_batch_size,
        global_batch=batch.global_batch_size,
        recompute="full" if config.training.recomputes_layers else "none",
    )


@cache
def _plan(config: Config, vocab_size: int) -> StagePlan:
    return plan_stages(config, vocab_size)


def throughput_rows() -> list[Row]:
    """Returns the rows of published/throughput.csv."""
    with (FOLDER / "throughput.csv").open() as file:
        return [_row(values) for values in csv.DictReader(file)]


def _number(text: str) -> float | None:
    return float(text) if text else None


def _row(values: dict[str, str]) -> Row:
    source, gpu = values["source"], values["gpu"]
    is_bf16 = "prequel" in source and int(source.rpartition(":")[2]) >= FIRST_BF16_LINE
    tp_size, hidden = int(values["tensor_parallel"]), int(values["hidden_size"])
    heads = int(values["attention_heads"]) if values["attention_heads"] else _usual_heads(hidden, tp_size)
    layers, stages = int(values["layers"]), int(values["pipeline_parallel"])
    with_embedding = (layers + 2) % stages == 0 and layers % stages != 0
    node, intra, inter = NODES[gpu]
    if "gpt2.md" in source:
        node = 4  # the runs of 64 GPUs had 16 nodes
    flags = (
        f"--dry-run --world-size {values['gpus']} --tensor-model-parallel-size {tp_size} "
        f"--pipeline-model-parallel-size {stages} --zero-stage {values['zero_stage'] or 0} "
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        f"--seq-length {values['seq_length']} --max-position-embeddings {values['seq_length']} "
        f"--vocab-size {values['vocab_size']} "
        f"--micro-batch-size {values['micro_batch_size']} --global-batch-size {values['global_batch_size']} "
        f"--lr 1e-4 --train-samples 1000000 --gpu {gpu.lower()} --loss-implementation plain "
        "--no-overlap-grad-reduce --no-overlap-param-gather "
        f"--node-size {node} --intra-node-gbps {intra} --inter-node-gbps {inter} "
        f"--partition-method type:transformer{'|embedding' * with_embedding} "
        f"{'--bf16' if is_bf16 else '--fp16'} "
        f"{'--checkpoint-activations' * (values['activation_recompute'] == '1')}"
    )
    return Row(
        source,
        gpu,
        parse_args(flags.split(), {}),
        int(values["vocab_size"]),
        values["out_of_memory"] == "1",
        _number(values["seconds_per_iteration"]),
        _number(values["memory_gb_max_stage"]),
        is_bf16,
    )


def _usual_heads(hidden: int, tp_size: int) -> int:
    """Returns the number of heads of a row that does not state it: the largest multiple of 8 whose heads have
    128 or more elements."""
    return max(
        heads
        for heads in range(tp_size, hidden // 128 + 1, tp_size)
        if hidden % heads == 0 and (hidden // heads) % 8 == 0
    )


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage: between steps, and at the peak of a step."""

    static: float
    peak: float


def stage_memory(config: Config, plan: StagePlan, vocab_size: int, memory: Memory, stage: int) -> StageMemory:
    """Returns the memory of one rank of a stage in the measured framework.

    With full recomputation an in-flight micro-batch keeps the input of every layer, 2 b s h bytes, and 1 / t
    of the stage's input, which was received in parts. While a layer is recomputed, its activations (arXiv
    2205.05198, equation 2, with dropout and unfused attention) and their gradients exist.
    """
    model, batch, tp_size = config.model, config.batch, config.parallel.tensor_model_parallel_size
    hidden = batch.micro_batch_size * model.seq_length * model.hidden_size
    scores = batch.micro_batch_size * model.num_attention_heads * model.seq_length**2 / tp_size
    layers = plan.num_transformer_layers(stage)
    parameters = plan.stage_parameters(stage)
    if config.parallel.num_stages == 1:
        parameters = sum(plan.parameters) - plan.parameters[embedding_and_head(plan.layers)[1]]
    head = embedding_and_head(plan.layers)[1]
    has_head = plan.bounds[stage] <= head < plan.bounds[stage + 1]
    if has_head and memory.positions_on_head and config.parallel.num_stages > 1:
        parameters += model.max_position_embeddings * model.hidden_size
    activations = hidden * (10 + 24 / tp_size) + 5 * scores
    kept, temporary = activations, 0.0
    if config.training.recomputes_layers:
        kept, temporary = 2.0 * hidden, activations * 1.5
    received = 2 * hidden / tp_size if config.parallel.num_stages > 1 else 0.0
    in_flight = in_flight_micro_batches(config)[stage]
    rows = padded_vocab_size(vocab_size, model, tp_size) / tp_size if has_head else 0
    logits = rows * batch.micro_batch_size * model.seq_length
    static = parameters * (memory.full + memory.sharded / config.parallel.data_parallel_size)
    static += memory.kept_logit * logits
    # Logits in 16 bits and in fp32, the softmax, and its gradient.
    in_pass = parameters * memory.in_pass + in_flight * (layers * kept + received) + temporary
    in_pass += max((14 - memory.kept_logit) * logits - temporary, 0.0)
    return StageMemory(static, static + max(in_pass, parameters * memory.in_update))


def fullest_gb(row: Row) -> float:
    """Returns the predicted memory of the most loaded GPU, in GB, as nvidia-smi shows it."""
    stages = range(row.config.parallel.num_stages)
    peaks = [stage_memory(row.config, row.plan, row.vocab_size, row.memory, s).peak for s in stages]
    return max(peaks) / GB + OUTSIDE_GB[row.gpu]


@dataclass(frozen=True)
class StageRow:
    """A published memory of a stage, in MiB after 20 iterations."""

    source: str
    engine: str
    config: Config
    vocab_size: int
    stage: int
    parameters: int
    allocated_mib: float
    peak_mib: float


def stage_rows() -> list[StageRow]:
    """Returns the rows of published/stage_memory.csv."""
    with (FOLDER / "stage_memory.csv").open() as file:
        return [_stage_row(values) for values in csv.DictReader(file)]


def _stage_row(values: dict[str, str]) -> StageRow:
    processes = int(values["TP"]) * int(values["PP"]) * int(values["DP"])
    flags = (
        f"--dry-run --world-size {processes} --tensor-model-parallel-size {values['TP']} "
        f"--pipeline-model-parallel-size {values['PP']} --num-layers {values['layers']} "
        f"--hidden-size {values['hidden']} --num-attention-heads {values['heads']} "
        f"--seq-length {values['seq']} --max-position-embeddings {values['seq']} "
        f"--vocab-size {values['padded_vocab']} "
        f"--micro-batch-size {values['MBS']} --global-batch-size {values['GBS']} --lr 1e-4 "
        "--train-samples 1000000 --fp16 --checkpoint-activations --loss-implementation plain"
    )
    return StageRow(
        values["src"],
        values["engine"],
        parse_args(flags.split(), {}),
        int(values["padded_vocab"]),
        int(values["stage"]),
        int(values["params"]),
        float(values["alloc_MiB"]),
        float(values["max_alloc_MiB"]),
    )
