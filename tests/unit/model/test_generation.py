"""Sampling of the next token, and the generation loop, against numbers worked out by hand."""

import pytest
import torch

from megatron.errors import UserError
from megatron.model.generation import Sampling, generate

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])
EOD = 0


def frequencies(sampling, draws=4000):
    generator = torch.Generator().manual_seed(5)
    tokens = [sampling.draw(LOGITS, generator) for _ in range(draws)]
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / draws


class Counting:
    """A fake model: it predicts t + 1 after a context that ends in t, and records the contexts."""

    def __init__(self):
        self.contexts = []

    def parameters(self):
        yield torch.zeros(1)

    def next_token_logits(self, tokens):
        self.contexts.append(tokens.tolist())
        return torch.nn.functional.one_hot((tokens[-1] + 1) % 10, 10).float()


def run(prompt, max_new_tokens, window=4):
    model = Counting()
    tokens = generate(model, prompt, max_new_tokens, Sampling(0.0), window=window, eod=EOD, seed=0)
    return list(tokens), model.contexts


def test_temperature_zero_takes_the_likeliest():
    assert Sampling(temperature=0.0).draw(LOGITS, torch.Generator()) == 1


def test_draws_follow_the_tempered_distribution():
    expected = torch.exp(LOGITS / 2) / torch.exp(LOGITS / 2).sum()
    assert torch.allclose(frequencies(Sampling(temperature=2.0)), expected, atol=0.03)


def test_top_k_draws_from_the_k_likeliest_in_their_proportions():
    kept = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]) * torch.exp(LOGITS)
    assert torch.allclose(frequencies(Sampling(top_k=2)), kept / kept.sum(), atol=0.03)


def test_top_p_draws_from_the_fewest_tokens_that_have_the_probability():
    # The probabilities are 0.64 and 0.23 for tokens 1 and 3: 0.7 needs both tokens, 0.6 only the first.
    kept = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]) * torch.exp(LOGITS)
    assert torch.allclose(frequencies(Sampling(top_p=0.7)), kept / kept.sum(), atol=0.03)
    assert frequencies(Sampling(top_p=0.6), draws=50)[1] == 1.0
    assert frequencies(Sampling(top_p=1e-9), draws=50)[1] == 1.0


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": 1e-300}, "--temperature 1e-300"),
        ({"top_k": -1}, "--top-k"),
        ({"top_p": 0.0}, "--top-p"),
    ]
    + [({"top_p": 1.5}, "--top-p"), ({"temperature": float("nan")}, "--temperature")],
)
def test_settings_that_make_no_sense_are_refused(settings, flag):
    with pytest.raises(UserError, match=flag):
        Sampling(**settings)


def test_the_model_sees_the_last_tokens_that_fit_its_window():
    tokens, contexts = run([1, 2], 4)
    assert tokens == [3, 4, 5, 6]
    assert contexts == [[1, 2], [1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]


def test_the_end_of_the_document_ends_the_text():
    assert run([7], 10)[0] == [8, 9]


def test_an_empty_prompt_is_the_start_of_a_document():
    assert run([], 2) == ([1, 2], [[EOD], [EOD, 1]])
