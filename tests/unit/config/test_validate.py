"""Checks across flags: each error has the values and the flag to change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.arguments import parse_args, read_command_line
from megatron.config import ConfigError, ModelConfig, padded_vocab_size
from tests.unit.config.command_lines import RUN, SMALL, WITHOUT_LENGTH, check_refused, refusal, rows

REFUSED = """
--world-size 6 --tensor-model-parallel-size 4 => 6 processes; --tensor-model-parallel-size 4
--world-size 6 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    => 6 processes; --tensor-model-parallel-size 2; --pipeline-model-parallel-size 2; = 4
--world-size 8 --tensor-model-parallel-size 8 => --num-attention-heads 4; --tensor-model-parallel-size 8
--world-size 4 --tensor-model-parallel-size 4 --ffn-hidden-size 102
    => --ffn-hidden-size 102; --tensor-model-parallel-size 4
--world-size 2 --tensor-model-parallel-size 2 --pad-vocab-size-to 1001
    => --pad-vocab-size-to 1001; --tensor-model-parallel-size 2; 1002
--vocab-size 2000 --pad-vocab-size-to 1000 => --pad-vocab-size-to 1000; 2000
--hidden-size 66 => --hidden-size 66; --num-attention-heads 4; --kv-channels
--position-embedding-type rotary --hidden-size 60 => rotary; 15; --kv-channels
--seq-length 64 => --seq-length 64; --max-position-embeddings 32
--world-size 2 --tensor-model-parallel-size 2 --checkpoint-activations --partition-activations --hidden-size
    33 --kv-channels 8 --ffn-hidden-size 64 --seq-length 31 --micro-batch-size 1
    => --partition-activations; 1023; --tensor-model-parallel-size 2
--num-query-groups 2 => --num-query-groups 2; --group-query-attention
--group-query-attention --num-query-groups 3 => --num-attention-heads 4; --num-query-groups 3
--num-attention-heads 12 --kv-channels 8 --ffn-hidden-size 96 --group-query-attention --num-query-groups 4
    --world-size 6 --tensor-model-parallel-size 6 --micro-batch-size 1
    => --num-query-groups 4; --tensor-model-parallel-size 6
--position-embedding-type rotary --rotary-percent 0.01 => --rotary-percent 0.01; 0 of 16; even number
--position-embedding-type rotary --rope-scaling-type yarn --rope-beta-slow 32
    => --rope-beta-slow 32; --rope-beta-fast 32
--eval-harness-interval 5 => --eval-harness-interval 5; --eval-harness-tasks
--eval-harness-limit 5 => --eval-harness-limit 5; --eval-harness-tasks
--eval-harness-tasks toy --tokenizer-model m => --eval-harness-tasks toy; --eval-harness-interval
--eval-tasks toy --eval-harness-interval 5 --tokenizer-model m --eval-only --load c
    => --eval-harness-tasks toy; --eval-only; tools/evaluate.py
--eval-only => --eval-only without --load would evaluate the initial weights
--eval-only --load c --eval-iters 0 => --eval-only with --eval-iters 0, which evaluates nothing
--eval-only --load c --split 100,0,0 => --eval-only with --split 100,0,0: there are no validation
--split 0,50,50 => --split 0,50,50 assigns no document to the train split
--eval-only --load c --train-data-path a => --eval-only without --valid-data-path: there are no validation
--mup --optimizer sgd => --mup without --optimizer adam
--qk-clip --qk-layernorm => --qk-clip with --qk-layernorm; undo their scaling; remove --qk-layernorm
--qk-clip --attn-logit-softcapping 30 => --qk-clip with --attn-logit-softcapping 30; remove one
--mup --softmax-scale 0.5 => --softmax-scale 0.5; --mup-attn-mult
--z-loss-weight 1e-4 --loss-implementation plain => --z-loss-weight 0.0001; plain; fused
--world-size 2 --tensor-model-parallel-size 2 --tp-comm-overlap
    => --tp-comm-overlap without --sequence-parallel; add --sequence-parallel
--world-size 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel
    --tp-comm-overlap --pipeline-schedule zero-bubble
    => --tp-comm-overlap; --pipeline-schedule zero-bubble; remove one
