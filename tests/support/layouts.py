"""The layouts that must give equal losses, as tables in code, and a tiny model to train on them.

`full_matrix()` has every combination (408 rows, for `benchmarks/parity.py`). `covering_rows()` is a subset
for CI in which every (TP, PP, DP) and every pair of option values occurs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, product
from math import fsum
from typing import TYPE_CHECKING, Any

from megatron.config import (
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleConfig,
    StabilityConfig,
    TrainingConfig,
)

if TYPE_CHECKING:
    import torch

    from megatron.data.loader import MicroBatch
    from megatron.engine.pipeline_engine import GPTEngine
    from megatron.model.pipeline_module import GPTModelPipe
    from megatron.mpu.parameter_spec import ParameterSpec
    from megatron.run import Run

STEPS = 20
VOCAB = 101
"""A prime number, so that the padding depends on the TP degree."""
EOD = 0
SEQ = 32
GLOBAL_BATCH = 8
RATE = 2e-3
CLIP = 1.0
"""The tiny model's norms lie on both sides of this value: some steps are clipped, some are not."""

WIDE: dict[str, Any] = {"hidden_size": 512, "ffn_hidden_size": 512}
"""Sizes for FP8: the shards of matrices on 4 tensor-parallel ranks are multiples of 128."""
WIDE_RATE = 1e-4
"""Learning rate of the wide model. At `RATE` it amplifies the rounding to FP8 to 5 % of the loss in 20
steps."""
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}

FP32_BOUND = 1e-5
"""Largest relative error of loss and grad norm in fp32, at every step."""
LOW_PRECISION_BOUND = 2e-3
"""Largest relative error of a bf16 or fp16 run's loss compared with the fp32 run, at every step."""
FP8_BOUND = 1e-2
"""Largest relative error of an FP8 run's loss compared with the bf16 run, at every step."""

POSITIONS = ("absolute", "rotary", "alibi")
PROCESS_LAYOUTS = tuple((tp, pp, dp) for tp, pp, dp in product((1, 2, 4), repeat=3) if tp * pp * dp <= 8)
# The options of a row beside TP, PP and DP, with their values.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1),
    "micro_batch": (1, 2),
    "recompute": (False, True),
    "positions": POSITIONS,
}


