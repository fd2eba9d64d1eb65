"""Special tokens that a text contains literally are ordinary text, or become their ids
with --parse-special-tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library
from transformers import PreTrainedTokenizerFast

from megatron.commands import preprocess_data
from megatron.commands.merge_datasets import merge
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.preprocessing import preprocess
from megatron.errors import UserError
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.backends import texts_encoder
from megatron.tokenizer.vocabulary_record import read_record
from tests.unit.tokenizer.test_tokenizers import slow_gpt2_ids, train_sentence_piece
from tests.unit.tokenizer.vocabularies import TEXT, tokenizer_flags, train_gpt2_vocabulary

EOD = "<|endoftext|>"
TEXTS = [
    *(
        "",
        EOD,
        f"a{EOD}b",
        f"{EOD}{EOD} {EOD}\n",
        f"the <|endof{EOD}text|>",
        "<|endoftext |>",
        "</s><s> a</s>",
    ),
    *(f"{TEXT[0]} <|eot|>{EOD}", f"Grüße{EOD}日本語<|eot|>", *TEXT[:4]),
]
COUNTS = {EOD: 8, "<|eot|>": 2}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return train_gpt2_vocabulary(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def flags(files: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the flags of each kind of tokenizer. Two kinds have a further special token, and an added token
    that is not special."""
    folder = tmp_path_factory.mktemp("tokenizers")
    library = Library(models.BPE.from_file(*files))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([EOD, "<|eot|>"])
    library.add_tokens([AddedToken("lazy dog", normalized=False)])
    PreTrainedTokenizerFast(tokenizer_object=library, eos_token=EOD).save_pretrained(folder / "hf")
    return {
        "gpt2": tokenizer_flags(vocab_file=files[0], merge_file=files[1]),
        "transformers": tokenizer_flags(tokenizer_name_or_path=str(folder / "hf")),
        "sentencepiece": tokenizer_flags(
            tokenizer_model=train_sentence_piece(folder / "sp.model", model_type="bpe")
        ),
    }


def ids_of(tokenizer: Tokenizer, backend: str) -> list[list[int]]:
    encoder = texts_encoder(tokenizer, backend)
    found = [encoder.encode(TEXTS, is_first) for is_first in (True, False)]
    assert all(np.array_equal(first, second) for first, second in zip(*found, strict=True))
    ids, sizes = found[0]
    return [part.tolist() for part in np.split(ids, np.cumsum(sizes)[:-1])]


@pytest.mark.parametrize("parse", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "transformers", "sentencepiece"])
def test_every_backend_reads_special_tokens_equally(name: str, parse: bool, flags: dict[str, Any]) -> None:
    tokenizer = build_tokenizer(flags[name], parse_special=parse)
    expected = [tokenizer.tokenize(text) for text in TEXTS]
    fast = ["gigatoken"] if name == "sentencepiece" else ["gigatoken", "words"]
    for backend in ("reference", *fast):
        assert ids_of(tokenizer, backend) == expected, backend
    has_special = [bool({*ids} & {*tokenizer.special_tokens.values()}) for ids in expected]
    assert tokenizer.parse_special == any(has_special) == (parse and name != "sentencepiece")
    if name != "sentencepiece":
        assert [tokenizer.detokenize(ids) for ids in expected] == TEXTS
    # Added tokens that are not special are always recognized.
    assert (name == "transformers") == (tokenizer.vocabulary().get("lazy dog") in expected[-4])


def test_ordinary_text_has_the_ids_of_openais_encoder(files: tuple[str, str], flags: dict[str, Any]) -> None:
    expected = [slow_gpt2_ids(*files, text) for text in TEXTS]
    assert ids_of(build_tokenizer(flags["gpt2"]), "auto") == expected


def write(folder: Path, texts: list[str] = TEXTS) -> str:
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(folder / "in.jsonl")


