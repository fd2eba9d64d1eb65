"""Texts that are generated with cached keys and values equal the texts of a loop that recomputes the
visible text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.model.inference.generation import Continuation, Sampling, generate
from megatron.model.inference.single_process import GPTModel
from megatron.mpu.parameters import initialize_parameters
from tests.distributed.test_latent_attention import YARN as LATENT
from tests.support.layouts import EOD, VOCAB, Row, config_of

WINDOW = 24
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True}
WINDOWS = {"window_size": 5, "window_pattern": ("W", "F")}
# Name -> (positions, settings of the model, settings of the data).
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "learned positions, norm of the embedding": ("absolute", {"embed_layernorm": True}, {}),
    "learned positions, documents": ("absolute", {}, DOCUMENTS),
    "rotary, groups, norms of heads, windows": (
        "rotary",
        {"num_query_groups": 2, "group_query_attention": True, "qk_layernorm": True, **WINDOWS},
        {},
    ),
    "rotary, positions in documents": ("rotary", {"window_rotary_base": 100.0, **WINDOWS}, DOCUMENTS),
    "rotary, one window": ("rotary", {"window_size": 3}, {"reset_attention_mask": True}),
    "ALiBi, documents": ("alibi", {}, DOCUMENTS),
    "ALiBi, windows, parallel": ("alibi", {"layer_arrangement": "parallel", **WINDOWS}, {}),
    "latent attention, documents": ("rotary", LATENT, DOCUMENTS),
    "rotary, sinks, caps, gate, layers without rotation": (
        "rotary",
        {
            **{"softmax_type": "learnable", "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
            **{"attention_output_gate": True, "no_rope_freq": ("R", "N"), **WINDOWS},
            **{"num_query_groups": 2, "group_query_attention": True},
        },
        DOCUMENTS,
    ),
    "rotary, other heads in windows": (
        "rotary",
        {
            **{**WINDOWS, "num_query_groups": 2, "group_query_attention": True, "v_channels": 6},
            **{"window_num_attention_heads": 6, "window_num_query_groups": 3, "window_kv_channels": 4},
            **{"window_softmax_type": "learnable", "attention_value_scale": 0.5},
        },
        {},
    ),
    "experts": ("rotary", {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}, {}),
}
PROMPTS = [[5, 6, 7], [9, EOD, 8, 7, EOD, 6, 5], [], list(range(1, 30)), [3]]


class Recomputing:
    """The model without a cache: each text is computed alone and completely."""

    def __init__(self, model: GPTModel) -> None:
        self.model = model

    @torch.no_grad()
    def next_token_logits(self, texts: Sequence[list[int]]) -> Tensor:
        return torch.cat([self.model(torch.tensor([text]))[:, -1].float() for text in texts])


def model_of(name: str) -> GPTModel:
    positions, model, data = MODELS[name]
    sizes = {"num_layers": 4, "init_method_std": 0.2, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    config = config_of(Row(positions=positions), model=sizes | model, data=data)
    gpt = GPTModel(config, VOCAB, EOD).eval()
    initialize_parameters(gpt, config.training.seed, ())
    return gpt


def texts_of(model: GPTModel, temperature: float, batch_size: int) -> list[list[int]]:
    """Returns the tokens after each prompt. The texts have different lengths, and exceed the window at least
    twice."""
    texts = [Continuation(str, prompt, 40 + index) for index, prompt in enumerate(PROMPTS)]
    found = generate(
        model, texts, Sampling(temperature), window=WINDOW, eod=EOD, seed=4, batch_size=batch_size
    )
    for _ in found:
        pass
    assert all(text.is_complete for text in texts)
    return [text.tokens for text in texts]


def plain_texts_of(model: GPTModel, temperature: float) -> list[list[int]]:
    """Returns the tokens after each prompt without cache, batches or the generator. Texts are computed one
    after the other. When a text is longer than the window, its first half window is removed."""
    plain, results = Recomputing(model), []
    for index, prompt in enumerate(PROMPTS):
        visible, tokens = list(prompt or [EOD]), list[int]()
        random = torch.Generator().manual_seed(4)
        while len(tokens) < 40 + index:
            while len(visible) > WINDOW:
                del visible[: WINDOW // 2]
            token = Sampling(temperature).draw(plain.next_token_logits([visible])[0], random)
            if token == EOD:
                break
            tokens.append(token)
            visible.append(token)
        results.append(tokens)
    return results


@pytest.mark.parametrize("name", MODELS)
def test_texts_in_batches_are_those_of_a_plain_loop(name: str) -> None:
    model = model_of(name)
    for temperature in (0.0, 1.5):
        expected = plain_texts_of(model, temperature)
        assert (
            max(map(len, expected)) > 1.5 * WINDOW and len({token for text in expected for token in text}) > 4
        )
        for batch_size in (1, 3):
            assert texts_of(model, temperature, batch_size) == expected


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_growing_texts(name: str, dtype: torch.dtype) -> None:
    """Texts grow, end, begin and move in the batch. Between these steps the model scores different texts."""
    model = model_of(name).to(dtype)
    plain, generator = Recomputing(model), torch.Generator().manual_seed(1)
    texts = [[4, 3], [EOD, 1, 2, 9, 9, 8], [7]]
    bound = 1e-5 if dtype == torch.float32 else 6e-2
    computed = []
    embedding = model.tied_modules["embed"].word_embeddings
    embedding.register_forward_hook(lambda _, arguments, __: computed.append(arguments[0].shape))
    for step in range(14):
        expected = plain.next_token_logits(texts)
        computed.clear()
        found = model.next_token_logits(texts)
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound * expected.abs().max().item())
        if step in (1, 2, 3, 8, 13):
            assert computed == [(len(texts), 1)]
        tokens = torch.randint(VOCAB, (len(texts),), generator=generator).tolist()
        texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
        model.score(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]]))
        if step == 3:
            texts[0] = [6, 5, 4]
        elif step == 5:
            texts = [*texts[2:], texts[1]]
        elif step == 9:
            texts += [[1, EOD, 2, 3]]
