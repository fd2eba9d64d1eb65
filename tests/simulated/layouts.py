"""Layouts and flags that the simulation is tested with: each option that changes memory, work or messages."""

from __future__ import annotations

from megatron.arguments import parse_args
from megatron.config import Config

_SMALL = (
    "--dry-run --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 64 --lr 1e-3 "
    "--train-samples 6400 --vocab-size 4000 --log-interval 10"
)
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
LLAMA = (
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    f"--disable-bias-linear --untie-embeddings-and-output-weights --ffn-hidden-size 704 {NO_DROPOUT}"
)
GROUPS = "--group-query-attention --num-query-groups 4"
QWEN3 = f"{LLAMA} {GROUPS} --qk-layernorm"
OLMO2 = f"{QWEN3} --qk-layernorm-scope projection --layer-arrangement post-norm"
NEOX = "--position-embedding-type rotary --rotary-percent 0.25 --layer-arrangement parallel"
FALCON = (
    "--position-embedding-type rotary --layer-arrangement parallel-one-norm --disable-bias-linear "
    "--group-query-attention --activation gelu_exact"
)

# Name -> flags. The order matters to the gate, which takes evenly spaced rows.
LAYOUTS = {
    "alone-fp32": "",
    "alone-bf16-recompute": f"--bf16 --checkpoint-activations {NO_DROPOUT}",
    "alone-fp16-selective-alibi": "--fp16 --recompute-granularity selective --position-embedding-type alibi",
    "alone-without-kernels": "--fp16 --recompute-granularity selective --position-embedding-type alibi "
    "--gpu v100-32gb",
    "tensor-2-without-kernels": "--world-size 2 --tensor-model-parallel-size 2 --fp16 --gpu v100-32gb",
    "alone-plain-loss": f"--bf16 --loss-implementation plain {NO_DROPOUT}",
    "alone-z-loss-swiglu": "--bf16 --z-loss-weight 1e-4 --glu-activation swiglu",
    "data-2": "--world-size 2 --bf16",
    "data-4-zero1": "--world-size 4 --zero-stage 1 --bf16 --checkpoint-activations",
    "data-4-buckets": "--world-size 4 --zero-stage 1 --bf16 --ddp-bucket-size 1000000",
    "data-4-zero2": "--world-size 4 --zero-stage 2 --bf16",
    "data-4-zero3": f"--world-size 4 --zero-stage 3 --bf16 {NO_DROPOUT}",
    "data-4-zero3-recompute": "--world-size 4 --zero-stage 3 --fp16 --checkpoint-activations",
    "data-2-offload": "--world-size 2 --zero-stage 1 --bf16 --cpu-offload",
    "data-2-offload-fp32": "--world-size 2 --zero-stage 1 --cpu-offload",
    "data-2-8-bit": "--world-size 2 --zero-stage 1 --bf16 --use-bnb-optimizer",
    "data-2-sgd": "--world-size 2 --zero-stage 1 --bf16 --optimizer sgd",
    "data-4-muon-buckets": "--world-size 4 --zero-stage 1 --bf16 --optimizer muon --ddp-bucket-size 1000000",
    "pipeline-2-tensor-2-muon": "--world-size 8 --pipeline-model-parallel-size 2 "
    f"--tensor-model-parallel-size 2 --optimizer muon --bf16 {LLAMA} {GROUPS}",
    "context-2-llama": f"--world-size 2 --context-parallel-size 2 --bf16 {LLAMA} {GROUPS}",
    "context-4-zero1-dropout": "--world-size 4 --context-parallel-size 4 --zero-stage 1 --bf16",
    "context-2-data-2-zero3-recompute": "--world-size 4 --context-parallel-size 2 --zero-stage 3 --bf16 "
    f"--checkpoint-activations {NO_DROPOUT}",
    "context-2-tensor-2-sequence": "--world-size 8 --context-parallel-size 2 --tensor-model-parallel-size 2 "
    f"--bf16 --sequence-parallel --zero-stage 1 {LLAMA} {GROUPS}",
    "context-2-tensor-2-partition-activations": "--world-size 4 --context-parallel-size 2 --bf16 "
    "--tensor-model-parallel-size 2 --checkpoint-activations --partition-activations",
    "context-2-pipeline-2-alibi-documents": "--world-size 4 --context-parallel-size 2 --bf16 "
    "--pipeline-model-parallel-size 2 --position-embedding-type alibi --reset-attention-mask --zero-stage 1",
    "context-2-zero-bubble-2-muon": "--world-size 4 --context-parallel-size 2 --optimizer muon --bf16 "
    f"--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble {LLAMA}",
    "tensor-2": f"--world-size 2 --tensor-model-parallel-size 2 --bf16 {NO_DROPOUT}",
    "tensor-2-dropout-embed-norm": "--world-size 2 --tensor-model-parallel-size 2 --fp16 --embed-layernorm",
    "tensor-2-sequence": "--world-size 2 --tensor-model-parallel-size 2 --bf16 --sequence-parallel",
    "tensor-4-sequence-recompute": "--world-size 4 --tensor-model-parallel-size 4 --bf16 --sequence-parallel "
    "--checkpoint-activations",
    "tensor-2-partition-activations": "--world-size 2 --tensor-model-parallel-size 2 --bf16 "
    "--checkpoint-activations --partition-activations",
    "tensor-2-checkpoint-in-cpu": "--world-size 2 --tensor-model-parallel-size 2 --bf16 "
    "--checkpoint-activations --checkpoint-in-cpu",
    "pipeline-2-rotary-documents": "--world-size 2 --pipeline-model-parallel-size 2 --bf16 "
    "--position-embedding-type rotary --reset-position-ids --reset-attention-mask",
    "pipeline-4-fp32": f"--world-size 4 --pipeline-model-parallel-size 4 {NO_DROPOUT}",
    "pipeline-2-fp32-residual": "--world-size 2 --pipeline-model-parallel-size 2 --bf16 "
    "--fp32-residual-connection --checkpoint-activations --checkpoint-num-layers 2",
    "pipeline-3-head-alone": "--world-size 3 --pipeline-model-parallel-size 3 --bf16 --global-batch-size 60 "
    "--partition-method type:embed:2|transformer:4",
    "pipeline-2-post-layernorm": "--world-size 2 --pipeline-model-parallel-size 2 --bf16 "
    "--fp32-residual-connection --apply-residual-connection-post-layernorm",
    "dualpipev-2": "--world-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule dualpipev --bf16",
    "dualpipev-2-tensor-2": "--world-size 8 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
    "--pipeline-schedule dualpipev --fp16 --checkpoint-activations",
    "interleaved-2": "--world-size 2 --pipeline-model-parallel-size 2 --virtual-pipeline-stages 2 --bf16",
    "interleaved-4-of-3-documents": "--world-size 4 --pipeline-model-parallel-size 4 --bf16 --num-layers 12 "
    "--virtual-pipeline-stages 3 --position-embedding-type rotary --reset-position-ids "
    f"--reset-attention-mask --global-batch-size 40 {NO_DROPOUT}",
    "interleaved-2-tensor-2": "--world-size 8 --pipeline-model-parallel-size 2 "
    "--tensor-model-parallel-size 2 --virtual-pipeline-stages 2 --fp16 --checkpoint-activations "
    "--zero-stage 1",
    "interleaved-2-llama-sequence": "--world-size 4 --pipeline-model-parallel-size 2 "
    f"--tensor-model-parallel-size 2 --virtual-pipeline-stages 2 --bf16 --sequence-parallel {LLAMA}",
    "interleaved-2-buckets": "--world-size 4 --pipeline-model-parallel-size 2 --virtual-pipeline-stages 2 "
    "--bf16 --zero-stage 1 --ddp-bucket-size 1",
    "dualpipev-2-buckets": "--world-size 4 --pipeline-model-parallel-size 2 --pipeline-schedule dualpipev "
    "--bf16 --zero-stage 1 --ddp-bucket-size 1",
    "zero-bubble-4": "--world-size 4 --pipeline-model-parallel-size 4 --pipeline-schedule zero-bubble --bf16",
    "zero-bubble-2-tensor-2-recompute": "--world-size 8 --pipeline-model-parallel-size 2 --fp16 "
    "--tensor-model-parallel-size 2 --pipeline-schedule zero-bubble --checkpoint-activations --zero-stage 1 "
    f"{NO_DROPOUT}",
    "zero-bubble-2-llama-sequence": "--world-size 4 --pipeline-model-parallel-size 2 "
    f"--tensor-model-parallel-size 2 --pipeline-schedule zero-bubble --bf16 --sequence-parallel {LLAMA}",
    "zero-bubble-2-buckets": "--world-size 4 --pipeline-model-parallel-size 2 --zero-stage 1 --bf16 "
    "--pipeline-schedule zero-bubble --ddp-bucket-size 1",
    "zero-bubble-4-neox": "--world-size 4 --pipeline-model-parallel-size 4 "
    f"--pipeline-schedule zero-bubble --bf16 {NEOX} {NO_DROPOUT}",
    "zero-bubble-2-falcon-recompute": "--world-size 4 --pipeline-model-parallel-size 2 --bf16 "
    f"--tensor-model-parallel-size 2 --pipeline-schedule zero-bubble --checkpoint-activations {FALCON}",
    "alone-llama": f"--bf16 {LLAMA} --group-query-attention --num-query-groups 4",
    "alone-llama-fp32-recompute": f"{LLAMA} --group-query-attention "
    "--checkpoint-activations --rotary-percent 0.5 --rotary-interleaved",
    "alone-multi-query-dropout": "--bf16 --group-query-attention",
    "tensor-2-query-groups": "--world-size 2 --tensor-model-parallel-size 2 --bf16 "
    f"--group-query-attention --num-query-groups 2 {NO_DROPOUT}",
    "tensor-4-llama": f"--world-size 4 --tensor-model-parallel-size 4 --bf16 {LLAMA} "
    "--group-query-attention --num-query-groups 2 --sequence-parallel",
    "pipeline-2-llama": f"--world-size 4 --pipeline-model-parallel-size 2 --bf16 {LLAMA} --zero-stage 1 "
    "--group-query-attention --num-query-groups 4",
    "dualpipev-2-llama-8-bit": "--world-size 2 --pipeline-model-parallel-size 2 "
    f"--pipeline-schedule dualpipev --bf16 --use-bnb-optimizer {LLAMA} --group-query-attention "
    "--num-query-groups 4",
    "alone-qwen3": f"--bf16 {QWEN3}",
    "alone-olmo2-recompute": f"--bf16 {OLMO2} --checkpoint-activations",
    "alone-neox": f"--bf16 {NEOX}",
    "alone-falcon-recompute": f"--bf16 {FALCON} {NO_DROPOUT} --checkpoint-activations",
    "alone-window-multi-query": f"--bf16 {LLAMA} {GROUPS} --window-size 32",
    "alone-window-without-kernels": f"--fp16 {LLAMA} {GROUPS} --window-size 32 --gpu v100-32gb",
    "pipeline-2-window-pattern": "--world-size 2 --pipeline-model-parallel-size 2 --num-layers 14 --bf16 "
    f"{LLAMA} {GROUPS} --window-size 32 --window-pattern W W F --partition-method stages:E+4,10+L "
    "--reset-attention-mask",
    "pipeline-2-window-pattern-recompute": "--world-size 2 --pipeline-model-parallel-size 2 --num-layers 20 "
    f"--bf16 {LLAMA} --window-size 32 --window-pattern W W W F --window-rotary-base 500 "
    "--partition-method stages:E+6,14+L --checkpoint-activations --checkpoint-num-layers 2",
    "context-2-window-pattern": "--world-size 2 --context-parallel-size 2 --bf16 --window-size 48 "
    f"--window-pattern W F {LLAMA} {GROUPS}",
    "data-2-zero3-window-pattern": f"--world-size 2 --bf16 --zero-stage 3 {LLAMA} "
    "--window-size 32 --window-pattern W F",
    "alone-qk-layernorm-absolute": "--bf16 --qk-layernorm",
    "tensor-2-qwen3": f"--world-size 2 --tensor-model-parallel-size 2 --bf16 {QWEN3}",
    "tensor-2-olmo2-recompute": f"--world-size 2 --tensor-model-parallel-size 2 --bf16 {OLMO2} "
    "--checkpoint-activations",
    "pipeline-2-tensor-2-gemma3": "--world-size 4 --pipeline-model-parallel-size 2 --bf16 --num-layers 7 "
    f"--tensor-model-parallel-size 2 {QWEN3} --glu-activation geglu_tanh --layer-arrangement pre-post-norm "
    "--apply-layernorm-1p --scale-embeddings --window-size 32 --window-pattern W W W W W F",
    "tensor-2-neox-sequence": f"--world-size 2 --tensor-model-parallel-size 2 --bf16 {NEOX} "
    "--sequence-parallel",
    "pipeline-2-tensor-2-olmo2": "--world-size 4 --pipeline-model-parallel-size 2 "
    f"--tensor-model-parallel-size 2 --bf16 {OLMO2} --sequence-parallel --zero-stage 1",
    "dualpipev-2-falcon-recompute": "--world-size 4 --pipeline-model-parallel-size 2 "
    f"--tensor-model-parallel-size 2 --pipeline-schedule dualpipev --bf16 {FALCON} --checkpoint-activations",
    "all-three": "--world-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16 "
    f"--zero-stage 1 --checkpoint-activations --position-embedding-type alibi --embed-layernorm {NO_DROPOUT}",
    "all-three-sequence": "--world-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--bf16 --zero-stage 1 --sequence-parallel",
    "tensor-2-chunks": "--world-size 2 --tensor-model-parallel-size 2 --bf16 --sequence-parallel "
    f"--tp-comm-overlap --tp-comm-overlap-chunks 4 {NO_DROPOUT}",
    "all-three-chunks-recompute": "--world-size 8 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --bf16 --zero-stage 1 --sequence-parallel --tp-comm-overlap "
    f"--checkpoint-activations {NO_DROPOUT}",
    "all-three-buckets": "--world-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--bf16 --zero-stage 1 --sequence-parallel --ddp-bucket-size 1",
    "all-three-spikes": "--world-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--fp16 --spike-policy skip --sync-tp-duplicated-parameters",
}

