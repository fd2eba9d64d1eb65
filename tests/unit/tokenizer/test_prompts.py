"""Tests which tokens of prompts and chats count in the loss."""

import json
from pathlib import Path

import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.preprocessing import preprocess
from megatron.errors import UserError
from megatron.tokenizer import build_tokenizer
from tests.support.chat_tokenizer import CHATML, MARKED, random_chats, save_chat_tokenizer, write_rows
from tests.unit.tokenizer.vocabularies import tokenizer_flags, train_gpt2_vocabulary

STRIPS_EARLIER_ANSWERS = (
    "{% for message in messages %}{{ message.role }}: "
    "{{ message.content if loop.last or message.role != 'assistant' else '...' }}<|im_end|>{% endfor %}"
)


def tokens_of(folder: Path, rows: list, keys: list[str], template: str | None = CHATML, **options):
    """Preprocesses rows. Returns ((ids, counts) of each document, the tokenizer, the progress)."""
    flags = tokenizer_flags(tokenizer_name_or_path=str(save_chat_tokenizer(folder / "tokenizer", template)))
    if not (folder / "in.jsonl").exists():
        write_rows(folder / "in.jsonl", rows)
    progress = preprocess([str(folder / "in.jsonl")], str(folder / "out"), keys, flags, **options)
    data = IndexedDataset(f"{folder}/out_{'_'.join(keys)}_document")
    assert data.loss_mask is not None
    pairs = [(data.get(i).tolist(), data.loss_mask.get(i).tolist()) for i in range(len(data))]
    return pairs, build_tokenizer(flags), progress


def counted_texts(pair, tokenizer) -> list[str]:
    """Returns the text of each run of consecutive tokens that count in the loss."""
    parts: list[list[int]] = [[]]
    for token, counts in zip(*pair, strict=True):
        if counts:
            parts[-1].append(token)
        elif parts[-1]:
            parts.append([])
    return [tokenizer.detokenize(part) for part in parts if part]


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>\n"), (MARKED, "<|im_end|>")])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_messages_of_the_assistant_count_with_the_end_of_their_turn(tmp_path, template, end, workers):
    rows = random_chats(20)
    pairs, tokenizer, _ = tokens_of(tmp_path, rows, ["messages"], template, workers=workers)
    source = tokenizer.source
    for row, pair in zip(rows, pairs, strict=True):
        kwargs = {"split_special_tokens": False}
        rendered = source.apply_chat_template(row["messages"], return_dict=True, tokenizer_kwargs=kwargs)
        assert pair[0] == rendered["input_ids"]
        answers = [m["content"] + end for m in row["messages"] if m["role"] == "assistant"]
        assert counted_texts(pair, tokenizer) == answers


def test_an_appended_end_counts_if_the_assistant_speaks_last(tmp_path):
    rows = random_chats(2)
    rows[1]["messages"].append({"role": "user", "content": "thanks"})
    pairs, tokenizer, _ = tokens_of(tmp_path, rows, ["messages"], append_eod=True)
    assert [(ids[-1], counts[-1]) for ids, counts in pairs] == [(tokenizer.eod, 1), (tokenizer.eod, 0)]


def test_a_completion_counts_with_the_end_of_the_document(tmp_path):
    rows = [{"prompt": "what is", "completion": " the sum?"}, {"prompt": "", "completion": "hello", "id": 3}]
    pairs, tokenizer, progress = tokens_of(tmp_path, rows, ["prompt", "completion"], append_eod=True)
    assert [counted_texts(pair, tokenizer) for pair in pairs] == [
        [" the sum?<|im_end|>"],
        ["hello<|im_end|>"],
    ]
    assert [tokenizer.detokenize(ids) for ids, _ in pairs] == [
        "what is the sum?<|im_end|>",
        "hello<|im_end|>",
    ]
    assert progress.documents == {"prompt_completion": 2}


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
BAD_CHATS = [
    ({"messages": "text"}, "expected a list of messages under 'messages', got 'text'"),
    ({"messages": []}, "expected a list of messages under 'messages'"),
    ({"messages": [3]}, "message 1: expected an object, got 3"),
    ({"messages": [USER, {"role": "assistant"}]}, "message 2: expected text under 'content', got None"),
    ({"messages": [{"content": "a"}]}, "message 1: expected text under 'role'"),
    ({"messages": [USER]}, "no token of its chat is the assistant's"),
    ({"messages": [ANSWER]}, "message 1 is the assistant's, expected a message before it"),
    ({"messages": [{"role": "user", "content": "<|im_end|>"}]}, "message 1 contains the special token"),
    ({"text": "a"}, "has no key 'messages', its keys are 'text'"),
]
BAD_PROMPTS = [
    ({"prompt": "a"}, "has no key 'completion', its keys are 'prompt'"),
    ({"prompt": ["a"], "completion": "b"}, "expected text under 'prompt', got .'a'."),
    ({"prompt": "a\ud800", "completion": "b"}, "the text under 'prompt' has an unpaired surrogate"),
    ({"prompt": "a", "completion": ""}, "the text under 'completion' has no tokens"),
]


@pytest.mark.parametrize(("row", "reason"), [*BAD_CHATS, *BAD_PROMPTS])
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, reason):
    keys = ["prompt", "completion"] if (row, reason) in BAD_PROMPTS else ["messages"]
    good = {"prompt": "a", "completion": "b", "messages": [USER, ANSWER]}
    with pytest.raises(UserError, match=rf"in.jsonl, line 2: {reason}"):
        tokens_of(tmp_path, [good, row], keys)
    pairs, *_, progress = tokens_of(tmp_path, [], keys, skip_bad_lines=True)
    assert (len(pairs), len(progress.skipped)) == (1, 1)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (STRIPS_EARLIER_ANSWERS, "changes the text before message 2 .* put {% generation %}"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "the chat template rejects it: roles must alternate",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_named(tmp_path, template, reason):
    with pytest.raises(UserError, match=f"line 1: .*{reason}"):
        tokens_of(tmp_path, [{"messages": [USER, ANSWER, USER, ANSWER]}], ["messages"], template)


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    with pytest.raises(UserError, match="tokenizer has no chat template, which --json-keys messages needs"):
        tokens_of(tmp_path, random_chats(1), ["messages"], None)
    vocab, merges = train_gpt2_vocabulary(tmp_path)
    flags = tokenizer_flags(vocab_file=vocab, merge_file=merges)
    with pytest.raises(UserError, match="a GPT2BPETokenizer has no chat template"):
        preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), ["messages"], flags)


def test_other_keys_beside_chats_are_refused(tmp_path):
    with pytest.raises(UserError, match="--json-keys messages text: 'messages' holds chats"):
        tokens_of(tmp_path, random_chats(1), ["messages", "text"])


def test_files_are_made_again_if_the_template_changes_or_the_mask_is_lost(tmp_path):
    rows, notes = random_chats(3), []
    for template, lost, kept in (
        (CHATML, False, False),
        (CHATML, False, True),
        (MARKED, False, False),
        (MARKED, True, False),
    ):
        if lost:
            (tmp_path / "out_messages_document_loss_mask.bin").unlink()
            (tmp_path / "out_messages_document_loss_mask.idx").unlink()
        tokens_of(tmp_path, rows, ["messages"], template, note=notes.append)
        assert ("kept" in notes[-1]) == kept
    record = json.loads((tmp_path / "out_messages_document.tokenizer.json").read_text())
    assert len(record["loss_mask_sha256"]) == len(record["chat_template_sha256"]) == 64
