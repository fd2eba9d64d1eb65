"""Translates flags and values of other frameworks, and finds the alternative to a flag (see `peer_flags`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megatron.config.peer_flags import UNSUPPORTED_FAMILIES, UNSUPPORTED_FLAGS

# A flag -> the words that replace it. A value after the flag goes after the last word.
REWRITTEN_FLAGS: Mapping[str, tuple[str, ...]] = {
    "--use-distributed-optimizer": ("--zero-stage", "1"),
    "--openai-gelu": ("--activation", "gelu"),
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rotary"),
    "--rotary-position-embeddings-theta": ("--rotary-base",),
    "--use-rope-scaling": ("--rope-scaling-type", "llama3"),
    "--num-key-value-heads": ("--group-query-attention", "--num-query-groups"),
    "--norm-epsilon": ("--layernorm-epsilon",),
    "--window-attn-skip-freq": ("--window-pattern",),
    "--enable-zbh1-pipeline": ("--pipeline-schedule", "zero-bubble"),
    "--recompute-activations": ("--recompute-granularity", "selective"),
    "--distribute-saved-activations": ("--partition-activations",),
    "--distribute-checkpointed-activations": ("--partition-activations",),
    "--cpu-optimizer": ("--cpu-offload",),
    "--optimizer-cpu-offload": ("--cpu-offload",),
    "--muon-nesterov": ("--muon-use-nesterov",),
    "--kill-switch-file": ("--kill-switch-path",),
    "--skip-train": ("--no-train",),
    "--wandb-exp-name": ("--wandb-name",),
    "--recompute-num-layers": ("--checkpoint-num-layers",),
    "--swiglu": ("--glu-activation", "swiglu"),
}

# Flag -> value of another framework -> this program's.
REWRITTEN_VALUES: Mapping[str, Mapping[str, str]] = {
    "--normalization": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"},
    "--position-embedding-type": {"rope": "rotary", "learned_absolute": "absolute"},
    "--tokenizer-type": {
        "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
        "Llama2Tokenizer": "SentencePieceTokenizer",
        "HuggingFaceTokenizer": "PretrainedFromHF",
    },
}


def rewrite(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words of a command line with `REWRITTEN_FLAGS` and `REWRITTEN_VALUES` replaced, and a note
    for each replacement. A flag with a value that it does not take stays: the parser rejects it."""
    words, notes = _rewritten_values(words)
    given = {word.partition("=")[0] for word in words}
    if "--swiglu" in words and "--ffn-hidden-size" not in given:
        words += _swiglu_size(words)
    result: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        stands_for = REWRITTEN_FLAGS.get(name)
        if stands_for is None:
            result.append(word)
        elif stands_for[-1].startswith("--"):
            result += [*stands_for[:-1], stands_for[-1] + equals + value]
            notes.append(f"{name} is read as {' '.join(stands_for)}")
        elif equals:
            result.append(word)
        elif stands_for[0] in given:
            notes.append(f"{name} is ignored: {stands_for[0]} is given")
        else:
            result += stands_for
            notes.append(f"{name} is read as {' '.join(stands_for)}")
    return result, list(dict.fromkeys(notes))


def _rewritten_values(words: Sequence[str]) -> tuple[list[str], list[str]]:
    result, notes, flag = list[str](), list[str](), ""
    for word in words:
        name, equals, value = word.partition("=") if word.startswith("--") else (flag, "", word)
        if (instead := REWRITTEN_VALUES.get(name, {}).get(value)) is not None:
            notes.append(f"{name} {value} is read as {name} {instead}")
            word = f"{name}={instead}" if equals else instead
        result.append(word)
        flag = word if word.startswith("--") else ""
    if any("HuggingFaceTokenizer" in note for note in notes):  # its --tokenizer-model is a folder or a name
        given = result
        result = [re.sub("^--tokenizer-model(?==|$)", "--tokenizer-name-or-path", word) for word in given]
        notes += ["--tokenizer-model is read as --tokenizer-name-or-path"] * (result != given)
    return result, notes


def _swiglu_size(words: Sequence[str]) -> list[str]:
    """Returns --ffn-hidden-size with the default of Megatron-LM's and Microsoft's --swiglu: 8/3 of the hidden
    size, rounded down to a multiple of 64; [] if the hidden size is not given as a number."""
    sizes = re.findall(r"(?<!\S)--hidden-size[ =](\d+)(?!\S)", " ".join(words))
    return ["--ffn-hidden-size", str(int((4 * int(sizes[-1]) * 2 / 3) / 64) * 64)] if sizes else []


def unsupported(name: str) -> str | None:
    """Returns the alternative to a flag of another framework; None for a flag that is in no table."""
    spelled = "--" + name.lstrip("-").replace("_", "-")
    if (answer := UNSUPPORTED_FLAGS.get(spelled)) is not None:
        return answer
    begins = [
        (begin, instead)
        for instead, all_begins in UNSUPPORTED_FAMILIES.items()
        for begin in all_begins
        if spelled.startswith(begin)
    ]
    return max(begins, key=lambda found: len(found[0]))[1] if begins else None
