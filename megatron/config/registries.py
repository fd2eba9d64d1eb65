"""The registries: for each extensible setting, a table of its choices.

A choice has a description and the name of an implementation, which is imported when it is used. To add a
choice, add one line to this file and write the implementation. The flag's choices, --help, docs/flags.md and
the error for an unknown name are generated from these tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.registry import Choice, Registry

# The implementations are elementwise functions Tensor -> Tensor.
ACTIVATIONS = Registry(
    "--activation",
    {
        "gelu": Choice(
            "GELU with the tanh approximation, as in GPT-2 and BLOOM", "megatron.model.activations:gelu"
        ),
        "gelu_exact": Choice("exact GELU (erf), as in GPT-NeoX and Falcon", "torch.nn.functional:gelu"),
    },
)

# The implementations are elementwise functions of the gate in value * activation(gate) (GLU variants,
# arXiv:2002.05202).
GLU_ACTIVATIONS = Registry(
    "--glu-activation",
    {
        "geglu": Choice("GELU", "torch.nn.functional:gelu"),
        "geglu_tanh": Choice("GELU with the tanh approximation, as in Gemma", "gelu"),
        "liglu": Choice("identity", "identity"),
        "quick_geglu": Choice("x * sigmoid(1.702 x), as in gpt-oss", "quick_gelu"),
        "reglu": Choice("ReLU", "torch.nn.functional:relu"),
        "swiglu": Choice("SiLU", "torch.nn.functional:silu"),
    },
    module="megatron.model.activations",
)

# The implementations are modules [..., size] -> [..., size] with __init__(size, epsilon, use_apex). If
# apply_layernorm_1p is set and is among the settings of the norm, __init__ gets True as fourth argument.
_CENTERED = ("apply_layernorm_1p",)
NORMALIZATIONS = Registry(
    "--normalization",
    {
        "LayerNorm": Choice("layer norm with weight and bias", "MixedFusedLayerNorm", settings=_CENTERED),
        "LayerNormWithoutBias": Choice(
            "layer norm with weight and without bias, as in Cohere's models",
            "LayerNormWithoutBias",
            settings=_CENTERED,
        ),
        "RMSNorm": Choice("RMS norm without bias (arXiv:1910.07467)", "RMSNorm", settings=_CENTERED),
    },
    module="megatron.model.norm",
)


@dataclass(frozen=True)
class LayerArrangement(Choice):
    """An order of norms, attention and MLP in a transformer layer. Its implementation is a function (layer,
    hidden, document_ids) -> hidden.

    norms: names of the layer's norms. ends_with_norm: whether the output of the MLP is normalized; the
    backward pass then needs this output.
    """

    norms: tuple[str, ...] = ()
    ends_with_norm: bool = False


LAYER_ARRANGEMENTS = Registry(
    "--layer-arrangement",
    {
        "pre-norm": LayerArrangement(
            "attention, then MLP, each x + f(norm(x)), as in GPT-2 and Llama",
            "pre_norm",
            settings=("apply_residual_connection_post_layernorm",),
            norms=("input_layernorm", "post_attention_layernorm"),
        ),
        "post-norm": LayerArrangement(
            "attention, then MLP, each x + norm(f(x)), as in OLMo 2 (arXiv:2501.00656)",
            "post_norm",
            norms=("post_attention_layernorm", "post_mlp_layernorm"),
            ends_with_norm=True,
        ),
        "pre-post-norm": LayerArrangement(
            "attention, then MLP, each x + norm(f(norm(x))), as in Gemma 3 (arXiv:2503.19786)",
            "post_norm",
            norms=(
                *("input_layernorm", "post_attention_layernorm"),
                *("pre_mlp_layernorm", "post_mlp_layernorm"),
            ),
            ends_with_norm=True,
        ),
        "parallel": LayerArrangement(
            "x + attention(norm(x)) + mlp(norm(x)) with two norms, as in GPT-NeoX (arXiv:2204.06745)",
            "parallel",
            norms=("input_layernorm", "post_attention_layernorm"),
        ),
        "parallel-one-norm": LayerArrangement(
            "x + attention(norm(x)) + mlp(norm(x)) with one norm, as in Falcon 7B (arXiv:2311.16867)",
            "parallel_one_norm",
            norms=("input_layernorm",),
        ),
    },
    module="megatron.model.residual",
)

# The implementations are functions LayerContext -> (norm of the queries, norm of the keys). The norms are
# modules [seq, batch, heads, head_dim] -> [seq, batch, heads, head_dim].
QK_NORMS = Registry(
    "--qk-layernorm-scope",
    {
        "head": Choice(
            "each head separately, with parameters shared by all heads, as in Qwen 3 (arXiv:2505.09388)",
            "head_norms",
        ),
        "projection": Choice("all heads together, as in OLMo 2 (arXiv:2501.00656)", "projection_norms"),
    },
    module="megatron.model.attention.qk_norm",
)

# The implementations are functions (rotary frequencies, ModelConfig) -> (scaled frequencies, multiplier of
# cosines and sines).
_SCALING = ("rope_scaling_factor",)
_ORIGINAL = (*_SCALING, "rope_original_max_position_embeddings")
ROPE_SCALINGS = Registry(
    "--rope-scaling-type",
    {
        "linear": Choice("position interpolation (arXiv:2306.15595)", "linear", settings=_SCALING),
        "llama3": Choice(
            "scaling by wavelength, as in Llama 3.1 (arXiv:2407.21783)",
            "llama3",
            settings=(*_ORIGINAL, "rope_low_freq_factor", "rope_high_freq_factor"),
        ),
        "yarn": Choice(
            "YaRN (arXiv:2309.00071)",
            "yarn",
            settings=(*_ORIGINAL, "rope_beta_slow", "rope_beta_fast", "rope_exact_range"),
        ),
    },
    module="megatron.model.rope_scaling",
)

# The implementations are instances of megatron.model.position.PositionScheme.
POSITION_EMBEDDINGS = Registry(
    "--position-embedding-type",
    {
        "absolute": Choice("learned position embeddings", "ABSOLUTE", settings=("max_position_embeddings",)),
        "rotary": Choice(
            "rotary embeddings (RoPE, arXiv:2104.09864)",
            "ROTARY",
            settings=(
                "rotary_base",
                "window_rotary_base",
                "window_rotary_percent",
                "rotary_percent",
                "rotary_interleaved",
                "rope_scaling_type",
                "window_rope_scaling",
                *ROPE_SCALINGS.settings(),
            ),
        ),
        "alibi": Choice("linear attention biases (ALiBi, arXiv:2108.12409)", "ALIBI"),
    },
    module="megatron.model.position",
)


@dataclass(frozen=True)
class OptimizerChoice(Choice):
    """An optimizer. Its implementation is a function (groups, OptimizerConfig, fused) ->
    torch.optim.Optimizer.

    moments: names of the states that the optimizer keeps for each element of a parameter. matrix_moments:
    names of the states for the weights of linear layers, if the optimizer updates these weights as whole
    matrices (Muon). The implementation then returns a `megatron.optimizer.matrix_optimizer.MatrixOptimizer`.
    """

    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    matrix_moments: tuple[str, ...] = ()


_ADAM = ("adam_beta1", "adam_beta2", "adam_eps")
_MATRIX = ("muon_momentum", "muon_use_nesterov")
_MUON = ("muon_scale_mode", "muon_extra_scale_factor", "muon_num_ns_steps", "muon_matmul_dtype")
OPTIMIZERS = Registry(
    "--optimizer",
    {
        "adam": OptimizerChoice(
            "Adam with decoupled weight decay (AdamW), as in Megatron-LM", "make_adam", settings=_ADAM
        ),
        "adamw": OptimizerChoice("another name for adam", "make_adam", settings=_ADAM),
        "lion": OptimizerChoice(
            "Lion (arXiv:2302.06675): the sign of a momentum, with decoupled weight decay",
            "megatron.optimizer.adam:make_lion",
            settings=("lion_beta1", "lion_beta2"),
            moments=("exp_avg",),
        ),
        "muon": OptimizerChoice(
            "Muon (kellerjordan.github.io/posts/muon): the orthogonalized momentum of each matrix of the "
            "linear layers; Adam for embeddings, LM head, norms and biases",
            "megatron.optimizer.matrix_optimizer:make_muon",
            settings=(*_ADAM, *_MATRIX, *_MUON),
            matrix_moments=("momentum_buffer",),
        ),
        "sgd": OptimizerChoice(
            "SGD with momentum", "make_sgd", settings=("sgd_momentum",), moments=("momentum_buffer",)
        ),
    },
    module="megatron.optimizer.parameter_groups",
)


class ConstantPhaseStyle(Choice):
    """An LR decay style with a phase at the maximum learning rate, where --branch-at can start a cooldown
    branch."""


class WarmupRelativeStyle(Choice):
    """An LR decay style whose function takes the progress of the run divided by the length of the warm-up (1
    at the end of the warm-up), instead of the progress of the decay. After the end of the decay, the learning
    rate is min_lr."""


# The implementations are functions (max_lr, min_lr, progress of the decay from 0 to 1) -> learning rate. WSD
# has a separate registry of such functions.
_DECAY = ("min_lr", "lr_decay_iters", "lr_decay_samples", "lr_decay_tokens")
_WSD = ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
LR_DECAY_STYLES = Registry(
    "--lr-decay-style",
    {
        "constant": ConstantPhaseStyle("no decay", "constant_lr"),
        "linear": Choice("linear decay to --min-lr", "linear_decay", settings=_DECAY),
        "cosine": Choice("cosine decay to --min-lr", "cosine_decay", settings=_DECAY),
        "inverse-square-root": WarmupRelativeStyle(
            "--lr x sqrt(warm-up length / progress of the run), at least --min-lr",
            "inverse_square_root_decay",
            settings=_DECAY,
        ),
        "WSD": ConstantPhaseStyle(
            "constant at --lr, then a final decay to --min-lr (--lr-wsd-decay-style, arXiv:2404.06395)",
            "megatron.config.registries:WSD_DECAY_STYLES",
            settings=(*_DECAY, *_WSD),
        ),
    },
    module="megatron.optimizer.schedule",
)

# The implementations are functions (max_lr, min_lr, progress of the decay from 0 to 1) -> learning rate, with
# names and formulas of Megatron-LM (megatron/core/optimizer_param_scheduler.py).
WSD_DECAY_STYLES = Registry(
    "--lr-wsd-decay-style",
    {
        "linear": Choice("1 - progress", "linear_decay"),
        "cosine": Choice("(1 + cos(pi x progress)) / 2", "cosine_decay"),
        "exponential": Choice("2 x 0.5^progress - 1", "exponential_decay"),
        "minus_sqrt": Choice("1 - sqrt(progress) (arXiv:2405.18392)", "minus_sqrt_decay"),
    },
    module="megatron.optimizer.schedule",
)


@dataclass(frozen=True)
class Partitioner(Choice):
    """A partition method. Its implementation is a function (PartitionMethod, LayerTable, PipelineShape) ->
    Partition.

    needs_memory: whether the method needs the predicted memory of the layers (`run.PredictMemory`).
    """

    needs_memory: bool = False


PARTITION_METHODS = Registry(
    "--partition-method",
    {
        "uniform": Partitioner("equal numbers of layers", "by_layer_count"),
        "parameters": Partitioner("equal numbers of parameters", "by_parameters"),
        "memory": Partitioner("equal estimated memory", "by_memory", needs_memory=True),
        "time": Partitioner("equal estimated FLOPs", "by_flops"),
        "profile": Partitioner("equal measured time", "by_measured_time"),
        "type": Partitioner(
            "equal sums of the numbers given for class names, as in type:embed:2|transformer:1",
            "by_layer_type",
        ),
        "layout": Partitioner(
            "explicit stages in Megatron-LM's syntax, as in layout:Et*3|(tt|)*29,t|L", "explicit_stages"
        ),
        "stages": Partitioner(
            "explicit numbers of transformer layers, as in stages:5,6*10,5", "explicit_stages"
        ),
    },
    module="megatron.pipeline.methods",
)


@dataclass(frozen=True)
class PipelineSchedule(Choice):
    """A pipeline schedule. Its implementation is a function (ranks, micro-batches) -> ScheduleActions, which
    the engine, the simulation and the plan execute.

    stages_per_rank: number of stages on a pipeline rank; 0 if --virtual-pipeline-stages sets it, which the
    function then takes as third argument. is_v_schedule: whether rank r of p holds the stages r and 2p - 1 -
    r; otherwise stage s is on rank s modulo p.

    micro_batches_per_rank: a step needs at least this number x pipeline ranks micro-batches; 0 if there is no
    minimum. micro_batches_multiple_of_ranks: whether the number of micro-batches must be a multiple of the
    pipeline ranks.

    splits_backward: whether separate passes compute the weight gradients (zero bubble).
    """

    stages_per_rank: int = 1
    is_v_schedule: bool = False
    micro_batches_per_rank: int = 0
    micro_batches_multiple_of_ranks: bool = False
    splits_backward: bool = False


PIPELINE_SCHEDULES = Registry(
    "--pipeline-schedule",
    {
        "1f1b": PipelineSchedule(
            "one forward, one backward (PipeDream-flush, arXiv:2104.04473)", "one_f_one_b"
        ),
        "interleaved": PipelineSchedule(
            "--virtual-pipeline-stages stages per rank, stage s on rank s modulo PP, which reduces the "
            "pipeline bubble (interleaved 1F1B, arXiv:2104.04473)",
            "interleaved",
            stages_per_rank=0,
            micro_batches_per_rank=1,
            micro_batches_multiple_of_ranks=True,
        ),
        "dualpipev": PipelineSchedule(
            "two stages per rank, the first and the last stage on rank 0, which reduces the pipeline bubble "
            "(DualPipeV, github.com/deepseek-ai/DualPipe)",
            "dual_pipe_v",
            stages_per_rank=2,
            is_v_schedule=True,
            micro_batches_per_rank=2,
        ),
        "zero-bubble": PipelineSchedule(
            "1F1B with a split backward pass; weight gradients are computed when the rank would be idle, "
            "which reduces the pipeline bubble (ZB-H1, arXiv:2401.10241)",
            "zero_bubble",
            splits_backward=True,
        ),
    },
    module="megatron.pipeline.schedule_actions",
)

# The implementations are `CheckpointWriter` classes. Each name is also the name of a checkpoint format.
SAVE_FORMATS = Registry(
    "--save-format",
    {
        "native": Choice("DeepSpeed's files", "megatron.checkpoint.formats.native_writer:NativeWriter"),
        "dcp": Choice(
            "torch.distributed.checkpoint, which PyTorch opens without this program",
            "megatron.checkpoint.formats.dcp_writer:DcpWriter",
        ),
    },
)


@dataclass(frozen=True)
class TokenizerChoice(Choice):
    """A tokenizer. Its implementation is a class whose arguments are the values of `settings`, in this order.
    All of these settings are required. takes_vocab_size: whether --vocab-size is required and the only
    argument."""

    takes_vocab_size: bool = False


TOKENIZERS = Registry(
    "--tokenizer-type",
    {
        "GPT2BPETokenizer": TokenizerChoice(
            "GPT-2's byte-level BPE",
            "megatron.tokenizer.gpt2_bpe:GPT2BPETokenizer",
            settings=("vocab_file", "merge_file"),
        ),
        "PretrainedFromHF": TokenizerChoice(
            "a tokenizer of Hugging Face transformers (Megatron-LM's HuggingFaceTokenizer)",
            "megatron.tokenizer.hugging_face:HuggingFaceTokenizer",
            settings=("tokenizer_name_or_path",),
        ),
        "SentencePieceTokenizer": TokenizerChoice(
            "a SentencePiece model",
            "megatron.tokenizer.sentence_piece:SentencePieceTokenizer",
            settings=("tokenizer_model",),
        ),
        "NullTokenizer": TokenizerChoice(
            "the numbers below --vocab-size as tokens, and an end-of-document token; for --mock-data",
            "megatron.tokenizer.null:NullTokenizer",
            takes_vocab_size=True,
        ),
    },
)


@dataclass(frozen=True)
class DataOrder(Choice):
    """The rules that order the samples. Its implementation is a `data.blended_dataset.Blend`.

    last_epoch_threshold: the last epoch is shuffled separately if the run reads less than this share of it.
    is_core: whether --split is rounded, and index files are read, as in Megatron-Core. blends_by_size:
    whether a blend may have no weights. repeats_short: whether data with fewer tokens than a sample are
    repeated within the sample.
    """

    last_epoch_threshold: float = 0.95
    is_core: bool = False
    blends_by_size: bool = True
    repeats_short: bool = False

    def shortest(self, seq_length: int) -> int:
        """Returns the minimum number of tokens in a split of a data set."""
        return 1 if self.repeats_short else seq_length + 1


DATA_ORDERS = Registry(
    "--data-order",
    {
        "native": DataOrder(
            "as megatron-deepspeed, but a blend of any length has the share of each data set to about a "
            "sample (Sainte-Laguë)",
            "megatron.data.blended_dataset:BlendOrder",
        ),
        "megatron-deepspeed": DataOrder(
            "BigScience's Megatron-DeepSpeed: the last epoch is separate if less than 95 % of it is used",
            "DeepSpeedBlend",
            blends_by_size=False,
        ),
        "megatron-deepspeed-microsoft": DataOrder(
            "Microsoft's Megatron-DeepSpeed (deepspeedai): as megatron-deepspeed with 80 %",
            "DeepSpeedBlend",
            last_epoch_threshold=0.80,
            blends_by_size=False,
            repeats_short=True,
        ),
        "megatron-core": DataOrder(
            "Megatron-Core and Megatron-LM: 80 %, and bounds of --split from cumulative fractions",
            "CoreBlend",
            last_epoch_threshold=0.80,
            is_core=True,
            repeats_short=True,
        ),
    },
    module="megatron.data.greedy_blend",
)

# The implementations are instances of megatron.cluster.devices.GPU.
GPUS = Registry(
    "--gpu",
    {
        "v100-16gb": Choice("15.77 GiB, 125 TFLOP/s in fp16", "V100_16GB"),
        "v100-32gb": Choice("31.74 GiB, 125 TFLOP/s in fp16", "V100_32GB"),
        "a100-40gb": Choice("39.50 GiB, 312 TFLOP/s in 16 bit", "A100_40GB"),
        "a100-80gb": Choice("79.25 GiB, 312 TFLOP/s in 16 bit", "A100_80GB"),
        "h100-80gb": Choice("79.11 GiB, 989 TFLOP/s in 16 bit", "H100_80GB"),
        "h200-141gb": Choice("139.72 GiB, 989 TFLOP/s in 16 bit", "H200_141GB"),
        "b200-180gb": Choice("178.35 GiB, 2,250 TFLOP/s in 16 bit", "B200_180GB"),
        "gb200-186gb": Choice("184.31 GiB, 2,500 TFLOP/s in 16 bit", "GB200_186GB"),
    },
    module="megatron.cluster.devices",
)