--micro-batch-size 3 => --global-batch-size 8; --micro-batch-size 3; data-parallel size 1
--world-size 16 => --global-batch-size 8; data-parallel size 16; = 16
--micro-batch-size 4 --rampup-batch-size 2 2 100
    => --rampup-batch-size 2 2 100; batch of 2; --micro-batch-size 4
--micro-batch-size 4 --rampup-batch-size 4 2 100
    => --rampup-batch-size 4 2 100; batch of 6; --micro-batch-size 4
--rampup-batch-size 3 2 100 => --rampup-batch-size 3 2 100; --global-batch-size 8
--rampup-batch-size 8 2 100 => --rampup-batch-size 8 2 100; --global-batch-size 8
--rampup-batch-size 10 1 100 => --rampup-batch-size 10 1 100; --global-batch-size 8
--partition-profile times.json
    => --partition-profile times.json; --partition-method profile
--pipeline-schedule dualpipev => --pipeline-schedule dualpipev; --pipeline-model-parallel-size 1
--world-size 4 --pipeline-model-parallel-size 4 --pipeline-schedule dualpipev --micro-batch-size 2
    => --pipeline-schedule dualpipev; = 8; 8 has 4 micro-batches; --global-batch-size
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule dualpipev --rampup-batch-size 2 2 100
    => --pipeline-schedule dualpipev; = 4; batch of 2 has 2; START
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule interleaved
    => --pipeline-schedule interleaved; --virtual-pipeline-stages 1; 2 or more
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule dualpipev --virtual-pipeline-stages 3
    => --virtual-pipeline-stages 3; --pipeline-schedule dualpipev; 2 per rank; interleaved
--pipeline-schedule zero-bubble => --pipeline-schedule zero-bubble; parallel-size 1; 2 or more; 1f1b
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble --virtual-pipeline-stages 2
    => --virtual-pipeline-stages 2; --pipeline-schedule zero-bubble; 1 per rank; interleaved
--num-virtual-stages-per-pipeline-rank 2
    => --virtual-pipeline-stages 2; --pipeline-model-parallel-size 1; 2 or more
--world-size 4 --pipeline-model-parallel-size 4 --virtual-pipeline-stages 2 --global-batch-size 10
    => 10 micro-batches; interleaved; multiple; = 4; --global-batch-size 10
--world-size 2 --pipeline-model-parallel-size 2 --virtual-pipeline-stages 2 --rampup-batch-size 2 1 100
    => interleaved; multiple; batch of 3 has 3; INCREMENT
--world-size 2 --pipeline-model-parallel-size 2 --zero-stage 2
    => --zero-stage 2; --pipeline-model-parallel-size 2; --zero-stage 1
--optimizer muon --cpu-offload => --optimizer muon with --cpu-offload; Remove --cpu-offload
--optimizer muon --use-bnb-optimizer => --use-bnb-optimizer without --optimizer adam
--optimizer muon --use-apex => --use-apex without --optimizer adam; remove --use-apex
--optimizer muon --mup => --mup without --optimizer adam
--use-bnb-optimizer --optimizer sgd => --use-bnb-optimizer without --optimizer adam
--deterministic-mode --compile => --deterministic-mode with --compile; measured times; remove one
--use-bnb-optimizer --use-apex => --use-bnb-optimizer with --use-apex
--spike-policy rollback --save there => --spike-policy rollback without --save and --save-interval
--skip-train-iteration-range 200-101 => --skip-train-iteration-range 200-101: expected FIRST-LAST
--skip-train-iteration-range 0-5 => --skip-train-iteration-range 0-5: expected FIRST-LAST
--skip-train-iteration-range 17 => --skip-train-iteration-range 17: expected FIRST-LAST
--skip-train-iteration-range a-b => --skip-train-iteration-range a-b: expected FIRST-LAST
--skip-train-iteration-range 3- => --skip-train-iteration-range 3-: expected FIRST-LAST
--skip-train-iteration-range 1-2-3 => --skip-train-iteration-range 1-2-3: expected FIRST-LAST
--cpu-offload --use-apex => --cpu-offload; --use-apex; GPUs only
--fp16 --bf16 => --fp16; --bf16
--loss-scale 12 => --loss-scale 12; --fp16; fp32
--bf16 --loss-scale 12 => --loss-scale 12; --fp16; bf16
--fp32-residual-connection => --fp32-residual-connection; --fp16; --bf16
--fp16 --min-loss-scale 8 --initial-loss-scale 4 => --min-loss-scale 8; --initial-loss-scale 4
--train-iters 10 => --train-iters; --train-samples; 10 and 800
--train-samples 7 => --train-samples 7; first batch of 8; --global-batch-size
--lr-decay-iters 10 => --lr-decay-iters 10; --train-samples 800
--lr-warmup-iters 10 => --lr-warmup-iters 10; --train-samples 800
--lr-decay-samples 10 --lr-decay-tokens 320 => --lr-decay-samples 10; --lr-decay-tokens 320
--lr-warmup-samples 10 --lr-warmup-fraction 0.1 => --lr-warmup-samples 10; --lr-warmup-fraction 0.1
--lr-warmup-samples 800 => --lr-warmup-samples 800; --train-samples: 800
--lr-warmup-samples 20 --lr-decay-samples 10 => --lr-warmup-samples 20; --lr-decay-samples: 10
--lr-warmup-samples 20 --lr-decay-tokens 320 => --lr-warmup-samples 20; --lr-decay-tokens; 10
--min-lr 1 => --min-lr 1.0; --lr 0.001
--checkpoint-num-layers 2 => --checkpoint-num-layers 2; --checkpoint-activations
--partition-activations => --partition-activations; --checkpoint-activations
--checkpoint-in-cpu --recompute-granularity selective => --checkpoint-in-cpu; --checkpoint-activations
--checkpoint-activations --recompute-granularity selective
    => --checkpoint-activations; --recompute-granularity selective; remove one
