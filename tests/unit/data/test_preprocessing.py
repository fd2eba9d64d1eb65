"""Tests preprocessing: the functions, and tools/preprocess_data.py as a command."""

from __future__ import annotations

import errno
import fcntl
import gzip
import io
import json
import multiprocessing
import os
import random
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron import files
from megatron.commands import preprocess_data
from megatron.data import dataset_builder, preprocessing, text_files
from megatron.data.dataset_builder import IndexedDatasetBuilder
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.preprocessing import Progress, preprocess
from megatron.data.text_files import LineBatch
from megatron.errors import UserError
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.flags import tokenizer_settings
from tests.support import HANG_TIMEOUT_S
from tests.unit.tokenizer.vocabularies import TEXT, tokenizer_flags, train_gpt2_vocabulary

REPOSITORY = Path(__file__).parents[3]
RECORDS = [{"text": f"{i}: {TEXT[i % 4]}", "title": f"title {i}"} for i in range(300)]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Any:
    vocab, merges = train_gpt2_vocabulary(tmp_path_factory.mktemp("gpt2"))
    return tokenizer_flags(vocab_file=vocab, merge_file=merges)


@pytest.fixture
def jsonl(tmp_path: Path) -> str:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return str(path)


def documents(prefix: Path | str) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset[i].tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("append_eod", [False, True])
def test_documents_are_the_tokenized_texts_in_order(
    jsonl: str, tmp_path: Path, flags: Any, append_eod: bool
) -> None:
    progress = preprocess([jsonl], str(tmp_path / "out"), ["text"], flags, append_eod=append_eod)
    tokenizer = build_tokenizer(flags)
    end = [tokenizer.eod] if append_eod else []
    expected = [tokenizer.tokenize(record["text"]) + end for record in RECORDS]
    assert documents(tmp_path / "out_text_document") == expected
    assert IndexedDataset(tmp_path / "out_text_document").dtype == np.uint16
    assert progress.documents == {"text": 300}
    assert progress.tokens == {"text": sum(map(len, expected))}
    assert (progress.lines, progress.input_bytes) == (300, os.path.getsize(jsonl))
    endings = ("bin", "idx", "tokenizer.json")
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", *(f"out_text_document.{end}" for end in endings)]


