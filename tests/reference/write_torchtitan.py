"""Writes tests/assets/torchtitan_llama.tar.gz with torchtitan 0.2.1, in an environment that has it:

    pip install torchtitan==0.2.1
    torchrun --nproc-per-node 2 tests/reference/write_torchtitan.py torchtitan_llama

The folder is what torchtitan's `CheckpointManager` saves after one step of AdamW with FSDP on two ranks, with
torchtitan's names, the optimizer's flattened state, and the state of the training. `config.json` describes
the Hugging Face model of the same shape. `logits.pt` has tokens and torchtitan's logits.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 64, "multiple_of": 16}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def main(folder: Path) -> None:
    """Trains for a step and saves."""
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = Transformer(TransformerModelArgs(**SIZES, max_seq_len=64))
    model.init_weights()
    for layer in model.layers.values():
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(7))
    model(tokens).float().logsumexp(-1).mean().backward()
    optimizer.step()
    logits = model(tokens).detach()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        **model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "train_state": {"step": torch.tensor(1, dtype=torch.int32)},
    }
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
        torch.save({"tokens": tokens, "logits": logits}, folder / "logits.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