--profile-step-end 20 => --profile-step-end 20 without --profile
--profile --use-pytorch-profiler => --use-pytorch-profiler without --tensorboard-dir; set --tensorboard-dir
--profile --profile-step-start 12 => --profile-step-start 12 with --profile-step-end 12; no iteration
--profile --profile-ranks 0 3 => --profile-ranks 3: expected ranks below the number of processes, 1
--profile --no-train --load a => --profile with --no-train
--recompute-modules layernorm => --recompute-modules layernorm without --recompute-granularity selective; set
--recompute-granularity full --recompute-modules layernorm => --recompute-modules layernorm; selective
--recompute-granularity selective --recompute-modules norm
    => --recompute-modules is 'norm': expected one of core_attn, layernorm, mlp_act, moe_act
--recompute-granularity selective --recompute-modules layernorm mlp
    => --recompute-modules mlp is not supported: set --recompute-granularity full; or mlp_act
--recompute-granularity selective --recompute-modules shared_experts
    => --recompute-modules shared_experts is not supported; or mlp_act
--recompute-granularity selective --recompute-modules mla_up_proj
    => --recompute-modules mla_up_proj is not supported; core_attn
--recompute-granularity selective --recompute-modules moe_act => moe_act without --num-experts; mlp_act
--recompute-granularity selective --recompute-modules mlp_act --num-experts 4 --moe-ffn-hidden-size 8
    => --recompute-modules mlp_act: all MLPs are experts; moe_act
--recompute-granularity selective --recompute-modules layernorm --compile
    => --recompute-modules layernorm with --compile; remove --compile
--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel --checkpoint-activations
    --partition-activations
    => --partition-activations; --sequence-parallel; remove --partition-activations
--save-interval 10 => --save-interval 10; --save
--save a --save-local b => --save-local b without --save-local-interval: set --save-local-interval, or remove
--save a --save-local-interval 5 => --save-local-interval 5 without --save-local: set --save-local, or
--save-local b --save-local-interval 5 => --save-local b without --save: it is a shared folder; set --save, or
--save /a --save-local /a/b --save-local-interval 5
    => --save-local /a/b is inside --save /a: set a folder outside it
--save /a --save-local /a/x/.. --save-local-interval 5
    => --save-local /a/x/.. is --save /a: set a folder outside it
--position-embedding-type alibi --reset-position-ids => --reset-position-ids; alibi; relative
--data-path 0.3 A B => --data-path; 3 values; 0.3 A 0.7 B
--data-path A 0.3 => --data-path 'A 0.3'; weight 'A'
--data-path 0 A 1 B => --data-path '0 A 1 B'; weight 0 is not above 0
--split 1,2,3,4 => --split; '1,2,3,4'; 969,30,1
--split 0,0,0 => --split; '0,0,0'
--split a,b => --split; 'a,b'
--split 5,-1,1 => --split; '5,-1,1'
--tokenizer-type PretrainedFromHF => --tokenizer-type PretrainedFromHF; --tokenizer-name-or-path
--tokenizer-type SentencePieceTokenizer => SentencePieceTokenizer; --tokenizer-model
--vocab-file v.json => GPT2BPETokenizer; --merge-file
--merge-file m.txt => GPT2BPETokenizer; --vocab-file
--tokenizer-model m --tokenizer-name-or-path t5-small
    => PretrainedFromHF and SentencePieceTokenizer; --tokenizer-type
