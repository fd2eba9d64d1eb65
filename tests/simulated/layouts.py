"""Layouts and flags with which the simulation is tested. They cover each option that changes memory, work or
messages."""

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
LATENT = (
    f"{LLAMA} --multi-latent-attention --qk-layernorm --q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 32 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 32"
)
NEOX = "--position-embedding-type rotary --rotary-percent 0.25 --layer-arrangement parallel"
FALCON = (
    "--position-embedding-type rotary --layer-arrangement parallel-one-norm --disable-bias-linear "
    "--group-query-attention --activation gelu_exact"
)

RECOMPUTE, SEQUENCE, MUON = "--checkpoint-activations", "--sequence-parallel", "--optimizer muon"
ZERO_1, ZERO_3 = "--zero-stage 1", "--zero-stage 3"
TP_2, TP_4 = (f"--tensor-model-parallel-size {size}" for size in (2, 4))
PP_2, PP_3, PP_4 = (f"--pipeline-model-parallel-size {size}" for size in (2, 3, 4))
CP_2, CP_4 = (f"--context-parallel-size {size}" for size in (2, 4))
WORLD_2, WORLD_3, WORLD_4, WORLD_8 = (f"--world-size {size}" for size in (2, 3, 4, 8))
EP_2, EP_4 = (f"--num-experts 8 --expert-model-parallel-size {size}" for size in (2, 4))
MODULES = "--recompute-granularity selective --recompute-modules layernorm mlp_act"
ZERO_BUBBLE, DUALPIPEV = (f"--pipeline-schedule {name}" for name in ("zero-bubble", "dualpipev"))

