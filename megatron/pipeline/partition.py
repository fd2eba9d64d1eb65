"""`--partition-method`: where the list of pipeline layers is cut into stages.

Needs no process group: a dry run on a laptop cuts as the training run does.
"""

import re
from collections.abc import Sequence

from megatron.config import ConfigError

# Class name of the input embedding and of the head.
EMBEDDING = "EmbeddingPipe"


def stage_bounds(
    method: str, layer_names: Sequence[str], layer_parameters: Sequence[int], num_stages: int
) -> list[int]:
    """Bounds of the stages, length num_stages + 1: stage s holds layers bounds[s] to bounds[s + 1] - 1.

    `uniform` gives each stage as many layers, `parameters` balances `layer_parameters`, `type:REGEX`
    balances the number of layers whose name matches (ignoring case). The cuts are DeepSpeed's own.

    Raises ConfigError for a method that does not exist, a regex that is not one or that matches no layer,
    and a stage that would be left without a layer.
    """
    # Imported here: importing DeepSpeed takes seconds, a misspelt method answers at once.
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    if method.lower() == "uniform":
        bounds = partition_uniform(num_items=len(layer_names), num_parts=num_stages)
    else:
        bounds = partition_balanced(_weights(method, layer_names, layer_parameters), num_stages)
    bounds = _keep_embeddings_whole(bounds, layer_names)
    for stage in range(num_stages):
        if bounds[stage] == bounds[stage + 1]:
            raise ConfigError(
                f"--partition-method {method} leaves stage {stage} of {num_stages} without a layer: "
                f"give more layers to share out, or lower --pipeline-model-parallel-size"
            )
    return bounds


def _keep_embeddings_whole(bounds: Sequence[int], layer_names: Sequence[str]) -> list[int]:
    """The bounds with the functions at the ends of the list on the stages of embedding and head.

    Between stages travel hidden states: neither tokens nor logits, of which each tensor rank has its own.
    """
    embeddings = [index for index, name in enumerate(layer_names) if name == EMBEDDING]
    if not embeddings:
        return [int(bound) for bound in bounds]
    first, head = embeddings[0], embeddings[-1]
    inner = [min(max(int(bound), first + 1), head) for bound in bounds[1:-1]]
    return [0, *inner, len(layer_names)]


def _weights(method: str, layer_names: Sequence[str], layer_parameters: Sequence[int]) -> list[int]:
    if method.lower() == "parameters":
        return list(layer_parameters)
    if not method.lower().startswith("type:"):
        raise ConfigError(f"--partition-method {method}: expected uniform, parameters or type:REGEX")
    pattern = method[len("type:") :]
    try:
        matches = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(
            f"--partition-method {method}: {pattern} is no regular expression ({error})"
        ) from error
    weights = [1 if matches.search(name) else 0 for name in layer_names]
    if not any(weights):
        known = ", ".join(dict.fromkeys(layer_names))
        raise ConfigError(
            f"--partition-method {method}: {pattern} matches none of the layers, which are {known}"
        )
    return weights