@dataclass(frozen=True)
class Row:
    """One combination of the matrix. The defaults are the single-process run that all other rows must equal.

    precision: beside bf16, fp16 and fp32 also 'fp8' (blockwise in bf16) and 'bf16-wide' (bf16 with the sizes
    that FP8 needs).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0
    micro_batch: int = 1
    recompute: bool = False
    positions: str = "absolute"
    precision: str = "fp32"
    cp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def is_wide(self) -> bool:
        """Returns whether the model has the sizes that FP8 needs."""
        return self.precision in ("fp8", "bf16-wide")

    @property
    def reference(self) -> Row:
        """Returns the run on one process with which the row is compared. It is in fp32, for an FP8 row in
        bf16."""
        return Row(positions=self.positions, precision="bf16-wide" if self.precision == "fp8" else "fp32")

    def __str__(self) -> str:
        recompute = "recompute" if self.recompute else "keep"
        return (
            f"tp{self.tp}-pp{self.pp}-dp{self.dp}-zero{self.zero}-micro{self.micro_batch}-{recompute}-"
            f"{self.positions}-{self.precision}" + (f"-cp{self.cp}" if self.cp > 1 else "")
        )


def full_matrix() -> list[Row]:
    """Returns every layout of at most 8 processes with every combination of options, in fp32."""
    return [
        Row(*mesh, **dict(zip(OPTIONS, values, strict=True)))
        for mesh in PROCESS_LAYOUTS
        for values in product(*OPTIONS.values())
    ]


def covering_rows() -> list[Row]:
    """Returns one row per (TP, PP, DP), with options such that every pair of option values occurs.

    The choice is greedy: the next row is the one whose pairs of option values are the rarest so far.
    """
    rows: list[Row] = []
    seen: Counter[tuple] = Counter()
    for mesh in PROCESS_LAYOUTS:
        candidates = [
            row
            for row in full_matrix()
            if (row.tp, row.pp, row.dp) == mesh
            and (row.tp < 4 or row.micro_batch == 2)  # 4 TP ranks are slow: half of the rows
        ]
        # fsum does not depend on the order of the set, which differs between processes. All processes must
        # choose equal rows.
        rows.append(max(candidates, key=lambda row: fsum(0.1 ** seen[pair] for pair in option_pairs(row))))
        seen.update(option_pairs(rows[-1]))
    return rows


def option_pairs(row: Row) -> set[tuple]:
    """Returns the pairs that a row covers: of two option values, and of an option value with a degree above
    1."""
    values = {name: getattr(row, name) for name in OPTIONS}
    in_use = {axis: getattr(row, axis) > 1 for axis in ("tp", "pp", "dp")}
    return {*combinations(values.items(), 2), *product(in_use.items(), values.items())}


def low_precision_rows() -> list[Row]:
    """Returns rows in bf16 and fp16, on layouts that use one or several kinds of parallelism, with ZeRO-0
    and ZeRO-1."""
    shapes = [
        Row(),
        Row(tp=2, zero=1, positions="rotary"),
        Row(pp=2, zero=1, micro_batch=2, recompute=True, positions="alibi"),
        Row(dp=2, micro_batch=2),
        Row(dp=4, zero=1, recompute=True, positions="alibi"),
        Row(tp=2, pp=2, micro_batch=2, positions="rotary"),
        Row(tp=2, pp=2, dp=2, zero=1, micro_batch=2),
    ]
    return [dataclasses.replace(row, precision=name) for name in ("bf16", "fp16") for row in shapes]


def dropout_rows() -> list[Row]:
    """Returns layouts whose dropout masks would differ if the masks depended on ranks."""
    return [
        Row(micro_batch=2, recompute=True),
        Row(tp=2),
        Row(tp=4, micro_batch=2, recompute=True, positions="alibi"),
        Row(pp=2, micro_batch=2),
        Row(dp=2, zero=1),
        Row(pp=4, recompute=True, positions="rotary"),
        Row(tp=2, pp=2, dp=2, zero=1, recompute=True),
    ]


def config_of(row: Row, **changes: dict[str, Any]) -> Config:
    """Returns the tiny model's configuration on the row's layout. `changes` overrides fields:
    `model={"embed_layernorm": True}`."""
    sections = {
        "model": ModelConfig(
            num_layers=4,
            num_attention_heads=4,
            seq_length=SEQ,
            max_position_embeddings=SEQ,
            position_embedding_type=row.positions,
            make_vocab_size_divisible_by=8,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **(WIDE if row.is_wide else {"hidden_size": 32}),
        ),
        "batch": BatchConfig(micro_batch_size=row.micro_batch, global_batch_size=GLOBAL_BATCH),
        "schedule": ScheduleConfig(lr=RATE),
        "parallel": ParallelConfig(
            tensor_model_parallel_size=row.tp,
            pipeline_model_parallel_size=row.pp,
            context_parallel_size=row.cp,
            zero_stage=row.zero,
            world_size=row.world_size,
        ),
        "training": TrainingConfig(train_iters=STEPS, checkpoint_activations=row.recompute),
        "optimizer": OptimizerConfig(clip_grad=CLIP),
        "precision": PrecisionConfig(
            bf16=row.precision in ("bf16", "bf16-wide", "fp8"),
            fp16=row.precision == "fp16",
            initial_loss_scale=2.0**12,
            fp8_recipe="blockwise" if row.precision == "fp8" else None,
            fp8_min_size=0,
        ),
        "data": DataConfig(),
        "checkpoint": CheckpointConfig(),
        "logging": LoggingConfig(),
        "stability": StabilityConfig(),
    }
    for section, fields in changes.items():
        sections[section] = dataclasses.replace(sections[section], **fields)
    parallel = sections["parallel"]
    # Other schedules ignore the number, so the test would not run what it claims.
    assert parallel.virtual_pipeline_stages == 1 or parallel.pipeline_schedule == "interleaved"
    return Config(**sections)


FINGERPRINT = {"paths": ["/data/corpus"], "seed": 1234, "tokens": [5000]}
"""Fingerprint of the data on which the runs of these tests claim to be trained."""


def unconnected_run(
    config: Config, vocab_size: int = VOCAB, fingerprint: dict[str, Any] = FINGERPRINT
) -> Run:
    """Returns a run before its processes connect. Its data have this fingerprint wherever the run starts."""
    from megatron.data.vocabulary import Vocabulary
    from megatron.run import Run
    from pretrain_gpt import predict_memory

    run = Run.from_config(config, Vocabulary(vocab_size, EOD), predict_memory)
    return dataclasses.replace(run, _fingerprints=defaultdict(lambda: fingerprint))


def make_run(config: Config, bounds: list[int] | None = None, vocab_size: int = VOCAB) -> Run:
    """Returns a run without data files, inside `run_world`. bounds: a partition instead of the partition that
    the flags choose."""
    import torch.distributed as dist

    run = unconnected_run(config, vocab_size).connected(dist.get_rank())
    if bounds is not None:
        partition = dataclasses.replace(run.stages.partition, bounds=bounds)
        run = dataclasses.replace(run, plan=dataclasses.replace(run.stages, partition=partition))
    return run


def build_model(
    config: Config, bounds: list[int] | None = None, vocab_size: int = VOCAB
) -> tuple[Run, GPTModelPipe]:
    """Builds this rank's stage, inside `run_world`. bounds: see `make_run`."""
    from megatron.training import build

    run = make_run(config, bounds, vocab_size)
    return run, build.build_model(run)


