"""Flags that BigScience's and Microsoft's Megatron-DeepSpeed, Megatron-LM, DeepSpeed or earlier versions of
this program have and this program does not have.

Each flag is in one of three tables: it is accepted and ignored (`IGNORED_FLAGS`), replaced by other flags
(`peer_rewriting`), or rejected with the alternative (`UNSUPPORTED_FLAGS`, and families of flags by the
beginning of their names in `UNSUPPORTED_FAMILIES`). docs/migration.md lists all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class IgnoredFlag:
    """An accepted flag without effect. nargs as in argparse, 0: no value."""

    name: str
    reason: str
    """Why the flag has no effect."""
    nargs: int | str | None = 0
    values: tuple[str, ...] | None = None
    """The values that are accepted; None: all."""
    otherwise: str = ""
    """The alternative for any other value."""
    only_in_plans: bool = False
    """Whether a run rejects the flag, because it would change the losses; a dry run is not affected."""
    not_with: str = ""
    """A setting, 'section.field', with which the flag is rejected."""
    is_deprecated: bool = False
    """Whether earlier versions of this program had the flag."""

    @property
    def note(self) -> str:
        """The note in the log of a run with this flag."""
        return f"{self.name} is {'deprecated and ' * self.is_deprecated}ignored: {self.reason}"


def _value(name: str, reason: str, values: tuple[str, ...] | None = None, otherwise: str = "") -> IgnoredFlag:
    return IgnoredFlag(name, reason, nargs=None, values=values, otherwise=otherwise)


def _switches(reason: str, *names: str) -> tuple[IgnoredFlag, ...]:
    return tuple(IgnoredFlag(name, reason) for name in names)


_NO_MOE = "mixture-of-experts layers are not implemented; remove the flag to train a dense model"
_NO_ULYSSES = (
    "Ulysses, which divides attention by heads, is not implemented; set --context-parallel-size, which "
    "divides the sequence"
)
_NO_TRANSFORMER_ENGINE = "Transformer Engine is not used; remove the flag"
_LAYERS_ON_STAGES = "set --partition-method, see docs/partition.md"
_DEEPSPEED_FORMAT = "checkpoints have DeepSpeed's format, or torch's with --save-format dcp"
_REQUEUE = "the scripts of examples/slurm requeue a stopped job, see docs/cluster.md; remove the flag"

_ONE_LR = (
    "all parameters have one learning rate, except with --mup; remove the flag, which only a dry run accepts"
)

IGNORED_FLAGS: tuple[IgnoredFlag, ...] = (
    *(
        IgnoredFlag(name, _ONE_LR, nargs=None, only_in_plans=True)
        for name in ("--decoupled-lr", "--decoupled-min-lr")
    ),
    IgnoredFlag(
        "--calculate-per-token-loss",
        "without --eod-mask-loss all micro-batches have equal numbers of tokens, so the mean of their losses "
        "is the mean over the tokens",
        not_with="data.eod_mask_loss",
    ),
    IgnoredFlag(
        "--grad-reduce-in-bf16", "gradients are accumulated and reduced in fp32, which is more exact"
    ),
    _value("--distributed-timeout-minutes", "--start-timeout and --hang-timeout limit how long ranks wait"),
    _value("--tiktoken-pattern", "no tokenizer of this program has it"),
    _value(
        "--recompute-method",
        "layers are recomputed in groups of --checkpoint-num-layers",
        ("uniform",),
        "a recomputation of only some layers is not implemented; set --recompute-granularity full",
    ),
    IgnoredFlag(
        "--simulate",
        "the plan of --dry-run has the memory, the work and the messages of a step; remove the flag, which "
        "only a dry run accepts",
        only_in_plans=True,
        is_deprecated=True,
    ),
    *_switches("use an external profiler, such as nsys", "--profile", "--use-pytorch-profiler"),
    *(
        IgnoredFlag(name, "use an external profiler, such as nsys", nargs="*")
        for name in ("--profile-step-start", "--profile-step-end", "--profile-ranks")
    ),
    # What this program always does.
    IgnoredFlag("--deepspeed", reason="DeepSpeed is always used"),
    IgnoredFlag(
        "--deepspeed-activation-checkpointing",
        reason="--checkpoint-activations enables activation checkpointing",
    ),
    IgnoredFlag(
        "--overlap-grad-reduce",
        reason="with --zero-stage 1 to 3 it is the default, see --no-overlap-grad-reduce",
    ),
    IgnoredFlag(
        "--overlap-param-gather",
        reason="with --zero-stage 1 or 3 it is the default, see --no-overlap-param-gather",
    ),
    IgnoredFlag("--accumulate-allreduce-grads-in-fp32", reason="gradients are always accumulated in fp32"),
    IgnoredFlag("--attention-softmax-in-fp32", reason="attention always computes the softmax in fp32"),
    IgnoredFlag("--fp16-lm-cross-entropy", reason="the loss is always computed in fp32"),
    IgnoredFlag("--exit-signal-handler", reason="the signals of --exit-signal save and exit"),
    IgnoredFlag(
        "--no-create-attention-mask-in-dataloader", reason="the data loader makes no attention masks"
    ),
    IgnoredFlag("--no-mmap-bin-files", reason="token files are always mapped into memory"),
    IgnoredFlag("--mmap-warmup", reason="token files are read on use"),
    IgnoredFlag("--use-mcore-models", reason="there is one implementation of the model"),
    IgnoredFlag("--no-pipeline-parallel", reason="with --pipeline-model-parallel-size 1 there is one stage"),
    IgnoredFlag("--enable-zbh1-exact-semantics", reason="zero-bubble gives the losses of 1f1b"),
    IgnoredFlag("--log-throughput", reason="the log line of each iteration has the throughput"),
    IgnoredFlag("--auto-detect-ckpt-format", reason="the format of a checkpoint is always detected"),
    _value("--data-impl", "the format of token files is always mmap", ("mmap", "infer")),
    _value("--DDP-impl", "gradients are reduced in buckets, see --zero-stage", ("local", "torch")),
    _value("--dataloader-type", "every epoch reads each sample once", ("single",), "remove the flag"),
    _value(
        "--transformer-impl",
        "Triton kernels are used where they can run, see --require-kernels",
        ("local",),
        _NO_TRANSFORMER_ENGINE,
    ),
    _value(
        "--attention-backend",
        "the fastest available attention is selected",
        ("auto", "flash", "fused"),
        "remove the flag",
    ),
    _value(
        "--weight-decay-incr-style",
        "the weight decay is constant",
        ("constant",),
        "a weight decay that changes is not implemented; set --weight-decay",
    ),
    _value(
        "--muon-tp-mode",
        "Muon always updates whole matrices, on any tensor-parallel degree",
        ("duplicated", "distributed"),
        "updates of the shards of a matrix depend on the tensor-parallel degree; remove the flag",
    ),
    _value(
        "--muon-coefficient-type", "Muon has Keller Jordan's coefficients", ("simple",), "remove the flag"
    ),
    _value(
        "--muon-scalar-optimizer", "Adam updates the parameters that Muon does not", ("adam",), "set adam"
    ),
    *_switches("Muon always updates Q, K and V as separate matrices", "--muon-split-qkv"),
    _value("--ds-sequence-parallel-size", "1 means no sequence parallelism", ("1",), _NO_ULYSSES),
    *(
        _value(name, "1 means a dense model", ("1",), _NO_MOE)
        for name in (
            *("--num-experts", "--expert-model-parallel-size", "--expert-tensor-parallel-size"),
            "--moe-expert-parallel-size",
        )
    ),
    *_switches(
        "every step is checked, see --max-consecutive-skips",
        *(
            "--check-for-nan-in-loss-and-grad",
            "--no-check-for-nan-in-loss-and-grad",
            "--check-for-large-grads",
        ),
    ),
    # Kernels and communication of other frameworks: no effect on the losses.
    *_switches(
        "attention uses Triton kernels or PyTorch's scaled_dot_product_attention",
        *("--use-flash-attn", "--use-flash-attn-v1", "--use-flash-attn-v2", "--use-flash-attn-triton"),
        *("--use-flash-attn-builder", "--no-masked-softmax-fusion"),
    ),
    *_switches(
        "--activation sets the activation; for Megatron's exact GELU set --activation gelu_exact",
        *("--no-bias-gelu-fusion", "--onnx-safe"),
    ),
    *_switches(
        "the flag selects a kernel that this program does not have",
        *("--abort-on-unmet-fused-kernel-constraints", "--no-bias-dropout-fusion"),
        *("--no-bias-swiglu-fusion", "--no-rope-fusion", "--no-persist-layer-norm"),
        *("--no-gradient-accumulation-fusion", "--cross-entropy-loss-fusion", "--disable-mem-efficient-ln"),
        *("--cpu_torch_adam", "--ds_fused_adam", "--use-flashinfer-fused-rope"),
    ),
    *_switches(
        "with --cpu-offload, the buffers that are copied to the device are always in pinned memory",
        *("--use-pin-memory", "--no-pin-cpu-grads", "--no-pin-cpu-params"),
    ),
    _value("--cross-entropy-fusion-impl", "the flag selects a kernel that this program does not have"),
    *_switches(
        "the layout and --ddp-bucket-size determine the communication",
        *("--no-async-tensor-model-parallel-allreduce", "--no-scatter-gather-tensors-in-pipeline"),
        *("--use-contiguous-buffers-in-ddp", "--no-contiguous-buffers-in-local-ddp"),
        *("--no-gradient-reduce-div-fusion", "--align-param-gather", "--no-align-param-gather"),
        *("--overlap-p2p-communication", "--no-overlap-p2p-communication", "--use-ring-exchange-p2p"),
        *("--overlap-param-gather-with-optimizer-step", "--overlap-p2p-communication-warmup-flush"),
        *("--zero-reduce-scatter", "--zero-contigious-gradients", "--ddp-average-in-collective"),
        *("--ddp-pad-buckets-for-high-nccl-busbw", "--use-nccl-ub", "--disable-gloo-process-groups"),
    ),
    _value("--zero-reduce-bucket-size", "--ddp-bucket-size sets the size of a bucket"),
    _value("--zero-allgather-bucket-size", "--ddp-bucket-size sets the size of a bucket"),
    _value("--ddp-num-buckets", "--ddp-bucket-size sets the size of a bucket"),
    IgnoredFlag("--high-priority-stream-groups", "CUDA streams have PyTorch's default priorities", nargs="*"),
    *_switches(
        "--checkpoint-activations, --partition-activations and --checkpoint-in-cpu set the recomputation",
        *("--contigious-checkpointing", "--synchronize-each-layer", "--profile-backward"),
    ),
    *_switches(
        "initial weights depend on the seed and the parameter's name, not on the device",
        *("--use-cpu-initialization", "--lazy-mpu-init", "--init-model-with-meta-device"),
    ),
    IgnoredFlag("--manual-gc", reason="Python's garbage collector runs on all ranks after the same steps"),
    _value("--manual-gc-interval", "Python's garbage collector runs every 100 steps"),
    _value("--empty-unused-memory-level", "the caching allocator runs as usual"),
    IgnoredFlag(
        "--no-query-key-layer-scaling", reason="attention scores are never scaled by the layer number"
    ),
    # Checkpoints.
    *_switches("checkpoints hold no random state", "--no-load-rng", "--no-save-rng"),
    *_switches(
        _DEEPSPEED_FORMAT,
        *("--use-persistent-ckpt-worker", "--ckpt-fully-parallel-save", "--no-ckpt-fully-parallel-save"),
        *("--ckpt-fully-parallel-load", "--ckpt-assume-constant-structure"),
        "--dist-ckpt-optim-fully-reshardable",
    ),
    _value(
        "--ckpt-format",
        "--save-format sets the format of saves, and the format of a checkpoint to load is detected",
        ("torch", "torch_dist", "torch_dcp"),
        "set --save-format",
    ),
    _value("--dist-ckpt-strictness", "checkpoints are always loaded strictly"),
    # Data.
    *_switches(
        "the index files of the sample order are mapped into memory when their first sample is read",
        *("--dataloader-fast-cache-load", "--dataloader-defer-npy-index-mmap"),
    ),
    _value("--num-dataset-builder-threads", "each rank opens its data in one thread"),
    # Logs.
    *_switches(
        "this quantity is not logged",
        *("--log-num-zeros-in-grad", "--log-params-norm", "--log-memory-to-tensorboard", "--log-energy"),
        *("--log-optimizer-states-to-tensorboard", "--log-world-size-to-tensorboard", "--log-progress"),
    ),
    *_switches(
        "learning rate and loss scale are always logged",
        *("--no-log-learnig-rate-to-tensorboard", "--no-log-loss-scale-to-tensorboard"),
    ),
    *_switches(
        "timers are logged with --log-timers-to-tensorboard",
        *("--no-barrier-with-level-1-timing", "--no-record-throughput"),
    ),
    _value("--timing-log-level", "timers are logged with --log-timers-to-tensorboard"),
    _value("--timing-log-option", "timers are logged with --log-timers-to-tensorboard"),
    _value("--tensorboard-log-interval", "every step is written to TensorBoard"),
    _value("--logging-level", "--log-level sets the level of the log"),
    IgnoredFlag("--no-one-logger", reason="one_logger is not used"),
    _value("--codecarbon-dir", "emissions are not tracked"),
)

# A flag -> the alternative.
UNSUPPORTED_FLAGS: Mapping[str, str] = {
    # Batch, length and schedule.
    "--gradient-accumulation-steps": "set --global-batch-size, which is --micro-batch-size x accumulation "
    "steps x data-parallel size",
    "--batch-size": "set --micro-batch-size",
    "--muon-fp32-matmul-prec": "set --muon-matmul-dtype bf16 or fp32",
    "--muon-no-split-qkv": "Muon always updates Q, K and V as separate matrices; remove the flag",
    "--model-parallel-size": "set --tensor-model-parallel-size",
    "--warmup": "set --lr-warmup-fraction, which is a fraction, not a percentage",
    "--lr-warmup-tokens": "set --lr-warmup-samples to the tokens divided by --seq-length; with "
    "--train-iters set --lr-warmup-iters",
    "--encoder-seq-length": "set --seq-length",
    "--decoder-seq-length": "set --seq-length",
    "--encoder-num-layers": "set --num-layers",
    "--decoder-num-layers": "set --num-layers",
    "--train-data-exact-num-epochs": "set --train-samples",
    "--start-weight-decay": "a weight decay that changes is not implemented; set --weight-decay",
    "--end-weight-decay": "a weight decay that changes is not implemented; set --weight-decay",
    "--lr-warmup-init": "the warmup starts at 0; remove the flag",
    "--head-lr-mult": "all parameters have one learning rate, except with --mup; remove the flag",
    "--step-batch-size-schedule": "set --rampup-batch-size",
    # Layout.
    "--num-layers-per-virtual-pipeline-stage": "set --virtual-pipeline-stages to the number of layers "
    "divided by --pipeline-model-parallel-size and by the value of this flag",
    "--microbatch-group-size-per-virtual-pipeline-stage": "micro-batches run in groups of the pipeline's "
    "size; remove the flag",
    "--pipeline-model-parallel-layout": "set --partition-method layout:LAYOUT with LAYOUT in Megatron-LM's "
    "syntax",
    "--pipeline-model-parallel-split-rank": "encoder-decoder models are not implemented; remove the flag",
    "--standalone-embedding-stage": _LAYERS_ON_STAGES,
    "--decoder-first-pipeline-num-layers": _LAYERS_ON_STAGES,
    "--decoder-last-pipeline-num-layers": _LAYERS_ON_STAGES,
    "--account-for-embedding-in-pipeline-split": _LAYERS_ON_STAGES,
    "--account-for-loss-in-pipeline-split": _LAYERS_ON_STAGES,
    "--use-tp-pp-dp-mapping": "tensor-parallel ranks are neighbors, then data-parallel, then pipeline "
    "ranks; remove the flag",
    "--use-torch-fsdp2": "set --zero-stage 3",
    "--use-megatron-fsdp": "set --zero-stage 3",
    "--data-parallel-sharding-strategy": "set --zero-stage 1, 2 or 3",
    "--num-distributed-optimizer-instances": "optimizer state is sharded over all data-parallel ranks; "
    "remove the flag",
    "--remote-device": "set --cpu-offload, which keeps the optimizer states in host memory",
    "--optimizer-offload-fraction": "set --cpu-offload, which keeps all optimizer states in host memory",
    "--data-parallel-random-init": "replicas have equal weights; remove the flag",
    # The model.
    "--squared-relu": "this activation is not implemented; CONTRIBUTING.md shows how to add one",
    "--quick-geglu": "set --glu-activation geglu, which gives different results",
    "--rotary-seq-len-interpolation-factor": "set --rope-scaling-type linear and --rope-scaling-factor",
    "--rotary-scaling-factor": "set --rope-scaling-type and --rope-scaling-factor",
    "--no-position-embedding": "set --position-embedding-type rotary or alibi, and remove the flag",
    "--apply-query-key-layer-scaling": "attention scores are not scaled by the layer number; remove the flag",
    "--embedding-weights-in-fp32": "weights have the precision of the run; remove the flag",
    "--init-method-xavier-uniform": "weights have a normal distribution; set --init-method-std",
    "--no-initialization": "weights are always initialized; remove the flag",
    "--no-rope-freq": "rotary embeddings are in all layers; remove the flag",
    "--attention-output-gate": "attention has no output gate; remove the flag",
    "--experimental-attention-variant": "the attention is softmax attention; remove the flag",
    "--rope-type": "set --rope-scaling-type",
    "--spec": "the architecture flags define the model, see docs/models.md",
    "--vocab-extra-ids": "tokens for span corruption are not implemented; remove the flag",
    # Recomputation and memory.
    "--activations-checkpoint-method": "layers are recomputed in groups of --checkpoint-num-layers, as with "
    "uniform; remove the flag",
    "--recompute-modules": "set --recompute-granularity selective, which recomputes the attention's core",
    "--scattered-embeddings": "set --sequence-parallel",
    "--split-transformers": "set --checkpoint-activations",
    "--memory-centric-tiled-linear": "set a larger --tensor-model-parallel-size",
    "--tile-factor": "set a larger --tensor-model-parallel-size",
    "--fine-grained-activation-offloading": "set --checkpoint-activations and --checkpoint-in-cpu",
    "--freeze-all-layers": "all layers are trained; remove the flag",
    "--offload-modules": "set --checkpoint-activations and --checkpoint-in-cpu",
    "--exp-avg-dtype": "set --use-bnb-optimizer for 8-bit moments",
    "--exp-avg-sq-dtype": "set --use-bnb-optimizer for 8-bit moments",
    "--main-grads-dtype": "gradients are accumulated in fp32; remove the flag",
    "--main-params-dtype": "the optimizer's weights are fp32; remove the flag",
    "--output-logit-dtype": "logits have the precision of the run, the loss fp32; remove the flag",
    "--defer-embedding-wgrad-compute": "set --pipeline-schedule zero-bubble, which defers weight gradients",
    "--wgrad-deferral-limit": "set --pipeline-schedule zero-bubble, which defers weight gradients",
    "--apply-wd-to-qk-layernorm": "biases and norm parameters have no weight decay; remove the flag",
    "--no-weight-decay-cond-type": "biases and norm parameters have no weight decay; remove the flag",
    "--use-precision-aware-optimizer": "set --use-bnb-optimizer for 8-bit moments",
    # Checkpoints.
    "--no-save-optim": "checkpoints always hold the optimizer state; remove the flag, see --no-load-optim",
    "--load-tag": "set --load to the folder of one checkpoint",
    "--ckpt-step": "set --load to the folder of one checkpoint",
    "--override-ckpt-iteration": "--finetune starts at iteration 0; remove the flag",
    "--reset-iteration": "set --finetune, which starts at iteration 0",
    "--no-load-lr-state": "set --finetune, or --override-lr-scheduler",
    "--exit-on-missing-checkpoint": "a --load without a checkpoint is an error, unless it is the folder of "
    "--save; remove the flag",
    "--pretrained-checkpoint": "set --load and --finetune",
    # Data.
    "--per-dataset-sequences-path": "token files contain their numbers of sequences; remove the flag",
    "--use-dataset-only": "data are read in the order of this program; remove the flag",
    "--return-data-index": "data are read in the order of this program; remove the flag",
    "--aml-data-download-path": "set --data-path",
    "--object-storage-cache-path": "token files are read from a mounted file system; set --data-path",
    "--dataloader-inter-document-masking": "set --reset-attention-mask and --reset-position-ids",
    "--reweight-loss-based-on-position-frequency": "the loss is the mean over all tokens; remove the flag",
    "--no-use-tokenizer-model-from-checkpoint-args": "set the flags of the tokenizer; remove the flag",
    "--trust-remote-code": "code of a tokenizer's folder is never run; remove the flag",
    "--loss-on-targets-only": "the loss is over all tokens; see --eod-mask-loss",
    "--random-ltd": "random layer token dropping is not implemented; remove the flag",
    "--data-efficiency-curriculum-learning": "set curriculum_learning in the file of --deepspeed-config",
    "--repeated-dataloader": "set --train-samples; the data are shuffled again for each epoch",
    # The rest of a run.
    "--fake-process-group": "set --dry-run",
    "--check-weight-hash-across-dp-replicas-interval": "set --check-invariants-interval",
    "--adlr-autoresume": _REQUEUE,
    "--adlr-autoresume-interval": _REQUEUE,
    "--yaml-cfg": "write the settings as flags",
    "--tp-comm-overlap-cfg": "set --tp-comm-overlap and --tp-comm-overlap-chunks",
    "--wandb-entity": "set the environment variable WANDB_ENTITY",
    "--use-mup": "set --mup and --mup-base-hidden-size",
}

# The alternative -> the beginnings of the flags' names. The longest matching beginning counts.
UNSUPPORTED_FAMILIES: Mapping[str, tuple[str, ...]] = {
    _NO_MOE: (
        *("--moe-", "--expert-", "--create-moe", "--disable-moe", "--enable-expert", "--num-experts-"),
        *("--topk", "--mlp-type", "--use-tutel", "--overlap-moe"),
    ),
    "fp8 and fp4 are not implemented; set --bf16": ("--fp8", "--fp4", "--no-fp8", "--first-last-layers-bf16"),
    _NO_TRANSFORMER_ENGINE: ("--te-", "--inference-rng"),
    "CUDA graphs are not used; remove the flag": (
        *("--cuda-graph", "--enable-cuda-graph", "--external-cuda-graph", "--optimizer-cuda-graph"),
    ),
    "only GPT models are trained; remove the flag": (
        *("--retro-", "--bert-", "--ict-", "--biencoder-", "--retriever-", "--indexer-", "--dino-"),
        *("--vision-", "--img-", "--num-classes", "--num-channels", "--patch-dim", "--mask-", "--swin-"),
        *("--titles-data", "--evidence-data", "--block-data", "--embedding-path", "--query-in-block"),
        *("--use-one-sent-docs", "--short-seq-prob", "--mean-noise-span", "--noise-density"),
        *("--iter-per-epoch", "--classes-fraction", "--data-per-class", "--sample-rate", "--mamba-"),
        *("--hybrid-", "--is-hybrid", "--output-bert", "--no-data-sharding", "--max-tokens-to-oom"),
    ),
    "knowledge distillation is not implemented; remove the flag": (
        *("--kd", "--mos", "--load-teacher", "--hidden-size-teacher", "--num-layers-teacher"),
        *("--num-attention-heads-teacher", "--logits-", "--export-kd"),
    ),
    "only pretraining and finetuning on token files are implemented; remove the flag": (
        *("--rl-", "--grpo-", "--langrl", "--perform-rl", "--sft"),
    ),
    "use tools/generate.py; remove the flag": (
        "--inference",
        "--ds-inference",
        "--decode-only",
        "--num-tokens-to-generate",
        *("--use-legacy-static", "--enable-chunked-prefill", "--num-speculative", "--use-same-sampling"),
        *("--refit-method", "--flash-decode", "--prompt", "--return-log-probs"),
    ),
    "docs/flags.md lists the flags of Muon; remove the flag": ("--muon-",),
    "all layers have softmax attention and one configuration; remove the flag": (
        *("--linear-", "--heterogeneous-layers", "--relative-attention", "--kitchen-"),
    ),
    "the layout and --ddp-bucket-size determine the communication; remove the flag": (
        *("--ddp-reduce-scatter", "--ddp-param-name", "--gtp-", "--no-use-layer-wise", "--create-all-gather"),
        *("--suggested-communication", "--disable-symmetric", "--enable-full-sharding", "--reuse-grad-buf"),
        *("--overlap-cpu-optimizer", "--use-torch-optimizer-for", "--keep-fp8"),
    ),
    "multi-token prediction is not implemented; remove the flag": ("--mtp-",),
    "fill-in-the-middle is not implemented; remove the flag": ("--fim-",),
    "multi-latent attention is not implemented; set --group-query-attention": (
        *("--multi-latent", "--qk-head", "--qk-pos-emb", "--v-head", "--q-lora", "--kv-lora", "--mscale"),
        *("--mla-", "--cache-mla"),
    ),
    "set --zero-stage 3": ("--megatron-fsdp", "--fsdp-", "--torch-fsdp2", "--outer-dp"),
    "see docs/cluster.md for failures, restarts and slow ranks; remove the flag": (
        *("--inprocess-", "--enable-ft-package", "--ft-", "--calc-ft", "--straggler-", "--rerun-"),
        *("--error-injection", "--run-workload-inspector", "--result-rejected-tracker"),
    ),
    "set --tensorboard-dir or --wandb-project": ("--one-logger", "--otel-", "--app-tag-run"),
    f"{_DEEPSPEED_FORMAT}; remove the flag": ("--ckpt-", "--dist-ckpt-", "--use-dist-ckpt", "--async-"),
    "set --rope-scaling-type yarn and the other --rope- flags": ("--yarn-", "--no-yarn-"),
    "set --context-parallel-size; keys and values are all-gathered, other exchanges are not implemented": (
        *("--ds-sequence-parallel-", "--force-ds-sequence-parallel", "--cp-comm-type"),
        *("--hierarchical-context-parallel", "--dynamic-context-parallel"),
    ),
    "index files are found automatically, see --data-cache-path; remove the flag": (
        *("--train-doc-idx", "--train-idx", "--train-sample-idx", "--train-shuffle-idx", "--train-desc"),
    ),
    "the setting exists only in Megatron-LM; remove the flag": (
        *("--enable-experimental", "--enable-msc", "--disable-msc", "--phase-transition", "--dump-param-to"),
        *(
            "--mid-level-dataset",
            "--allow-ambiguous-pad",
            "--use-fused-weighted",
            "--export-te",
            "--model-prov",
        ),
    ),
    "use an external profiler, such as nsys; remove the flag": ("--profile-",),
}
