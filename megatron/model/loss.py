"""The loss of the model."""

import torch
from torch import Tensor

from megatron.model.scoring import masked_mean
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from megatron.mpu.layout import TPGroup
from megatron.mpu.parameters import main_grad_of


class CrossEntropy:
    """Loss of a micro-batch: mean over samples of each sample's mean over its unmasked tokens.

    The mean per sample comes first. So the loss of a global batch does not depend on how the batch is divided
    into micro-batches and data-parallel ranks, even if `--eod-mask-loss` masks unequal numbers of tokens.
    `z_loss_weight` applies to `from_hidden` in training, see `vocab_parallel_linear_cross_entropy`.
    """

    def __init__(self, tp_group: TPGroup, vocab_size: int, z_loss_weight: float = 0.0) -> None:
        self.tp_group = tp_group
        self.vocab_size = vocab_size
        self.z_loss_weight = z_loss_weight

    def __call__(self, logits: Tensor, labels_and_mask: tuple[Tensor, Tensor]) -> Tensor:
        """logits [batch, seq, padded_vocab / TP], labels [batch, seq], mask [batch, seq] -> scalar fp32."""
        labels, mask = labels_and_mask
        # In training nothing reads the logits again: their memory is reused for the probabilities.
        losses = vocab_parallel_cross_entropy(
            logits, labels, self.tp_group, self.vocab_size, overwrite_logits=torch.is_grad_enabled()
        )
        return masked_mean(losses, mask)

    def from_hidden(self, hidden: Tensor, weight: Tensor, labels_and_mask: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the loss from the head's input [batch, seq, hidden] and weight [padded_vocab / TP, hidden].

        If the weight has a `main_grad` (the optimizer sets it), its gradient is added to `main_grad` in fp32.
        """
        labels, mask = labels_and_mask
        # The mean is a weighted sum, so that the gradients computed in the forward pass are final.
        token_weights = mask / (mask.sum(dim=1, keepdim=True).clamp(min=1.0) * len(mask))
        return vocab_parallel_linear_cross_entropy(
            hidden,
            weight,
            labels,
            self.tp_group,
            self.vocab_size,
            token_weights=token_weights,
            z_loss_weight=self.z_loss_weight if torch.is_grad_enabled() else 0.0,
            main_grad=main_grad_of(weight),
        ).sum()
