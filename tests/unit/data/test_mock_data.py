"""--mock-data makes samples without files, equal on every layout and after a resume."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.arguments import parse_args, read_command_line
from megatron.config import ConfigError
from megatron.data.mock_dataset import MockDataset
from megatron.data.vocabulary import find_vocabulary
from megatron.errors import UserError
from megatron.run import Run
from megatron.tokenizer.null import NullTokenizer
from megatron.training.data import data_report
from tests.unit.config.command_lines import RUN

NULL = [*RUN, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]


def mock(name: str = "train", num_samples: int = 50, seed: int = 1, eod: int | None = 100) -> MockDataset:
    return MockDataset(name, num_samples, 64, seed, 101, eod)


def test_mock_data_depend_on_seed_split_and_number_only() -> None:
    samples = np.stack([mock()[i] for i in range(50)])
    assert samples.shape == (50, 65) and samples.dtype == np.int64
    assert samples.min() >= 0 and samples.max() == 100
    assert len({sample.tobytes() for sample in samples}) == 50
    longer = mock(num_samples=80)
    assert all((longer[i] == samples[i]).all() for i in (49, 0, 7))  # in any order
    for other in (mock("valid"), mock(seed=2), mock(seed=0)):
        assert (other[3] != samples[3]).any()
    assert 20 < (samples == 100).sum() < 120  # about one document ends in each sample
    assert mock(eod=None)[0].max() < 101
    with pytest.raises(IndexError):
        mock()[50]


def test_the_first_mock_data_do_not_change() -> None:
    """Losses of runs with mock data are compared across versions of this program and of numpy."""
    assert mock(eod=None)[0][:5].tolist() == FIRST


FIRST = [76, 28, 18, 44, 63]


def test_the_null_tokenizer_of_mock_data_has_megatron_lms_vocabulary() -> None:
    vocabulary = find_vocabulary(parse_args(NULL, {}))
    assert (vocabulary.size, vocabulary.eod) == (101, 100)
    tokenizer = NullTokenizer(100)
    assert tokenizer.tokenize("7 3 100") == [7, 3, 100] and tokenizer.detokenize([7, 3]) == "7 3"
    for text in ("7 x", "101", "-1", "٣"):
        with pytest.raises(UserError, match="expected numbers below 101"):
            tokenizer.tokenize(text)


def test_mock_data_need_no_files_and_no_batch_size() -> None:
    words = list(NULL)
    place = words.index("--global-batch-size")
    del words[place : place + 2]
    config = parse_args(words, {"WORLD_SIZE": "4"})
    assert config.batch.global_batch_size == 4
    run = Run.from_config(config)
    assert "--mock-data" in data_report(run)
    longer = parse_args([*words, "--train-samples", "9000", "--global-batch-size", "8"], {})
    assert run.fingerprint == Run.from_config(longer).fingerprint
    other = parse_args([*words, "--seed", "5"], {})
    assert run.fingerprint != Run.from_config(other).fingerprint


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--data-path x", "--mock-data with --data-path x: mock data read no files"),
        ("--train-data-path x", "--mock-data with --train-data-path x"),
        ("--data-args-path x", "^--mock-data with --data-args-path x: [^\n]*$"),
        ("--per-split-data-args-path x", "^--mock-data with --per-split-data-args-path x: [^\n]*$"),
        ("--valid-weighted-split-paths-path x", "--mock-data with --valid-weighted-split-paths-path x"),
        ("--split 0,50,50", "--split 0,50,50 assigns no document to the train split"),
    ],
)
def test_mock_data_contradict_token_files(words: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parse_args([*NULL, *words.split()], {})


def test_the_null_tokenizer_needs_a_size_also_with_mock_data() -> None:
    with pytest.raises(ConfigError, match="NullTokenizer without --vocab-size"):
        parse_args(NULL[:-2], {})


def test_mock_data_work_without_a_tokenizer() -> None:
    config = read_command_line([*RUN, "--mock-data", "--vocab-size", "100"], {}).config
    vocabulary = find_vocabulary(config)
    assert (vocabulary.size, vocabulary.eod) == (100, None)
