"""Rotary position embedding with YaRN (arXiv 2309.00071) as DeepSeek-V3 and Kimi-K2 use it, in float64."""

import math

import numpy as np

from reference.config import ModelConfig, Yarn


def inv_freq(config: ModelConfig) -> np.ndarray:
    """[rope/2] radians per position. YaRN leaves fast pairs as they are, divides slow ones by `factor` and ramps
    between, at every position, not only past the original context."""
    dim, yarn = config.qk_rope_head_dim, config.yarn
    plain = config.rope_theta ** -(np.arange(0, dim, 2) / dim)
    if yarn is None:
        return plain
    low, high = correction_range(dim, config.rope_theta, yarn)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def correction_range(dim: int, theta: float, yarn: Yarn) -> tuple[float, float]:
    """The ramp's ends: the pairs that turn beta_fast and beta_slow times within the original context."""

    def pair(turns: float) -> float:
        context = yarn.original_max_position_embeddings
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(yarn.beta_fast)), 0)
    high = min(math.ceil(pair(yarn.beta_slow)), dim - 1)
    return low, high + 0.001 if high == low else high


def mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def attention_factor(yarn: Yarn | None) -> float:
    """The factor on cos and sin; 1 for Kimi, where both mscales are equal."""
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return mscale(yarn.factor, yarn.mscale) / mscale(yarn.factor, yarn.mscale_all_dim)
    return mscale(yarn.factor, 1.0)


def softmax_scale(config: ModelConfig) -> float:
    """qk_head_dim^-1/2 * m^2, m = 0.1 * mscale_all_dim * ln(factor) + 1 under YaRN."""
    yarn = config.yarn
    m = mscale(yarn.factor, yarn.mscale_all_dim) if yarn and yarn.mscale_all_dim else 1.0
    return config.qk_head_dim**-0.5 * m * m


def rope_tables(config: ModelConfig, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, [positions, rope/2], attention factor included."""
    angles = np.arange(positions)[:, None] * inv_freq(config)
    factor = attention_factor(config.yarn)
    return np.cos(angles) * factor, np.sin(angles) * factor