"""


@pytest.mark.parametrize(
    ("words", "parts"), rows(REFUSED), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_contradiction_is_refused_with_its_numbers_and_flags(words: str, parts: list[str]) -> None:
    check_refused(words.split(), parts)


MIXED_UNITS = """
=> --train-iters; --train-samples; neither
--train-iters 10 --lr-decay-samples 80 => --lr-decay-samples 80; --train-iters 10
--train-iters 10 --lr-warmup-samples 8 => --lr-warmup-samples 8; --train-iters 10
--train-iters 10 --rampup-batch-size 2 2 20 => --rampup-batch-size 2 2 20; --train-iters 10
--train-iters 10 --lr-warmup-iters 10 => --lr-warmup-iters 10; --train-iters: 10
--train-iters 10 --lr-decay-tokens 3200 --lr-warmup-iters 2 => --lr-warmup-iters 2; --lr-decay-tokens
--train-iters 10 --lr-decay-iters 5 --lr-decay-tokens 32 => --lr-decay-iters 5; --lr-decay-tokens 32
"""


@pytest.mark.parametrize(("words", "parts"), rows(MIXED_UNITS))
def test_iterations_and_samples_are_not_mixed(words: str, parts: list[str]) -> None:
    check_refused(words.split(), parts, base=WITHOUT_LENGTH)


@pytest.mark.parametrize(
    "words",
    [
        "--train-iters 10 --lr-warmup-iters 2 --lr-decay-iters 8",
        "--train-iters 10 --lr-decay-tokens 3200 --lr-warmup-samples 8",
        "--train-samples 80 --lr-decay-tokens 2560 --lr-warmup-samples 8 --train-tokens 3200",
        "--train-samples 80 --lr-warmup-fraction 0.1",
    ],
)
def test_flags_in_one_unit_are_accepted(words: str) -> None:
    parse_args([*WITHOUT_LENGTH, *words.split()], {})


def test_kv_channels_frees_the_hidden_size_from_the_heads() -> None:
    assert parse_args([*SMALL, "--hidden-size", "66", "--kv-channels", "16"], {}).model.kv_channels == 16


@pytest.mark.parametrize("flag", ["--save", "--load", "--data-path", "--log-path", "--vocab-file"])
@pytest.mark.parametrize("path", ["x" * 250, "/".join(["folder"] * 700), "\u00e9" * 130])
def test_a_path_that_is_too_long_is_hostile_and_named_by_its_flag(flag: str, path: str) -> None:
    sentence = refusal(flag, path)
    assert sentence.startswith(f"{flag} {path[:40]}... is too long") and len(sentence) < 200


# A flag without effect is reported even if it was typed with its default value. The test split is evaluated
# on --eval-iters batches, and a DeepSpeed file may make the loss scale dynamic.
NO_EFFECT = """
--hysteresis 3 => --hysteresis has no effect without --fp16
--bf16 --hysteresis 2 => --hysteresis has no effect without --fp16
--sgd-momentum 0.9 => --sgd-momentum has no effect with --optimizer adam
--rope-scaling-factor 8 => --rope-scaling-factor has no effect with --position-embedding-type absolute
--position-embedding-type rotary --rope-scaling-factor 8
    => --rope-scaling-factor has no effect without --rope-scaling-type
--bf16 --initial-loss-scale 4096 --min-loss-scale 2 --loss-scale-window 5
    => --initial-loss-scale has no effect without --fp16; --min-loss-scale has no effect without --fp16;
           --loss-scale-window has no effect without --fp16
--fp16 --loss-scale 12 --hysteresis 3 => --hysteresis has no effect with the static --loss-scale 12
--fp16 --hysteresis 3 --initial-loss-scale 4096 --loss-scale-window 5 =>
--fp16 --loss-scale 12 --hysteresis 3 --deepspeed_config f.json =>
--optimizer sgd --adam-beta1 .8 --adam-beta2 .8 --adam-eps 1e-6 --sgd-momentum 0
    => --adam-beta1 has no effect with --optimizer sgd; --adam-beta2 has no effect with --optimizer sgd;
           --adam-eps has no effect with --optimizer sgd