def test_the_files_do_not_depend_on_workers_and_batch_size(
    jsonl: str, tmp_path: Path, flags: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocess([jsonl, jsonl], str(tmp_path / "one"), ["text"], flags)
    monkeypatch.setattr(text_files, "BATCH_LINES", 7)
    preprocess([jsonl, jsonl], str(tmp_path / "two"), ["text"], flags, workers=2)
    for ending in ("bin", "idx"):
        one, two = (tmp_path / f"{name}_text_document.{ending}" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
    assert len(IndexedDataset(tmp_path / "two_text_document")) == 600


def test_each_json_key_gives_a_pair_of_files(jsonl: str, tmp_path: Path, flags: Any) -> None:
    preprocess([jsonl], str(tmp_path / "out"), ["text", "title"], flags)
    tokenizer = build_tokenizer(flags)
    assert documents(tmp_path / "out_title_document") == [tokenizer.tokenize(r["title"]) for r in RECORDS]
    assert documents(tmp_path / "out_text_document") == [tokenizer.tokenize(r["text"]) for r in RECORDS]


def test_gz_files_are_read_and_blank_lines_and_empty_documents_dropped(tmp_path: Path, flags: Any) -> None:
    lines = ['{"text": "one"}', "", '{"text": ""}', "  ", '{"text": "two"}']
    with gzip.open(tmp_path / "in.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))  # without a newline at the end
    progress = preprocess(
        [str(tmp_path / "in.jsonl.gz")], str(tmp_path / "out"), ["text"], flags, append_eod=True
    )
    tokenizer = build_tokenizer(flags)
    expected = [tokenizer.tokenize(text) + [tokenizer.eod] for text in ("one", "two")]
    assert documents(tmp_path / "out_text_document") == expected
    assert progress.skipped == []
    assert progress.empty_documents == {"text": 1}


BAD_LINES = [
    (b'{"text": "a"', "not valid JSON"),
    (b"[1]", "expected a JSON object, got list"),
    (b'{"title": "a", "id": 3}', "has no key 'text', its keys are 'title', 'id'"),
    (b'{"text": 3}', "expected text under 'text', got 3"),
    (b'{"text": null}', "expected text under 'text', got None"),
    (b'{"text": "\xff"}', "not UTF-8"),
    (b'{"text": "\\ud800"}', "unpaired surrogate"),
]


@pytest.mark.parametrize("line, reason", BAD_LINES)
def test_a_bad_line_is_named_and_nothing_is_written(
    tmp_path: Path, flags: Any, line: bytes, reason: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=rf"{path}, line 3: .*{reason}.*--skip-bad-lines"):
        preprocess([str(path)], str(tmp_path / "out"), ["text"], flags)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_bad_lines_can_be_skipped_and_are_counted(tmp_path: Path, flags: Any) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join([*(line for line, _ in BAD_LINES), b'{"text": "good"}']))
    progress = preprocess([str(path)], str(tmp_path / "out"), ["text"], flags, skip_bad_lines=True)
    assert [bad.line for bad in progress.skipped] == list(range(1, len(BAD_LINES) + 1))
    assert progress.lines == len(BAD_LINES) + 1
    assert documents(tmp_path / "out_text_document") == [build_tokenizer(flags).tokenize("good")]


LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)
COMPRESSED = gzip.compress(LINES.encode())


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("in.jsonl.gz", LINES.encode(), r"not a .gz file, it begins with b'\{\"te'"),
        ("in.jsonl", gzip.compress(LINES.encode()), "it is a .gz file; add .gz"),
        ("in.jsonl", LINES.encode("utf-16"), "UTF-16"),
        ("in.jsonl", LINES.encode("utf-16-be"), "UTF-16"),
        ("in.jsonl", LINES.encode("utf-32-le"), "UTF-16 or UTF-32"),
        ("in.jsonl.gz", gzip.compress(LINES.encode("utf-16-le")), "UTF-16"),
        ("in.jsonl.gz", COMPRESSED[: len(COMPRESSED) // 2], r"cannot read line \d+"),
    ],
)
def test_an_input_of_another_format_or_a_truncated_one_is_named(
    tmp_path: Path, flags: Any, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"--input {tmp_path / name}: .*{reason}"):
        preprocess([str(tmp_path / name)], str(tmp_path / "out"), ["text"], flags)
    assert os.listdir(tmp_path) == [name]


def test_utf_8_with_a_byte_order_mark_is_read(tmp_path: Path, flags: Any) -> None:
    (tmp_path / "in.jsonl").write_bytes('{"text": "one"}\n'.encode("utf-8-sig"))
    progress = preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), ["text"], flags)
    assert progress.documents == {"text": 1}


class FullDisk(io.FileIO):
    """A file that accepts no more than `free` bytes."""

    free = 0

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.free:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize(("full", "free"), [("bin", 0), ("bin", 100), ("idx", 0)])
def test_a_full_disk_is_one_sentence_that_names_the_file(
    jsonl: str, tmp_path: Path, flags: Any, monkeypatch: pytest.MonkeyPatch, full: str, free: int
) -> None:
    def open_on_full_disk(path: Any, mode: str = "r", **arguments: Any) -> Any:
        if f".{full}." not in str(path) or "b" not in mode or "r" in mode:
            return open(path, mode, **arguments)
        file = FullDisk(path, mode.replace("b", ""))
        file.free = free
        return io.BufferedWriter(file)

    for module in (dataset_builder, files):
        monkeypatch.setattr(module, "open", open_on_full_disk, raising=False)
    expected = rf"cannot write {tmp_path}/out_text_document.{full}: No space left on device: free"
    with pytest.raises(UserError, match=expected):
        preprocess([jsonl], str(tmp_path / "out"), ["text"], flags)
    assert os.listdir(tmp_path) == [Path(jsonl).name]


