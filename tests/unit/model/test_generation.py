"""Compares the sampling of the next token, and the generation loop, with values computed by hand."""

import pytest
import torch

from megatron.errors import UserError
from megatron.model.inference.generation import Continuation, Sampling, generate

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])
EOD = 0


def frequencies(sampling, draws=4000):
    generator = torch.Generator().manual_seed(5)
    tokens = [sampling.draw(LOGITS, generator) for _ in range(draws)]
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / draws


class Counting:
    """A fake model: it predicts t + 1 after a context that ends in t, and records the contexts."""

    generation_batch_size = 1

    def __init__(self):
        self.contexts = []

    def next_token_logits(self, texts):
        self.contexts += texts
        following = torch.tensor([(text[-1] + 1) % 10 for text in texts])
        return torch.nn.functional.one_hot(following, 10).float()


def decode(ids):
    """Decodes UTF-8 bytes: token 1 is an `a`, 8 and 9 are the two bytes of a `é`."""
    return bytes({8: 0xC3, 9: 0xA9}.get(token, 96 + token) for token in ids).decode(errors="replace")


def run(prompt, max_new_tokens, window=4):
    model = Counting()
    text = Continuation(decode, prompt, max_new_tokens)
    assert list(generate(model, [text], Sampling(0.0), window=window, eod=EOD, seed=0))
    return text.tokens, model.contexts


def test_temperature_zero_takes_the_likeliest():
    assert Sampling(temperature=0.0).draw(LOGITS, torch.Generator()) == 1


def test_draws_follow_the_tempered_distribution():
    expected = torch.exp(LOGITS / 2) / torch.exp(LOGITS / 2).sum()
    assert torch.allclose(frequencies(Sampling(temperature=2.0)), expected, atol=0.03)


def test_top_k_draws_from_the_k_likeliest_in_their_proportions():
    kept = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]) * torch.exp(LOGITS)
    assert torch.allclose(frequencies(Sampling(top_k=2)), kept / kept.sum(), atol=0.03)


def test_top_p_draws_from_the_fewest_tokens_that_have_the_probability():
    # Tokens 1 and 3 have probabilities 0.64 and 0.23: 0.7 needs both tokens, 0.6 only the first token.
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


def test_the_model_sees_between_half_and_all_of_its_window():
    tokens, contexts = run([1, 2], 6)
    assert tokens == [3, 4, 5, 6, 7, 8]
    assert contexts == [[1, 2], [1, 2, 3], [1, 2, 3, 4], [3, 4, 5], [3, 4, 5, 6], [5, 6, 7]]


@pytest.mark.parametrize("window", [1, 2, 5, 8])
def test_what_the_model_sees_depends_only_on_the_text(window):
    """If a prompt equals a shorter prompt and its continuation, the model sees equal contexts from then
    on."""
    expected = run([1], 8, window)[1]
    assert {len(context) for context in expected} <= set(range(1, window + 1))
    assert all(len(context) > window // 2 for context in expected[window - 1 :])
    for length in range(2, 8):
        assert run(list(range(1, length + 1)), 9 - length, window)[1] == expected[length - 1 :]


def test_the_end_of_the_document_ends_the_text():
    assert run([7], 10)[0] == [8, 9]


def test_texts_of_a_batch_keep_their_places():
    model, prompts = Counting(), [[1], [8], [3], [4, 5]]
    texts = [Continuation(decode, prompt, 3) for prompt in prompts]
    for _ in generate(model, texts, Sampling(0.0), window=9, eod=EOD, seed=0, batch_size=2):
        pass
    assert [text.tokens for text in texts] == [[2, 3, 4], [9], [4, 5, 6], [6, 7, 8]]
    batches = [[[1], [8]], [[1, 2], [8, 9]], [[1, 2, 3], [3]], [[4, 5], [3, 4]], [[4, 5, 6], [3, 4, 5]]]
    assert model.contexts == [text for batch in batches for text in batch] + [[4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("stop", "parts"),
    [
        ((), ["a", "ab", "abc", "abcdefg", "abcdefgé"]),
        (("cd",), ["ab", "ab"]),  # a token for each letter: the `c` is held back
        (("x", "gé", "fgé"), ["abcde", "abcde"]),
        (("cx",), ["ab", "abcd", "abcdefgé"]),
        (("d", "bcd"), ["a", "a"]),
    ],
)
def test_text_up_to_a_stop_string(stop, parts):
    text, found = Continuation(decode, [7], 9, stop, after=[7]), []
    for token in range(1, 10):
        text.append(token)
        found.append(text.text)
        if text.is_complete:
            break
    assert text.is_complete and found[-1] == parts[-1] and set(parts) <= set(found)
    assert all(found[-1].startswith(part) for part in found)  # printed text stays


def test_an_empty_prompt_is_the_start_of_a_document():
    assert run([], 2) == ([1, 2], [[EOD], [EOD, 1]])
