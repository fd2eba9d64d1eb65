"""The model in one process, for tests of its logits.

DeepSpeed's `PipelineModule` needs a process group, so these functions run inside `run_world(1, ...)`.
"""

from __future__ import annotations

import torch

from megatron.model.pipeline_module import GPTModelPipe
from megatron.mpu.parameters import spec_of
from tests.support.layouts import EOD, VOCAB, Row, build_model, config_of


def model_with_weights(row: Row, weights: dict[str, torch.Tensor], **changes) -> GPTModelPipe:
    """Returns the tiny model in evaluation mode, with the values of `weights` in the parameters that it
    has."""
    _, model = build_model(config_of(row, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
    return model.eval()


def random_weights(row: Row, **changes) -> dict[str, torch.Tensor]:
    """Returns values for all parameters. No parameter is constant: a bias of 0 or a norm's weight of 1 would
    hide errors.

    Padding rows of the vocabulary stay zero.
    """
    _, model = build_model(config_of(row, **changes))
    generator = torch.Generator().manual_seed(11)
    weights = {}
    for name, parameter in model.named_parameters():
        mean = spec_of(parameter).init_value
        weights[name] = mean + 0.15 * torch.randn(parameter.shape, generator=generator)
    weights["tied_modules.embed.word_embeddings.weight"][VOCAB:] = 0.0
    return weights


def random_weights_and_logits(row: Row, tokens: torch.Tensor, changes: dict) -> tuple:
    """Returns (weights, logits [batch, seq, VOCAB] of the vocabulary without padding)."""
    weights = random_weights(row, **changes)
    return weights, logits(model_with_weights(row, weights, **changes), tokens)


@torch.no_grad()
def logits(model: GPTModelPipe, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the logits [batch, seq, VOCAB] of tokens [batch, seq]."""
    return model(tokens)[..., :VOCAB]


def random_tokens(batch: int, seq: int, seed: int = 5) -> torch.Tensor:
    """Returns random tokens that are not the end of a document."""
    return torch.randint(EOD + 1, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(seed))
