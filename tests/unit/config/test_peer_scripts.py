"""The arguments of published scripts of Microsoft's Megatron-DeepSpeed and of Megatron-LM pass a dry run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.arguments import parse_args, read_command_line
from megatron.config import Config, ConfigError
from megatron.config.foreign_flags import rewrite
from tests.unit.config.command_lines import RUN, SMALL

# examples_deepspeed/pretrain_llama2_distributed.sh (Microsoft, b644fba3), 8 GPUs.
LLAMA_2 = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 24 --hidden-size 2048 "
    "--ffn-hidden-size 5504 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 32 "
    "--seq-length 2048 --max-position-embeddings 2048 --train-iters 250000 --save tmp --load tmp "
    "--data-path 1 tmp/data/bookcorpus_train_1m_text_sentence --data-impl mmap --tokenizer-type "
    "GPTSentencePieceTokenizer --tokenizer-model tmp/tokenizer.model --split 949,50,1 "
    "--distributed-backend nccl --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 "
    "--clip-grad 1 --lr-warmup-iters 2000 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 "
    "--log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --bf16 "
    "--no-query-key-layer-scaling --attention-dropout 0 --hidden-dropout 0 "
    "--use-rotary-position-embeddings --untie-embeddings-and-output-weights --swiglu --normalization "
    "rmsnorm --disable-bias-linear --num-key-value-heads 4 --zero-stage=0 --deepspeed"
)
# The script's options for recomputation and wandb.
OPTIONS = (
    "--recompute-granularity full --recompute-method uniform --deepspeed-activation-checkpointing "
    "--wandb-project pretrain-llama2 --wandb-exp-name exp0 --wandb-save-dir wandb"
)
# examples/llama/train_llama3_8b_h100_fp8.sh (Megatron-LM, 157006d6), 8 GPUs.
LLAMA_3 = (
    "--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 "
    "--max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 "
    "--rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std "
    "0.0134 --attention-backend fused "
    "--apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 "
    "--global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples "
    "3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style "
    "cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 "
    "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather "
    "--grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc "
    "--empty-unused-memory-level 1 --exit-duration-in-mins 235 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --tensor-model-parallel-size 1 --context-parallel-size 1 "
    "--sequence-parallel --data-cache-path cache --split '99,1,0' --no-create-attention-mask-in-dataloader "
    "--no-mmap-bin-files --num-workers 1 --vocab-size 128256 --log-interval 1 --eval-iters 32 "
    "--eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 "
    "--profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 --save c --load c "
    "--tensorboard-dir t"
)
MOCK = "--mock-data --tokenizer-type NullTokenizer --tiktoken-pattern v2"
REAL = "--data-path text_document --tokenizer-type HuggingFaceTokenizer --tokenizer-model folder"


def dry_run(words: str) -> Config:
    argv = [*words.split(), "--dry-run", "--world-size", "8"]
    return read_command_line(argv, {}).config


def test_a_note_names_only_a_flag_that_was_given() -> None:
    words = "--tokenizer-type HuggingFaceTokenizer --tokenizer-name-or-path folder"
    assert len(rewrite(words.split())[1]) == 1
    assert len(rewrite(words.replace("name-or-path", "model").split())[1]) == 2


@pytest.mark.parametrize("options", ["", OPTIONS])
def test_microsofts_llama_2_script_passes_a_dry_run(options: str, tmp_path: Path) -> None:
    file = tmp_path / "deepspeed.json"
    sizes = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 1}
    file.write_text(json.dumps({**sizes, "zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}))
    config = dry_run(f"{LLAMA_2} {options} --deepspeed_config={file}")
    model = config.model
    assert (model.ffn_hidden_size, model.glu_activation, model.normalization) == (5504, "swiglu", "RMSNorm")
    assert (model.position_embedding_type, model.query_groups) == ("rotary", 4)
    assert config.data.tokenizer_type == "SentencePieceTokenizer"
    assert config.training.recomputes_layers is bool(options)
    assert config.logging.wandb_save_dir == ("wandb" if options else None)


@pytest.mark.parametrize("data", [MOCK, REAL])
def test_megatron_lms_llama_3_script_passes_a_dry_run(data: str) -> None:
    config = dry_run(f"{LLAMA_3} {data}")
    assert (config.model.ffn_hidden_size, config.model.position_embedding_type) == (14336, "rotary")
    assert config.parallel.zero_stage == 1 and config.data.split == "99,1,0"
    assert (config.data.tokenizer_name_or_path == "folder") is (data == REAL)


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--decoupled-lr 1e-3", "--decoupled-lr is not supported: all parameters have one"),
        ("--simulate", "--simulate is not supported: .* which only a dry run accepts"),
    ],
)
def test_a_run_rejects_what_only_a_dry_run_ignores(flag: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_args([*RUN, "--mock-data", "--vocab-size", "9", *flag.split()], {})


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("--hidden-size 4096 --swiglu", 10880),  # Megatron-LM's int(4 * hidden * 2 / 3 / 64) * 64
        ("--swiglu --hidden-size=2048", 5440),
        ("--swiglu --hidden-size 2048 --ffn-hidden-size 5504", 5504),
    ],
)
def test_swiglu_has_megatron_lms_default_size(words: str, size: int) -> None:
    assert parse_args([*SMALL, *words.split()], {}).model.ffn_hidden_size == size


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        ("--position-embedding-type learned_absolute", "position_embedding_type", "absolute"),
        ("--position-embedding-type=rope", "position_embedding_type", "rotary"),
        ("--normalization layernorm", "normalization", "LayerNorm"),
    ],
)
def test_values_of_other_programs_are_understood(words: str, setting: str, value: str) -> None:
    command = read_command_line([*SMALL, *words.split()], {})
    assert getattr(command.config.model, setting) == value
    assert any("is read as" in note and value in note for note in command.notes)


@pytest.mark.parametrize("tokenizer", ["SentencePieceTokenizer", "Llama2Tokenizer"])
def test_tokenizers_of_other_programs_are_understood(tokenizer: str) -> None:
    words = [*SMALL, "--tokenizer-type", tokenizer, "--tokenizer-model", "m"]
    assert parse_args(words, {}).data.tokenizer_type == "SentencePieceTokenizer"


def test_a_recomputation_of_some_layers_is_rejected() -> None:
    with pytest.raises(ConfigError, match="--recompute-method is 'block': expected uniform"):
        parse_args([*SMALL, "--recompute-granularity", "full", "--recompute-method", "block"], {})