--recompute-granularity selective --attention-dropout 0
    => --recompute-granularity has no effect with --attention-dropout 0: fused attention stores no attention
           scores to recompute (other --recompute-modules and full reduce memory)
--recompute-granularity selective --recompute-modules core_attn layernorm --attention-dropout 0
    => --recompute-modules has no effect for core_attn with --attention-dropout 0: fused attention stores no
           attention scores to recompute (other --recompute-modules and full reduce memory)
--recompute-granularity selective --recompute-modules layernorm mlp_act --attention-dropout 0 =>
--zero-stage 1 --no-overlap-grad-reduce --cuda-graph-impl local --attention-dropout 0 --world-size 2
    => --no-overlap-grad-reduce has no effect with --cuda-graph-impl local, which overlaps neither
--recompute-granularity selective =>
--node-size 8 => --node-size has no effect without --dry-run and --gpu
--checkpoint-activations --partition-activations
    => --partition-activations has no effect with --tensor-model-parallel-size 1
--spike-window 9 --sync-tp-duplicated-parameters
    => --spike-window has no effect without --spike-policy; --sync-tp-duplicated-parameters has no effect
           with --tensor-model-parallel-size 1
--lr-decay-style constant --min-lr 1e-5 --log-timers-to-tensorboard
    => --log-timers-to-tensorboard has no effect without --tensorboard-dir and --wandb-project; --min-lr has
           no effect with --lr-decay-style constant
--optimizer adamw --sgd-momentum 0 => --sgd-momentum has no effect with --optimizer adamw
--adam-beta1 .8 --adam-eps 1e-6 =>
--pad-vocab-size-to 1024 --make-vocab-size-divisible-by 64
    => --make-vocab-size-divisible-by has no effect with --pad-vocab-size-to 1024
--make-vocab-size-divisible-by 64 =>
--tensorboard-queue-size 5 => --tensorboard-queue-size has no effect without --tensorboard-dir
--tensorboard-queue-size 5 --tensorboard-dir folder =>
--eval-iters 0 --eval-interval 5 => --eval-interval has no effect with --eval-iters 0
--split 1 --eval-iters 5 --eval-interval 5
    => --eval-interval has no effect with --split 1; --eval-iters has no effect with --split 1
--split 9,0,1 --eval-iters 5 =>
--tokenizer-model m =>
--tokenizer-name-or-path t5-small =>
--tokenizer-type SentencePieceTokenizer --tokenizer-model m --merge-file m.txt
    => --merge-file has no effect with --tokenizer-type SentencePieceTokenizer
