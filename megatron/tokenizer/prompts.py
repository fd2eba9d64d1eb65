"""Tokenizes prompts with completions, and chats. Only completions count in the loss."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from megatron.errors import UserError, one_line
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.hugging_face import HuggingFaceTokenizer

PROMPT_KEYS = ("prompt", "completion")
CHAT_KEY = "messages"
_ASSISTANT = "assistant"
_SURROGATE = re.compile("[\ud800-\udfff]")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class CountedTokens(NamedTuple):
    """The tokens of a document, and for each token whether it counts in the loss."""

    ids: list[int]
    counts: list[bool]


class RowEncoder(Protocol):
    """Tokenizes the rows of a jsonl file."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a row that the encoder reads."""

    def __call__(self, row: dict[str, Any]) -> CountedTokens:
        """Returns the tokens of a row. Raises ValueError, with the reason, for a row without tokens."""


def row_encoder(
    tokenizer: Tokenizer,
    json_keys: Sequence[str],
    eod: int | None,
    find_special: Callable[[str], list[str]],
) -> RowEncoder | None:
    """Returns the encoder of prompts or chats under these keys; None if the keys hold plain texts.

    eod: the token that ends each row; None to add none. find_special: lists the special tokens in a text.
    Raises UserError if the tokenizer has no chat template, and if keys of prompts are combined with other
    keys.
    """
    if set(json_keys) == set(PROMPT_KEYS):
        return PromptEncoder(tokenizer, eod)
    if not has_prompts(json_keys):
        return None
    if len(json_keys) > 1:
        others = " ".join(key for key in json_keys if key != CHAT_KEY)
        raise UserError(
            f"--json-keys {' '.join(json_keys)}: '{CHAT_KEY}' holds chats, the other keys text: preprocess "
            f"{others} with a command of its own"
        )
    return ChatEncoder(tokenizer, eod, find_special)


def has_prompts(json_keys: Sequence[str]) -> bool:
    """Returns whether rows with these keys are prompts with completions, or chats."""
    return set(json_keys) == set(PROMPT_KEYS) or CHAT_KEY in json_keys


def recorded_settings(tokenizer: Tokenizer, json_keys: Sequence[str]) -> dict[str, str]:
    """Returns the entries about the encoder of rows with these keys, for the record of token files."""
    if CHAT_KEY not in json_keys or not isinstance(tokenizer, HuggingFaceTokenizer):
        return {}
    return {"chat_template_sha256": hashlib.sha256(chat_template(tokenizer).encode()).hexdigest()}


class PromptEncoder:
    """Tokenizes rows with a prompt and a completion. The two are tokenized separately. The end-of-document
    token belongs to the completion."""

    keys = PROMPT_KEYS

    def __init__(self, tokenizer: Tokenizer, eod: int | None) -> None:
        self._tokenizer, self._end = tokenizer, [] if eod is None else [eod]

    def __call__(self, row: dict[str, Any]) -> CountedTokens:
        for key in PROMPT_KEYS:
            _check_text(row, key)
        prompt, completion = (self._tokenizer.tokenize(row[key]) for key in PROMPT_KEYS)
        completion += self._end
        if not completion:
            raise ValueError("the text under 'completion' has no tokens")
        return CountedTokens(prompt + completion, [False] * len(prompt) + [True] * len(completion))


