"""Tests which files preprocessing reads and writes: formats, shards, folders of token files,
repeated commands."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from megatron.commands import preprocess_data, verify_dataset
from megatron.config import ConfigError, DataConfig
from megatron.data import text_files
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.splits import verify_token_files
from megatron.data.text_files import files_of_shard, find_files, parse_shard, stem_of
from megatron.errors import UserError
from megatron.object_store.store import ObjectStore
from tests.end_to_end.command import ROOT
from tests.support import HANG_TIMEOUT_S
from tests.support.object_store import Bucket, Exchange, answer, cut_after
from tests.support.preprocessing_kills import kill_shards
from tests.unit.tokenizer.vocabularies import TEXT, tokenizer_flags, train_gpt2_vocabulary

RECORDS = [{"text": f"{i}: {TEXT[i % 4]}", "id": i} for i in range(2000)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    vocab, merges = train_gpt2_vocabulary(tmp_path_factory.mktemp("gpt2"))
    flags = tokenizer_flags(vocab_file=vocab, merge_file=merges)
    return ["--vocab-file", flags.vocab_file, "--merge-file", flags.merge_file]


def lines(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def write_parquet(path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path, row_group_size=700)


FORMATS: dict[str, Callable[[Path], object]] = {
    "jsonl": lambda path: path.write_bytes(lines(RECORDS)),
    "jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(RECORDS))),
    # Two frames, as `cat a.zst b.zst` makes.
    "jsonl.zst": lambda path: path.write_bytes(
        b"".join(
            pyarrow.compress(lines(part), "zstd", asbytes=True) for part in (RECORDS[:900], RECORDS[900:])
        )
    ),
    "parquet": write_parquet,
}


def token_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".idx")}


def test_every_format_gives_the_same_tokens(tmp_path: Path, tokenizer: list[str]) -> None:
    found = []
    for ending, write in FORMATS.items():
        write(tmp_path / f"in.{ending}")
        output = tmp_path / ending / ""
        preprocess_data.main(
            ["--input", str(tmp_path / f"in.{ending}"), "--output-prefix", f"{output}/", *tokenizer]
        )
        found.append(token_bytes(output))
    command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), "--input", "-", *tokenizer]
    command += ["--output-prefix", str(tmp_path / "in")]
    subprocess.run(command, input=lines(RECORDS), check=True, capture_output=True, timeout=HANG_TIMEOUT_S)
    found.append({name: (tmp_path / name).read_bytes() for name in found[0]})
    assert {*found[0]} == {"in_text_document.bin", "in_text_document.idx"}
    assert all(files == found[0] for files in found)


def tokenize_new(word: str, output: str, tokenizer: list[str]) -> None:
    text_files._listing.cache_clear()  # as in a process that starts
    preprocess_data.main(["--input", word, "--output-prefix", f"{output}/", *tokenizer])


def test_objects_of_every_format_are_read_in_blocks(
    tmp_path: Path, tokenizer: list[str], bucket: Bucket, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects are read completely even if some requests fail or connections break."""
    monkeypatch.setattr(text_files, "OBJECT_BLOCK_BYTES", 5000)
    store = ObjectStore(bucket.url)
    for ending, write in FORMATS.items():
        write(tmp_path / "in")
        store.put_file(f"corpus/{ending.split('.')[-1]}.{ending}", tmp_path / "in")
    store.put("corpus/deep/other.jsonl", b"")
    store.put("corpus/notes.md", b"")
    bucket.heal()
    bucket.fault("GET", answer(503, "SlowDown"), first=3, times=2)
    bucket.fault("GET", cut_after(1000), first=10)
    tokenize_new(f"{bucket.url}/corpus/", f"{tmp_path}/out", tokenizer)
    assert bucket.count("LIST") == 1 and bucket.count("GET") > 30
    (tmp_path / "in.jsonl").write_bytes(lines(RECORDS))
    preprocess_data.main(
        ["--input", f"{tmp_path}/in.jsonl", "--output-prefix", f"{tmp_path}/local/", *tokenizer]
    )
    for ending in ("bin", "idx"):
        expected = (tmp_path / f"local/in_text_document.{ending}").read_bytes()
        made = [*(tmp_path / "out").glob(f"*.{ending}")]
        assert len(made) == len(FORMATS) and all(path.read_bytes() == expected for path in made)
    # An existing output is kept without reading its object. An object that was replaced is read again.
    store.put("corpus/jsonl.jsonl", lines(RECORDS))
    bucket.heal()
    capsys.readouterr()
    tokenize_new(f"{bucket.url}/corpus/*.jsonl*", f"{tmp_path}/out", tokenizer)
    assert capsys.readouterr().out.count("kept") == 2
    assert {request.key for request in bucket.requests if request.kind == "GET"} == {"run/corpus/jsonl.jsonl"}
    assert find_files([f"{bucket.url}/**/*.jsonl"]) == [
        f"{bucket.url}/corpus/{name}.jsonl" for name in ("deep/other", "jsonl")
    ]


