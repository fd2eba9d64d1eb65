"""A real corpus, made once: the standard library's sources, a byte-level BPE trained on them, token files."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

from tests.end_to_end.command import ROOT

NUM_FILES = 30
VOCAB_SIZE = 600


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slice",
        metavar="K/N",
        help="of the tests that are selected only every Nth, from the Kth on, in an order by hash",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps one slice of the tests. Any N slices K = 0 .. N - 1 together are all tests, and a test's slice
    does not depend on which others there are."""
    if config.option.slice is None:
        return
    wanted, count = map(int, config.option.slice.split("/"))
    chosen = {item for item in items if zlib.crc32(item.nodeid.encode()) % count == wanted % count}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with vocab.json, merges.txt and text_text_document.bin and .idx.

    Documents are the paragraphs of the files, so that most samples hold the end of one.
    """
    folder = tmp_path_factory.mktemp("corpus")
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:NUM_FILES]
    texts = [source.read_text(encoding="utf-8") for source in sources]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, vocab_size=VOCAB_SIZE, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.save_model(str(folder))
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n\n") if paragraph.strip()]
    lines = [json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs]
    (folder / "text.jsonl").write_text("".join(lines))
    subprocess.run(
        [sys.executable, "tools/preprocess_data.py", "--input", folder / "text.jsonl", "--append-eod"]
        + ["--output-prefix", folder / "text", "--workers", "2"]
        + ["--vocab-file", folder / "vocab.json", "--merge-file", folder / "merges.txt"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder


@pytest.fixture(scope="session")
def data(corpus: Path) -> list[str]:
    """The flags that name the corpus."""
    return [
        *("--data-path", str(corpus / "text_text_document"), "--split", "900,50,50"),
        *("--tokenizer-type", "GPT2BPETokenizer"),
        *("--vocab-file", str(corpus / "vocab.json"), "--merge-file", str(corpus / "merges.txt")),
    ]