"""


@pytest.mark.parametrize(("words", "notes"), rows(NO_EFFECT), ids=lambda v: v if isinstance(v, str) else "")
def test_a_flag_without_effect_beside_the_others_is_noted(words: str, notes: list[str]) -> None:
    assert read_command_line([*SMALL, *words.split()], {}, reads_files=False).notes == tuple(notes)


# --- a run, whose files and packages must exist ---


@pytest.fixture
def run(tmp_path: Path) -> list[str]:
    """Returns the flags of a run whose token files exist."""
    for ending in (".bin", ".idx"):
        (tmp_path / f"text{ending}").touch()
    return [*RUN, "--vocab-size", "100", "--data-path", str(tmp_path / "text")]


def make_package(folder: Path, name: str, parts: tuple[str, ...], patch: pytest.MonkeyPatch) -> None:
    """Makes only this package importable, with these sub-packages. Without `parts` there is no package."""
    for part in parts:
        (folder / name / part).mkdir(parents=True, exist_ok=True)
        (folder / name / part / "__init__.py").touch()
    patch.setattr(sys, "path", [str(folder)] if parts else [])
    patch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("flag", ["--gpu a100-80gb", "--device-memory 80"])
def test_the_device_of_a_plan_has_no_effect_on_a_run(flag: str, run: list[str]) -> None:
    notes = read_command_line([*run, *flag.split()], {}).notes
    assert notes == (f"{flag.split()[0]} has no effect without --dry-run",)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--vocab-size 100", ("--data-path is missing",)),
        ("--data-path @", ("--tokenizer-type", "--vocab-size")),
        *[
            (f"--data-path @ --vocab-size 100 {flag}", (flag, "--tokenizer-type"))
            for flag in ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
        ],
    ],
)
def test_a_run_needs_data_and_a_vocabulary(words: str, parts: tuple[str, ...], run: list[str]) -> None:
    check_refused(words.replace("@", run[-1]).split(), parts, base=RUN)


def test_a_run_needs_both_token_files(run: list[str], tmp_path: Path) -> None:
    parse_args(run, {})
    (tmp_path / "text.idx").unlink()
    sentence = refusal(base=run)
    assert "--data-path" in sentence and str(tmp_path / "text.idx") in sentence


def test_a_run_needs_the_files_of_its_tokenizer(run: list[str], tmp_path: Path) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    words = [*run, "--vocab-file", str(vocab), "--merge-file", str(merges)]
    with pytest.raises(ConfigError) as caught:
        parse_args(words, {})
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()] == [
        "--vocab-file",
        "--merge-file",
    ]
    vocab.touch()
    assert f"--merge-file: {merges} does not exist" in refusal(base=words)
    merges.touch()
    assert parse_args(words, {}).data.tokenizer_type == "GPT2BPETokenizer"


def test_an_absent_folder_to_load_from_is_a_fresh_start(tmp_path: Path) -> None:
    parse_args([*SMALL, "--load", str(tmp_path / "none")], {})


@pytest.mark.parametrize(
    ("flag", "name", "parts", "error"),
    [
        ("--use-apex", "apex", (), "it is not installed"),
        ("--use-apex", "apex", ("",), "another package with that name"),  # PyPI's package of this name
        ("--use-apex", "apex", ("", "optimizers", "normalization"), None),
        ("--use-bnb-optimizer", "bitsandbytes", (), "not installed: pip install bitsandbytes"),
        ("--use-bnb-optimizer", "bitsandbytes", ("",), None),
        ("--use_bnb_optimizer", "bitsandbytes", ("",), None),
    ],
)
def test_the_package_of_an_optimizer_must_be_installed(
    flag: str,
    name: str,
    parts: tuple[str, ...],
    error: str | None,
    run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_package(tmp_path, name, parts, monkeypatch)
    if error is not None:
        assert error in refusal(flag, base=run)
        return
    optimizer = parse_args([*run, flag], {}).optimizer
    assert optimizer.use_apex if name == "apex" else optimizer.use_bnb_optimizer


def model(**sizes: int) -> ModelConfig:
    return ModelConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8, max_position_embeddings=8, **sizes
    )


@pytest.mark.parametrize(
    ("true_size", "tensor_parallel", "padded"),
    [(50257, 1, 50304), (50257, 4, 50688), (128, 1, 128), (129, 1, 256), (1, 2, 256)],
)
def test_the_vocabulary_is_padded_to_a_multiple_that_grows_with_the_tensor_ranks(
    true_size: int, tensor_parallel: int, padded: int
) -> None:
    assert padded_vocab_size(true_size, model(), tensor_parallel) == padded


def test_the_vocabulary_is_padded_to_exactly_the_size_asked_for() -> None:
    assert padded_vocab_size(250680, model(pad_vocab_size_to=250880), 4) == 250880
    with pytest.raises(ConfigError, match=r"--pad-vocab-size-to 100 is smaller than the vocabulary of 101"):
        padded_vocab_size(101, model(pad_vocab_size_to=100), 1)
    with pytest.raises(ConfigError, match=r"--pad-vocab-size-to 101 .*--tensor-model-parallel-size 2.*102"):
        padded_vocab_size(100, model(pad_vocab_size_to=101), 2)


def test_any_number_of_ranges_is_read() -> None:
    flags = ["--skip-train-iteration-range", "13251-14000", "16_651-19500", "5-5"]
    stability = parse_args([*SMALL, *flags], {}).stability
    assert stability.skipped_ranges == ((13251, 14000), (16651, 19500), (5, 5))
    assert parse_args(SMALL, {}).stability.skipped_ranges == ()


def test_a_rollback_has_a_limit() -> None:
    flags = [*SMALL, "--spike-policy", "rollback", "--save", "there", "--save-interval", "5"]
    assert parse_args(flags, {}).stability.max_rollbacks == 3
