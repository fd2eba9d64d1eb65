"""The whole GPT in one process, without an engine: for generation and for tools that look into a model."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from megatron.config import Config
from megatron.model.gpt_model import pipeline_layers
from megatron.model.norm import norm_class
from megatron.model.transformer import LayerContext
from megatron.mpu.layout import TPGroup
from megatron.mpu.parameters import ParameterSpec, spec_of
from megatron.mpu.random import DropoutRNG


class GPTModel(nn.Module):
    """The layers of `pipeline_layers`, one after the other, under the parameter names of `GPTModelPipe`.

    It needs no process group. Its parameters are uninitialised fp32 until weights are loaded, for example
    with `megatron.checkpoint.weights.load_full_weights`. Layer norms are PyTorch's, never apex's.
    """

    def __init__(self, config: Config, vocab_size: int, eod: int | None) -> None:
        """`vocab_size`: real tokens; `eod`: the token that ends a document, None if unknown."""
        super().__init__()
        config = replace(config, optimizer=replace(config.optimizer, use_apex=False))
        context = LayerContext(config, TPGroup(), DropoutRNG(config.training.seed))
        self.vocab_size = vocab_size
        self._norm = norm_class(config)
        self.tied_modules = nn.ModuleDict()
        self._steps: list[Callable] = []
        for index, layer in enumerate(pipeline_layers(context, vocab_size, eod)):
            if isinstance(layer, TiedLayerSpec):
                self._steps.append(self._tied_step(layer))
            elif isinstance(layer, LayerSpec):
                self.add_module(str(index), layer.build())
                self._steps.append(self.get_submodule(str(index)))
            else:
                self._steps.append(layer)

    def _tied_step(self, layer: TiedLayerSpec) -> Callable:
        """The first layer under a key makes the module, the later ones use it in their own way."""
        if layer.key not in self.tied_modules:
            self.tied_modules[layer.key] = layer.build()
        module = self.tied_modules[layer.key]
        return module if layer.forward_fn is None else partial(layer.forward_fn, module)

    def forward(self, tokens: Tensor, last_only: bool = False) -> Tensor:
        """tokens [batch, seq] -> logits [batch, seq, vocab_size], padding cut off.

        `last_only`: of the last position alone, [batch, 1, vocab_size], which saves most of the head's work.
        """
        state = tokens
        for step in self._steps:
            # The final norm is the first layer after the transformer that positions pass one by one.
            if last_only and isinstance(step, self._norm):
                state = state[:, -1:]
            state = step(state)
        return state[..., : self.vocab_size]

    @torch.no_grad()
    def next_token_logits(self, tokens: Tensor) -> Tensor:
        """tokens [seq] -> fp32 logits [vocab_size] of the token that follows them."""
        return self(tokens.unsqueeze(0), last_only=True)[0, -1].float()


def model_specs(config: Config, vocab_size: int, eod: int | None) -> dict[str, ParameterSpec]:
    """What the parameters of the model are, by name; nothing is allocated."""
    with torch.device("meta"):
        model = GPTModel(config, vocab_size, eod)
    return {name: spec_of(parameter) for name, parameter in model.named_parameters()}