@pytest.mark.parametrize("parse", [False, True])
def test_preprocessing_counts_and_records_them(parse: bool, flags: dict[str, Any], tmp_path: Path) -> None:
    arguments = ([write(tmp_path)], str(tmp_path / "out"), ["text"], flags["transformers"])
    for _ in range(2):  # a repeated run keeps the files, and a different choice replaces them
        notes: list[str] = []
        progress = preprocess(*arguments, parse_special=parse, note=notes.append)
        prefix = str(tmp_path / "out_text_document")
        tokenizer = build_tokenizer(flags["transformers"], parse_special=parse)
        dataset = IndexedDataset(prefix)
        assert [dataset[i].tolist() for i in range(len(dataset))] == [
            tokenizer.tokenize(text) for text in TEXTS if text
        ]
        assert progress.special_tokens == COUNTS and not progress.indivisible_tokens
        record = read_record(prefix)
        assert record is not None and record["parse_special_tokens"] == parse
        preprocess(*arguments, parse_special=parse, note=notes.append)
        assert "kept" in notes[-1]
        parse = not parse


def test_worker_processes_parse_and_count_them(flags: dict[str, Any], tmp_path: Path) -> None:
    arguments = ([write(tmp_path)], str(tmp_path / "out"), ["text"], flags["gpt2"])
    progress = preprocess(*arguments, parse_special=True, workers=2)
    tokenizer = build_tokenizer(flags["gpt2"], parse_special=True)
    assert progress.special_tokens == {EOD: COUNTS[EOD]}
    assert IndexedDataset(tmp_path / "out_text_document")[0].tolist() == [tokenizer.eod]


def test_a_merged_data_set_records_the_choice_of_its_parts(flags: dict[str, Any], tmp_path: Path) -> None:
    for name, parse in (("a", False), ("b", False), ("c", True)):
        preprocess([write(tmp_path)], str(tmp_path / name), ["text"], flags["gpt2"], parse_special=parse)
    prefix = {name: str(tmp_path / f"{name}_text_document") for name in "abc"}
    assert not merge([prefix["a"], prefix["b"]], str(tmp_path / "equal"))
    (note,) = merge([prefix["a"], prefix["c"]], str(tmp_path / "mixed"))
    assert "became ids in some of the data sets" in note
    equal, mixed = (read_record(str(tmp_path / name)) for name in ("equal", "mixed"))
    assert equal is not None and equal["parse_special_tokens"] is False
    assert mixed is not None and "parse_special_tokens" not in mixed


def run(capsys: pytest.CaptureFixture[str], tokenizer: Any, folder: Path, *more: str) -> str:
    given = [word for name, value in vars(tokenizer).items() if value for word in (f"--{name}", value)]
    words = ["--input", write(folder), "--output-prefix", str(folder / "out"), *more]
    preprocess_data.main([*words, *(word.replace("_", "-") if word[:2] == "--" else word for word in given)])
    return capsys.readouterr().err


def test_the_tool_reports_them(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, kind in (
        ((), "are ordinary text (--parse-special-tokens: their ids)"),
        (("--parse-special-tokens",), "became their ids (--parse-special-tokens)"),
    ):
        last = run(capsys, flags["transformers"], tmp_path, *more).splitlines()[-1]
        assert last == f"10 special tokens in the texts {kind}: 8 of <|endoftext|>, 2 of <|eot|>"
    with pytest.raises(SystemExit) as stop:
        run(capsys, flags["sentencepiece"], tmp_path, "--parse-special-tokens")
    assert stop.value.code == 2
    assert (
        "a SentencePieceTokenizer reads special tokens in texts as ordinary text" in capsys.readouterr().err
    )


def test_a_tokenizer_that_has_them_as_words_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = Library(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=library, eos_token="</s>", unk_token="<unk>").save_pretrained(
        tmp_path / "hf"
    )
    flags = tokenizer_flags(tokenizer_name_or_path=str(tmp_path / "hf"))
    progress = preprocess([write(tmp_path, ["a </s> a"])], str(tmp_path / "out"), ["text"], flags)
    assert progress.indivisible_tokens == {"</s>": 1} and not progress.special_tokens
    assert IndexedDataset(tmp_path / "out_text_document")[0].tolist() == [2, 1, 2]
    assert "became their ids where the tokenizer's model has them" in run(capsys, flags, tmp_path)


def test_a_tokenizer_without_the_feature_is_an_error(flags: dict[str, Any], tmp_path: Path) -> None:
    arguments = ([write(tmp_path)], str(tmp_path / "out"), ["text"], flags["sentencepiece"])
    with pytest.raises(UserError, match="--parse-special-tokens: a SentencePieceTokenizer"):
        preprocess(*arguments, parse_special=True)
    assert preprocess(*arguments).special_tokens == {"</s>": 2, "<s>": 1}
