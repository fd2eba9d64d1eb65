"""Compares each tokenizer with its reference, and tests errors for damaged files."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import UserError
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.vocabulary_record import vocabulary_digest
from tests.unit.tokenizer.vocabularies import TEXT, train_gpt2_vocabulary
from tests.unit.tokenizer.vocabularies import tokenizer_flags as flags

TRICKY = [
    "",
    " ",
    "   three spaces   and a tail  ",
    "tab\tand\nnewlines\r\n\n\n end",
    "I'll say it's 'quoted', we've they'd I'M DON'T",
    "日本語 Grüße на здоровье e\u0301 \u00a0no-break \u200bzero-width \ufeff",
    "🙂👨\u200d👩\u200d👧 \U0001f3f4",
    "1 12 123 12345678901234567890 ½ ² ٣",
    "a<|endoftext|>b <|endoftext|> c",
    "\x00\x01\x7f control",
    "x" * 500,
    "http://example.org/?q=1&r=%20#frag__init__",
    *TEXT[:4],
]


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return train_gpt2_vocabulary(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def gpt2(gpt2_files: tuple[str, str]) -> Tokenizer:
    vocab, merges = gpt2_files
    return build_tokenizer(flags(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges))


@pytest.fixture(scope="module")
def hugging_face_folder(gpt2_files: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import GPT2Tokenizer

    folder = str(tmp_path_factory.mktemp("hf"))
    GPT2Tokenizer(*gpt2_files).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sentence_piece_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train_sentence_piece(tmp_path_factory.mktemp("sp") / "tokenizer.model")


def train_sentence_piece(path: Path, **options: int | str) -> str:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=model, vocab_size=400, byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, **options
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.mark.parametrize("text", TRICKY)
def test_gpt2_gives_the_ids_of_transformers(gpt2: Tokenizer, gpt2_files: tuple[str, str], text: str) -> None:
    from transformers import GPT2Tokenizer

    reference = GPT2Tokenizer(*gpt2_files)
    assert gpt2.tokenize(text) == reference.encode(text, split_special_tokens=True)
    vocab, merges = gpt2_files
    parsing = build_tokenizer(flags(vocab_file=vocab, merge_file=merges), parse_special=True)
    assert parsing.tokenize(text) == parsing.tokenize_batch([text])[0] == reference.encode(text)


def slow_gpt2_ids(vocab_file: str, merge_file: str, text: str) -> list[int]:
    """Applies OpenAI's algorithm: splits by a pattern, maps bytes to characters, merges pairs by rank."""
    import regex

    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letter = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        letter.setdefault(byte, chr(256 + sum(other not in printable for other in range(byte))))
    vocabulary = json.loads(Path(vocab_file).read_text())
    lines = Path(merge_file).read_text().splitlines()
    merges = [tuple(line.split(" ")) for line in lines if not line.startswith("#version")]
    rank = {pair: i for i, pair in enumerate(merges)}
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ids = []
    for word in regex.findall(pattern, text):
        parts = [letter[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = list(zip(parts[:-1], parts[1:], strict=True))
            best = min(pairs, key=lambda pair: rank.get(pair, len(rank)))
            if best not in rank:
                break
            merged, i = [], 0
            while i < len(parts):
                if i + 1 < len(parts) and (parts[i], parts[i + 1]) == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        ids += [vocabulary[part] for part in parts]
    return ids


@pytest.mark.parametrize("text", TRICKY)
def test_gpt2_gives_the_ids_of_openais_algorithm(
    gpt2: Tokenizer, gpt2_files: tuple[str, str], text: str
) -> None:
    assert gpt2.tokenize(text) == slow_gpt2_ids(*gpt2_files, text)


def test_gpt2_has_the_size_and_end_of_document_of_the_files(
    gpt2: Tokenizer, gpt2_files: tuple[str, str]
) -> None:
    vocabulary = json.loads(Path(gpt2_files[0]).read_text())
    assert gpt2.vocab_size == len(vocabulary) == 400
    assert gpt2.eod == vocabulary["<|endoftext|>"]
    assert gpt2.name == "GPT2BPETokenizer"
    assert gpt2.special_tokens == {"<|endoftext|>": gpt2.eod}


def test_hugging_face_folder_gives_the_same_ids(gpt2: Tokenizer, hugging_face_folder: str) -> None:
    tokenizer = build_tokenizer(
        flags(tokenizer_type="PretrainedFromHF", tokenizer_name_or_path=hugging_face_folder)
    )
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == ("PretrainedFromHF", 400, gpt2.eod)
    assert tokenizer.tokenize_batch(TRICKY) == gpt2.tokenize_batch(TRICKY)
    assert [tokenizer.detokenize(tokenizer.tokenize(text)) for text in TRICKY] == TRICKY
    assert vocabulary_digest(tokenizer) == vocabulary_digest(gpt2)


def test_hugging_face_adds_no_special_tokens(
    gpt2: Tokenizer, hugging_face_folder: str, tmp_path: Path
) -> None:
    from tokenizers import processors
    from transformers import AutoTokenizer

    marked = AutoTokenizer.from_pretrained(hugging_face_folder)
    marked.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", gpt2.eod)]
    )
    marked.save_pretrained(tmp_path)
    tokenizer = build_tokenizer(flags(tokenizer_name_or_path=str(tmp_path)))
    assert tokenizer.tokenize("the dog") == gpt2.tokenize("the dog")
    assert tokenizer.adds_bos and tokenizer.bos == gpt2.eod
    assert not gpt2.adds_bos


def test_sentence_piece_gives_the_ids_of_its_library(sentence_piece_file: str) -> None:
    import sentencepiece

    reference = sentencepiece.SentencePieceProcessor(model_file=sentence_piece_file)
    tokenizer = build_tokenizer(
        flags(tokenizer_type="SentencePieceTokenizer", tokenizer_model=sentence_piece_file)
    )
    assert tokenizer.tokenize_batch(TRICKY) == [reference.encode(text) for text in TRICKY]
    assert (tokenizer.name, tokenizer.vocab_size) == ("SentencePieceTokenizer", reference.get_piece_size())
    assert tokenizer.eod == reference.piece_to_id("</s>")
    assert tokenizer.detokenize(tokenizer.tokenize("the lazy dog")) == "the lazy dog"


@pytest.mark.parametrize("kind", ["gpt2", "sentence_piece"])
def test_batches_and_single_texts_agree(
    kind: str, gpt2_files: tuple[str, str], sentence_piece_file: str
) -> None:
    vocab, merges = gpt2_files
    given = {"tokenizer_model": sentence_piece_file}
    if kind == "gpt2":
        given = {"vocab_file": vocab, "merge_file": merges}
    tokenizer = build_tokenizer(flags(**given))
    assert tokenizer.tokenize_batch(TRICKY) == [tokenizer.tokenize(text) for text in TRICKY]
    assert tokenizer.tokenize_batch([]) == []


def test_gpt2_detokenizes_to_the_same_text(gpt2: Tokenizer) -> None:
    assert [gpt2.detokenize(gpt2.tokenize(text)) for text in TRICKY] == TRICKY


def test_the_default_type_is_the_one_that_fits_the_files(
    gpt2_files: tuple[str, str], sentence_piece_file: str
) -> None:
    vocab, merges = gpt2_files
    assert build_tokenizer(flags(vocab_file=vocab, merge_file=merges)).name == "GPT2BPETokenizer"
    assert build_tokenizer(flags(tokenizer_model=sentence_piece_file)).name == "SentencePieceTokenizer"
    with pytest.raises(UserError, match="GPT2BPETokenizer and SentencePieceTokenizer.*--tokenizer-type"):
        build_tokenizer(flags(vocab_file=vocab, merge_file=merges, tokenizer_model=sentence_piece_file))
    with pytest.raises(UserError, match="--tokenizer-model"):
        build_tokenizer(flags())


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"tokenizer_type": "GPT2BPETokenizer"}, "needs --vocab-file"),
        ({"vocab_file": "/nowhere/vocab.json"}, "--vocab-file /nowhere/vocab.json: the file does not exist"),
        ({"tokenizer_type": "PretrainedFromHF"}, "needs --tokenizer-name-or-path"),
        ({"tokenizer_name_or_path": "/nowhere"}, "--tokenizer-name-or-path /nowhere: expected a folder"),
        ({"tokenizer_type": "SentencePieceTokenizer"}, "needs --tokenizer-model"),
        (
            {"tokenizer_model": "/nowhere/sp.model"},
            "--tokenizer-model /nowhere/sp.model: the file does not exist",
        ),
        ({"tokenizer_type": "BertTokenizer"}, "--tokenizer-type is 'BertTokenizer': expected one of"),
    ],
)
def test_a_missing_file_is_named_with_its_flag(given: dict[str, str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        build_tokenizer(flags(**given))


def test_missing_merges_are_named(gpt2_files: tuple[str, str]) -> None:
    with pytest.raises(UserError, match="--merge-file .*/none.txt: the file does not exist"):
        build_tokenizer(flags(vocab_file=gpt2_files[0], merge_file="/nowhere/none.txt"))


@pytest.mark.parametrize(
    "removed, expected", [("<|endoftext|>", "<|endoftext|> is missing"), ("A", "1 of the 256 byte symbols")]
)
def test_an_incomplete_gpt2_vocabulary_is_refused(
    gpt2_files: tuple[str, str], tmp_path: Path, removed: str, expected: str
) -> None:
    vocabulary = json.loads(Path(gpt2_files[0]).read_text())
    del vocabulary[removed]
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    with pytest.raises(UserError) as caught:
        build_tokenizer(flags(vocab_file=str(tmp_path / "vocab.json"), merge_file=gpt2_files[1]))
    assert expected in str(caught.value)


def test_damaged_files_are_named(gpt2_files: tuple[str, str], tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text('{"a": ')
    with pytest.raises(UserError, match=f"--vocab-file {bad} with --merge-file"):
        build_tokenizer(flags(vocab_file=str(bad), merge_file=gpt2_files[1]))
    with pytest.raises(UserError, match=f"--tokenizer-model {bad}: not a SentencePiece model"):
        build_tokenizer(flags(tokenizer_model=str(bad)))


def test_tokenizers_without_an_end_of_document_are_refused(hugging_face_folder: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hugging_face_folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "hf")
    with pytest.raises(UserError, match="has no eos token"):
        build_tokenizer(flags(tokenizer_name_or_path=str(tmp_path / "hf")))
    model = train_sentence_piece(tmp_path / "sp.model", eos_id=-1)
    with pytest.raises(UserError, match="has no end-of-sentence piece"):
        build_tokenizer(flags(tokenizer_model=model))


def test_gpt2_does_not_import_heavy_libraries(gpt2_files: tuple[str, str]) -> None:
    code = (
        "import sys; from types import SimpleNamespace as N; from megatron.tokenizer import build_tokenizer\n"
        f"build_tokenizer(N(tokenizer_type=None, vocab_file={gpt2_files[0]!r}, merge_file={gpt2_files[1]!r}, "
        "tokenizer_name_or_path=None, tokenizer_model=None))\n"
        "print([name for name in ('torch', 'transformers', 'sentencepiece') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
