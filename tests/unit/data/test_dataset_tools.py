"""Runs the commands tools/merge_datasets.py and tools/verify_dataset.py."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.commands import merge_datasets, prepare_indices, verify_dataset
from megatron.config import ConfigError
from megatron.config.mistakes import Mistakes
from megatron.config.sections.data import TOKENIZER_FIELDS
from megatron.data.indexed_dataset import HEADER, IndexedDataset
from megatron.optimizer.batch_schedule import RunLength
from megatron.planner.command import without_settings
from megatron.tokenizer.vocabulary_record import read_record, record_path, write_record
from tests.end_to_end.flags import ABSOLUTE, MODEL
from tests.unit.config.command_lines import BLOOM, GPT_104B
from tests.unit.data.token_files import build, numbered_documents, write_documents

SIZES = ([3, 0, 5], [4], [2, 6])


def vocabulary(vocab_size: int = 100, eod: int = 7, letter: str = "a") -> Any:
    """Returns the part of a tokenizer that a vocabulary record needs."""
    return SimpleNamespace(
        name="Test",
        vocab_size=vocab_size,
        eod=eod,
        vocabulary=lambda: {letter * (i + 1): i for i in range(5)},
    )


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    """Writes three data sets with equal vocabulary records. Returns their prefixes."""
    prefixes = []
    for number, sizes in enumerate(SIZES):
        prefixes.append(write_documents(tmp_path / f"part{number}", numbered_documents(sizes)))
        write_record(prefixes[-1], vocabulary())
    return prefixes


def merge(inputs: list[str], output: Path | str) -> None:
    merge_datasets.main(["--input", *inputs, "--output-prefix", str(output)])


def mistake(capsys: pytest.CaptureFixture[str], tool: Any, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        tool.main(list(arguments))
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_merged_documents_are_those_of_the_inputs_in_order(inputs: list[str], tmp_path: Path) -> None:
    merge(inputs, tmp_path / "all")
    merged = IndexedDataset(tmp_path / "all")
    expected = [document for sizes in SIZES for document in numbered_documents(sizes)]
    assert [merged[i].tolist() for i in range(len(merged))] == expected
    assert merged.doc_idx.tolist() == list(range(len(expected) + 1))
    assert merged.dtype == np.uint16
    record, expected_record = read_record(str(tmp_path / "all")), read_record(inputs[0])
    assert record is not None and expected_record is not None and record.items() > expected_record.items()
    # The bytes equal a file in which all documents were written at once.
    once = write_documents(tmp_path / "once", expected)
    for ending in (".bin", ".idx"):
        assert Path(f"{tmp_path}/all{ending}").read_bytes() == Path(f"{once}{ending}").read_bytes()


def test_documents_of_several_sequences_keep_their_boundaries(inputs: list[str], tmp_path: Path) -> None:
    # Turns the three sequences of the first data set into two documents: [0, 3] and [5].
    path = Path(f"{inputs[0]}.idx")
    content = path.read_bytes()
    header = list(HEADER.unpack(content[: HEADER.size]))
    header[-1] = 3
    doc_idx = np.array([0, 2, 3], dtype="<i8").tobytes()
    path.write_bytes(HEADER.pack(*header) + content[HEADER.size : HEADER.size + 3 * 12] + doc_idx)
    merge([inputs[1], inputs[0], inputs[2]], tmp_path / "all")
    assert IndexedDataset(tmp_path / "all").doc_idx.tolist() == [0, 1, 3, 4, 5, 6]


def test_inputs_that_do_not_fit_together_are_refused(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = write_documents(tmp_path / "wide", [[1, 2]], dtype="int32")
    output = str(tmp_path / "all")
    before = sorted(os.listdir(tmp_path))
    error = mistake(capsys, merge_datasets, "--input", inputs[0], wide, "--output-prefix", output)
    assert f"--input {wide}" in error and "int32" in error and "uint16" in error
    assert sorted(os.listdir(tmp_path)) == before
    write_record(inputs[1], vocabulary(letter="b"))
    error = mistake(capsys, merge_datasets, "--input", *inputs, "--output-prefix", output)
    assert inputs[0] in error and inputs[1] in error and "vocabular" in error
    assert sorted(os.listdir(tmp_path)) == before


def test_an_input_without_a_record_gives_no_record(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.remove(record_path(inputs[2]))
    write_record(str(tmp_path / "all"), vocabulary(letter="b"))  # these files are replaced
    merge(inputs, tmp_path / "all")
    assert not os.path.exists(record_path(str(tmp_path / "all")))
    assert inputs[2] in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_damaged_input_is_named(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    os.truncate(inputs[1] + ending, 5)
    error = mistake(capsys, merge_datasets, "--input", *inputs, "--output-prefix", str(tmp_path / "all"))
    assert inputs[1] + ending in error
    assert not list(tmp_path.glob("all*"))


def test_an_output_that_is_an_input_is_refused(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = f"{tmp_path}/../{tmp_path.name}/part1"
    assert output in mistake(capsys, merge_datasets, "--input", *inputs, "--output-prefix", output)
    flags = ["--input", inputs[0], "--output-prefix", str(tmp_path / "all")]
    assert "expected at least 2" in mistake(capsys, merge_datasets, *flags)
    flags[1] = os.path.dirname(inputs[0])
    count = len(list(Path(flags[1]).glob("*.idx")))
    sentence = mistake(capsys, merge_datasets, *flags)
    assert f"is a folder with {count} data sets" in sentence and f"set '{flags[1]}/*' for all" in sentence
    flags = ["--input", *inputs, "--output-prefix", str(tmp_path / "none" / "all")]
    assert str(tmp_path / "none") in mistake(capsys, merge_datasets, *flags)


def test_an_intact_data_set_is_summarized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_documents(tmp_path / "data", [[1, 2, 7], [], [3, 99], [7]])
    write_record(prefix, vocabulary())
    verify_dataset.main([prefix])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{prefix}: intact"
    assert "4, of 0 to 3 tokens, 1.5 on average; 1 empty" in lines[1]
    assert "6 of type uint16, ids 1 to 99" in lines[2]
    assert "Test, 100 tokens" in lines[3]
    assert "2 documents end with the end-of-document token, 7" in lines[4]
    os.remove(record_path(prefix))
    verify_dataset.main([prefix])
    assert "no record" in capsys.readouterr().out


def break_index(prefix: str, at: int) -> str:
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    content[at] ^= 9
    Path(f"{prefix}.idx").write_bytes(content)
    return f"{prefix}.idx"


def break_offset(prefix: str) -> str:
    return break_index(prefix, HEADER.size + 4 * 3 + 8)


def break_boundary(prefix: str) -> str:
    return break_index(prefix, -8)


def truncate_tokens(prefix: str) -> str:
    os.truncate(f"{prefix}.bin", 8)
    return f"{prefix}.bin"


def token_outside_the_vocabulary(prefix: str) -> str:
    write_record(prefix, vocabulary(vocab_size=7))  # the last token is 7
    return f"{prefix}.bin"


def break_record(prefix: str) -> str:
    record = json.loads(Path(record_path(prefix)).read_text())
    Path(record_path(prefix)).write_text(json.dumps({**record, "vocab_size": "many"}))
    return record_path(prefix)


@pytest.mark.parametrize(
    "damage",
    [break_offset, break_boundary, truncate_tokens, token_outside_the_vocabulary, break_record],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_file_is_named_and_the_others_are_verified(
    inputs: list[str], capsys: pytest.CaptureFixture[str], damage: Any
) -> None:
    path = damage(inputs[0])
    with pytest.raises(SystemExit) as caught:
        verify_dataset.main([inputs[0], inputs[1]])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {path}") and printed.err.count("\n") == 1
    assert printed.out.startswith(f"{inputs[1]}: intact")


def test_negative_token_ids_are_damage_without_a_record_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_documents(tmp_path / "data", [[1, -2]], dtype="int32")
    assert "-2" in mistake(capsys, verify_dataset, prefix)


def named_tokens(output: str, sets: dict[str, list[list[int]]]) -> list[list[int]]:
    """Returns the tokens of each sample that --sample names, read from the documents that were written."""
    samples = []
    for line in output.splitlines():
        if line.startswith("sample "):
            prefix = line.partition(" of ")[2].partition(" of ")[2].partition(", in epoch")[0]
            samples.append([])
        elif match := re.fullmatch(r" *([\d,]+) +\[([\d,]+), ([\d,]+)\) +([\d,]+)", line):
            document, start, end, size = (int(word.replace(",", "")) for word in match.groups())
            assert size == len(sets[prefix][document])
            samples[-1] += sets[prefix][document][start:end]
    return samples


@pytest.mark.parametrize("order", ["native", "megatron-core"])
def test_a_sample_is_named_as_the_run_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: str
) -> None:
    sets = {}
    for number, name in enumerate("ab"):
        documents = [
            [1000 * number + token for token in one] for one in numbered_documents([5, 0, 9, 17, 4] * 9)
        ]
        sets[write_documents(tmp_path / name, documents)] = documents
    a, b = sets
    run = [*"--seq-length 16 --train-samples 60 --global-batch-size 4 --eval-iters 1 --seed 5".split()]
    run += ["--data-order", order, "--data-cache-path", str(tmp_path / "cache")]
    own = ["--train-data-path", a, "--valid-data-path", b, a]
    ranges = [
        *("--train-weighted-split-paths", f"T: 1 0:0.8 {a}, 2 0:0.8 {b}"),
        *("--valid-weighted-split-paths", f"V: 1 0.8:1 {a}", f"W: 1 0.5:1 {a}, 1 0.8:1 {b}"),
    ]
    for given in (["--data-path", "0.3", a, "0.7", b, "--split", "8,2"], own, ranges):
        config = verify_dataset.sampled_run([*run, *given], Mistakes())
        length = RunLength.from_config(config)
        datasets = build(config.data, 16, 5, length.samples_per_split(config))
        for subset, groups, samples in (
            ("train", [datasets.train], (0, 37, 59)),
            ("valid", datasets.valid, (0, 3)),
        ):
            for i in samples:
                verify_dataset.main(["--sample", str(i), "--subset", subset, *run, *given])
                found = named_tokens(capsys.readouterr().out, sets)
                assert found == [group[i].tolist() for group in groups if group is not None]
    error = mistake(capsys, verify_dataset, "--sample", "60", *run, *own)
    assert "--sample 60: the run reads 60 samples of train, expected 0 to 59" in error
    assert "reads no test data" in mistake(
        capsys, verify_dataset, "--sample", "1", "--subset", "test", *run, *own
    )


def test_flags_of_other_uses_are_refused(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "no data set" in mistake(capsys, verify_dataset)
    assert "--subset valid is for --sample" in mistake(capsys, verify_dataset, inputs[0], "--subset", "valid")
    assert "set --html" in mistake(capsys, verify_dataset, inputs[0], "--vocab-file", "x")
    assert "--seq-length" in mistake(
        capsys, verify_dataset, "--sample", "1", "--train-samples", "8", "--global-batch-size", "8"
    )
    with pytest.raises(ConfigError) as caught:
        verify_dataset.build_parser().parse_args(["--subset", "valid", "--vocab-file", "x"])
    assert all(part in str(caught.value) for part in ("no data set", "--subset valid", "set --html"))


def test_a_batch_that_the_layout_of_the_run_determines_is_asked_for(
    inputs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """--global-batch-size is derived from the layout, which these tools do not know."""
    run = ["--micro-batch-size", "2", "--train-iters", "9", "--seq-length", "8", "--data-path", inputs[0]]
    error = mistake(capsys, verify_dataset, "--sample", "1", *run)
    assert "set --global-batch-size as in the run" in error
    error = mistake(capsys, prepare_indices, *run, *MODEL, *ABSOLUTE, "--lr", "1")
    assert "set --global-batch-size or --world-size as in the run" in error


@pytest.mark.parametrize("flags", [BLOOM, GPT_104B], ids=["176B", "104B"])
def test_the_flags_of_a_large_run_give_its_samples(
    inputs: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], tmp_path: Path
) -> None:
    """The layout, the model and the files of an sbatch script need not fit this machine. Only a DeepSpeed
    file that may end the run earlier (104B has --train-tokens) must exist."""
    dropped = {f"data.{name}" for name in TOKENIZER_FIELDS}
    dropped |= {"training.deepspeed_config"} if "--train-tokens" in flags else set()
    words = [*without_settings(flags, dropped), "--seq-length", "4"]
    words += ["--data-path", inputs[0], "--train-samples", "4096", "--data-cache-path", str(tmp_path)]
    words += ["--lr-warmup-samples", "9", "--seed", "3"]
    verify_dataset.main(["--sample", "1", *words])
    (found,) = named_tokens(capsys.readouterr().out, {inputs[0]: numbered_documents(SIZES[0])})
    config = verify_dataset.sampled_run(words, Mistakes())
    length = RunLength.from_config(config)
    train = build(config.data, 4, 3, length.samples_per_split(config)).train
    assert train is not None and found == train[1].tolist()


def test_the_curriculum_of_a_deepspeed_file_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --train-tokens the curriculum determines the number of samples and of epochs. Prepared indices are
    found only if the tool reads the curriculum."""
    prefix = write_documents(tmp_path / "data", numbered_documents([20] * 20))
    schedule = {"total_curriculum_step": 1000, "difficulty_step": 8}
    section = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 32}
    section |= {"schedule_type": "fixed_linear", "schedule_config": schedule}
    file, cache = tmp_path / "ds.json", tmp_path / "cache"
    run = ["--data-path", prefix, "--data-cache-path", str(cache)]
    run += "--split 1 --train-samples 9999 --train-tokens 5000 --eval-iters 0 --lr 1".split()
    run += "--global-batch-size 8 --micro-batch-size 1".split()
    run += [*MODEL, *ABSOLUTE, "--vocab-size", "100", "--deepspeed_config", str(file)]
    assert str(file) in mistake(capsys, verify_dataset, "--sample", "3", *run)
    file.write_text(json.dumps({"curriculum_learning": section}))
    prepare_indices.main(["--world-size", "2", *run])
    prepared = set(cache.glob("*.npy"))
    verify_dataset.main(["--sample", "3", *run])
    assert set(cache.glob("*.npy")) == prepared and len(prepared) == 3
    assert "in epoch 1 of 51" in capsys.readouterr().out