# Name -> flags. The order matters: the gate runs evenly spaced rows.
LAYOUTS = {
    "alone-fp32": "",
    "alone-bf16-recompute": f"--bf16 {RECOMPUTE} {NO_DROPOUT}",
    "alone-fp16-selective-alibi": "--fp16 --recompute-granularity selective --position-embedding-type alibi",
    "alone-without-kernels": "--fp16 --recompute-granularity selective --position-embedding-type alibi "
    "--gpu v100-32gb",
    "tensor-2-without-kernels": f"{WORLD_2} {TP_2} --fp16 --gpu v100-32gb",
    "alone-plain-loss": f"--bf16 --loss-implementation plain {NO_DROPOUT}",
    "alone-z-loss-swiglu": "--bf16 --z-loss-weight 1e-4 --glu-activation swiglu",
    "data-2": f"{WORLD_2} --bf16",
    "data-4-zero1": f"{WORLD_4} {ZERO_1} --bf16 {RECOMPUTE}",
    "data-4-buckets": f"{WORLD_4} {ZERO_1} --bf16 --ddp-bucket-size 1000000",
    "data-4-zero2": f"{WORLD_4} --zero-stage 2 --bf16",
    "data-4-zero3": f"{WORLD_4} {ZERO_3} --bf16 {NO_DROPOUT}",
    "data-4-zero3-recompute": f"{WORLD_4} {ZERO_3} --fp16 {RECOMPUTE}",
    "data-2-offload": f"{WORLD_2} {ZERO_1} --bf16 --cpu-offload",
    "data-2-offload-fp32": f"{WORLD_2} {ZERO_1} --cpu-offload",
    "data-2-8-bit": f"{WORLD_2} {ZERO_1} --bf16 --use-bnb-optimizer",
    "data-2-sgd": f"{WORLD_2} {ZERO_1} --bf16 --optimizer sgd",
    "data-4-muon-buckets": f"{WORLD_4} {ZERO_1} --bf16 {MUON} --ddp-bucket-size 1000000",
    "pipeline-2-tensor-2-muon": f"{WORLD_8} {PP_2} {TP_2} {MUON} --bf16 {LLAMA} {GROUPS}",
    "context-2-llama": f"{WORLD_2} {CP_2} --bf16 {LLAMA} {GROUPS}",
    "context-4-zero1-dropout": f"{WORLD_4} {CP_4} {ZERO_1} --bf16",
    "context-2-data-2-zero3-recompute": f"{WORLD_4} {CP_2} {ZERO_3} --bf16 {RECOMPUTE} {NO_DROPOUT}",
    "context-2-tensor-2-sequence": f"{WORLD_8} {CP_2} {TP_2} --bf16 {SEQUENCE} {ZERO_1} {LLAMA} {GROUPS}",
    "context-2-tensor-2-partition-activations": f"{WORLD_4} {CP_2} --bf16 {TP_2} {RECOMPUTE} "
    "--partition-activations",
    "context-2-pipeline-2-alibi-documents": f"{WORLD_4} {CP_2} --bf16 {PP_2} --position-embedding-type alibi "
    f"--reset-attention-mask {ZERO_1}",
    "context-2-zero-bubble-2-muon": f"{WORLD_4} {CP_2} {MUON} --bf16 {PP_2} {ZERO_BUBBLE} {LLAMA}",
    "tensor-2-gate-sinks-no-rotary": f"{WORLD_2} {TP_2} --bf16 {QWEN3} --attention-output-gate "
    "--softmax-type learnable --no-rope-freq 4",
    "tensor-4-pipeline-2-window-heads": f"{WORLD_8} {TP_4} {PP_2} --bf16 {QWEN3} --window-size 32 "
    "--window-pattern W F F --window-num-attention-heads 16 --window-num-query-groups 2 --v-channels 16 "
    "--window-softmax-type learnable --attention-output-gate --attention-output-gate-scope head",
    "tensor-2-capped-sequence": f"{WORLD_2} {TP_2} {SEQUENCE} --bf16 {LLAMA} {GROUPS} "
    "--attn-logit-softcapping 50 --final-logit-softcapping 30",
    "tensor-2": f"{WORLD_2} {TP_2} --bf16 {NO_DROPOUT}",
    "tensor-2-dropout-embed-norm": f"{WORLD_2} {TP_2} --fp16 --embed-layernorm",
    "tensor-2-sequence": f"{WORLD_2} {TP_2} --bf16 {SEQUENCE}",
    "tensor-4-sequence-recompute": f"{WORLD_4} {TP_4} --bf16 {SEQUENCE} {RECOMPUTE}",
    "tensor-2-partition-activations": f"{WORLD_2} {TP_2} --bf16 {RECOMPUTE} --partition-activations",
    "tensor-2-checkpoint-in-cpu": f"{WORLD_2} {TP_2} --bf16 {RECOMPUTE} --checkpoint-in-cpu",
    "pipeline-2-rotary-documents": f"{WORLD_2} {PP_2} --bf16 --position-embedding-type rotary "
    "--reset-position-ids --reset-attention-mask",
    "pipeline-4-fp32": f"{WORLD_4} {PP_4} {NO_DROPOUT}",
    "pipeline-2-fp32-residual": f"{WORLD_2} {PP_2} --bf16 --fp32-residual-connection {RECOMPUTE} "
    "--checkpoint-num-layers 2",
    "pipeline-3-head-alone": f"{WORLD_3} {PP_3} --bf16 --global-batch-size 60 --partition-method "
    "type:embed:2|transformer:4",
    "pipeline-2-post-layernorm": f"{WORLD_2} {PP_2} --bf16 --fp32-residual-connection "
    "--apply-residual-connection-post-layernorm",
    "dualpipev-2": f"{WORLD_2} {PP_2} {DUALPIPEV} --bf16",
    "dualpipev-2-tensor-2": f"{WORLD_8} {PP_2} {TP_2} {DUALPIPEV} --fp16 {RECOMPUTE}",
    "interleaved-2": f"{WORLD_2} {PP_2} --virtual-pipeline-stages 2 --bf16",
    "interleaved-4-of-3-documents": f"{WORLD_4} {PP_4} --bf16 --num-layers 12 --virtual-pipeline-stages 3 "
    "--position-embedding-type rotary --reset-position-ids --reset-attention-mask --global-batch-size 40 "
    f"{NO_DROPOUT}",
    "interleaved-2-tensor-2": f"{WORLD_8} {PP_2} {TP_2} --virtual-pipeline-stages 2 --fp16 {RECOMPUTE} "
    f"{ZERO_1}",
    "interleaved-2-llama-sequence": f"{WORLD_4} {PP_2} {TP_2} --virtual-pipeline-stages 2 --bf16 {SEQUENCE} "
    f"{LLAMA}",
    "interleaved-2-buckets": f"{WORLD_4} {PP_2} --virtual-pipeline-stages 2 --bf16 {ZERO_1} "
    "--ddp-bucket-size 1",
    "dualpipev-2-buckets": f"{WORLD_4} {PP_2} {DUALPIPEV} --bf16 {ZERO_1} --ddp-bucket-size 1",
    "zero-bubble-4": f"{WORLD_4} {PP_4} {ZERO_BUBBLE} --bf16",
    "zero-bubble-2-tensor-2-recompute": f"{WORLD_8} {PP_2} --fp16 {TP_2} {ZERO_BUBBLE} {RECOMPUTE} {ZERO_1} "
    f"{NO_DROPOUT}",
    "zero-bubble-2-llama-sequence": f"{WORLD_4} {PP_2} {TP_2} {ZERO_BUBBLE} --bf16 {SEQUENCE} {LLAMA}",
    "zero-bubble-2-buckets": f"{WORLD_4} {PP_2} {ZERO_1} --bf16 {ZERO_BUBBLE} --ddp-bucket-size 1",
    "zero-bubble-4-neox": f"{WORLD_4} {PP_4} {ZERO_BUBBLE} --bf16 {NEOX} {NO_DROPOUT}",
    "zero-bubble-2-falcon-recompute": f"{WORLD_4} {PP_2} --bf16 {TP_2} {ZERO_BUBBLE} {RECOMPUTE} {FALCON}",
    "alone-llama": f"--bf16 {LLAMA} {GROUPS}",
    "alone-llama-fp32-recompute": f"{LLAMA} --group-query-attention {RECOMPUTE} --rotary-percent 0.5 "
    "--rotary-interleaved",
    "alone-multi-query-dropout": "--bf16 --group-query-attention",
    "tensor-2-query-groups": f"{WORLD_2} {TP_2} --bf16 --group-query-attention --num-query-groups 2 "
    f"{NO_DROPOUT}",
    "tensor-4-llama": f"{WORLD_4} {TP_4} --bf16 {LLAMA} --group-query-attention --num-query-groups 2 "
    f"{SEQUENCE}",
    "pipeline-2-llama": f"{WORLD_4} {PP_2} --bf16 {LLAMA} {ZERO_1} {GROUPS}",
    "dualpipev-2-llama-8-bit": f"{WORLD_2} {PP_2} {DUALPIPEV} --bf16 --use-bnb-optimizer {LLAMA} {GROUPS}",
    "alone-qwen3": f"--bf16 {QWEN3}",
    "alone-olmo2-recompute": f"--bf16 {OLMO2} {RECOMPUTE}",
    "tensor-2-latent": f"{WORLD_2} {TP_2} --bf16 {LATENT}",
    "context-2-tensor-2-latent-sequence": f"{WORLD_4} {CP_2} {TP_2} --bf16 {SEQUENCE} {LATENT}",
    "pipeline-2-latent-recompute": f"{WORLD_2} {PP_2} --bf16 {RECOMPUTE} {LATENT} --v-head-dim 64",
    "alone-neox": f"--bf16 {NEOX}",
    "alone-falcon-recompute": f"--bf16 {FALCON} {NO_DROPOUT} {RECOMPUTE}",
    "alone-window-multi-query": f"--bf16 {LLAMA} {GROUPS} --window-size 32",
    "alone-window-without-kernels": f"--fp16 {LLAMA} {GROUPS} --window-size 32 --gpu v100-32gb",
    "pipeline-2-window-pattern": f"{WORLD_2} {PP_2} --num-layers 14 --bf16 {LLAMA} {GROUPS} --window-size 32 "
    "--window-pattern W W F --partition-method stages:E+4,10+L --reset-attention-mask",
    "pipeline-2-window-pattern-recompute": f"{WORLD_2} {PP_2} --num-layers 20 --bf16 {LLAMA} --window-size "
    f"32 --window-pattern W W W F --window-rotary-base 500 --partition-method stages:E+6,14+L {RECOMPUTE} "
    "--checkpoint-num-layers 2",
    "context-2-window-pattern": f"{WORLD_2} {CP_2} --bf16 --window-size 48 --window-pattern W F {LLAMA} "
    f"{GROUPS}",
    "data-2-zero3-window-pattern": f"{WORLD_2} --bf16 {ZERO_3} {LLAMA} --window-size 32 --window-pattern W F",
    "tensor-2-window-pattern": f"{WORLD_2} {TP_2} --bf16 {SEQUENCE} --num-layers 6 {LLAMA} --window-size 32 "
    "--window-pattern W F",
    "zero-bubble-2-tensor-2-window-pattern": f"{WORLD_4} {PP_2} {TP_2} {ZERO_BUBBLE} --bf16 {SEQUENCE} "
    "--num-layers 10 --window-size 32 --window-pattern W F F",
    "alone-qk-layernorm-absolute": "--bf16 --qk-layernorm",
    "tensor-2-qwen3": f"{WORLD_2} {TP_2} --bf16 {QWEN3}",
    "tensor-2-olmo2-recompute": f"{WORLD_2} {TP_2} --bf16 {OLMO2} {RECOMPUTE}",
    "pipeline-2-tensor-2-gemma3": f"{WORLD_4} {PP_2} --bf16 --num-layers 7 {TP_2} {QWEN3} --glu-activation "
    "geglu_tanh --layer-arrangement pre-post-norm --apply-layernorm-1p --scale-embeddings --window-size 32 "
    "--window-pattern W W W W W F",
    "tensor-2-neox-sequence": f"{WORLD_2} {TP_2} --bf16 {NEOX} {SEQUENCE}",
    "pipeline-2-tensor-2-olmo2": f"{WORLD_4} {PP_2} {TP_2} --bf16 {OLMO2} {SEQUENCE} {ZERO_1}",
    "dualpipev-2-falcon-recompute": f"{WORLD_4} {PP_2} {TP_2} {DUALPIPEV} --bf16 {FALCON} {RECOMPUTE}",
    "all-three": f"{WORLD_8} {TP_2} {PP_2} --bf16 {ZERO_1} {RECOMPUTE} --position-embedding-type alibi "
    f"--embed-layernorm {NO_DROPOUT}",
    "all-three-sequence": f"{WORLD_8} {TP_2} {PP_2} --bf16 {ZERO_1} {SEQUENCE}",
    "tensor-2-chunks": f"{WORLD_2} {TP_2} --bf16 {SEQUENCE} --tp-comm-overlap --tp-comm-overlap-chunks 4 "
    f"{NO_DROPOUT}",
    "all-three-chunks-recompute": f"{WORLD_8} {TP_2} {PP_2} --bf16 {ZERO_1} {SEQUENCE} --tp-comm-overlap "
    f"{RECOMPUTE} {NO_DROPOUT}",
    "all-three-buckets": f"{WORLD_8} {TP_2} {PP_2} --bf16 {ZERO_1} {SEQUENCE} --ddp-bucket-size 1",
    "experts-8-alone-fp32": "--num-experts 8 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3",
    "experts-2-data-4-shared": f"{WORLD_4} {EP_2} --bf16 {ZERO_1} --moe-layer-freq D E E --num-layers 7 "
    "--ddp-bucket-size 3000000 --moe-router-topk 3 "
    "--moe-shared-expert-intermediate-size 128 --moe-shared-expert-gate",
    "experts-4-context-2-tensor-2": f"{WORLD_8} {EP_4} {TP_2} {CP_2} --bf16 {SEQUENCE} {ZERO_1} {LLAMA} "
    "--moe-ffn-hidden-size 192 --moe-aux-loss-coeff 0.01",
    "experts-2-zero-bubble-2-dense": f"{WORLD_8} {EP_2} {PP_2} {TP_2} {ZERO_BUBBLE} --bf16 {SEQUENCE} "
    f"--moe-layer-freq D E --num-layers 8 {LLAMA} --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias",
    "experts-2-zero3-allgather-recompute": f"{WORLD_4} {EP_2} --bf16 {ZERO_3} {RECOMPUTE} {NO_DROPOUT} "
    "--moe-token-dispatcher-type allgather --moe-shared-expert-intermediate-size 128",
    "fp8-alone-recompute": f"--bf16 --fp8-recipe blockwise --fp8-min-size 0 {RECOMPUTE}",
    "fp8-tensor-2-data-2-sequence": f"{WORLD_4} {TP_2} --bf16 {ZERO_1} {SEQUENCE} --fp8-format hybrid "
    "--fp8-min-size 0",
    "fp8-data-4-zero3": f"{WORLD_4} {ZERO_3} --bf16 --fp8-recipe blockwise --fp8-min-size 0 {NO_DROPOUT}",
    "fp8-tensorwise-2-zero-bubble-2": f"{WORLD_4} {TP_2} {PP_2} {ZERO_BUBBLE} --bf16 "
    "--fp8-recipe tensorwise --fp8-min-size 0",
    "fp8-first-last-uneven": f"{WORLD_2} {PP_2} --num-layers 9 --bf16 --fp8-recipe blockwise "
    f"--fp8-min-size 0 --first-last-layers-bf16 --partition-method stages:E+6,3+L {LLAMA} "
    "--ffn-hidden-size 768",
    "fp8-first-last-interleaved-2": f"{WORLD_4} {PP_2} {TP_2} --num-layers 8 --bf16 "
    "--fp8-recipe blockwise --fp8-min-size 192 --first-last-layers-bf16 --virtual-pipeline-stages 2 "
    f"{SEQUENCE} {ZERO_1} {RECOMPUTE}",
    "fp8-experts-2-pipeline-2": f"{WORLD_4} {EP_2} {PP_2} --bf16 --fp8-recipe blockwise --fp8-min-size 0 "
    "--moe-ffn-hidden-size 256",
    "multi-token-2-buckets": f"{WORLD_4} {TP_2} --bf16 {ZERO_1} {SEQUENCE} {LLAMA} --mtp-num-layers 2 "
    "--ddp-bucket-size 1",
    "multi-token-zero-bubble-2-experts": f"{WORLD_4} {EP_2} {PP_2} {ZERO_BUBBLE} --bf16 {LLAMA} "
    "--moe-layer-freq D E E E --mtp-num-layers 1 --reset-attention-mask",
    "all-three-spikes": f"{WORLD_8} {TP_2} {PP_2} --fp16 --spike-policy skip --sync-tp-duplicated-parameters",
}