def build_engine(config: Config, bounds: list[int] | None = None, vocab_size: int = VOCAB) -> GPTEngine:
    """Builds the engine with this rank's stage, inside `run_world`."""
    from megatron.engine.pipeline_engine import GPTEngine

    return GPTEngine(*build_model(config, bounds, vocab_size))


def evaluate(
    engine: GPTEngine, micro_batches: Iterator[MicroBatch], count: int, **options: Any
) -> torch.Tensor:
    """Returns the mean loss over the unmasked tokens of `GPTEngine.evaluate_totals`, a scalar on the
    device."""
    losses, tokens = engine.evaluate_totals(micro_batches, count, **options)
    return losses / tokens


@dataclass(frozen=True)
class RankWeights:
    """The parameters of a rank: its coordinates, and specs and shards by global name."""

    tp_rank: int
    dp_rank: int
    stage: int
    specs: dict[str, ParameterSpec]
    shards: dict[str, torch.Tensor]


def weights_of(engine: GPTEngine) -> RankWeights:
    """Returns copies of the engine's parameters, as a result for `run_world`."""
    from megatron.mpu.parameters import spec_of

    mesh, parameters = engine.mesh, dict(engine.module.named_parameters())
    with engine.optimizer.gathered_params():
        return RankWeights(
            mesh.tp.rank,
            mesh.dp.rank,
            mesh.pp.rank,
            {name: spec_of(p) for name, p in parameters.items()},
            {name: p.detach().clone() for name, p in parameters.items()},
        )


def full_weights(ranks: list[RankWeights]) -> dict[str, torch.Tensor]:
    """Returns the unsharded parameters by name without padded rows. Each comes from the first replica that
    has it."""
    from megatron.mpu.parameters import merge_shards

    shards: dict[str, dict[int, torch.Tensor]] = {}
    specs: dict[str, ParameterSpec] = {}
    for rank in ranks:
        specs |= rank.specs
        for name, shard in rank.shards.items():
            shards.setdefault(name, {}).setdefault(rank.tp_rank, shard)
    return {
        name: merge_shards(specs[name], [of_ranks[i] for i in sorted(of_ranks)])[: specs[name].num_valid_rows]
        for name, of_ranks in shards.items()
    }