def test_a_disk_that_is_full_for_the_vocabulary_record_is_named(
    jsonl: str, tmp_path: Path, flags: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(preprocessing, "write_record", fail)
    with pytest.raises(UserError, match=r"out_text_document.tokenizer.json: No space left on device"):
        preprocess([jsonl], str(tmp_path / "out"), ["text"], flags)


@pytest.mark.parametrize(
    ("line", "skips", "reason"),
    [
        ('{"text": ""}', False, "no line has text under the JSON key 'text'"),
        ('{"text": ""}', True, "no line has text under the JSON key 'text'"),
        ('{"content": "a"}', False, "line 1: has no key 'text'.*--json-keys"),
        ('{"content": "a"}', True, "1 lines skipped: .*line 1: has no key 'text'.*--json-keys"),
    ],
)
def test_input_without_text_is_refused(
    tmp_path: Path, flags: Any, line: str, skips: bool, reason: str
) -> None:
    (tmp_path / "in.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=reason):
        preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), ["text"], flags, skip_bad_lines=skips)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "tools" / "preprocess_data.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_tool_writes_what_training_reads(jsonl: str, tmp_path: Path, flags: Any) -> None:
    prefix = str(tmp_path / "out")
    done = run_tool(
        "--input", jsonl, "--output-prefix", prefix, "--tokenizer-type", "GPT2BPETokenizer",
        "--vocab-file", flags.vocab_file, "--merge-file", flags.merge_file, "--append-eod", "--workers", "2",
        "--dataset-impl", "mmap", "--log-interval", "100",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("processed 300 documents, ") and "MB/s" in lines[0] and "docs/s" in lines[0]
    assert lines[1].startswith(f"{prefix}_text_document: 300 documents, ")
    tokenizer = build_tokenizer(flags)
    expected = [[*tokenizer.tokenize(record["text"]), tokenizer.eod] for record in RECORDS]
    assert documents(prefix + "_text_document") == expected


def test_the_tool_counts_what_it_leaves_out(tmp_path: Path, flags: Any, capsys: Any) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n{"text": ""}\n{"text": ""}\n[]\n')
    arguments = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out")]
    arguments += ["--vocab-file", flags.vocab_file, "--merge-file", flags.merge_file, "--skip-bad-lines"]
    preprocess_data.main(arguments)
    printed = capsys.readouterr()
    assert "skipped 1 of 4 lines" in printed.err and "dropped 2 documents" in printed.err
    assert "1 documents" in printed.out


@pytest.mark.gate(rows=0, also=["group-2", "main-9"])  # a signal that is handled, and one that is not
@pytest.mark.parametrize("target, number", [("main", 15), ("group", 15), ("group", 2), ("main", 9)])
def test_a_signal_ends_the_tool_with_its_workers(
    target: str, number: int, jsonl: str, tmp_path: Path, flags: Any
) -> None:
    """Temporary files remain only after SIGKILL, which no program can handle."""
    folder = tmp_path / "out"
    folder.mkdir()
    command = [sys.executable, REPOSITORY / "tools/preprocess_data.py", "--input", *[jsonl] * 2000]
    command += ["--output-prefix", folder / "x", "--vocab-file", flags.vocab_file]
    command += ["--merge-file", flags.merge_file, "--workers", "2", "--log-interval", "1000"]
    tool = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert tool.stdout is not None and "processed" in tool.stdout.readline()
    assert list(folder.glob("*.tmp"))
    os.kill(tool.pid, number) if target == "main" else os.killpg(tool.pid, number)
    output, errors = tool.communicate(timeout=HANG_TIMEOUT_S)
    assert tool.returncode == (-9 if number == 9 else 128 + number)
    if number != 9:
        assert not os.listdir(folder) and errors == "interrupted\n"
    else:  # the next run removes the temporary files, but not an active run's
        with IndexedDatasetBuilder(folder / "x_text_document", np.uint16):
            with IndexedDatasetBuilder(folder / "x_text_document", np.uint16):
                assert len(list(folder.glob("*.tmp"))) == 4
    deadline = time.monotonic() + HANG_TIMEOUT_S
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:  # until the last process of the group has ended
            os.killpg(tool.pid, 0)
            time.sleep(0.05)


def test_a_worker_that_is_killed_at_any_time_ends_the_run(jsonl: str, tmp_path: Path, flags: Any) -> None:
    """The worker may be killed even while it sends a result and a second worker lives."""
    times = random.Random(4)
    killed: list[Any] = []
    timers: list[threading.Timer] = []
    half = 1000 * len(Path(jsonl).read_bytes().splitlines())
    others = set(multiprocessing.active_children())  # the pool of `run_world`, which later tests need

    def workers() -> list[Any]:
        return [child for child in multiprocessing.active_children() if child not in others]

    def kill_one(progress: Progress) -> None:
        if not killed:
            killed.append(times.choice(workers()))
            timers.append(threading.Timer(times.uniform(0.0, 0.2), killed[0].kill))
            timers[-1].start()
        elif progress.lines >= half:
            timers[-1].join()  # the run cannot end before

    for _ in range(3):
        with pytest.raises(UserError, match="--workers: a worker process died"):
            preprocess([jsonl] * 2000, str(tmp_path / "out"), ["text"], flags, workers=2, report=kill_one)
        assert killed.pop().exitcode == -9
        assert os.listdir(tmp_path) == ["in.jsonl"] and not workers()


def test_a_worker_that_is_killed_while_it_sends_a_result_is_noticed(jsonl: str, flags: Any) -> None:
    worker = preprocessing._Worker(tokenizer_settings(flags), (("text",), False, "words"))
    pipe = worker._pipe

    def kill_and_receive() -> Any:
        assert pipe.poll(HANG_TIMEOUT_S)  # the worker has begun, and waits for space in the pipe
        worker.kill()
        return pipe.recv()

    sends = {"send": pipe.send, "send_bytes": pipe.send_bytes}
    worker._pipe = SimpleNamespace(**sends, recv=kill_and_receive)  # type: ignore[assignment]
    with pytest.raises(UserError, match="--workers: a worker process died"):
        worker.encode(LineBatch(jsonl, 1, Path(jsonl).read_bytes().splitlines() * 100))


def test_on_a_terminal_a_bar_shows_the_speed(jsonl: str, tmp_path: Path, flags: Any) -> None:
    terminal, other_end = os.openpty()
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))  # 24 lines of 100 columns
    command = [sys.executable, str(REPOSITORY / "tools" / "preprocess_data.py"), "--input", jsonl]
    command += ["--output-prefix", str(tmp_path / "out")]
    command += ["--vocab-file", flags.vocab_file, "--merge-file", flags.merge_file]
    with subprocess.Popen(command, stdout=other_end, stderr=subprocess.DEVNULL) as tool:
        os.close(other_end)
        shown = b""
        try:
            while part := os.read(terminal, 1 << 16):
                shown += part
        except OSError:  # how Linux says that the other end was closed
            pass
    os.close(terminal)
    assert tool.returncode == 0
    bar = next(part for part in reversed(shown.decode().split("\r")) if part.startswith("tokenizing"))
    size_kb = os.path.getsize(jsonl) / 1000
    assert bar.startswith("tokenizing: |") and f"{size_kb:.1f}k/{size_kb:.1f}k" in bar
    assert "MB/s" in bar and "docs/s" in bar


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"--input": "/nowhere.jsonl"}, "--input /nowhere.jsonl: the file does not exist"),
        ({"--output-prefix": "/nowhere/out"}, "the folder /nowhere does not exist"),
        ({"--vocab-file": "/nowhere.json"}, "--vocab-file /nowhere.json: the file does not exist"),
        ({"--workers": "0"}, "--workers is 0: expected at least 1"),
        ({"--workers": "many"}, "--workers"),
        ({"--dataset-impl": "lazy"}, "--dataset-impl"),
        ({"--json-keys": "body"}, "line 1: has no key 'body'"),
        ({"--inputs": "x"}, "--inputs"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    jsonl: str, tmp_path: Path, flags: Any, change: dict[str, str], expected: str
) -> None:
    given = {
        "--input": jsonl,
        "--output-prefix": str(tmp_path / "out"),
        "--vocab-file": flags.vocab_file,
        "--merge-file": flags.merge_file,
    } | change
    done = run_tool(*(word for pair in given.items() for word in pair))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and expected in done.stderr
    assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["in.jsonl"]
