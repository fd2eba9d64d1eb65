"""Small tokenizers, trained by the tests."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind: it's lazy.",
    "def train(model, data):\n    for batch in data:\n        model.step(batch)\n",
    "Numbers such as 1, 12, 123 and 1234 stand beside words; so do $prices and user@example.org.",
    "Grüße aus München, на здоровье, 日本語のテキスト und ein paar Emoji 🙂🚀.",
] * 4


def tokenizer_flags(**given: str | None) -> Namespace:
    """Returns the parsed tokenizer flags of a tool. Flags that are not given are None."""
    names = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_name_or_path", "tokenizer_model")
    return Namespace(**{name: given.get(name) for name in names})


def train_gpt2_vocabulary(folder: Path, vocab_size: int = 400) -> tuple[str, str]:
    """Writes vocab.json and merges.txt of a byte-level BPE to `folder`. Returns their paths."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        TEXT, vocab_size=vocab_size, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.save_model(str(folder))
    return str(folder / "vocab.json"), str(folder / "merges.txt")
