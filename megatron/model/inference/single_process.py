"""The whole GPT model in one process, without DeepSpeed's engine, for generation and for tools."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from megatron.config import Config
from megatron.model.gpt_model import pipeline_layers
from megatron.model.inference.growing_texts import GrowingTexts, Pass
from megatron.model.inference.scoring import Scores, score_in_parts
from megatron.model.layer_context import LayerContext, LayerIO, join_layer_io
from megatron.model.layer_list import first_mtp_layer_of
from megatron.model.norm import norm_class
from megatron.mpu.mesh import ONE_RANK
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import spec_of
from megatron.mpu.random import DropoutRNG


class GPTModel(nn.Module):
    """Runs the layers of `pipeline_layers` in order. Its parameters have the names of `GPTModelPipe`.

    It needs no process group. Its parameters are fp32 and uninitialized until weights are loaded, for example
    with a checkpoint's `StateReader.load_weights`. It always uses PyTorch's layer norm, not apex's.
    """

    generation_batch_size = 8
    """The number of texts to generate at a time: see `scoring.LanguageModel`."""

    def __init__(self, config: Config, vocab_size: int, eod: int | None) -> None:
        """vocab_size: number of real tokens, without padding. eod: the end-of-document token, or None."""
        super().__init__()
        config = replace(config, optimizer=replace(config.optimizer, use_apex=False))
        context = LayerContext(config, ONE_RANK, DropoutRNG(config.training.seed))
        self.vocab_size, self._cache = vocab_size, context.cache
        self._texts = GrowingTexts(self._run)
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
        norm = norm_class(config)
        del self._steps[first_mtp_layer_of(config.model.num_layers) :]  # only the loss uses them
        (self._final_norm,) = (index for index, step in enumerate(self._steps) if isinstance(step, norm))

    def _tied_step(self, layer: TiedLayerSpec) -> Callable:
        """Returns the function of a layer with shared weights. The first layer of a key builds the module;
        later layers use it with their `forward_fn`."""
        if layer.key not in self.tied_modules:
            self.tied_modules[layer.key] = layer.build()
        module = self.tied_modules[layer.key]
        return module if layer.forward_fn is None else partial(layer.forward_fn, module)

    def forward(self, tokens: Tensor, last_only: bool = False) -> Tensor:
        """Returns the logits [batch, seq, vocab_size], without the padding, of tokens [batch, seq].

        last_only: returns only the logits of the last position, [batch, 1, vocab_size], so the head does less
        work.
        """
        hidden = self._hidden(tokens)
        return self._head(hidden[:, -1:] if last_only else hidden)

    def _hidden(self, inputs: LayerIO) -> Tensor:
        """Returns the input of the final norm, [batch, seq, hidden]. inputs: tokens [batch, seq], with or
        without document ids."""
        state = inputs
        for step in self._steps[: self._final_norm]:
            state = step(state)
        assert isinstance(state, Tensor)
        return state

    def _head(self, hidden: Tensor) -> Tensor:
        """Returns the logits without padding. The final norm and the head compute each position
        independently."""
        state = hidden
        for step in self._steps[self._final_norm :]:
            state = step(state)
        return state[..., : self.vocab_size]

    def next_token_logits(self, texts: Sequence[list[int]]) -> Tensor:
        """Returns the logits of the next token after each text: see `scoring.LanguageModel`."""
        return self._texts.logits(texts)

    @torch.no_grad()
    def _run(self, request: Pass) -> Tensor:
        """Returns the logits [texts, vocab_size] of a pass that uses the cache."""
        request = request.to(next(self.parameters()).device)
        tokens, keeping = request.prepare(self._cache)
        with keeping:
            hidden = self._hidden(tokens)
        return self._head(request.last_of(hidden))[:, 0].float()

    @torch.no_grad()
    def score(self, tokens: Tensor, targets: Tensor, document_ids: Tensor | None = None) -> Scores:
        """Returns the scores of `targets`: see `scoring.LanguageModel`."""
        device = next(self.parameters()).device
        ids = None if document_ids is None else document_ids.to(device)
        hidden = self._hidden(join_layer_io(tokens.to(device), ids))
        return score_in_parts(self._head, hidden, targets.to(device), ONE_RANK.tp, self.vocab_size)


def model_specs(config: Config, vocab_size: int, eod: int | None) -> dict[str, ParameterSpec]:
    """Returns the spec of every parameter, by name. It builds the model on the meta device."""
    with torch.device("meta"):
        model = GPTModel(config, vocab_size, eod)
    return {name: spec_of(parameter) for name, parameter in model.named_parameters()}
