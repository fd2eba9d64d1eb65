"""Builds this rank's part of the model and its engine."""

from collections.abc import Callable

from torch import nn

from megatron.config import Config
from megatron.config.registry import load_object
from megatron.engine.pipeline_engine import GPTEngine
from megatron.model.pipeline_module import GPTModelPipe
from megatron.mpu.layout import ParallelLayout, TPGroup
from megatron.mpu.parameters import initialize_parameters
from megatron.planner.stages import StagePlan
from megatron.tokenizer.vocabulary import Vocabulary


def build_engine(
    config: Config,
    layout: ParallelLayout,
    tp_group: TPGroup,
    vocab: Vocabulary,
    plan: StagePlan,
    initialize: Callable[[nn.Module, int, TPGroup], None] = initialize_parameters,
) -> GPTEngine:
    """This rank's stages of the model, in their engine. initialize: see `GPTModelPipe`. Collective."""
    model = GPTModelPipe(config, layout, tp_group, vocab.size, vocab.eod, plan.bounds, initialize)
    engine: GPTEngine = load_object(config.parallel.schedule.engine)(config, layout, tp_group, model)
    return engine
