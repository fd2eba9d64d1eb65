"""tools/generate.py on checkpoints of several layouts and models, against a GPT in plain PyTorch."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.reading import read_checkpoint
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
from tests.end_to_end.command import pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL, NO_DROPOUT, SHORT
from tests.reference.plain_gpt import plain_gpt_logits
from tools import generate

LAYERS, HEADS, SEQ = 4, 4, 32  # as in MODEL
NEW_TOKENS = 40  # more than the sequence holds: the window slides
PROMPT = "def main(argv):\n    for argument in"
# Weights that are cut along their columns over tensor ranks, and those that every rank holds whole.
CUT_BY_COLUMN = ("dense.weight", "dense_4h_to_h.weight")
REPLICATED = ("norm", "position_embeddings", "dense.bias", "dense_4h_to_h.bias", f"{LAYERS + 4}.")


@dataclass(frozen=True)
class Variant:
    """A trained run, and how the plain GPT has to be told of its model."""

    processes: int
    flags: str
    plain: dict[str, object]


VARIANTS = {
    "absolute positions, PP 2": Variant(
        2, f"--pipeline-model-parallel-size 2 {' '.join(ABSOLUTE)}", {"positions": "absolute"}
    ),
    "alibi, norm after the embedding, gated MLP, bf16, TP 2": Variant(
        2,
        "--tensor-model-parallel-size 2 --position-embedding-type alibi --embed-layernorm "
        "--glu-activation swiglu --bf16",
        {"positions": "alibi", "embed_norm": True, "glu": "swiglu"},
    ),
    "rotary, fp16, one process": Variant(
        0, "--position-embedding-type rotary --fp16 --initial-loss-scale 1024", {"positions": "rotary"}
    ),
}


@dataclass(frozen=True)
class Trained:
    """Folder with `latest`, the variant's description, the tokenizer."""

    folder: Path
    plain: dict[str, object]
    tokenizer: GPT2BPETokenizer

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole fp32 weights, put together from DeepSpeed's files without the help of the package."""
        shards = defaultdict(list)
        for path in sorted((self.folder / "global_step5").glob("layer_*-model_*-model_states.pt")):
            layer = int(path.name[6:8])
            prefix = "tied_modules.embed." if layer == 1 else f"{layer}."
            for name, shard in torch.load(path, weights_only=True).items():
                shards[prefix + name].append(shard.float())
        return {name: self._whole(name, parts) for name, parts in shards.items()}

    def _whole(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        if len(parts) == 1 or any(word in name for word in REPLICATED):
            return parts[0]
        if name.endswith(CUT_BY_COLUMN):
            return torch.cat(parts, dim=1)
        if "dense_h_to_4h" in name and "glu" in self.plain:
            halves = [part.chunk(2) for part in parts]
            return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
        return torch.cat(parts)

    def greedy_tokens(self, prompt: str) -> list[int]:
        """What the plain GPT finds likeliest, token by token."""
        weights, size = self.weights(), self.tokenizer.vocab_size
        tokens = self.tokenizer.tokenize(prompt)
        start = len(tokens)
        for _ in range(NEW_TOKENS):
            context = torch.tensor([tokens[-SEQ:]])
            logits = plain_gpt_logits(weights, context, layers=LAYERS, heads=HEADS, vocab=size, **self.plain)[
                0, -1
            ]
            if int(logits.argmax()) == self.tokenizer.eod:
                break
            tokens.append(int(logits.argmax()))
        return tokens[start:]


@pytest.fixture(scope="module")
def train(
    corpus: Path, data: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Trained]:
    """Trains a variant for five steps; each only once."""

    @cache
    def train_once(name: str) -> Trained:
        variant, folder = VARIANTS[name], tmp_path_factory.mktemp("trained")
        flags = [*MODEL, *variant.flags.split(), *NO_DROPOUT, *SHORT, *data, "--save", str(folder)]
        run = pretrain(flags, processes=variant.processes)
        assert run.exit_code == 0, run.stderr
        tokenizer = GPT2BPETokenizer(str(corpus / "vocab.json"), str(corpus / "merges.txt"))
        return Trained(folder, variant.plain, tokenizer)

    return train_once


@pytest.fixture
def trained(train: Callable[[str], Trained]) -> Trained:
    """One of them, where any will do."""
    return train(next(iter(VARIANTS)))


def output(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    generate.main(list(flags))
    return capsys.readouterr().out


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_text_is_the_argmax_of_a_plain_gpt(
    name: str, train: Callable[[str], Trained], capsys: pytest.CaptureFixture[str]
) -> None:
    trained = train(name)
    printed = output(
        capsys, "--load", str(trained.folder), "--prompt", PROMPT, "--greedy", "--max-new-tokens", "40"
    )
    expected = trained.greedy_tokens(PROMPT)
    assert len(set(expected)) > 1 or len(expected) == NEW_TOKENS
    assert printed == PROMPT + trained.tokenizer.detokenize(expected) + "\n"


def test_padding_is_never_drawn(trained: Trained) -> None:
    checkpoint = read_checkpoint(str(trained.folder))
    model = generate.load_model(checkpoint)
    table = model.tied_modules["embed"].word_embeddings.weight
    assert table.shape[0] > checkpoint.vocab_size
    with torch.no_grad():
        table[checkpoint.vocab_size :] = 100 * table.abs().max()
    assert model(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, checkpoint.vocab_size)

    from megatron.model.generation import Sampling
    from megatron.model.generation import generate as tokens_after

    tokens = list(
        tokens_after(model, [5], 200, Sampling(temperature=50.0), window=SEQ, eod=checkpoint.eod, seed=3)
    )
    assert len(set(tokens)) > 10
    assert max(tokens) < checkpoint.vocab_size


def test_the_logits_of_the_last_position_are_those_of_the_whole(trained: Trained) -> None:
    model = generate.load_model(read_checkpoint(str(trained.folder)))
    tokens = torch.arange(20).unsqueeze(0)
    whole = model(tokens)[0, -1]
    assert torch.allclose(model.next_token_logits(tokens[0]), whole, rtol=1e-5, atol=1e-6)


def test_a_sample_is_the_same_for_the_same_seed_and_another_for_another(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--load", str(trained.folder / "global_step5"), "--prompt", PROMPT, "--seed"]
    first, again, other = (output(capsys, *flags, seed) for seed in ("1", "1", "2"))
    assert first == again != other
    assert first.startswith(PROMPT)


def test_several_prompts_do_not_influence_each_other(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--load", str(trained.folder), "--max-new-tokens", "10", "--top-k", "20", "--top-p", "0.9"]
    alone = [output(capsys, *flags, "--prompt", prompt) for prompt in ("class A", "import os")]
    rule = "-" * 40 + "\n"
    both = output(capsys, *flags, "--prompt", "class A", "--prompt", "import os")
    assert both == alone[0] + rule + alone[1]


def test_a_prompt_comes_from_stdin(
    trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--load", str(trained.folder), "--greedy", "--max-new-tokens", "5"]
    monkeypatch.setattr("sys.stdin", io.StringIO("import os\n"))
    assert output(capsys, *flags) == output(capsys, *flags, "--prompt", "import os")


def test_a_tokenizer_that_was_moved_is_named_by_flags(
    trained: Trained, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((corpus / name).read_bytes())
    flags = ["--load", str(trained.folder), "--greedy", "--max-new-tokens", "5", "--prompt", "x"]
    moved = ["--vocab-file", str(tmp_path / "vocab.json"), "--merge-file", str(tmp_path / "merges.txt")]
    assert output(capsys, *flags, *moved) == output(capsys, *flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--load", "/no/such/folder"], ["/no/such/folder", "no such folder"]),
        (["--load", "."], ["there is no checkpoint", "latest"]),
        (["--load", ".", "--top-k", "-1"], ["--top-k is -1"]),
        (["--load", ".", "--max-new-tokens", "0"], ["--max-new-tokens is 0"]),
        (["--load", ".", "--seed", "-1"], ["--seed is -1"]),
        (["--load", ".", "--temprature", "1"], ["--temprature"]),
        ([], ["--load"]),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(
    flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        generate.main([*flags, "--prompt", "x"])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert all(word in printed.err for word in words)


def test_another_tokenizer_is_refused(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.unit.tokenizer.vocabularies import train_gpt2_vocabulary

    vocab, merges = train_gpt2_vocabulary(tmp_path)
    with pytest.raises(SystemExit) as caught:
        generate.main(
            ["--load", str(trained.folder), "--prompt", "x", "--vocab-file", vocab, "--merge-file", merges]
        )
    assert caught.value.code == 2
    assert f"was trained with {trained.tokenizer.vocab_size} tokens" in capsys.readouterr().err
