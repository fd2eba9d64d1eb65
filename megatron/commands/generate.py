"""Generates text from a checkpoint.

    python tools/generate.py --load checkpoints --prompt "def main(" --prompt "class Queue:" --top-k 50
    echo "import os" | python tools/generate.py --load checkpoints/global_step300 --greedy

The checkpoint may have any layout. It names the model and the tokenizer; set the tokenizer flags only if the
tokenizer's files have moved. Text is written to stdout, notes to stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.config import LoggingConfig
from megatron.config.tool_parser import ToolParser, add_verify_digests_flag, at_least_1, check_folder
from megatron.errors import UserError, exit_on_user_error
from megatron.tokenizer.flags import add_parse_special_flag, add_tokenizer_flags, check_parse_special

if TYPE_CHECKING:
    from megatron.checkpoint.record import Checkpoint
    from megatron.model.generation import Sampling
    from megatron.model.single_process import GPTModel
    from megatron.tokenizer import Tokenizer

# Decoders return this for an incomplete UTF-8 character. The next token may complete it.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
MAX_SEED = 2**63 - 1


def build_parser() -> ToolParser:
    parser = ToolParser(__doc__)
    group = parser.add_argument_group("input")
    group.add_argument(
        "--load",
        required=True,
        metavar="FOLDER",
        help="folder with the file `latest`, or a global_stepN folder",
    )
    group.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; may be repeated (default: read from stdin)",
    )
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--max-new-tokens", type=at_least_1, default=100, help="number of new tokens per prompt"
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="divide the logits by this number (default: 1); 0 means --greedy",
    )
    group.add_argument(
        "--top-k", type=int, default=0, help="sample from the k most likely tokens (default: 0, all)"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the smallest set of most likely tokens with this probability (default: 1, all)",
    )
    group.add_argument("--greedy", action="store_true", help="always use the most likely token")
    group.add_argument("--seed", type=int, default=0, help="random seed of each prompt")
    add_verify_digests_flag(parser)
    tokenizer = add_tokenizer_flags(parser, "tokenizer (default: the tokenizer of the checkpoint)")
    add_parse_special_flag(tokenizer, "prompts")
    return parser


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """Returns the texts of --prompt, or stdin as one text. Raises UserError for text that is not UTF-8."""
    if arguments.prompt is None and sys.stdin.isatty():
        raise UserError("no prompt: set --prompt TEXT, or write a text to stdin")
    source = "stdin" if arguments.prompt is None else "--prompt"
    try:
        prompts = arguments.prompt or [sys.stdin.read().removesuffix("\n")]
        for prompt in prompts:
            prompt.encode()  # Python decodes other bytes of the command line to surrogates
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise UserError(f"{source} is not UTF-8 text ({error.reason}): convert it with iconv") from error
    return prompts


def read_sampling(arguments: argparse.Namespace) -> Sampling:
    """Returns the sampling settings. Raises UserError for invalid values."""
    # Late: torch and DeepSpeed take seconds to import.
    from megatron.model.generation import Sampling

    if not 0 <= arguments.seed <= MAX_SEED:
        raise UserError(f"--seed is {arguments.seed}, expected 0 to {MAX_SEED}")
    temperature = 0.0 if arguments.greedy else arguments.temperature
    return Sampling(temperature, arguments.top_k, arguments.top_p)


def write_text(
    model: GPTModel,
    tokenizer: Tokenizer,
    checkpoint: Checkpoint,
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
) -> int:
    """Prints the prompt and each generated token as it arrives; returns the number of new tokens."""
    # Late: torch and DeepSpeed take seconds to import.
    from megatron.model.generation import generate

    tokens = tokenizer.tokenize(prompt)
    window = checkpoint.config.model.seq_length
    if len(tokens) > window:
        print(
            f"note: the prompt has {len(tokens):,} tokens, and the model's sequence length is {window:,}: "
            "only the last tokens are used",
            file=sys.stderr,
        )
    print(prompt, end="", flush=True)
    num_prompt_tokens, start = len(tokens), len(tokenizer.detokenize(tokens))
    stream = generate(model, tokens, max_new_tokens, sampling, window=window, eod=tokenizer.eod, seed=seed)
    text = ""
    for token in stream:
        tokens.append(token)
        text = tokenizer.detokenize(tokens)
        if not text.endswith(INCOMPLETE):
            print(text[start:], end="", flush=True)
            start = len(text)
    print(text[start:], flush=True)
    return len(tokens) - num_prompt_tokens


@exit_on_user_error()
def main(argv: Sequence[str] | None = None) -> None:
    arguments = build_parser().parse_args(argv)
    check_folder("--load", arguments.load)
    prompts = read_prompts(arguments)

    # Late: torch and DeepSpeed take seconds to import.
    from megatron.cluster.processes import configure_logging, use_device_alone

    configure_logging(LoggingConfig())
    use_device_alone()
    from megatron.checkpoint.reading import find_tokenizer, load_model, read_checkpoint

    sampling = read_sampling(arguments)
    checkpoint = read_checkpoint(arguments.load)
    tokenizer = find_tokenizer(arguments, checkpoint, arguments.parse_special_tokens)
    check_parse_special(tokenizer, arguments.parse_special_tokens)
    model = load_model(checkpoint, verify=not arguments.no_verify_digests, fp32_on_cpu=True)
    print(f"{checkpoint.folder}, trained for {checkpoint.state.iteration} iterations", file=sys.stderr)
    start, new = time.monotonic(), 0
    for index, prompt in enumerate(prompts):
        if index:
            print("-" * 40)
        new += write_text(
            model, tokenizer, checkpoint, prompt, arguments.max_new_tokens, sampling, arguments.seed
        )
    seconds = time.monotonic() - start
    print(f"{new} new tokens in {seconds:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
