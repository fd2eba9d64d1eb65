"""The loss of the model."""

import torch
from torch import Tensor

from megatron.mpu.context_parallel import shard_sequence
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from megatron.mpu.mesh import Axis


class CrossEntropy:
    """Loss of a micro-batch, which is differentiated: the weighted sum of the losses of its tokens.

    The executor chooses the weights so that the mean over all micro-batches of a step is the mean over the
    unmasked tokens of the global batch, however many of them a micro-batch has. `z_loss_weight` applies to
    `from_hidden` in training, see `vocab_parallel_linear_cross_entropy`.

    With context parallelism each rank has the logits of its own tokens, and all labels and weights. Its loss
    is CP times its tokens' part of the loss of the micro-batch. So the mean over the context-parallel ranks
    is the loss, and the mean of their gradients is the gradient: data- and context-parallel ranks are
    averaged in one way everywhere.
    """

    def __init__(
        self,
        tp_group: Axis,
        vocab_size: int,
        z_loss_weight: float = 0.0,
        cp_group: Axis | None = None,
        softcapping: float | None = None,
    ) -> None:
        """cp_group: None for whole sequences. softcapping: of the logits in `from_hidden`; a call gets
        capped logits."""
        self.tp_group, self.cp_group = tp_group, cp_group or Axis("cp")
        self.vocab_size = vocab_size
        self.z_loss_weight, self.softcapping = z_loss_weight, softcapping

    def __call__(self, logits: Tensor, labels_and_weights: tuple[Tensor, Tensor]) -> Tensor:
        """logits [batch, seq / CP, padded_vocab / TP], labels [batch, seq], weights of the tokens' losses
        [batch, seq] -> scalar fp32."""
        labels, token_weights = self._own_labels_and_weights(*labels_and_weights)
        # In training nothing reads the logits again: their memory is reused for the probabilities.
        losses = vocab_parallel_cross_entropy(
            logits, labels, self.tp_group, self.vocab_size, overwrite_logits=torch.is_grad_enabled()
        )
        return (losses * token_weights).sum()

    def from_hidden(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels_and_weights: tuple[Tensor, Tensor],
        loss_gradient: float = 1.0,
    ) -> Tensor:
        """Returns the loss from the head's input [batch, seq / CP, hidden] and weight [padded_vocab / TP,
        hidden].

        If the weight has a `main_grad` (the optimizer sets it), its gradient is added to `main_grad` in fp32.
        loss_gradient: the gradient of the loss in the backward pass, needed for that sum.
        """
        labels, token_weights = self._own_labels_and_weights(*labels_and_weights)
        return vocab_parallel_linear_cross_entropy(
            hidden,
            weight,
            labels,
            self.tp_group,
            self.vocab_size,
            token_weights=token_weights,
            z_loss_weight=self.z_loss_weight if torch.is_grad_enabled() else 0.0,
            loss_gradient=loss_gradient,
            softcapping=self.softcapping,
        ).sum()

    def _own_labels_and_weights(self, labels: Tensor, token_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the labels of this rank's tokens and their weights in the loss, both [batch, seq / CP]."""
        if self.cp_group.size > 1:
            token_weights = token_weights * self.cp_group.size
        return (
            shard_sequence(labels, self.cp_group),
            shard_sequence(token_weights, self.cp_group),
        )
