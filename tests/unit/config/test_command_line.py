"""Valid flags become the configuration, and each invalid command line gets an error of one sentence."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.arguments import parse_args, read_command_line
from megatron.commands import ds_to_universal, evaluate
from megatron.config import Config, ConfigError
from megatron.config.config import SETTINGS, Setting
from megatron.config.flag_parser import HELP_GROUPS, make_parser
from megatron.config.foreign_flags import foreign_flags, rewrite
from tests.unit.config.command_lines import RUN, SMALL, check_refused, refusal

# (Flags, field, value): ways to write a value, and derived values.
WRITTEN = [
    ("--hidden-size 2_048", "model.hidden_size", 2048),
    ("--adam-beta1 .8", "optimizer.adam_beta1", 0.8),
    ("--weight-decay 1e-1", "optimizer.weight_decay", 0.1),
    ("--rampup-batch-size 2 2 9_765_625", "batch.rampup_batch_size", (2, 2, 9_765_625)),
    ("--deepspeed-config=ds.json", "training.deepspeed_config", "ds.json"),
    ("--local_rank=3", "parallel.local_rank", 3),
    ("--data-path 0.3 A 0.7 B", "data.data_path", ("0.3", "A", "0.7", "B")),
    ("--vocab-file v.json --merge-file m.txt", "data.tokenizer_type", "GPT2BPETokenizer"),
    ("--tokenizer-name-or-path t5-small", "data.tokenizer_type", "PretrainedFromHF"),
    ("--tokenizer-model m", "data.tokenizer_type", "SentencePieceTokenizer"),
    (
        "--pp-partition-method 'type:transformer|embedding'",
        "parallel.partition_method",
        "type:transformer|embedding",
    ),
    ('--partition-method "parameters"', "parallel.partition_method", "parameters"),
    ("--exit-signal usr1 SIGTERM", "training.exit_signal", ("SIGUSR1", "SIGTERM")),
    ("--exit-signal", "training.exit_signal", ()),
    ("--num-workers 2", "data.valid_num_workers", 2),
    ("--num-workers 2 --valid-num-workers 0", "data.valid_num_workers", 0),
    ("--no-train 1 --load x", "training.no_train", True),
    ("--eval-only 1 --load x", "training.no_train", True),
    ("--fp16 --loss-scale 12", "precision.loss_scale", 12.0),
    ("--fp16 --loss-scale 0", "precision.loss_scale", None),
]


def sample(setting: Setting) -> tuple[list[str], object]:
    """Returns (words of a flag with a value, the value)."""
    if setting.kind is bool:
        return [], True
    word = {int: "7", float: "0.5", str: "word"}[setting.kind]
    word = word if setting.flag.choices is None else list(setting.flag.choices)[-1]
    count = {None: 1, "+": 2, "*": 2}.get(setting.flag.nargs, setting.flag.nargs)
    value = setting.kind(word)
    return [word] * count, value if setting.flag.nargs is None else (value,) * count


def test_every_flag_sets_its_field_under_each_of_its_names() -> None:
    parser = make_parser()
    for name, setting in SETTINGS.items():
        words, value = sample(setting)
        for option in setting.options:
            found = vars(parser.parse_args([option, *words]))[name]
            assert (found, type(found)) == (value, type(value)), option


@pytest.mark.parametrize(("words", "path", "value"), WRITTEN)
def test_a_value_can_be_written_in_several_ways_or_be_derived(words: str, path: str, value: object) -> None:
    found = parse_args([*SMALL, *words.split()], {}).value(path)
    assert (found, type(found)) == (value, type(value))


def test_a_value_with_spaces_is_not_split() -> None:
    assert parse_args([*SMALL, "--split", "969, 30, 1"], {}).data.split == "969, 30, 1"


def test_defaults_are_megatrons() -> None:
    config = parse_args(SMALL, {})
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0.1, 0.1)
    assert config.model.init_method_std == 0.02
    assert config.model.layernorm_epsilon == 1e-5
    assert config.model.make_vocab_size_divisible_by == 128
    assert config.model.ffn_hidden_size == 256
    assert config.model.kv_channels == 16
    assert config.optimizer.weight_decay == 0.01
    assert config.optimizer.clip_grad == 1.0
    assert config.precision.initial_loss_scale == 2**32
    assert config.precision.loss_scale is None
    assert config.data.split == "969, 30, 1"
    assert config.training.seed == 1234
    assert (config.training.eval_interval, config.training.eval_iters) == (1000, 100)
    assert (config.logging.log_interval, config.logging.tensorboard_queue_size) == (100, 1000)
    assert (config.logging.log_level, config.logging.log_level_replica) == ("warning", "error")


@pytest.mark.parametrize("positions", ["absolute", "rotary"])
def test_derived_position_table_is_the_sequence(positions: str) -> None:
    words = [word for word in SMALL if word != "--max-position-embeddings"]
    words.remove("32")
    assert (
        parse_args([*words, "--position-embedding-type", positions], {}).model.max_position_embeddings == 32
    )


def test_a_config_is_frozen() -> None:
    config = parse_args(SMALL, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.num_layers = 5  # type: ignore[misc]


def test_to_dict_holds_plain_types_and_from_dict_gives_the_config_back() -> None:
    config = parse_args([*SMALL, "--data-path", "a", "--rampup-batch-size", "2", "2", "100"], {})
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_from_dict_names_what_it_does_not_know_and_what_it_lacks() -> None:
    settings = parse_args(SMALL, {}).to_dict()
    settings["model"]["num_gates"] = 8
    with pytest.raises(ConfigError, match=r"model\.num_gates"):
        Config.from_dict(settings)
    with pytest.raises(ConfigError, match="modle"):
        Config.from_dict({"modle": {}})
    with pytest.raises(ConfigError, match=r"model\.num_layers"):
        Config.from_dict({})


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--num-layer", "--num-layers"),
        ("--num_layers", "--num-layers"),
        ("--ffn_hidden_size", "--ffn-hidden-size"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--lr-decay-sample=5", "--lr-decay-samples"),
        ("--pp-partition-metod", "--pp-partition-method"),
        ("--ffn-hiden-szie", "--ffn-hidden-size"),
        ("--vocab", "--vocab-file or --vocab-size"),
        ("--micro-batch", "--micro-batch-size"),
    ],
)
def test_a_misspelled_flag_gets_the_nearest_real_one(typed: str, meant: str) -> None:
    assert refusal(typed, "4") == f"unknown flag {typed.split('=')[0]}: did you mean {meant}?"


@pytest.mark.parametrize(
    "typed",
    ["--num-clusters", "--teacher-num-layers", "--tp-size", "--rope-theta", "--no-save-optimizer", "--num"],
)
def test_a_flag_that_resembles_none_gets_no_hint(typed: str) -> None:
    assert refusal(typed, "4") == f"unknown flag {typed}: see --help"


UNSUPPORTED = foreign_flags().unsupported


@pytest.mark.parametrize("spelling", ["{}", "underscores", "{}=4"])
def test_an_unsupported_flag_of_another_framework_gets_what_to_do_instead(spelling: str) -> None:
    """One error names all unsupported flags."""
    known, expected = make_parser()._option_string_actions, {}
    for name, answer in UNSUPPORTED.items():
        typed = name.removesuffix("*")
        assert typed not in known
        named = re.findall(r"--[a-z][a-z0-9-]*[a-z0-9]", answer)
        assert [flag for flag in named if flag not in known and flag != "--rope"] == []
        typed = "--" + typed[2:].replace("-", "_") if spelling == "underscores" else spelling.format(typed)
        expected[typed] = f"{typed.split('=')[0]} is not supported: {answer}"
    with pytest.raises(ConfigError) as caught:
        parse_args([*SMALL, *expected], {})
    assert [line.strip() for line in str(caught.value).splitlines()] == list(expected.values())


@pytest.mark.parametrize("framework", ["bigscience", "microsoft", "megatron_lm"])
def test_every_flag_of_another_framework_has_an_answer(framework: str) -> None:
    """The files in peer_flags contain the flags in the frameworks' argument files (BigScience 8387ae17,
    Microsoft 4efb479d, Megatron-LM d98e8a64), flags in at least three of Megatron-LM's launch scripts, and
    the flags of experts that Megatron-LM generates from its config classes."""
    flags = (Path(__file__).parent / "peer_flags" / f"{framework}.txt").read_text().split()
    foreign = foreign_flags()
    known = make_parser()._option_string_actions.keys() | foreign.rewritten.keys() | foreign.ignored.keys()
    assert [flag for flag in flags if flag not in known and foreign.alternative(flag)[0] is None] == []


def test_the_file_of_foreign_flags_is_read_only_for_an_unknown_flag() -> None:
    foreign_flags.cache_clear()
    parse_args([*SMALL, "--normalization", "rmsnorm", "--bf16"], {})
    refusal("--seed", "-1")
    assert foreign_flags.cache_info().currsize == 0
    parse_args([*SMALL, "--use-flash-attn"], {})
    assert foreign_flags.cache_info().currsize == 1


def test_all_unsupported_flags_are_listed_at_once() -> None:
    words = "--DDP-impl local --ds-sequence-parallel-size 2 --moe-latent-size 3 --xyzzy -4".split()
    with pytest.raises(ConfigError) as caught:
        parse_args([*SMALL, *words], {})
    assert [line.strip().split(":")[0] for line in str(caught.value).splitlines()] == [
        "--ds-sequence-parallel-size is '2'",
        "--moe-latent-size is not supported",
        "unknown flag --xyzzy",
    ]


@pytest.mark.parametrize("words", ["--DDP-impl a b c", "--DDP-impl=a b c", "--DDP-impl a"])
def test_surplus_values_of_an_unsupported_flag_are_no_error_of_their_own(words: str) -> None:
    value = words.replace("=", " ").partition(" ")[2]
    assert refusal(*words.split()).startswith(f"--DDP-impl is '{value}': expected local or torch")


def test_a_flag_of_another_framework_is_read_as_flags_of_this_program() -> None:
    parser = make_parser()
    for name, words in foreign_flags().rewritten.items():
        value = []
        if words[-1].startswith("--") and parser._option_string_actions[words[-1]].nargs in (None, "+"):
            value = ["2"]
        typed, notes = rewrite([name, *value])
        assert notes == [f"{name} is read as {' '.join(words)}"]
        assert parser.parse_args(typed) == parser.parse_args([*words, *value]), name
        if value:
            assert parser.parse_args(rewrite([f"{name}=2"])[0]) == parser.parse_args([*words, *value])


def test_a_rewritten_flag_gives_way_to_the_flag_that_it_stands_for() -> None:
    for words in ("--zero-stage 0 --use-distributed-optimizer", "--use-distributed-optimizer --zero-stage 0"):
        command = read_command_line([*SMALL, *words.split()], {})
        assert command.config.parallel.zero_stage == 0
        assert "--use-distributed-optimizer is ignored: --zero-stage is given" in command.notes
    with pytest.raises(ConfigError, match="--openai-gelu takes no value"):
        parse_args([*SMALL, "--openai-gelu=1"], {})


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--num-layers 1e3", ("--num-layers", "'1e3'", "integer")),
        ("--num-layers four", ("--num-layers", "'four'", "integer")),
        ("--seed 1.0", ("--seed", "'1.0'", "integer")),
        ("--lr fast", ("--lr", "'fast'", "a number")),
        ("--lr nan", ("--lr", "nan", "finite")),
        ("--rampup-batch-size 1 2", ("--rampup-batch-size", "expected 3 arguments")),
        ("--rampup-batch-size 1 2 x", ("--rampup-batch-size", "'x'", "integer")),
        ("--seed", ("--seed", "expected one argument")),
        ("--fp16=1", ("--fp16", "'1'")),
        ("--data-path", ("--data-path", "at least one")),
        ("--optimizer lamb", ("--optimizer", "'lamb'", "adam, adamw")),
        ("--position-embedding-type relative", ("--position-embedding-type", "'relative'", "rotary")),
        ("--log-level loud", ("--log-level", "'loud'", "warning")),
        ("--data-impl lazy", ("--data-impl", "'lazy'", "mmap")),
        ("--num-layers 0", ("--num-layers", "0", "at least 1")),
        ("--hidden-size -4", ("--hidden-size", "-4", "at least 1")),
        ("--num-attention-heads 0", ("--num-attention-heads", "0", "at least 1")),
        ("--micro-batch-size 0", ("--micro-batch-size", "0", "at least 1")),
        ("--rampup-batch-size 2 0 9", ("--rampup-batch-size", "0", "at least 1")),
        ("--hidden-dropout 1", ("--hidden-dropout", "1.0", "less than 1")),
        ("--attention-dropout -0.1", ("--attention-dropout", "-0.1", "at least 0")),
        ("--lr 0", ("--lr", "0.0", "more than 0")),
        ("--seed 4294967296", ("--seed", "4294967296", "at most 4294967295")),
        ("--zero-stage 4", ("--zero-stage", "4", "at most 3")),
        ("--partition-method balanced", ("--partition-method is 'balanced'", "expected", "uniform, ")),
        ("--partition-method ''", ("--partition-method is empty",)),
        (
            "--exit-signal SIGKILL",
            ("--exit-signal SIGKILL: expected one of SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2",),
        ),
        ("--xyzzy-plugh", ("unknown flag --xyzzy-plugh: see --help",)),
        ("--num-work 2", ("--num-workers",)),  # abbreviated
        ("--split 969, 30, 1", ("value '30,'",)),
        ("--no-train 0", ("--no-train is '0': expected no value, or 1",)),
    ],
)
def test_an_invalid_value_is_refused_with_what_was_expected(words: str, parts: tuple[str, ...]) -> None:
    check_refused(words.split(), parts)


def test_an_empty_value_is_refused() -> None:
    assert refusal("--partition-method", "").startswith("--partition-method is empty")


def test_missing_flags_are_listed_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(["--num-layers", "4", "--lr", "1e-3"], {})
    for flag in (
        "--hidden-size",
        "--num-attention-heads",
        "--seq-length",
        "--micro-batch-size",
    ):
        assert flag in str(caught.value)
    assert "--num-layers" not in str(caught.value)


def test_a_repeated_flag_takes_the_last_value_and_is_reported() -> None:
    command = read_command_line(
        [*SMALL, "--seed", "1", "--seed", "2", "--clip-grad", "1.0", "--clip-grad", "1"], {}
    )
    assert command.config.training.seed == 2
    assert command.notes == ("--seed is given more than once: the last value, 2, is used",)


def test_an_ignored_flag_is_reported_once_with_the_reason() -> None:
    words, expected = [], []
    for old in foreign_flags().ignored.values():
        value = old.values[0] if old.values else "value"
        words += [old.name] if old.nargs == 0 else [old.name, value]
        how = "deprecated and ignored" if old.name == "--simulate" else "ignored"
        expected.append(f"{old.name} is {how}: {old.reason}")
    assert sorted(read_command_line([*SMALL, *words, *words], {}).notes) == sorted(expected)


@pytest.mark.parametrize(
    "method",
    ["uniform", "type:embed:2|transformer:1", "'weighted_type:embed:2'", '"stages:5,6*10,5"', "memory"],
)
@pytest.mark.parametrize("name", ["--partition-method", "--pp-partition-method"])
def test_partition_methods_are_accepted_with_and_without_quotes(name: str, method: str) -> None:
    assert parse_args([*SMALL, name, method], {}).parallel.partition_method == method.strip("'\"")


def test_the_launchers_environment_gives_world_size_and_local_rank() -> None:
    config = parse_args(SMALL, {"WORLD_SIZE": "4", "LOCAL_RANK": "2"})
    assert (config.parallel.world_size, config.parallel.local_rank) == (4, 2)
    assert parse_args([*SMALL, "--local-rank=1"], {"LOCAL_RANK": "2"}).parallel.local_rank == 1


def test_a_planned_world_size_needs_dry_run() -> None:
    config = parse_args([*SMALL, "--world-size", "8"], {"WORLD_SIZE": "2"})
    assert config.parallel.world_size == 8
    with pytest.raises(ConfigError, match=r"--world-size 8 .* 2 started .*--dry-run"):
        parse_args([*RUN, "--world-size", "8"], {"WORLD_SIZE": "2"})


def test_a_launcher_variable_that_is_not_a_number_is_named() -> None:
    assert "WORLD_SIZE is 'many'" in refusal(env={"WORLD_SIZE": "many"})


def test_help_is_grouped_as_megatrons_and_has_every_field_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert [line[:-1] for line in lines if line.endswith(":") and line[:-1] in HELP_GROUPS] == list(
        HELP_GROUPS
    )
    flags = [line.split()[0].rstrip(",") for line in lines if line.startswith("  --")]
    assert len(flags) == len(set(flags))
    for setting in SETTINGS.values():
        assert flags.count(setting.option) == 1 and setting.flag.help
    ignored = " ".join(text.partition("(accepted and ignored):")[2].split())
    for old in foreign_flags().ignored.values():
        assert old.name in re.split("[ ,:]+", ignored) and f": {old.reason}" in ignored


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("megatron.config", ("torch", "deepspeed", "numpy")),
        ("megatron.arguments", ("torch", "deepspeed", "transformers")),
    ],
)
def test_importing_the_flags_imports_no_large_package(module: str, heavy: tuple[str, ...]) -> None:
    program = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_config_of_an_older_checkpoint_has_its_values_under_the_new_names() -> None:
    settings = json.loads(json.dumps(parse_args([*SMALL, "--spike-window", "9"], {}).to_dict()))
    settings["trouble"] = settings.pop("stability")
    del settings["checkpoint"]["allow_replica_mismatch"]
    settings["checkpoint"]["allow_drift"] = True
    settings["training"]["simulate"] = False  # a removed setting
    config = Config.from_dict(settings)
    assert config.stability.spike_window == 9
    assert config.checkpoint.allow_replica_mismatch is True


def test_tools_accept_underscores_and_dashes() -> None:
    words = ["--input_folder", "a", "--output_folder", "b", "--num_merge_workers", "3", "--no_strict"]
    dashed = [word.replace("_", "-") for word in words]
    found, expected = (ds_to_universal.build_parser().parse_args(typed) for typed in (dashed, words))
    assert found == expected and expected.num_merge_workers == 3
    evaluate_words = ["--load", "c", "--data-path", "d", "--local-rank=2", "--universal-checkpoint"]
    arguments = evaluate.build_parser().parse_args(evaluate_words)
    assert (arguments.local_rank, arguments.universal_checkpoint) == (2, True)
