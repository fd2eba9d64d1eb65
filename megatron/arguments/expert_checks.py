"""Checks of the sizes of expert layers and of their layout. `Mesh.create` checks the ranks of the expert
axis."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.config import Config
from megatron.config.sections.layer_pattern import DENSE
from megatron.config.sections.model import ModelConfig


def expert_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for settings of expert layers that do not fit each other or the layout."""
    model = config.model
    if model.num_experts is None:
        return
    if model.moe_layer_freq == (DENSE,):
        yield (
            f"--moe-layer-freq gives none of the {model.num_layers} layers experts: remove --num-experts and "
            "--moe-layer-freq, or change the pattern"
        )
    yield from _router_mistakes(model, model.num_experts)
    yield from _layout_mistakes(config, model.num_experts)


def _router_mistakes(model: ModelConfig, experts: int) -> Iterator[str]:
    chosen, softmax = model.moe_router_topk, model.moe_router_score_function == "softmax"
    if chosen > experts:
        yield (
            f"--moe-router-topk {chosen} is larger than --num-experts {experts}: reduce the one, or increase "
            "the other"
        )
    if chosen == 1 and softmax and not model.moe_router_pre_softmax:
        yield (
            "--moe-router-topk 1 without --moe-router-pre-softmax: the softmax over one chosen expert is "
            "always 1, so the router would not be trained; set --moe-router-pre-softmax, or "
            "--moe-router-score-function sigmoid"
        )
    groups, best = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is None or best is None:
        return
    if experts % groups:
        yield (
            f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}: change one of "
            "them"
        )
    if best > groups:
        yield (
            f"--moe-router-group-topk {best} is larger than --moe-router-num-groups {groups}: reduce "
            "--moe-router-group-topk"
        )
    if chosen % best:
        yield (
            f"--moe-router-topk {chosen} is not divisible by --moe-router-group-topk {best}: the score of a "
            "group is a sum over their quotient; change one of them"
        )
    elif chosen > (available := best * (experts // groups)) and best <= groups and chosen <= experts:
        yield (
            f"--moe-router-topk {chosen} is larger than the {available} experts in --moe-router-group-topk "
            f"{best} groups: reduce --moe-router-topk, or increase --moe-router-group-topk"
        )


def _layout_mistakes(config: Config, experts: int) -> Iterator[str]:
    parallel, shared = config.parallel, config.model.moe_shared_expert_intermediate_size
    tensor, ranks = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    if experts % ranks:
        yield (
            f"--num-experts {experts} is not divisible by --expert-model-parallel-size {ranks}: change one "
            "of them"
        )
    if tensor > 1 and not parallel.sequence_parallel:
        yield (
            f"--num-experts {experts} with --tensor-model-parallel-size {tensor}: the ranks of a "
            "tensor-parallel group route different tokens; add --sequence-parallel"
        )
    if shared is not None and shared % tensor:
        yield (
            f"--moe-shared-expert-intermediate-size {shared} is not divisible by "
            f"--tensor-model-parallel-size {tensor}: change one of them"
        )
    if config.checkpoint.save is not None and config.checkpoint.save_format == "native":
        yield (
            f"--save-format native with --num-experts {experts}: DeepSpeed's files have no place for "
            "experts; remove --save-format"
        )
    if config.checkpoint.save_local is not None:
        yield (
            f"--save-local with --num-experts {experts}: local checkpoints have DeepSpeed's layout, which "
            "has no place for experts; remove --save-local"
        )