class ChatEncoder:
    """Tokenizes chats with the chat template of a Hugging Face tokenizer. Only messages of the assistant
    count in the loss.

    A template with `{% generation %}` marks these messages. With any other template the chat is rendered
    twice for each of them, up to the beginning of the message and up to its end. The difference is the tokens
    of the message, including the end of the turn.
    """

    keys = (CHAT_KEY,)

    def __init__(
        self, tokenizer: Tokenizer, eod: int | None, find_special: Callable[[str], list[str]]
    ) -> None:
        self._eod, self._find_special = eod, find_special
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise UserError(
                f"--json-keys {CHAT_KEY}: a {tokenizer.name} has no chat template: use a Hugging Face "
                "tokenizer (--tokenizer-name-or-path), or write prompts and completions"
            )
        self._tokenizer, self._parses_special = tokenizer, tokenizer.parse_special
        self._marks_assistant = _GENERATION.search(chat_template(tokenizer)) is not None

    def __call__(self, row: dict[str, Any]) -> CountedTokens:
        messages = row[CHAT_KEY]
        self._check(messages)
        try:
            ids, counts = self._marked(messages) if self._marks_assistant else self._compared(messages)
        except _TemplateError as error:
            raise ValueError(f"the chat template rejects it: {error}") from error
        if not any(counts):
            raise ValueError(f"no token of its chat is the {_ASSISTANT}'s")
        if self._eod is not None and ids[-1] != self._eod:
            ids, counts = [*ids, self._eod], [*counts, messages[-1]["role"] == _ASSISTANT]
        return CountedTokens(ids, counts)

    def _check(self, messages: Any) -> None:
        """Raises ValueError unless `messages` is a chat."""
        if not isinstance(messages, list) or not messages:
            raise ValueError(f"expected a list of messages under '{CHAT_KEY}', got {messages!r:.40}")
        for number, message in enumerate(messages, 1):
            if not isinstance(message, dict):
                raise ValueError(f"message {number}: expected an object, got {message!r:.40}")
            for key in ("role", "content"):
                _check_text(message, key, f"message {number}: ")
            if not self._parses_special and (found := self._find_special(message["content"])):
                raise ValueError(
                    f"message {number} contains the special token {found[0]}, which a chat template does not "
                    "keep as text: remove it, or set --parse-special-tokens"
                )

    def _render(self, messages: list[dict[str, str]], **options: Any) -> Any:
        """Returns the tokens of messages in the form that transformers returns."""
        try:
            return self._tokenizer.source.apply_chat_template(
                messages,
                tokenize=True,
                return_dict=True,
                tokenizer_kwargs={"split_special_tokens": False},  # special tokens of the template become ids
                **options,
            )
        except Exception as error:  # a template may raise any error, for example about the order of roles
            raise _TemplateError(one_line(error)) from error

    def _marked(self, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
        rendered = self._render(messages, return_assistant_tokens_mask=True)
        return list(rendered["input_ids"]), [count > 0 for count in rendered["assistant_masks"]]

    def _compared(self, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
        ids = list(self._render(messages)["input_ids"])
        counts = [False] * len(ids)
        for number, message in enumerate(messages):
            if message["role"] != _ASSISTANT:
                continue
            if number == 0:
                raise ValueError(f"message 1 is the {_ASSISTANT}'s, expected a message before it")
            before = self._render(messages[:number], add_generation_prompt=True)["input_ids"]
            after = self._render(messages[: number + 1])["input_ids"]
            if ids[: len(before)] != before or ids[: len(after)] != after:
                raise ValueError(
                    f"its chat template changes the text before message {number + 1} when later messages "
                    "follow: put {% generation %} and {% endgeneration %} around the text of the "
                    f"{_ASSISTANT} in the template"
                )
            counts[len(before) : len(after)] = [True] * (len(after) - len(before))
        return ids, counts


def _check_text(values: dict[str, Any], key: str, where: str = "") -> None:
    """Raises ValueError unless `values` has a text under `key`. where: the place of `values`, for the
    message."""
    text = values.get(key)
    if not isinstance(text, str):
        raise ValueError(f"{where}expected text under '{key}', got {text!r:.40}")
    if has_surrogate(text):
        raise ValueError(f"{where}the text under '{key}' has an unpaired surrogate")


def has_surrogate(text: str) -> bool:
    """Returns whether a text contains surrogates: it is then not valid Unicode, and tokenizers reject it."""
    return not text.isascii() and _SURROGATE.search(text) is not None


class _TemplateError(Exception):
    """An error that a chat template raises."""


def chat_template(tokenizer: HuggingFaceTokenizer) -> str:
    """Returns the tokenizer's chat template. Raises UserError if it has none."""
    try:
        return str(tokenizer.source.get_chat_template())
    except ValueError as error:
        raise UserError(
            f"--tokenizer-name-or-path {tokenizer.source.name_or_path}: the tokenizer has no chat template, "
            f"which --json-keys {CHAT_KEY} needs: add a file chat_template.jinja to its folder"
        ) from error