# Combinations that are not in LAYOUTS. Only their plan is compared.
MORE = {
    "modules-fp16": f"--fp16 {MODULES} core_attn --position-embedding-type alibi",
    "modules-sequence": f"{WORLD_4} {TP_2} {PP_2} --bf16 {LLAMA} {SEQUENCE} {MODULES}",
    "modules-chunks-falcon": f"{WORLD_2} {TP_2} --bf16 {FALCON} {NO_DROPOUT} {SEQUENCE} --tp-comm-overlap "
    f"{MODULES}",
    "modules-zero3": f"{WORLD_2} --bf16 {ZERO_3} {LLAMA} {MODULES}",
    "modules-experts-zero-bubble": f"{WORLD_4} {EP_2} {PP_2} {ZERO_BUBBLE} --bf16 {LLAMA} {MODULES} moe_act "
    "--moe-shared-expert-intermediate-size 128",
    "plain-loss": f"{WORLD_2} {TP_2} --bf16 --loss-implementation plain",
    "average-zero1": f"{WORLD_4} {TP_2} --bf16 {ZERO_1} --sync-tp-duplicated-parameters",
    "fp8-first-last-zero3": f"{WORLD_2} --num-layers 10 --bf16 --fp8-recipe blockwise {ZERO_3} "
    "--fp8-min-size 0 --first-last-layers-bf16 --num-layers-at-end-in-bf16 0",
    "fp8-first-last-zero2": f"{WORLD_4} --bf16 --fp8-recipe blockwise --fp8-min-size 0 "
    "--zero-stage 2 --first-last-layers-bf16",
    "fp8-pattern-experts": f"{WORLD_4} {EP_2} {PP_2} {ZERO_1} --num-layers 12 --bf16 --fp8-recipe blockwise "
    "--fp8-min-size 0 --moe-layer-freq D E --moe-ffn-hidden-size 256 --fp8-layer-pattern B F F",
    "zero3-tensor": f"{WORLD_4} {TP_2} --bf16 {ZERO_3} {SEQUENCE}",
    "zero3-groups": f"{WORLD_2} --bf16 {ZERO_3} {RECOMPUTE} --checkpoint-num-layers 3 {NO_DROPOUT}",
    "8-bit-tensor": f"{WORLD_4} {TP_2} --bf16 {ZERO_1} --use-bnb-optimizer",
    "late-gradients": f"{WORLD_2} --bf16 {ZERO_1} --ddp-bucket-size 1 --no-overlap-grad-reduce",
    "early-weights": f"{WORLD_2} --bf16 {ZERO_1} --ddp-bucket-size 1 --no-overlap-param-gather",
    "no-overlap": f"{WORLD_2} --bf16 {ZERO_1} --ddp-bucket-size 1 --no-overlap-grad-reduce "
    "--no-overlap-param-gather",
    "documents": f"{WORLD_4} {TP_2} {PP_2} --bf16 --position-embedding-type rotary --reset-position-ids",
    "sequence-fp32-residual": f"{WORLD_4} {TP_2} {PP_2} --bf16 {SEQUENCE} --fp32-residual-connection "
    f"{RECOMPUTE} {NO_DROPOUT}",
    "multi-token-zero3-recompute": f"{WORLD_2} --bf16 {ZERO_3} {RECOMPUTE} {NO_DROPOUT} --mtp-num-layers 1 "
    "--position-embedding-type rotary",
    "multi-token-2-plain": f"{WORLD_2} {PP_2} --bf16 --mtp-num-layers 2 --position-embedding-type alibi "
    "--loss-implementation plain --num-layers 8",
    "multi-token-partition-activations": f"{WORLD_2} --bf16 {TP_2} {RECOMPUTE} --partition-activations "
    "--mtp-num-layers 2 --position-embedding-type rotary",
    "mup-swiglu": f"{WORLD_4} {TP_2} --bf16 {ZERO_1} --mup --mup-base-hidden-size 32 --glu-activation swiglu",
}


def config_of(flags: str) -> Config:
    """Returns the configuration of a small model with additional flags."""
    return parse_args([*_SMALL.split(), *flags.split()], {})
