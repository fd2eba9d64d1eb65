"""A layer of experts in plain PyTorch, one token at a time: the reference for `megatron.model.experts`."""

import torch
import torch.nn.functional as F


class PlainExperts:
    """The expert layers of a model: their settings, and their state from step to step.

    bias and load: layer index -> fp32 [experts]. `losses` sums the balance losses and z-losses of a global
    batch, `counts` its tokens per expert.
    """

    def __init__(
        self,
        k=2,
        score="softmax",
        pre_softmax=False,
        groups=None,
        group_topk=None,
        group_score=None,
        factor=1.0,
        balance=None,
        coefficient=0.0,
        z_coefficient=0.0,
        bias_rate=None,
    ):
        self.k, self.score, self.pre_softmax, self.factor = k, score, pre_softmax, factor
        self.groups, self.group_topk = groups, group_topk
        self.group_score = group_score or (k // group_topk if groups else 0)
        self.balance, self.coefficient, self.z_coefficient = balance, coefficient, z_coefficient
        self.bias_rate = bias_rate
        self.bias, self.load = {}, {}
        self.begin_step()

    def begin_step(self):
        self.losses, self.counts = torch.zeros(()), {}

    def end_step(self):
        for index, counts in self.counts.items():
            if self.bias_rate is not None:
                self.bias[index] = self.bias_of(index) - self.bias_rate * torch.sign(counts - counts.mean())
            self.load[index] = counts / counts.mean()

    def bias_of(self, index):
        return self.bias.get(index, 0.0)

    def chosen(self, scores):
        """Returns the indices of the k best experts in the best groups. scores: [experts]."""
        scores = scores.tolist()
        allowed = range(len(scores))
        if self.groups:
            size = len(scores) // self.groups
            parts = [list(range(g * size, (g + 1) * size)) for g in range(self.groups)]
            best = [
                sum(sorted((scores[e] for e in part), reverse=True)[: self.group_score]) for part in parts
            ]
            order = sorted(range(self.groups), key=lambda g: (-best[g], g))[: self.group_topk]
            allowed = [expert for g in sorted(order) for expert in parts[g]]
        return sorted(sorted(allowed, key=lambda e: (-scores[e], e))[: self.k])

    def layer(self, weights, index, x, feed):
        """Computes a layer. x: [batch, seq, hidden]; the result has this shape, too. feed: function of
        (prefix of names of an MLP, matrices of one expert, token) that returns the output."""
        logits = x @ weights[f"{index}.mlp.router.weight"].T + weights.get(f"{index}.mlp.router.bias", 0.0)
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        outputs, counts = [], torch.zeros(logits.shape[-1])
        for sample in range(len(x)):
            unbiased = torch.zeros_like(counts)
            for token in range(x.shape[1]):
                own = scores[sample, token]
                experts = self.chosen((own + self.bias_of(index)).detach())
                weight = own[experts]
                if self.score == "sigmoid":
                    weight = weight / (weight.sum() + 1e-20)
                elif not self.pre_softmax:
                    weight = weight / weight.sum()
                vector = x[sample, token]
                outputs.append(
                    sum(
                        w * self.factor * feed(vector, expert)
                        for w, expert in zip(weight, experts, strict=True)
                    )
                )
                counts[experts] += 1
                unbiased[sorted(range(len(own)), key=lambda e: (-own[e].item(), e))[: self.k]] += 1
            if self.balance == "seq_aux_loss":
                self._add_balance(scores[sample], unbiased / unbiased.mean(), len(x) * x.shape[1])
        if self.balance == "global_aux_loss":
            self._add_balance(scores, self.load.get(index, torch.ones_like(counts)), len(x) * x.shape[1])
        self.losses = self.losses + self.z_coefficient * logits.logsumexp(-1).square().mean()
        self.counts[index] = self.counts.get(index, 0) + counts
        return torch.stack(outputs).view(x.shape)

    def _add_balance(self, scores, load, tokens):
        shares = scores if self.score == "softmax" else scores / scores.sum(-1, keepdim=True)
        self.losses = self.losses + self.coefficient * (shares * load).sum() / tokens


def expert_mlp(experts, weights, index, x, activation):
    """Returns the output of a layer with a router. activation: function of the wide vector of an MLP."""
    name = f"{index}.mlp"

    def feed(vector, expert):
        wide = weights[f"{name}.experts.dense_h_to_4h.weight"][expert] @ vector
        if f"{name}.experts.dense_h_to_4h.bias" in weights:
            wide = wide + weights[f"{name}.experts.dense_h_to_4h.bias"][expert]
        output = weights[f"{name}.experts.dense_4h_to_h.weight"][expert] @ activation(wide)
        if f"{name}.experts.dense_4h_to_h.bias" in weights:
            output = output + weights[f"{name}.experts.dense_4h_to_h.bias"][expert]
        return output

    output = experts.layer(weights, index, x, feed)
    shared = f"{name}.shared_expert.dense_h_to_4h.weight"
    if shared in weights:
        wide = F.linear(x, weights[shared], weights.get(shared.replace("weight", "bias")))
        second = f"{name}.shared_expert.dense_4h_to_h"
        added = F.linear(activation(wide), weights[f"{second}.weight"], weights.get(f"{second}.bias"))
        if f"{name}.shared_expert_gate.weight" in weights:
            added = added * torch.sigmoid(x @ weights[f"{name}.shared_expert_gate.weight"].T)
        output = output + added
    return output
