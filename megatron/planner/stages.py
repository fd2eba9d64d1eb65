"""What each pipeline stage will hold, found without allocating a parameter or making a process group."""

from dataclasses import dataclass

from megatron.config import Config
from megatron.model.gpt_model import layer_names, layer_parameter_counts, pipeline_layers
from megatron.model.transformer import LayerContext
from megatron.mpu.layout import TensorGroup
from megatron.mpu.random import DropoutStream
from megatron.pipeline.partition import EMBEDDING, stage_bounds


@dataclass(frozen=True)
class StagePlan:
    """The list of layers and where it is cut: stage s holds layers bounds[s] to bounds[s + 1] - 1."""

    names: list[str]
    parameters: list[int]
    """Per layer, on one tensor-parallel rank."""
    bounds: list[int]
    total_parameters: int
    """Of the whole model, the tied embedding counted once."""

    def stage_parameters(self, stage: int) -> int:
        """Parameters that one rank of the stage holds; embedding and head on one stage are one matrix."""
        first, last = self.bounds[stage], self.bounds[stage + 1]
        held = sum(self.parameters[first:last])
        tied = [i for i in range(first, last) if self.names[i] == EMBEDDING]
        return held - (self.parameters[tied[-1]] if len(tied) == 2 else 0)


def plan_stages(config: Config, vocab_size: int) -> StagePlan:
    """Lists the layers and cuts them by `--partition-method`; ConfigError where that cannot be done."""
    parallel = config.parallel
    tensor = TensorGroup(size=parallel.tensor_model_parallel_size)
    context = LayerContext(config, tensor, DropoutStream(config.training.seed))
    layers = pipeline_layers(context, vocab_size, eod=0)
    names, parameters = layer_names(layers), layer_parameter_counts(layers)
    bounds = stage_bounds(parallel.partition_method, names, parameters, parallel.pipeline_model_parallel_size)
    whole = layer_parameter_counts(layers, whole=True)
    head = max(index for index, name in enumerate(names) if name == EMBEDDING)
    return StagePlan(names, parameters, bounds, total_parameters=sum(whole) - whole[head])
