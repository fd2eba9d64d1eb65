#!/usr/bin/env python
"""Continue a text with a trained model.

    python tools/generate.py --load checkpoints --prompt "def main(" --prompt "class Queue:" --top-k 50
    echo "import os" | python tools/generate.py --load checkpoints/global_step300 --greedy

The checkpoint may have been written on any layout. It says itself which model and which tokenizer it belongs
to; the tokenizer's flags are for files that have been moved. The text goes to stdout, remarks go to stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.config import ConfigError, LoggingConfig, exit_on_config_error
from megatron.config.tool_parser import ToolParser
from megatron.tokenizer.flags import add_tokenizer_flags

if TYPE_CHECKING:
    from megatron.checkpoint.discovery import Checkpoint
    from megatron.model.generation import Sampling
    from megatron.model.single_process import GPTModel
    from megatron.tokenizer import Tokenizer

# What a decoder puts for bytes that are no text yet: the next token may complete the character.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
LARGEST_SEED = 2**63 - 1


def build_parser() -> ToolParser:
    """The flags."""
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
        help="text to continue, as often as wanted (default: stdin)",
    )
    group = parser.add_argument_group("generation")
    group.add_argument("--max-new-tokens", type=int, default=100, help="per prompt (default: 100)")
    group.add_argument(
        "--temperature", type=float, default=1.0, help="below 1: safer, above 1: wilder (default: 1)"
    )
    group.add_argument(
        "--top-k", type=int, default=0, help="draw from the k likeliest tokens (default: 0, all)"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="draw from the likeliest that have this probability (default: 1)",
    )
    group.add_argument("--greedy", action="store_true", help="always the likeliest token: --temperature 0")
    group.add_argument(
        "--seed", type=int, default=0, help="of the draws; each prompt starts from it (default: 0)"
    )
    parser.add_argument(
        "--no-verify-digests",
        action="store_true",
        help="do not compare the weights with the checkpoint's digests",
    )
    add_tokenizer_flags(parser, "tokenizer (default: the checkpoint's own)")
    return parser


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """The texts to continue: --prompt, else all of stdin as one."""
    if arguments.prompt is not None:
        return arguments.prompt
    if sys.stdin.isatty():
        raise ConfigError("there is nothing to continue: give --prompt TEXT, or a text on stdin")
    return [sys.stdin.read().removesuffix("\n")]


def read_sampling(arguments: argparse.Namespace) -> Sampling:
    """How tokens are drawn; ConfigError for values that make no sense."""
    from megatron.model.generation import Sampling

    if arguments.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens is {arguments.max_new_tokens}, expected 1 or more")
    if not 0 <= arguments.seed <= LARGEST_SEED:
        raise ConfigError(f"--seed is {arguments.seed}, expected 0 to {LARGEST_SEED}")
    temperature = 0.0 if arguments.greedy else arguments.temperature
    return Sampling(temperature, arguments.top_k, arguments.top_p)


def load_model(checkpoint: Checkpoint) -> GPTModel:
    """The model on the accelerator, in the precision that it was trained in; on a CPU always in fp32."""
    from deepspeed.accelerator import get_accelerator

    from megatron.checkpoint.weights import load_full_weights
    from megatron.model.gpt_model import PARAMETER_DTYPES
    from megatron.model.single_process import GPTModel

    config = checkpoint.config
    model = GPTModel(config, checkpoint.vocab_size, checkpoint.eod)
    load_full_weights(model, checkpoint.folder)
    device = get_accelerator().current_device_name()
    if get_accelerator().device_name() != "cpu":
        model.to(device, PARAMETER_DTYPES[config.precision.name])
    return model.eval()


def write_text(
    model: GPTModel,
    tokenizer: Tokenizer,
    checkpoint: Checkpoint,
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
) -> int:
    """Prints the prompt and what follows, as it comes; returns the number of new tokens."""
    from megatron.model.generation import generate

    tokens = tokenizer.tokenize(prompt)
    print(prompt, end="", flush=True)
    num_prompt_tokens, start = len(tokens), len(tokenizer.detokenize(tokens))
    stream = generate(
        model,
        tokens,
        max_new_tokens,
        sampling,
        window=checkpoint.config.model.seq_length,
        eod=checkpoint.eod,
        seed=seed,
    )
    text = ""
    for token in stream:
        tokens.append(token)
        text = tokenizer.detokenize(tokens)
        if not text.endswith(INCOMPLETE):
            print(text[start:], end="", flush=True)
            start = len(text)
    print(text[start:], flush=True)
    return len(tokens) - num_prompt_tokens


def run(argv: Sequence[str] | None) -> None:
    """Do the work; ConfigError for a user's mistake."""
    arguments = build_parser().parse_args(argv)
    if not os.path.isdir(arguments.load):
        raise ConfigError(f"--load {arguments.load}: there is no such folder")
    prompts = read_prompts(arguments)

    from megatron.cluster.processes import configure_logging

    configure_logging(LoggingConfig())
    from megatron.checkpoint.integrity.verify import check_weights
    from megatron.checkpoint.reading import find_tokenizer, read_checkpoint

    sampling = read_sampling(arguments)
    checkpoint = read_checkpoint(arguments.load)
    tokenizer = find_tokenizer(arguments, checkpoint)
    if not arguments.no_verify_digests and not check_weights(checkpoint):
        print(f"{checkpoint.folder} has no digests of its weights: they are not compared", file=sys.stderr)
    model = load_model(checkpoint)
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


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with code 2, and one sentence, for a user's mistake."""
    with exit_on_config_error():
        run(argv)


if __name__ == "__main__":
    main()