def sample_tokens(first: int, count: int) -> torch.Tensor:
    """Returns samples [count, SEQ + 1] of a text that can be learned: each token is 1 to 3 above the previous
    one.

    The samples depend only on their numbers, so all layouts read equal samples.
    """
    import torch

    rows = []
    for sample in range(first, first + count):
        generator = torch.Generator().manual_seed(sample)
        steps = torch.randint(1, 4, (SEQ + 1,), generator=generator)
        steps[0] = torch.randint(0, VOCAB, (1,), generator=generator)
        rows.append(steps.cumsum(0) % VOCAB)
    return torch.stack(rows)


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (tokens, labels) of a step, both [GLOBAL_BATCH, SEQ]. Steps are counted from 0."""
    samples = sample_tokens(step * GLOBAL_BATCH, GLOBAL_BATCH)
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def micro_batches(engine: GPTEngine, step: int) -> Iterator[MicroBatch]:
    """Returns this rank's micro-batches of the step's global batch."""
    from megatron.data.loader import MicroBatch

    size, mesh = engine.run.config.batch.micro_batch_size, engine.mesh
    start, stride = step * GLOBAL_BATCH, mesh.dp_size * size
    for first in range(start + mesh.dp.rank * size, start + GLOBAL_BATCH, stride):
        yield MicroBatch.from_rows(sample_tokens(first, size), first)


def train(
    engine: GPTEngine, steps: Iterable[int], rate: float | None = None, **options: Any
) -> list[tuple[float, float]]:
    """Trains on the numbered steps. Returns (loss, grad norm) of each step. rate: learning rate; None means
    `RATE`. options: arguments of `GPTEngine.train_step`."""
    history = []
    for step in steps:
        batch = micro_batches(engine, step)
        loss = engine.train_step(batch, GLOBAL_BATCH, RATE if rate is None else rate, **options)
        history.append((loss.item(), engine.optimizer.grad_norm))
    return history


def train_layout(row: Row, steps: int = STEPS, **changes: dict[str, Any]) -> list[tuple[float, float]]:
    """Trains the tiny model on a row's layout, inside `run_world`. Returns (loss, grad norm) of each step."""
    with no_messages_in_default_group():
        rate = WIDE_RATE if row.is_wide else None
        return train(build_engine(config_of(row, **changes)), range(steps), rate)


@contextmanager
def no_messages_in_default_group() -> Iterator[None]:
    """Raises AssertionError for a point-to-point message in the group of all ranks, for which NCCL would make
    a communicator of two ranks."""
    import torch.distributed as dist

    kept = {name: vars(dist.ProcessGroup)[name] for name in ("send", "recv")}  # not bound to the class

    def guarded(name: str) -> Callable[..., Any]:
        def call(group: dist.ProcessGroup, *args: Any) -> Any:
            assert group != dist.group.WORLD, f"a {name} in the default group"
            return kept[name].__get__(group)(*args)

        return call

    for name in kept:
        setattr(dist.ProcessGroup, name, guarded(name))
    try:
        yield
    finally:
        for name, original in kept.items():
            setattr(dist.ProcessGroup, name, original)


def relative_errors(
    history: Sequence[tuple[float, ...]], reference: Sequence[tuple[float, ...]]
) -> tuple[float, float]:
    """Returns (largest relative error of the loss, largest relative error of the grad norm and of any numbers
    after it) over all steps."""
    if len(history) != len(reference):
        raise ValueError(f"{len(history)} steps compared with {len(reference)}")
    errors = [
        [abs(value - wanted) / abs(wanted) for value, wanted in zip(step, expected, strict=True)]
        for step, expected in zip(history, reference, strict=True)
    ]
    return max(loss for loss, *_ in errors), max(max(others) for _, *others in errors)
