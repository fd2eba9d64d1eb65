"""Models as Hugging Face folders: BLOOM for ALiBi with an embedding norm, GPT-2 for absolute positions.

A `Family` says in one table how settings and parameters correspond. It is read in both directions:
`write_hugging_face` makes a folder from a native checkpoint, `from_hugging_face` reads one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron.checkpoint.folders import Checkpoint
from megatron.checkpoint.weights import LayerFiles, model_specs
from megatron.config import Config, ConfigError, ModelConfig
from megatron.model.gpt_model import FIRST_TRANSFORMER_LAYER, PARAMETER_DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MAX_FILE_BYTES = 5 * 10**9
"""Of one file of weights, unless a single tensor is larger."""


@dataclass(frozen=True)
class Transform:
    """How one tensor becomes the other; both functions take the tensor and the number of heads."""

    to_theirs: Callable[[Tensor, int], Tensor]
    to_ours: Callable[[Tensor, int], Tensor]


def _heads_last(rows: Tensor, heads: int) -> Tensor:
    """Rows ordered (heads, 3, head_dim) -> (3, heads, head_dim)."""
    return rows.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def _heads_first(rows: Tensor, heads: int) -> Tensor:
    """Rows ordered (3, heads, head_dim) -> (heads, 3, head_dim)."""
    return rows.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


SAME = Transform(lambda x, heads: x, lambda x, heads: x)
# GPT-2's linear layers are `Conv1D`, which holds [inputs, outputs].
TURNED = Transform(lambda x, heads: x.t(), lambda x, heads: x.t())
REORDERED = Transform(_heads_last, _heads_first)
REORDERED_TURNED = Transform(
    lambda x, heads: _heads_last(x, heads).t(), lambda x, heads: _heads_first(x.t(), heads)
)


@dataclass(frozen=True)
class Parameter:
    """A parameter's two names. In ours `{layer}` is a transformer layer's index in the pipeline's list and
    `{final}` that of the final norm; in theirs `{block}` counts transformer layers from 0."""

    ours: str
    theirs: str
    transform: Transform = SAME


def _with_bias(
    ours: str, theirs: str, weight: Transform = SAME, bias: Transform = SAME
) -> tuple[Parameter, Parameter]:
    return (
        Parameter(f"{ours}.weight", f"{theirs}.weight", weight),
        Parameter(f"{ours}.bias", f"{theirs}.bias", bias),
    )


@dataclass(frozen=True)
class Family:
    """How our models of one kind are written as Hugging Face's.

    fields: (field of ModelConfig, their setting). written_fields: the same, but for settings that only
    matter in training and are not read back. our_constants, their_constants: what else defines the family.
    """

    architecture: str
    fields: tuple[tuple[str, str], ...]
    written_fields: tuple[tuple[str, str], ...]
    our_constants: Mapping[str, Any]
    their_constants: Mapping[str, Any]
    parameters: tuple[Parameter, ...]

    def names(self, num_layers: int) -> Iterator[Parameter]:
        """The table for a model of so many layers, with real names."""
        final = FIRST_TRANSFORMER_LAYER + num_layers + 1
        for parameter in self.parameters:
            blocks = range(num_layers) if "{layer}" in parameter.ours else (0,)
            for block in blocks:
                layer = FIRST_TRANSFORMER_LAYER + block
                yield Parameter(
                    parameter.ours.format(layer=layer, final=final),
                    parameter.theirs.format(block=block),
                    parameter.transform,
                )


_EMBED = "tied_modules.embed"
FAMILIES = {
    "bloom": Family(
        architecture="BloomForCausalLM",
        fields=(
            ("num_layers", "n_layer"),
            ("hidden_size", "hidden_size"),
            ("num_attention_heads", "n_head"),
            ("layernorm_epsilon", "layer_norm_epsilon"),
            ("vocab_size", "vocab_size"),
            # Not a setting of BloomConfig, but BLOOM's own config.json has it.
            ("seq_length", "seq_length"),
            ("apply_residual_connection_post_layernorm", "apply_residual_connection_post_layernorm"),
        ),
        written_fields=(
            ("init_method_std", "initializer_range"),
            ("hidden_dropout", "hidden_dropout"),
            ("attention_dropout", "attention_dropout"),
        ),
        our_constants={"position_embedding_type": "alibi", "embed_layernorm": True},
        their_constants={"tie_word_embeddings": True},
        parameters=(
            Parameter(f"{_EMBED}.word_embeddings.weight", "transformer.word_embeddings.weight"),
            *_with_bias(f"{_EMBED}.word_embeddings.norm", "transformer.word_embeddings_layernorm"),
            *_with_bias("{layer}.input_layernorm", "transformer.h.{block}.input_layernorm"),
            *_with_bias(
                "{layer}.self_attention.query_key_value",
                "transformer.h.{block}.self_attention.query_key_value",
            ),
            *_with_bias("{layer}.self_attention.dense", "transformer.h.{block}.self_attention.dense"),
            *_with_bias("{layer}.post_attention_layernorm", "transformer.h.{block}.post_attention_layernorm"),
            *_with_bias("{layer}.mlp.dense_h_to_4h", "transformer.h.{block}.mlp.dense_h_to_4h"),
            *_with_bias("{layer}.mlp.dense_4h_to_h", "transformer.h.{block}.mlp.dense_4h_to_h"),
            *_with_bias("{final}", "transformer.ln_f"),
        ),
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        fields=(
            ("num_layers", "n_layer"),
            ("hidden_size", "n_embd"),
            ("num_attention_heads", "n_head"),
            ("layernorm_epsilon", "layer_norm_epsilon"),
            ("vocab_size", "vocab_size"),
            ("max_position_embeddings", "n_positions"),
            ("ffn_hidden_size", "n_inner"),
        ),
        written_fields=(
            ("init_method_std", "initializer_range"),
            ("hidden_dropout", "resid_pdrop"),
            ("hidden_dropout", "embd_pdrop"),
            ("attention_dropout", "attn_pdrop"),
        ),
        our_constants={"position_embedding_type": "absolute", "embed_layernorm": False},
        their_constants={
            "tie_word_embeddings": True,
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        parameters=(
            Parameter(f"{_EMBED}.word_embeddings.weight", "transformer.wte.weight"),
            Parameter(f"{_EMBED}.position_embeddings.weight", "transformer.wpe.weight"),
            *_with_bias("{layer}.input_layernorm", "transformer.h.{block}.ln_1"),
            *_with_bias(
                "{layer}.self_attention.query_key_value",
                "transformer.h.{block}.attn.c_attn",
                REORDERED_TURNED,
                REORDERED,
            ),
            *_with_bias("{layer}.self_attention.dense", "transformer.h.{block}.attn.c_proj", TURNED),
            *_with_bias("{layer}.post_attention_layernorm", "transformer.h.{block}.ln_2"),
            *_with_bias("{layer}.mlp.dense_h_to_4h", "transformer.h.{block}.mlp.c_fc", TURNED),
            *_with_bias("{layer}.mlp.dense_4h_to_h", "transformer.h.{block}.mlp.c_proj", TURNED),
            *_with_bias("{final}", "transformer.ln_f"),
        ),
    ),
}


def family_of(model: ModelConfig) -> str:
    """'bloom' or 'gpt2'; ConfigError, with the flag, for a model that is neither."""
    alibi = model.position_embedding_type == "alibi"
    if model.position_embedding_type == "rotary":
        raise ConfigError(
            "a model with --position-embedding-type rotary cannot be written for Hugging Face: BLOOM takes "
            "alibi, GPT-2 absolute"
        )
    if model.glu_activation is not None:
        raise ConfigError(
            f"a model with --glu-activation {model.glu_activation} cannot be written for Hugging Face: the "
            "MLPs of BLOOM and GPT-2 have no gate"
        )
    if alibi != model.embed_layernorm:
        raise ConfigError(
            "a model with --position-embedding-type alibi and no --embed-layernorm cannot be written for "
            "Hugging Face: BLOOM always has that norm"
            if alibi
            else "a model with --embed-layernorm and --position-embedding-type absolute cannot be written "
            "for Hugging Face: GPT-2 has no norm there"
        )
    if model.kv_channels * model.num_attention_heads != model.hidden_size:
        raise ConfigError(
            f"a model with --kv-channels {model.kv_channels} x {model.num_attention_heads} heads cannot be "
            f"written for Hugging Face: the heads of BLOOM and GPT-2 divide the hidden size "
            f"{model.hidden_size} among them"
        )
    if alibi and model.ffn_hidden_size != 4 * model.hidden_size:
        raise ConfigError(
            f"a model with --ffn-hidden-size {model.ffn_hidden_size} and --position-embedding-type alibi "
            f"cannot be written for Hugging Face: BLOOM's MLP is 4 x hidden size {model.hidden_size} wide"
        )
    if not alibi and model.apply_residual_connection_post_layernorm:
        raise ConfigError(
            "a model with --apply-residual-connection-post-layernorm and --position-embedding-type absolute "
            "cannot be written for Hugging Face: BLOOM knows that flag, GPT-2 does not"
        )
    return "bloom" if alibi else "gpt2"


def remarks(config: Config) -> list[str]:
    """What the written model does otherwise than the trained one, a sentence each."""
    found = []
    if config.data.reset_attention_mask or config.data.reset_position_ids:
        found.append(
            "the model was trained with documents kept apart (--reset-attention-mask, --reset-position-ids), "
            "which Hugging Face's does not do: give it one document at a time"
        )
    if config.precision.fp32_residual_connection and config.precision.name != "fp32":
        found.append(
            "the model was trained with --fp32-residual-connection: Hugging Face's rounds the residual "
            f"stream to {config.precision.name}, unless it is loaded in fp32"
        )
    return found


def write_hugging_face(
    checkpoint: Checkpoint,
    output: Path,
    precision: str | None = None,
    write_tokenizer: Callable[[Path], None] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes the folder `output`: config.json, weights as safetensors, and what `write_tokenizer` adds.

    precision: 'fp32', 'fp16' or 'bf16'; None: the one that the run trained in. The weights pass through
    memory a file at a time. The folder appears complete or not at all. Raises ConfigError for a model that
    has no Hugging Face form, for damaged files, and for an `output` that is taken.
    """
    config = checkpoint.config
    family = FAMILIES[family_of(config.model)]
    precision = precision or config.precision.name
    their_config = _hugging_face_config(config, checkpoint.vocab_size, checkpoint.eod, precision)
    temporary = output.with_name(output.name + ".tmp")
    for path in (output, temporary):
        if path.exists():
            raise ConfigError(f"{path} exists already: remove it, or give another --output")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be made: {error.strerror}") from error
    try:
        their_config.save_pretrained(temporary)
        _write_generation_config(their_config, temporary)
        weights = _their_weights(checkpoint, family, precision)
        _write_weights(weights, temporary, max_file_bytes)
        if write_tokenizer is not None:
            write_tokenizer(temporary)
        temporary.rename(output)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def _hugging_face_config(
    config: Config, vocab_size: int, eod: int | None, precision: str
) -> PreTrainedConfig:
    from transformers import AutoConfig

    model_type = family_of(config.model)
    family = FAMILIES[model_type]
    settings = {theirs: getattr(config.model, ours) for ours, theirs in family.fields + family.written_fields}
    settings["vocab_size"] = vocab_size
    # Our documents begin where another has ended: the same token stands at both ends.
    return AutoConfig.for_model(
        model_type,
        **settings,
        **family.their_constants,
        bos_token_id=eod,
        eos_token_id=eod,
        architectures=[family.architecture],
        dtype=PARAMETER_DTYPES[precision],
    )


