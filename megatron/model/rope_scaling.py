"""Rotary frequencies for a longer context than a model was trained with (--rope-scaling-type).

Each function takes the frequencies, fp32 [rotary_dim / 2] in radians per token, highest first. It returns the
scaled frequencies and a multiplier of cosines and sines. With factor k, the scaled angle of position k p
equals the unscaled angle of position p: for all frequencies (linear), or for the low ones (llama3, yarn).
"""

import math

import torch
from torch import Tensor

from megatron.config import ModelConfig


def linear(frequency: Tensor, model: ModelConfig) -> tuple[Tensor, float]:
    """Divides all frequencies by the factor (position interpolation, arXiv 2306.15595)."""
    return frequency / model.rope_scaling_factor, 1.0


def llama3(frequency: Tensor, model: ModelConfig) -> tuple[Tensor, float]:
    """Divides low frequencies by the factor, keeps high ones, and interpolates between them, as Llama 3.1
    does.

    A frequency is low if it makes at most --rope-low-freq-factor rotations in the original context. It is
    high if it makes at least --rope-high-freq-factor. The interpolation is linear in the number of rotations.
    See `apply_scaling` of github.com/meta-llama/llama-models.
    """
    rotations = model.rope_original_max_position_embeddings * frequency / (2 * math.pi)
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return _blended(frequency, kept, model.rope_scaling_factor), 1.0


def yarn(frequency: Tensor, model: ModelConfig) -> tuple[Tensor, float]:
    """Scales like `llama3`, but interpolates linearly in the frequency's index (YaRN, arXiv 2309.00071). The
    interpolated indices lie between the index with --rope-beta-fast rotations and the index with
    --rope-beta-slow rotations; this range is rounded outwards unless --rope-exact-range is given. The
    attention scores are multiplied by (0.1 ln k + 1)^2 (equation 22 of the paper), or with latent attention
    by DeepSeek's factors."""

    def index_of(rotations: float) -> float:
        wavelength = model.rope_original_max_position_embeddings / rotations
        return model.rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(model.rotary_base))

    first, last = index_of(model.rope_beta_fast), index_of(model.rope_beta_slow)
    if not model.rope_exact_range:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, model.rotary_dim - 1)
    index = torch.arange(len(frequency), dtype=torch.float32)
    kept = 1.0 - ((index - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    factor = model.rope_scaling_factor
    return _blended(frequency, kept, factor), model.yarn_multiplier(factor)


def _blended(frequency: Tensor, kept: Tensor, factor: float) -> Tensor:
    return kept * frequency + (1.0 - kept) * frequency / factor
