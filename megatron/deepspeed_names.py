"""Which public methods of DeepSpeed's engine and pipeline module a caller of this program may use.

This program configures DeepSpeed for fp32 without clipping, and replaces its optimizer, messages and
checkpoint reader. Many public methods of DeepSpeed would therefore train with wrong numbers, read sharded
weights, or return settings that the run does not have. A method that is not listed as supported raises a
UserError before it changes anything. This includes methods that a newer DeepSpeed adds. DeepSpeed's own code
can still call these methods.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from megatron.errors import UserError

T = TypeVar("T", bound=type)

_STEP = "use train_step(micro_batches, global_batch_size, lr) or evaluate(micro_batches, num_micro_batches)"
_FILES = (
    "save and load with megatron.checkpoint.manager.CheckpointManager, convert with "
    "tools/convert_checkpoint.py or tools/convert_huggingface.py"
)
_INSTEAD = {
    _STEP: (
        "train_batch forward backward step scale no_sync coalesce_grad_reduction deepspeed_io "
        "allreduce_gradients set_gradient_accumulation_boundary set_train_batch_size "
        "set_train_micro_batch_size set_dataloader set_dataiterator set_batch_fn "
        "set_data_post_process_func clip_fp32_gradients"
    ),
    _FILES: (
        "save_checkpoint load_checkpoint save_16bit_model save_fp16_model module_state_dict "
        "load_module_state_dict load_moe_state_dict save_state_dict load_state_dir load_state_dict "
        "ckpt_prefix ckpt_layer_path ckpt_layer_path_list"
    ),
    "set --compile, which compiles the transformer layers": (
        "compile get_compile_time register_compile_pass get_deepcompile_backend "
        "get_deepspeed_compile_backend get_autosp_backend get_autotp_backend"
    ),
    "set --checkpoint-activations and --checkpoint-num-layers": "set_checkpoint_interval",
    "the parameters must stay views of the optimizer's buffers; set --fp16 or --bf16 for a precision": (
        "to to_empty cuda cpu type half bfloat16 float double zero_grad requires_grad_"
    ),
}
"""What to do instead -> names of the unsupported methods, including methods of `nn.Module`."""
_GENERAL = "this program does not use what it returns or changes; run.config has the settings of the run"


def restrict(supported: str, answers: Mapping[str, Callable[[Any], Any]]) -> Callable[[T], T]:
    """Returns a decorator for a subclass of a DeepSpeed class.

    supported: names of the methods that do what DeepSpeed documents. answers: name of a method without
    arguments, or of a property -> function that returns its result from the object.
    """
    allowed = {*supported.split(), "__init__"}

    def decorate(cls: T) -> T:
        names = {name for names in _INSTEAD.values() for name in names.split() if hasattr(cls, name)}
        for base in cls.__mro__:
            if base.__module__.partition(".")[0] == "deepspeed":
                names |= {name for name in vars(base) if not name.startswith("_")}
        for name in names - allowed:
            found = getattr(cls, name)
            if isinstance(found, property):
                setattr(cls, name, property(_guarded(cls, name, found.fget, answers.get(name))))
            elif callable(found):
                setattr(cls, name, _guarded(cls, name, found, answers.get(name)))
        return cls

    return decorate


def _guarded(cls: type, name: str, method: Any, answer: Callable[[Any], Any] | None) -> Callable[..., Any]:
    instead = next((text for text, names in _INSTEAD.items() if name in names.split()), _GENERAL)

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] == "deepspeed":
            return method(self, *args, **kwargs)
        if answer is not None:
            return answer(self)
        raise UserError(f"{cls.__name__}.{name} is not supported: {instead}")

    return call