def _write_generation_config(their_config: PreTrainedConfig, folder: Path) -> None:
    from transformers import GenerationConfig

    GenerationConfig.from_model_config(their_config).save_pretrained(folder)


def _their_weights(checkpoint: Checkpoint, family: Family, precision: str) -> Iterator[tuple[str, Tensor]]:
    model = checkpoint.config.model
    specs = model_specs(checkpoint.config, checkpoint.vocab_size, checkpoint.eod)
    table = {parameter.ours: parameter for parameter in family.names(model.num_layers)}
    for name, whole in LayerFiles(checkpoint.folder).all_wholes(specs):
        parameter = table[name]
        without_padding = whole[: specs[name].used_rows]
        theirs = parameter.transform.to_theirs(without_padding, model.num_attention_heads)
        converted = theirs.to(PARAMETER_DTYPES[precision])
        if converted.dtype != theirs.dtype and not converted.isfinite().all() and theirs.isfinite().all():
            raise ConfigError(f"--dtype {precision} cannot hold the values of {name}: use bf16 or fp32")
        yield parameter.theirs, converted.contiguous()


def _write_weights(weights: Iterator[tuple[str, Tensor]], folder: Path, max_file_bytes: int) -> None:
    """One file model.safetensors, or several with an index, named as `save_pretrained` does."""
    parts: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total_bytes = pending_bytes = 0

    def flush() -> None:
        from safetensors.torch import save_file

        part = folder / f"part-{len(parts)}"
        save_file(pending, part, metadata={"format": "pt"})
        # safetensors lets nobody else read its files: they get the rights of the others in the folder.
        part.chmod((folder / "config.json").stat().st_mode)
        parts.append(list(pending))
        pending.clear()

    for name, tensor in weights:
        if pending and pending_bytes + tensor.nbytes > max_file_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    if len(parts) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    index: dict[str, Any] = {"metadata": {"total_size": total_bytes}, "weight_map": {}}
    for number, names in enumerate(parts):
        file_name = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file_name)
        index["weight_map"] |= dict.fromkeys(names, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def from_hugging_face(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields of `ModelConfig`, and whole weights under our names, of a BLOOM or GPT-2 in `folder`.

    The fields are those that decide which function of the tokens the model is, and `seq_length` where the
    folder says it. `vocab_size` is the number of rows of the embedding. Raises ConfigError for a folder that
    cannot be read and for a model that ours cannot express.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        their_config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # depends on what is missing
        raise ConfigError(
            f"{folder} is not the folder of a Hugging Face model ({_first_line(error)})"
        ) from error
    fields = _our_fields(their_config, folder)
    family = FAMILIES[their_config.model_type]
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # likewise
        raise ConfigError(f"the weights in {folder} cannot be read ({_first_line(error)})") from error
    for keys, verb in (("missing_keys", "lacks"), ("unexpected_keys", "holds, beside those of the model,")):
        if report[keys]:
            raise ConfigError(f"{folder} {verb} {len(report[keys])} weights, among them {min(report[keys])}")
    state, heads = model.state_dict(), fields["num_attention_heads"]
    return fields, {
        parameter.ours: parameter.transform.to_ours(state[parameter.theirs], heads).contiguous()
        for parameter in family.names(fields["num_layers"])
    }


def _our_fields(their_config: PreTrainedConfig, folder: str | Path) -> dict[str, Any]:
    family = FAMILIES.get(their_config.model_type)
    if family is None:
        raise ConfigError(
            f"{folder} holds a model of type {their_config.model_type}: expected {' or '.join(FAMILIES)}"
        )
    for name, expected in family.their_constants.items():
        found = getattr(their_config, name)
        if found != expected:
            raise ConfigError(
                f"{folder} has {name} = {found} in its config.json: only {expected} can be expressed"
            )
    values = {ours: getattr(their_config, theirs, None) for ours, theirs in family.fields}
    if "max_position_embeddings" in values:
        values["seq_length"] = values["max_position_embeddings"]
    return {**family.our_constants, **{name: value for name, value in values.items() if value is not None}}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