@pytest.mark.parametrize(
    "fault", ["truncated", "replaced", "grown", "denied", "absent", "no match", "scheme", "output"]
)
def test_an_object_that_cannot_be_read_is_named(
    fault: str, tmp_path: Path, tokenizer: list[str], bucket: Bucket, capsys: Any
) -> None:
    store, content = ObjectStore(bucket.url), gzip.compress(lines(RECORDS))
    store.put("a.jsonl.gz", content[: len(content) // 2] if fault == "truncated" else content)
    word, problem = f"{bucket.url}/a.jsonl.gz", f"{bucket.url}/a.jsonl.gz: "
    if fault == "truncated":
        problem += "cannot read line "
    elif fault in ("replaced", "grown"):
        new = b"x" if fault == "replaced" else content + b"x"

        def replace_and_answer(exchange: Exchange) -> None:
            found = exchange.forward()
            store.put("a.jsonl.gz", new)
            exchange.send(*(found if fault == "grown" else exchange.forward()))

        bucket.fault("GET", replace_and_answer)
        problem = (
            f"{bucket.url}/a.jsonl.gz.* the object (ends at byte 1, not |was replaced while it was read)"
        )
    elif fault == "denied":
        bucket.fault("GET", answer(403, "AccessDenied"))
        problem = f"{bucket.url}/a.jsonl.gz .*403 AccessDenied"
    elif fault == "absent":
        word, problem = f"{bucket.url}/b.jsonl", "b.jsonl: no object"
    elif fault == "no match":
        word, problem = f"{bucket.url}/*.zst", "no object matches the pattern"
    elif fault == "scheme":
        word, problem = "gs://bucket/a.jsonl", "unknown scheme"
    output = str(tmp_path / "out")
    if fault == "output":
        output, problem = "s3://bucket/out", "--output-prefix s3:.*expected a path"
    with pytest.raises(SystemExit, match="2"):
        tokenize_new(word, output, tokenizer)
    message = capsys.readouterr().err
    assert re.search(problem, message) and message.count("\n") == 1
    assert not os.path.exists(output) or os.listdir(output) == []


@pytest.mark.parametrize("ending", FORMATS)
def test_a_damaged_or_wrongly_named_file_is_named(
    ending: str, tmp_path: Path, tokenizer: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"in.{ending}"
    FORMATS[ending](path)
    if ending != "jsonl":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path = path.rename(tmp_path / "in.jsonl.zst")
    with pytest.raises(SystemExit, match="2"):
        preprocess_data.main(["--input", str(path), "--output-prefix", str(tmp_path / "out"), *tokenizer])
    message = capsys.readouterr().err
    assert message.startswith(f"error: --input {path}: ") and message.count("\n") == 1
    assert os.listdir(tmp_path) == [path.name]


def test_patterns_folders_and_lists_name_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl.gz", "c.parquet", "notes.md", "d/e.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    whole = [str(tmp_path / name) for name in ("a.jsonl.gz", "b.jsonl", "c.parquet")]
    assert find_files([str(tmp_path)]) == whole
    assert find_files([f"{tmp_path}/*.jsonl*"]) == whole[:2]
    assert find_files([f"{tmp_path}/**/*.jsonl"]) == [whole[1], str(tmp_path / "d/e.jsonl")]
    (tmp_path / "list").write_text(f"# comment\n{whole[1]}\n\n{tmp_path}/*.gz\n")
    assert find_files([f"@{tmp_path}/list", whole[2]]) == [whole[1], whole[0], whole[2]]
    for word, problem in (
        (f"{tmp_path}/*.txt", "no file matches the pattern"),
        (f"{tmp_path}/x.jsonl", "the file does not exist"),
        (f"@{tmp_path}/nothing", "the file does not exist"),
        (f"{tmp_path}/d/../list/", "the file does not exist"),
    ):
        with pytest.raises(ConfigError, match=problem):
            find_files([word])
    (tmp_path / "x.tar").touch()
    with pytest.raises(ConfigError, match=r"only plain, .gz, .zst and .parquet"):
        find_files([f"{tmp_path}/x.tar"])
    assert [stem_of(name) for name in ("d/a.b.jsonl.zst", "c.parquet", "t.txt.gz", "x")] == [
        *("a.b", "c", "t", "x")
    ]


def test_shards_are_disjoint_complete_and_balanced_by_bytes(tmp_path: Path) -> None:
    sizes = np.random.default_rng(1).integers(1, 100_000, 300).tolist()
    paths = [str(tmp_path / f"{number}.jsonl") for number in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        with open(path, "wb") as file:
            file.truncate(size)
    shards = [files_of_shard(paths, shard, 7) for shard in range(7)]
    assert sorted(sum(shards, [])) == sorted(paths)
    loads = [sum(map(os.path.getsize, shard)) for shard in shards]
    assert max(loads) <= 1.01 * sum(sizes) / 7
    assert all(shard == sorted(shard, key=paths.index) for shard in shards)
    array = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_COUNT": "4"}
    assert parse_shard("0/4", {}) == (0, 4) and parse_shard("slurm", array) == (2, 4)
    for text, environment in (("4/4", {}), ("1", {}), ("-1/2", {}), ("slurm", {}), ("a/b", {})):
        with pytest.raises(ConfigError, match=f"--shard {text}: expected"):
            parse_shard(text, environment)
    with pytest.raises(ConfigError, match="without a step"):
        parse_shard("slurm", array | {"SLURM_ARRAY_TASK_ID": "9"})


def corpus(folder: Path) -> list[Path]:
    paths = [folder / f"part{number}.jsonl" for number in range(5)]
    for number, path in enumerate(paths):
        path.write_bytes(lines(RECORDS[100 * number : 100 * number + 150]))
    return paths


def test_a_repeated_command_keeps_what_is_done_and_makes_the_rest(
    tmp_path: Path, tokenizer: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    paths, output = corpus(tmp_path), tmp_path / "out"

    def run(*extra: str) -> set[str]:
        """Returns the names of the files that were written."""
        preprocess_data.main(
            ["--input", f"{tmp_path}/part*", "--output-prefix", f"{output}/", *tokenizer, *extra]
        )
        written = capsys.readouterr().out.splitlines()
        return {line.split("_text_document")[0].rsplit("/")[-1] for line in written if "(.bin and" in line}

    for shard in range(3):
        run("--shard", f"{shard}/3")
    made = token_bytes(output)
    assert len(made) == 10 and run() == set()
    paths[1].write_bytes(lines(RECORDS[7:9]))  # different content
    os.utime(paths[2])  # may have different content
    (output / "part3_text_document.idx").unlink()  # interrupted between two renames
    other = output / "part4_text_document.bin"
    other.write_bytes(bytes(reversed(other.read_bytes())))  # different tokens, of equal size
    assert run() == {"part1", "part2", "part3", "part4"} and run() == set()
    again = token_bytes(output)
    assert {name for name in made if made[name] != again[name]} == {
        *("part1_text_document.bin", "part1_text_document.idx")
    }
    assert len(run("--append-eod")) == 5  # different settings

    paths[0].write_bytes(b"\n")
    assert "part0" not in run("--append-eod")  # a file without text stops no other files
    with pytest.raises(SystemExit, match="2"):
        run(
            "--append-eod",
            "--input",
            str(paths[1]),
            f"{paths[1].rename(tmp_path / 'part1.json')}",
            str(paths[2]),
        )


def test_a_start_and_the_verification_notice_other_tokens(tmp_path: Path, tokenizer: list[str]) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines(RECORDS))
    preprocess_data.main(["--input", f"{tmp_path}/in.jsonl", "--output-prefix", f"{tmp_path}/", *tokenizer])
    prefix = f"{tmp_path}/in_text_document"
    data = DataConfig(data_path=(prefix,))
    verify_token_files(data)
    assert "intact" in verify_dataset.verify(prefix)
    tokens = np.memmap(f"{prefix}.bin", np.uint16, "r+")
    tokens[len(tokens) // 7] ^= 1  # outside of the sample
    tokens.flush()
    verify_token_files(data)
    with pytest.raises(UserError, match=f"{prefix}.bin: damaged or replaced, its SHA-256 is"):
        verify_dataset.verify(prefix)
    tokens[:] = tokens[::-1].copy()
    tokens.flush()
    assert len(IndexedDataset(prefix)) == len(RECORDS)
    with pytest.raises(UserError, match=f"--data-path {prefix}: the tokens of the .bin file differ from"):
        verify_token_files(data)


@pytest.mark.full
def test_shards_that_are_killed_at_any_time_end_with_the_bytes_of_an_undisturbed_run(
    tmp_path: Path, tokenizer: list[str]
) -> None:
    """`benchmarks/kills.py --preprocessing` runs this test with 50 kills."""
    corpus(tmp_path)
    outcome = kill_shards(tmp_path, ["--input", f"{tmp_path}/part*.jsonl", *tokenizer], kills=3, seed=5)
    assert outcome.unfinished >= 3 and outcome.completed
