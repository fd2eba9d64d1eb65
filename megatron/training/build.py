"""Builds this rank's part of the model and its engine."""

from megatron.config import Config
from megatron.engine.pipeline_engine import GPTEngine
from megatron.model.pipeline_module import GPTModelPipe
from megatron.mpu.layout import ParallelLayout, TPGroup
from megatron.mpu.parameters import InitialValues, initial_values
from megatron.pipeline.stages import StagePlan
from megatron.tokenizer.vocabulary import Vocabulary


def build_engine(
    config: Config,
    layout: ParallelLayout,
    tp_group: TPGroup,
    vocab: Vocabulary,
    plan: StagePlan,
    values: InitialValues = initial_values,
) -> GPTEngine:
    """This rank's stages of the model, in their engine. values: see `GPTModelPipe`. Collective."""
    model = GPTModelPipe(config, layout, tp_group, vocab.size, vocab.eod, plan.bounds, values)
    return GPTEngine(config, layout, tp_group, model)
