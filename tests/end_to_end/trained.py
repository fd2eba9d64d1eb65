"""Short training runs of several layouts and models, for the tests of the tools that read checkpoints."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
from tests.end_to_end.command import pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL, NO_DROPOUT, SHORT
from tests.reference.plain_gpt import plain_gpt_logits

LAYERS, HEADS, SEQ = 4, 4, 32  # as in MODEL
NEW_TOKENS = 40  # more than the sequence length: the window slides
# Weights that are sharded along their columns over TP ranks, and weights that are replicated.
SHARDED_BY_COLUMN = ("dense.weight", "dense_4h_to_h.weight")
REPLICATED = ("norm", "position_embeddings", "dense.bias", "dense_4h_to_h.bias", f"{LAYERS + 4}.")


@dataclass(frozen=True)
class Variant:
    """A trained run, and the settings of the plain GPT for its model."""

    processes: int
    flags: str
    plain: dict[str, object]


VARIANTS = {
    "absolute positions, masked ends of documents, PP 2": Variant(
        2,
        f"--pipeline-model-parallel-size 2 {' '.join(ABSOLUTE)} --eod-mask-loss",
        {"positions": "absolute"},
    ),
    "alibi, norm after the embedding, gated MLP, bf16, TP 2": Variant(
        2,
        "--tensor-model-parallel-size 2 --position-embedding-type alibi --embed-layernorm "
        "--glu-activation swiglu --bf16",
        {"positions": "alibi", "embed_norm": True, "glu": "swiglu"},
    ),
    "rotary, fp16, one process": Variant(
        0, "--position-embedding-type rotary --fp16 --initial-loss-scale 1024", {"positions": "rotary"}
    ),
}


@dataclass(frozen=True)
class Trained:
    """A folder with `latest`, the variant's description, the tokenizer, and the losses of the last
    evaluation."""

    folder: Path
    plain: dict[str, object]
    tokenizer: GPT2BPETokenizer
    losses: dict[str, float]
    """'validation' or 'test' -> loss on the first global batch of the split."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns full fp32 weights, assembled from DeepSpeed's files without code of the package."""
        shards = defaultdict(list)
        for path in sorted((self.folder / "global_step5").glob("layer_*-model_*-model_states.pt")):
            layer = int(path.name[6:8])
            prefix = "tied_modules.embed." if layer == 1 else f"{layer}."
            for name, shard in torch.load(path, weights_only=True).items():
                shards[prefix + name].append(shard.float())
        return {name: self._whole(name, parts) for name, parts in shards.items()}

    def _whole(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        if len(parts) == 1 or any(word in name for word in REPLICATED):
            return parts[0]
        if name.endswith(SHARDED_BY_COLUMN):
            return torch.cat(parts, dim=1)
        if "dense_h_to_4h" in name and "glu" in self.plain:
            halves = [part.chunk(2) for part in parts]
            return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
        return torch.cat(parts)

    def greedy_tokens(self, prompt: str) -> list[int]:
        """Generates the plain GPT's most likely tokens, one at a time. Returns them."""
        weights, size = self.weights(), self.tokenizer.vocab_size
        tokens = self.tokenizer.tokenize(prompt)
        start = len(tokens)
        for _ in range(NEW_TOKENS):
            context = torch.tensor([tokens[-SEQ:]])
            logits = plain_gpt_logits(weights, context, layers=LAYERS, heads=HEADS, vocab=size, **self.plain)[
                0, -1
            ]
            if int(logits.argmax()) == self.tokenizer.eod:
                break
            tokens.append(int(logits.argmax()))
        return tokens[start:]


def train_variant(name: str, folder: Path, corpus: Path, data: list[str]) -> Trained:
    """Trains a variant for five steps, and saves it in `folder`."""
    variant = VARIANTS[name]
    flags = [*MODEL, *variant.flags.split(), *NO_DROPOUT, *SHORT, *data, "--save", str(folder)]
    run = pretrain(flags, processes=variant.processes).ok()
    tokenizer = GPT2BPETokenizer(str(corpus / "vocab.json"), str(corpus / "merges.txt"))
    losses = {str(line["name"]): float(line["lm_loss"]) for line in run.evaluations}
    return Trained(folder, variant.plain, tokenizer, losses)
