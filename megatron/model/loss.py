"""The loss of the model."""

import torch
from torch import Tensor

from megatron.mpu.context_parallel import shard_sequence
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from megatron.mpu.mesh import Axis


class CrossEntropy:
    """Loss of a micro-batch, which is differentiated: mean over samples of each sample's mean over its
    unmasked tokens; 0 for a sample without any.

    The mean per sample comes first. So the gradient of a global batch does not depend on how the batch is
    divided into micro-batches and data-parallel ranks, even if `--eod-mask-loss` masks unequal numbers of
    tokens. The loss that is logged is the mean over all unmasked tokens, from `sample_totals`.
    `z_loss_weight` applies to `from_hidden` in training, see `vocab_parallel_linear_cross_entropy`.

    With context parallelism each rank has the logits of its own tokens, and all labels and the whole mask.
    Its loss is CP times its tokens' part of the loss of the micro-batch. So the mean over the
    context-parallel ranks is the loss, and the mean of their gradients is the gradient: data- and
    context-parallel ranks are averaged in one way everywhere.
    """

    def __init__(
        self,
        tp_group: Axis,
        vocab_size: int,
        z_loss_weight: float = 0.0,
        cp_group: Axis | None = None,
    ) -> None:
        """cp_group: None for whole sequences."""
        self.tp_group, self.cp_group = tp_group, cp_group or Axis("cp")
        self.vocab_size = vocab_size
        self.z_loss_weight = z_loss_weight
        self.sample_totals = (torch.zeros(0), torch.zeros(0))
        """Of each sample of the last micro-batch: its weighted loss on this rank, and its unmasked tokens."""

    def __call__(self, logits: Tensor, labels_and_mask: tuple[Tensor, Tensor]) -> Tensor:
        """logits [batch, seq / CP, padded_vocab / TP], labels [batch, seq], mask [batch, seq] -> scalar
        fp32."""
        labels, token_weights, tokens = self._own_labels_and_weights(*labels_and_mask)
        # In training nothing reads the logits again: their memory is reused for the probabilities.
        losses = vocab_parallel_cross_entropy(
            logits, labels, self.tp_group, self.vocab_size, overwrite_logits=torch.is_grad_enabled()
        )
        return self._sum(losses * token_weights, tokens)

    def from_hidden(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels_and_mask: tuple[Tensor, Tensor],
        loss_gradient: float = 1.0,
    ) -> Tensor:
        """Returns the loss from the head's input [batch, seq / CP, hidden] and weight [padded_vocab / TP,
        hidden].

        If the weight has a `main_grad` (the optimizer sets it), its gradient is added to `main_grad` in fp32.
        loss_gradient: the gradient of the loss in the backward pass, needed for that sum.
        """
        labels, token_weights, tokens = self._own_labels_and_weights(*labels_and_mask)
        losses = vocab_parallel_linear_cross_entropy(
            hidden,
            weight,
            labels,
            self.tp_group,
            self.vocab_size,
            token_weights=token_weights,
            z_loss_weight=self.z_loss_weight if torch.is_grad_enabled() else 0.0,
            loss_gradient=loss_gradient,
        )
        return self._sum(losses, tokens)

    def _sum(self, weighted_losses: Tensor, tokens: Tensor) -> Tensor:
        """Returns the sum, and sets `sample_totals`. weighted_losses [batch, seq / CP], tokens [batch]."""
        self.sample_totals = (weighted_losses.detach().sum(dim=1), tokens)
        return weighted_losses.sum()

    def _own_labels_and_weights(self, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the labels of this rank's tokens, their weights in the loss, both [batch, seq / CP], and
        each sample's number of unmasked tokens [batch]. The mean is a weighted sum, so that the gradients
        computed in the forward pass are final."""
        tokens = mask.sum(dim=1, keepdim=True)
        token_weights = mask / (tokens.clamp(min=1.0) * len(mask))
        if self.cp_group.size > 1:
            token_weights = token_weights * self.cp_group.size
        return (
            shard_sequence(labels, self.cp_group, dim=1),
            shard_sequence(token_weights, self.cp_group, dim=1),
            tokens.squeeze(1),
        )
