"""The two classic recipes for a layout, as steps of plans. docs/tuning.md explains them.

nodes        TP = devices per node, PP = nodes, micro-batch 1, 8 to 16 x PP accumulation steps; then the
             micro-batch grows as long as the plan fits and gets faster.
micro-batch  First a few layers of full width on one device, without communication, with the largest
             micro-batch that fits: the rate that no layout can beat. Then the whole model on as few devices
             per replica as it fits on, and data parallelism for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.config import Config, ConfigError
from megatron.planner.search import NO_GPU, Candidate, Change, evaluate
from megatron.planner.timing.network import find_network

_FEW_LAYERS = 4
_ACCUMULATION = (8, 16)


@dataclass(frozen=True)
class RecipeStep:
    """A step: what it does, and its plan."""

    text: str
    candidate: Candidate


def nodes_recipe(config: Config, vocab_size: int) -> list[RecipeStep]:
    """ConfigError if the number of devices is not a multiple of the node, or the model cannot be divided."""
    network = find_network(config)
    if network is None:
        raise ConfigError(NO_GPU)
    world, node = config.parallel.world_size, network.node_size
    if world % node:
        raise ConfigError(
            f"--recipe nodes: {world} devices are not a multiple of --node-size {node}: change one of them"
        )
    nodes = world // node
    ranks = max(n for n in range(1, nodes + 1) if nodes % n == 0 and n <= config.model.num_layers)
    change = {
        "parallel.tensor_model_parallel_size": node,
        "parallel.pipeline_model_parallel_size": ranks,
        "parallel.zero_stage": 1 if nodes > ranks else 0,
        "batch.micro_batch_size": 1,
    }
    first = evaluate(config, change, vocab_size)
    least, most = (factor * ranks for factor in _ACCUMULATION)
    count = first.step.micro_batches
    advice = "as the recipe requires"
    if not least <= count <= most:
        batch = 12 * ranks * first.config.parallel.data_parallel_size
        advice = (
            f"the recipe requires {least} to {most}, as a global batch of about {batch} samples would give"
        )
    text = f"TP = {node} devices of a node, PP = {ranks}, micro-batch 1: {count} accumulation steps; {advice}"
    steps = [RecipeStep(text, first)]
    return steps + _grow(config, vocab_size, change, first)


def _grow(config: Config, vocab_size: int, change: Change, last: Candidate) -> list[RecipeStep]:
    """Doubles the micro-batch while the plan fits and is faster; recomputes first if it does not fit."""
    steps: list[RecipeStep] = []
    if not last.fits and not config.training.recomputes_layers:
        change = {
            **change,
            "training.checkpoint_activations": True,
            "training.recompute_granularity": None,
        }
        last = evaluate(config, change, vocab_size)
        steps.append(RecipeStep("it does not fit: all layers are recomputed", last))
    while True:
        size = 2 * last.config.batch.micro_batch_size
        try:
            larger = evaluate(config, {**change, "batch.micro_batch_size": size}, vocab_size)
        except ConfigError:
            return steps
        if not larger.fits:
            steps.append(RecipeStep(f"micro-batch {size} does not fit", larger))
            return steps
        if larger.tokens_per_second <= last.tokens_per_second:
            steps.append(RecipeStep(f"micro-batch {size} fits and is slower: the one before is kept", larger))
            return steps
        steps.append(RecipeStep(f"micro-batch {size} fits and is faster", larger))
        last = larger


def micro_batch_recipe(config: Config, vocab_size: int) -> list[RecipeStep]:
    """ConfigError if the whole model fits on no number of devices of a node x pipeline ranks."""
    one = {
        "parallel.tensor_model_parallel_size": 1,
        "parallel.pipeline_model_parallel_size": 1,
        "parallel.zero_stage": 0,
        "parallel.world_size": 1,
        "parallel.sequence_parallel": False,
        "parallel.tp_comm_overlap": False,
        "model.num_layers": min(_FEW_LAYERS, config.model.num_layers),
    }
    largest = _largest(config, vocab_size, one, (64, 32, 16, 8, 4, 2, 1))
    if largest is None:
        raise ConfigError(
            f"--recipe micro-batch: {one['model.num_layers']} layers do not fit on one device: use "
            "--recipe nodes"
        )
    size = largest.config.batch.micro_batch_size
    steps = [
        RecipeStep(
            f"{one['model.num_layers']} layers on one device, the largest micro-batch: {size}", largest
        )
    ]
    network = find_network(config)
    assert network is not None
    world = config.parallel.world_size
    shapes = sorted(
        (tp * pp, pp, tp)
        for tp in range(1, network.node_size + 1)
        for pp in range(1, config.model.num_layers + 1)
        if world % (tp * pp) == 0 and config.model.heads_divide(tp)
    )
    sizes = tuple(n for n in (64, 32, 16, 8, 4, 2, 1) if n <= max(size, 1))
    for devices, pp, tp in shapes:
        change = {
            "parallel.tensor_model_parallel_size": tp,
            "parallel.pipeline_model_parallel_size": pp,
            "parallel.zero_stage": 1 if world > devices else 0,
        }
        whole = _largest(config, vocab_size, change, sizes)
        if whole is not None:
            text = f"the whole model on the fewest devices per replica, {devices}: TP {tp}, PP {pp}"
            return [*steps, RecipeStep(text, whole)]
    raise ConfigError(
        f"--recipe micro-batch: the model fits on no part of {world} devices: give more devices, or "
        "--checkpoint-activations"
    )


def _largest(config: Config, vocab_size: int, change: Change, sizes: tuple[int, ...]) -> Candidate | None:
    """The layout with the largest micro-batch that fits and divides the batch."""
    for size in sizes:
        try:
            one = evaluate(config, {**change, "batch.micro_batch_size": size}, vocab_size)
        except ConfigError:
            continue
        if one.fits:
            return one
    return None


RECIPES: dict[str, Callable[[Config, int], list[RecipeStep]]] = {
    "nodes": nodes_recipe,
    "micro-batch": micro_batch_recipe,
}
