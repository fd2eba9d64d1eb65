"""A real corpus, made once: the standard library's sources, a byte-level BPE trained on them, and token
files."""

from __future__ import annotations

import enum
import gc
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import types
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

import tests.environment  # noqa: F401
from tests.end_to_end.command import ROOT
from tests.support.object_store import Bucket, ObjectStoreServer, serve_objects
from tests.support.process_state import process_state

NUM_FILES = 30
VOCAB_SIZE = 600

_FIRST_START = pytest.StashKey[float]()


def pytest_configure() -> None:
    """Makes processes that tests start independent of this pytest's ignored signals and of its options."""
    # Signals are ignored under nohup and in the background.
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    # A pytest that a test runs in a different folder does not know the options of this conftest.
    os.environ.pop("PYTEST_ADDOPTS", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slice",
        metavar="K/N",
        help="run only the tests of slice K out of N, by a hash of their names",
    )
    parser.addoption(
        "--start-within",
        metavar="SECONDS",
        type=float,
        default=float("inf"),
        help="skip the tests that have not started this long after the first one, each with its name",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_FIRST_START] = time.monotonic()


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.option.start_within
    if time.monotonic() - item.config.stash[_FIRST_START] > limit:
        pytest.skip(f"not run: --start-within={limit:g} seconds are over")


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marks that are added here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the rows outside the gate, then keeps one slice of the tests.

    The N slices K = 0 .. N - 1 together are all tests. The slice of a test does not depend on other tests.
    """
    rows_left_out = any("[" in argument for argument in config.args) or config.getoption("lf", False)
    _mark_rows_outside_the_gate(items, has_all_rows=not rows_left_out)
    if config.option.start_within < float("inf"):
        # Tests that start processes come last, so that --start-within skips them, and not the many tests of
        # single parts.
        items.sort(key=lambda item: "unit" not in item.path.relative_to(ROOT).parts)
    if config.option.slice is None:
        return
    wanted, count = map(int, config.option.slice.split("/"))
    chosen = {item for item in items if zlib.crc32(item.nodeid.encode()) % count == wanted % count}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_collection_finish() -> None:
    # Modules and tests are never garbage: a collection would look at each of their objects.
    gc.freeze()


def _mark_rows_outside_the_gate(items: list[pytest.Item], has_all_rows: bool) -> None:
    """Marks as `full` the rows of a test with `gate(rows=N)` that are outside the gate.

    N evenly spaced parameter rows stay in the gate, including the first and the last row. With two
    parameters, a step of N / count would always find one value of one parameter. Rows with an id in
    `gate(also=[...])` stay, too.

    has_all_rows: whether `items` has all rows of each test. Then an id in `also` that no row has is an error:
    after a change of the rows, the test could otherwise leave the gate without notice.
    """
    rows = defaultdict(list)
    for item in items:
        if item.get_closest_marker("gate") is not None:
            rows[item.nodeid.partition("[")[0]].append(item)
    for all_rows in rows.values():
        mark = all_rows[0].get_closest_marker("gate").kwargs
        count, also = mark["rows"], mark.get("also", ())
        kept = {index * (len(all_rows) - 1) // max(count - 1, 1) for index in range(count)}
        names = [item.nodeid.partition("[")[2][:-1] for item in all_rows]
        if has_all_rows and (unknown := set(also) - set(names)):
            raise pytest.UsageError(f"{all_rows[0].nodeid}: gate(also=...) names no row: {sorted(unknown)}")
        for index, (item, name) in enumerate(zip(all_rows, names, strict=True)):
            if index not in kept and name not in also:
                item.add_marker(pytest.mark.full)


@pytest.fixture(autouse=True)
def _process_is_left_as_it_was() -> Iterator[None]:
    """Fails a test that changes the state of its process. Otherwise a later test would fail, and only if one
    process runs both tests in this order. The environment is restored, since programs and libraries that a
    test calls set variables."""
    environment, before = dict(os.environ), process_state()
    yield
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    after = process_state()
    changes = {part: (before[part], after[part]) for part in before if before[part] != after[part]}
    assert not changes, "the test has changed the state of its process: (before, after)"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with vocab.json, merges.txt and text_text_document.bin and .idx.

    Documents are the paragraphs of the files, so that most samples contain the end of a document.
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
    """Returns the flags that name the corpus."""
    return [
        *("--data-path", str(corpus / "text_text_document"), "--split", "900,50,50"),
        *("--tokenizer-type", "GPT2BPETokenizer"),
        *("--vocab-file", str(corpus / "vocab.json"), "--merge-file", str(corpus / "merges.txt")),
    ]


@pytest.fixture
def their_positions() -> Iterator[type[enum.Enum]]:
    """Yields BigScience's enumeration of position embeddings, in a module that is not installed here."""
    module = types.ModuleType("megatron.enums")
    kind = enum.Enum(
        "PositionEmbeddingType", {"rotary": 1, "absolute": 2, "alibi": 3}, module="megatron.enums"
    )
    module.PositionEmbeddingType = kind  # type: ignore[attr-defined]
    sys.modules["megatron.enums"] = module
    yield kind
    del sys.modules["megatron.enums"]


@pytest.fixture(scope="session")
def object_store_server() -> Iterator[ObjectStoreServer]:
    """Runs an object store with the protocol of S3."""
    with serve_objects() as server:
        yield server


@pytest.fixture
def bucket(object_store_server: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Returns an empty bucket. The environment of this process and of its children refers to the bucket's
    server."""
    bucket = object_store_server.new_bucket()
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return bucket
