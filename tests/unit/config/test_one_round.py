"""One error contains all mistakes of a command line, each once, and no errors that follow from a different
mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.arguments import read_command_line
from megatron.commands import (
    convert_checkpoint,
    convert_huggingface,
    generate,
    plan,
    preprocess_data,
    verify_dataset,
)
from megatron.config import ConfigError
from tests.unit.config.command_lines import RUN, SMALL


def lines_of(words: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_command_line(words, {})
    return [line.strip() for line in str(caught.value).splitlines()]


def changed(words: str, base: list[str] = SMALL) -> list[str]:
    return [*base, *words.split()]


def check_lines(lines: list[str], parts: list[str]) -> None:
    """Checks that each part begins its own line, in any order, and that there are no further lines."""
    assert len(lines) == len(parts), lines
    for part in parts:
        assert sum(line.startswith(part) for line in lines) == 1, (part, lines)


def test_one_round_has_mistakes_of_every_kind() -> None:
    words = (
        "--lr abc --hiden-size 256 --no-save-optim --normalization bad --position-embedding-type nope "
        "--tensor-model-parallel-size 3 --global-batch-size 7 --micro-batch-size 2 --world-size 3 --seed -1"
    )
    check_lines(
        lines_of(changed(words)),
        [
            "--lr is 'abc'",
            "unknown flag --hiden-size: did you mean --hidden-size?",
            "--no-save-optim is not supported",
            "--normalization is 'bad'",
            "--position-embedding-type is 'nope'",
            "--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3",
            "--ffn-hidden-size 256 is not divisible by --tensor-model-parallel-size 3",
            "--global-batch-size 7 is not divisible by --micro-batch-size 2",
            "--seed is -1",
        ],
    )


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        # A flag with an invalid value causes no further error.
        ("--pipeline-model-parallel-size two --pipeline-schedule zero-bubble", ["--pipeline-model"]),
        ("--tensor-model-parallel-size 0 --sequence-parallel --global-batch-size 7", ["--tensor-model"]),
        ("--micro-batch-size x --global-batch-size 7 --world-size 4", ["--micro-batch-size is 'x'"]),
        ("--lr x --min-lr 5", ["--lr is 'x'"]),
        ("--hidden-size x --position-embedding-type rotary", ["--hidden-size is 'x'"]),
        (
            "--num-attention-heads 0 --num-query-groups 3 --group-query-attention",
            ["--num-attention-heads is"],
        ),
        ("--train-samples many", ["--train-samples is 'many'"]),
        ("--seq-length x --max-position-embeddings 1", ["--seq-length is 'x'"]),
        ("--window-pattern 7x --window-size 4", ["--window-pattern is"]),
        ("--split 969, 30, 1", ["unexpected value '30,'"]),
        # Independent mistakes are all reported.
        ("--hidden-size 66 --seq-length 64", ["--hidden-size 66", "--seq-length 64"]),
        (
            "--world-size 2 --tensor-model-parallel-size 4 --global-batch-size 7 --micro-batch-size 2",
            ["2 processes cannot be divided", "--global-batch-size 7"],
        ),
        (
            "--lr-decay-style WSD --seed -1",
            ["--seed is -1", "--lr-decay-style WSD without --lr-wsd-decay-samples"],
        ),
        (
            "--lr-decay-style WSD --lr-decay-tokens 99 --seed -1",
            ["--seed", "--lr-decay-style WSD with a decay"],
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-samples 790 --lr-warmup-samples 20 --seed -1",
            ["--seed", "--lr-wsd-decay-samples 790: the decay has to end after 800"],
        ),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 2", ["--lr-wsd-decay-iters 2 cannot be combined"]),
        (
            "--train-iters 5 --lr-decay-style inverse-square-root --lr-decay-iters 3 --lr-decay-tokens 99",
            ["exactly one of --train-iters", "--lr-decay-style inverse", "--lr-decay-iters 3 and"],
        ),
        (
            "--pipeline-schedule zero-bubble --virtual-pipeline-stages 2",
            [
                "--virtual-pipeline-stages 2 with --pipeline-schedule",
                "--virtual-pipeline-stages 2 with --pipeline-model",
            ],
        ),
        ("--min-lr 5 --lr-warmup-samples 900", ["--min-lr 5.0", "--lr-warmup-samples 900"]),
        ("--bf16 --fp16 --zero-stage 4", ["--bf16", "--zero-stage is 4"]),
        ("--seed --tokenizer-type Nope", ["--seed: expected one argument", "--tokenizer-type is 'Nope'"]),
    ],
)
def test_one_round_has_no_consequences_of_another_mistake(words: str, parts: list[str]) -> None:
    lines = lines_of(changed(words))
    if "--bf16 --fp16" in words:
        lines = sorted({line.replace("--fp16", "--bf16") for line in lines})
    check_lines(lines, parts)


def test_one_round_has_missing_flags_without_those_that_are_misspelled() -> None:
    lines = lines_of("--num-layer 4 --seq-length 32 --train-iters 5 --dry-run".split())
    check_lines(lines, ["unknown flag --num-layer", "missing required flags: --hidden-size"])
    assert "--num-layers (" not in lines[1] and "--lr (" in lines[1]


def test_one_round_has_all_missing_files(tmp_path: Path) -> None:
    words = f"--data-path {tmp_path}/a {tmp_path}/b --vocab-file {tmp_path}/v --merge-file {tmp_path}/m"
    more = f" --deepspeed_config {tmp_path}/none.json"
    check_lines(
        lines_of(changed(words + more, RUN)),
        [
            *(f"--vocab-file: {tmp_path}/v does not", f"--merge-file: {tmp_path}/m does not"),
            *(f"--data-path: {tmp_path}/{name}" for name in "ab"),
            "--deepspeed_config",
        ],
    )


def test_one_round_has_all_mistakes_of_the_deepspeed_file(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    settings = {
        "zero_optimisation": {"stage": 1},
        "train_batch_size": 64,
        "gradient_clipping": 5,
        "bf16": {"enabled": True, "enabledd": True},
        "fp16": 3,
        "optimizer": {"type": "Adam"},
    }
    file.write_text(json.dumps(settings))
    check_lines(
        lines_of(changed(f"--deepspeed_config {file} --seed -1")),
        [
            "--seed is -1",
            "the DeepSpeed config has zero_optimisation, which is not supported: did you mean zero_optim",
            "the DeepSpeed config's train_batch_size is 64 but --global-batch-size is 8",
            "the DeepSpeed config's gradient_clipping is 5 but --clip-grad is 1.0",
            "the DeepSpeed config's bf16.enabled is true but --bf16 is false",
            "the DeepSpeed config's bf16.enabledd is not supported: did you mean enabled?",
            "the DeepSpeed config's fp16 is 3: expected an object",
            "the DeepSpeed config has optimizer: ",
        ],
    )


def test_one_round_of_a_tool() -> None:
    with pytest.raises(ConfigError) as caught:
        preprocess_data.build_parser().parse_args("--workers x --inptu a --tokenizer-type none".split())
    lines = [line.strip() for line in str(caught.value).splitlines()]
    check_lines(
        lines,
        [
            "--workers is 'x': expected an integer",
            "argument --tokenizer-type: invalid choice",
            "unknown flag --inptu: did you mean --input",
            "the following arguments are required: --output-prefix",
        ],
    )


def test_one_round_has_the_own_checks_of_a_tool(capsys: pytest.CaptureFixture[str]) -> None:
    for tool, words, parts in (
        (
            preprocess_data,
            "--input none.jsonl --output-prefix none/a --workers 0 --shard 3 --log-interval x",
            (
                *("--log-interval is 'x'", "--workers is 0", "--output-prefix none/a: the folder"),
                *("--shard 3: the shards would", "--shard 3: expected", "--input none.jsonl"),
            ),
        ),
        (
            convert_checkpoint,
            "--from none --workers 0",
            ("the following arguments are required: --to", "--workers is 0", "--from none: there is no"),
        ),
        (
            convert_checkpoint,
            "--from . --to none --format dcp --dtype bf16 --no-tokenizer",
            (
                f"{flag} acts only on a checkpoint that becomes a Hugging Face model: remove it"
                for flag in ("--dtype", "--no-tokenizer")
            ),
        ),
        (
            generate,
            "--load none --prompt x --seed -1 --top-k -1 --top-p 0 --max-new-tokens 0 --universal_checkpoint",
            (
                *("--load none: there is no", "--seed is -1", "--top-k -1", "--top-p 0"),
                "--max-new-tokens is 0",
            ),
        ),
        (verify_dataset, "tokens --sample 3 --lr x", ("PREFIX tokens with --sample",)),
        (
            convert_huggingface,
            "--load . --to none --dtype int8 --vocab-size 5 --universal-chekpoint",
            (
                *("argument --dtype: invalid choice", "unknown flag --universal-chekpoint: did you mean"),
                "--vocab-size acts only on a Hugging Face model",
            ),
        ),
    ):
        with pytest.raises(SystemExit, match="2"):
            tool.main(words.split())
        error = capsys.readouterr().err.removeprefix("error: ")
        check_lines([line.strip() for line in error.splitlines()], list(parts))


def test_one_round_of_a_plan_has_mistakes_of_the_tool_and_of_the_run() -> None:
    arguments = plan.build_parser().parse_args("--top x --gpu nope --hiden-size 4".split())
    words = [
        *arguments.training,
        *"--num-layers 2 --num-attention-heads 4 --seq-length 8 --train-iters 5".split(),
    ]
    with pytest.raises(ConfigError) as caught:
        read_command_line([*words, "--dry-run"], {}, mistakes=arguments.mistakes)
    check_lines(
        [line.strip() for line in str(caught.value).splitlines()],
        ["--top is 'x'", "--gpu is 'nope'", "unknown flag --hiden-size", "missing required flags: --micro"],
    )
