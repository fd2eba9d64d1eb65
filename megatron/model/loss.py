"""The cross-entropy loss of the model."""

import torch
from torch import Tensor

from megatron.mpu.context_parallel import shard_sequence
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from megatron.mpu.mesh import Axis


class CrossEntropy:
    """The loss of a micro-batch that is differentiated: the weighted sum of the losses of its tokens.

    The executor chooses the weights so that the mean over all micro-batches of a step is the mean over the
    unmasked tokens of the global batch, however many of them each micro-batch has. `z_loss_weight` applies
    only to `from_hidden` in training: see `vocab_parallel_linear_cross_entropy`.

    With context parallelism each rank has the logits of its own tokens, but the labels and weights of all
    tokens. Its loss is CP times its tokens' part of the loss of the micro-batch. The mean over the
    context-parallel ranks is therefore the loss, and the mean of their gradients is the gradient, so data-
    and context-parallel ranks are averaged in the same way.
    """

    def __init__(
        self,
        tp_group: Axis,
        vocab_size: int,
        z_loss_weight: float = 0.0,
        cp_group: Axis | None = None,
        softcapping: float | None = None,
    ) -> None:
        """cp_group: the context-parallel ranks; None if each rank has whole sequences. softcapping: cap of
        the logits that `from_hidden` computes; the logits that a call receives are already capped."""
        self.tp_group, self.cp_group = tp_group, cp_group or Axis("cp")
        self.vocab_size = vocab_size
        self.z_loss_weight, self.softcapping = z_loss_weight, softcapping

    def __call__(self, logits: Tensor, labels_and_weights: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the loss, fp32 scalar. logits: [batch, seq / CP, padded_vocab / TP]. labels_and_weights:
        labels [batch, seq], and the weights of the tokens' losses [batch, seq]."""
        labels, token_weights = self._own_labels_and_weights(*labels_and_weights)
        # Training does not read the logits after the loss, so the probabilities reuse their memory.
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
        """Returns the loss from the head's input `hidden` [batch, seq / CP, hidden] and the head's weight
        [padded_vocab / TP, hidden].

        If the optimizer has given the weight a `main_grad`, the weight's gradient is added to it in fp32.
        loss_gradient: the gradient of the loss in the backward pass, by which this sum is scaled.
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