# What LAYOUTS do not combine; only the plan is compared.
MORE = {
    "plain-loss": "--world-size 2 --tensor-model-parallel-size 2 --bf16 --loss-implementation plain",
    "average-zero1": "--world-size 4 --tensor-model-parallel-size 2 --bf16 --zero-stage 1 "
    "--sync-tp-duplicated-parameters",
    "zero3-tensor": "--world-size 4 --tensor-model-parallel-size 2 --bf16 --zero-stage 3 --sequence-parallel",
    "zero3-groups": "--world-size 2 --bf16 --zero-stage 3 --checkpoint-activations "
    f"--checkpoint-num-layers 3 {NO_DROPOUT}",
    "8-bit-tensor": "--world-size 4 --tensor-model-parallel-size 2 --bf16 --zero-stage 1 --use-bnb-optimizer",
    "late-gradients": "--world-size 2 --bf16 --zero-stage 1 --ddp-bucket-size 1 --no-overlap-grad-reduce",
    "early-weights": "--world-size 2 --bf16 --zero-stage 1 --ddp-bucket-size 1 --no-overlap-param-gather",
    "no-overlap": "--world-size 2 --bf16 --zero-stage 1 --ddp-bucket-size 1 --no-overlap-grad-reduce "
    "--no-overlap-param-gather",
    "documents": "--world-size 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16 "
    "--position-embedding-type rotary --reset-position-ids",
    "sequence-fp32-residual": "--world-size 4 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --bf16 "
    f"--sequence-parallel --fp32-residual-connection --checkpoint-activations {NO_DROPOUT}",
    "mup-swiglu": "--world-size 4 --tensor-model-parallel-size 2 --bf16 --zero-stage 1 --mup "
    "--mup-base-hidden-size 32 --glu-activation swiglu",
}


def config_of(flags: str) -> Config:
    """The configuration of a small model with additional flags."""
    return parse_args([*_SMALL.split(), *flags.split()], {})
