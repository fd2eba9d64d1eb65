"""Layers of Megatron-Core's HybridModel (MambaModel until version 0.17) as transformer layers, and back.

A pattern has one letter per layer: * is attention, - an MLP, E experts; | separates pipeline stages. The
layers 2 N and 2 N + 1 form transformer layer N. HybridModel ignores some arguments that GPTModel obeys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.errors import UserError, one_line

Arguments = Mapping[str, Any]
PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Names of the argument that holds the pattern: the first since Megatron-Core 0.17, the second in
older versions."""
# Arguments of hybrid models that only repeat what the pattern says.
_RESTATE_PATTERN = (*PATTERNS, "is_hybrid_model", "hybrid_attention_ratio", "hybrid_mlp_ratio")
_SPECS = (["hybrid_stack_spec"], ["mamba_stack_spec"])
# Both arguments change the rotation in GPTModel. HybridModel ignores the first, and half of the second.
_SCALING, _INTERLEAVED = "use_rope_scaling", "rotary_interleaved"
_WINDOWS, _ROTATIONS = "window_attn_skip_freq", "no_rope_freq"
_LETTERS = {
    "*": "attention",
    "-": "an MLP",
    "E": "experts",
    "M": "a Mamba layer",
    "G": "a gated delta network",
    "D": "sparse attention",
    "+": "latent attention",
    "/": "a prediction of several tokens",
}


def hybrid_layer(layer: int, name: str) -> int:
    """Returns the index of the hybrid layer with a part of transformer layer `layer`. name: the part's
    name."""
    return 2 * layer + (not name.startswith("self_attention."))


def transformer_arguments(args: Arguments) -> Arguments:
    """Returns the arguments of the GPTModel that is equal to a hybrid model. Returns the arguments of a
    GPTModel unchanged. Raises ValueError if the layers of the pattern do not form transformer layers."""
    name = next((name for name in PATTERNS if args.get(name)), None)
    if name is None:
        return args
    has_experts = _experts_of_pattern(name, args[name])
    for argument in (_INTERLEAVED, _ROTATIONS):
        if args.get(argument):
            raise ValueError(f"{argument} is {one_line(args[argument])} with {name}, expected None or False")
    own = {key: value for key, value in args.items() if key not in _RESTATE_PATTERN}
    if isinstance(spec := own.get("spec"), list) and spec[-1:] in _SPECS:
        del own["spec"]
    if isinstance(every := own.get(_WINDOWS), int) and every:
        own[_WINDOWS] = [int(number % every != 0) for number in range(1, 2 * len(has_experts) + 1)]
    if isinstance(own.get(_WINDOWS), (list, tuple)):
        own[_WINDOWS] = [*own[_WINDOWS][::2]]
    own |= {"num_layers": len(has_experts), "moe_layer_freq": [*map(int, has_experts)], _SCALING: False}
    return own if any(has_experts) else own | {"num_experts": None, "num_moe_experts": None}


def _experts_of_pattern(name: str, pattern: object) -> list[bool]:
    """Returns for each transformer layer of a pattern whether it has experts."""
    letters = str(pattern).replace("|", "")
    for number, letter in enumerate(letters + "." * (len(letters) % 2)):
        expected = "-E" if number % 2 else "*"
        if letter in expected:
            continue
        found = "missing" if letter == "." else f"{_LETTERS.get(letter, 'unknown')} ({one_line(letter)})"
        raise ValueError(
            f"{name} is {one_line(pattern, 200)}: layer {number} is {found}, expected "
            f"{' or '.join(f'{_LETTERS[kind]} ({kind})' for kind in expected)}: this "
            "program has only pairs of attention and MLP or experts: continue the model in Megatron-LM"
        )
    return [letter == "E" for letter in letters[1::2]]


def hybrid_arguments(args: Arguments) -> Arguments:
    """Returns the arguments of the hybrid model that is equal to a GPTModel. args: the GPTModel's arguments,
    as `MEGATRON_CORE.arguments` returns them. Raises UserError if no hybrid model is equal."""
    for argument in (_SCALING, _INTERLEAVED, _ROTATIONS):
        if args.get(argument):
            raise UserError(
                f"--hybrid-model cannot express {argument} {one_line(args[argument])} of the model: remove "
                "the flag, which writes a GPTModel"
            )
    layers, frequency = args["num_layers"], args.get("moe_layer_freq")
    has_experts = frequency if isinstance(frequency, list) else [args["num_experts"]] * layers
    pattern = "".join("*E" if experts else "*-" for experts in has_experts)
    windows = args[_WINDOWS] and [window for window in args[_WINDOWS] for _ in "*-"]
    own = {**args, **dict.fromkeys(PATTERNS, pattern), "is_hybrid_model": True, "num_layers": len(pattern)}
    # The pattern already says which layers have experts.
    return own | {_WINDOWS: windows} | ({"moe_layer_freq": 1} if args["num_experts"] else {})
