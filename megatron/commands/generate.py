"""Generates text from a checkpoint.

    python tools/generate.py --load checkpoints --prompt "def main(" --prompt "class Queue:" --top-k 50
    echo "import os" | python tools/generate.py --load checkpoints/global_step300 --greedy

The checkpoint may have any layout. It names the model and the tokenizer; set the tokenizer flags only if the
tokenizer's files have moved. The tool writes texts to stdout and notes to stderr. The context has the
sequence length of the training. If a text is longer, the model sees only its last tokens, between half the
context and the whole context.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config import LoggingConfig
from megatron.config.mistakes import Mistakes
from megatron.config.tool_parser import (
    ToolParser,
    add_universal_flag,
    add_verify_digests_flag,
    at_least_1,
    check_folder,
)
from megatron.errors import UserError, exit_on_user_error
from megatron.tokenizer.flags import add_parse_special_flag, add_tokenizer_flags, check_parse_special

if TYPE_CHECKING:
    from megatron.checkpoint.record import Checkpoint
    from megatron.model.inference.generation import Sampling
    from megatron.model.inference.single_process import GPTModel
    from megatron.tokenizer import Tokenizer

RULE = "-" * 40
MAX_SEED = 2**63 - 1


def build_parser() -> ToolParser:
    parser = ToolParser(__doc__)
    group = parser.add_argument_group("input")
    group.add_argument(
        "--load",
        required=True,
        metavar="FOLDER",
        help="folder with the file `latest` or `latest_universal`, or a global_stepN folder",
    )
    add_universal_flag(group, "the folder")
    group.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; may be repeated (default: read from stdin)",
    )
    group.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="file with a prompt on each line; these prompts follow the prompts of --prompt",
    )
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--max-new-tokens", type=at_least_1, default=100, help="number of new tokens per prompt"
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="divide the logits by this number (default: 1); 0 has the effect of --greedy",
    )
    group.add_argument(
        "--top-k",
        type=int,
        default=0,
        help="sample from the k most likely tokens (default: 0, from all tokens)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the smallest set of most likely tokens whose total probability reaches this "
        "number (default: 1, from all tokens)",
    )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end a text before this string; may be repeated (default: only the end of the document)",
    )
    group.add_argument(
        "--batch-size", type=at_least_1, help="number of prompts that are continued at a time (default: 8)"
    )
    group.add_argument("--greedy", action="store_true", help="always use the most likely token")
    group.add_argument("--seed", type=int, default=0, help="random seed of each prompt")
    add_verify_digests_flag(parser)
    tokenizer = add_tokenizer_flags(parser, "tokenizer (default: the tokenizer of the checkpoint)")
    add_parse_special_flag(tokenizer, "prompts")
    return parser


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """Returns the texts of --prompt and --prompt-file, or stdin as one text. Raises UserError for text that
    is not UTF-8, and for a file that cannot be read or is empty."""
    prompts, file = list(arguments.prompt or ()), arguments.prompt_file
    if not prompts and file is None and sys.stdin.isatty():
        raise UserError("no prompt: set --prompt TEXT, or write a text to stdin")
    source = f"--prompt-file {file}" if file else "--prompt" if prompts else "stdin"
    try:
        if file is not None:
            lines = Path(file).read_bytes().decode()
            prompts += lines.removesuffix("\n").split("\n") if lines else []
        elif not prompts:
            prompts = [sys.stdin.read().removesuffix("\n")]
        for prompt in prompts:
            prompt.encode()  # Python decodes other bytes of the command line to surrogates
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise UserError(f"{source} is not UTF-8 text ({error.reason}): convert it with iconv") from error
    except OSError as error:
        raise UserError(f"{source} cannot be read ({error.strerror}): set a text file") from error
    if not prompts:
        raise UserError(f"{source} is empty, expected a prompt on each line: write one, or set --prompt")
    return prompts


def read_sampling(arguments: argparse.Namespace, mistakes: Mistakes) -> Sampling:
    """Returns the sampling settings. Raises ConfigError with the given mistakes and the mistakes of invalid
    values."""
    # The import is late, because torch and DeepSpeed take seconds to import.
    from megatron.model.inference.generation import Sampling

    if not 0 <= arguments.seed <= MAX_SEED:
        mistakes.add(f"--seed is {arguments.seed}, expected 0 to {MAX_SEED}")
    if "" in (arguments.stop or ()):
        mistakes.add("--stop is an empty string, expected a text: remove it")
    settings: dict[str, Any] = {
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
    }
    for name, value in settings.items():
        with mistakes.collect():
            Sampling(**{name: value})
    mistakes.raise_all()
    return Sampling(**settings | {"temperature": 0.0} if arguments.greedy else settings)


def write_texts(
    model: GPTModel,
    tokenizer: Tokenizer,
    checkpoint: Checkpoint,
    prompts: list[str],
    arguments: argparse.Namespace,
    sampling: Sampling,
) -> int:
    """Prints the prompts in their order, each with its generated text as soon as tokens arrive. Returns the
    number of new tokens."""
    # The import is late, because torch and DeepSpeed take seconds to import.
    from megatron.model.inference.generation import Continuation, first_visible, generate

    window, texts = checkpoint.config.model.seq_length, []
    for prompt in prompts:
        tokens = tokenizer.tokenize(prompt)
        if len(tokens) > window:
            print(
                f"note: the prompt has {len(tokens):,} tokens, and the model's sequence length is "
                f"{window:,}: only the last {len(tokens) - first_visible(len(tokens), window):,} are used",
                file=sys.stderr,
            )
        stop = arguments.stop or ()
        texts.append(Continuation(tokenizer.detokenize, tokens, arguments.max_new_tokens, stop, after=tokens))
    index, printed = 0, 0
    print(prompts[0], end="", flush=True)
    for _ in generate(
        model,
        texts,
        sampling,
        window=window,
        eod=tokenizer.eod,
        seed=arguments.seed,
        batch_size=arguments.batch_size,
    ):
        while index < len(texts):
            text = texts[index]
            print(text.text[printed:], end="\n" if text.is_complete else "", flush=True)
            printed = len(text.text)
            if not text.is_complete:
                break
            index, printed = index + 1, 0
            if index < len(texts):
                print(RULE, prompts[index], sep="\n", end="", flush=True)
    return sum(len(text.tokens) for text in texts)


@exit_on_user_error()
def main(argv: Sequence[str] | None = None) -> None:
    mistakes = Mistakes()
    arguments = build_parser().collect(sys.argv[1:] if argv is None else argv, mistakes)
    with mistakes.collect(["--load"]):
        check_folder("--load", arguments.load or "")
    prompts = list[str]()
    with mistakes.collect():
        prompts = read_prompts(arguments)

    # The import is late, because torch and DeepSpeed take seconds to import.
    from megatron.cluster.processes import configure_logging, use_device_alone

    configure_logging(LoggingConfig())
    use_device_alone()
    from megatron.checkpoint.reading import find_tokenizer, load_model, read_checkpoint

    sampling = read_sampling(arguments, mistakes)
    checkpoint = read_checkpoint(arguments.load, arguments.universal_checkpoint)
    tokenizer = find_tokenizer(arguments, checkpoint, arguments.parse_special_tokens)
    check_parse_special(tokenizer, arguments.parse_special_tokens)
    model = load_model(checkpoint, verify=not arguments.no_verify_digests, fp32_on_cpu=True)
    print(f"{checkpoint.folder}, trained for {checkpoint.state.iteration} iterations", file=sys.stderr)
    start = time.monotonic()
    new = write_texts(model, tokenizer, checkpoint, prompts, arguments, sampling)
    seconds = time.monotonic() - start
    print(f"{new} new tokens in {seconds:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
