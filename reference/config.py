"""A model's shape, read from the fields of a Hugging Face DeepSeek-V3 or Kimi-K2 config."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

# What the forward pass assumes; a config that says otherwise is another model.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}

# Far beyond any model; within them, sums and products of two fit the engine's integers.
LARGEST = 1 << 20  # a size or a count
LONGEST = 1 << 30  # a number of positions
LEAST, MOST = 1e-30, 1e30  # a real: float32 holds it


def short(value: object, limit: int = 80) -> str:
    """A value from a file as part of one line: control characters escaped, the middle of a long one left out."""
    text = str(value) or "''"
    if len(text) > limit:
        text = f"{text[: limit // 2]}…{text[-limit // 4 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True)
class Yarn:
    """RoPE of type "yarn"; defaults as in transformers."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Fields and defaults of `DeepseekV3Config`; sizes have no default."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None  # None: queries come from hidden_size directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 3
    moe_layer_freq: int = 1
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    yarn: Yarn | None = None

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_width(self) -> int:
        """Values cached per token and layer: normed latent, then roped key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> "ModelConfig":
        """Reads and checks a config. RoPE may be spelt `rope_scaling` or `rope_parameters`, Kimi-K2.5's fields may
        lie in `text_config`; fields that decide nothing here are ignored.

        Raises ValueError with one line, `<field>: <value>: <reason>`.
        """
        config = config.get("text_config", config)
        _require(isinstance(config, Mapping), "text_config", config, "must be a map")
        for name, value in FIXED.items():
            _require(config.get(name, value) == value, name, config.get(name), f"only {value!r} is supported")
        where = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        rope = config.get(where) or {}
        _require(isinstance(rope, Mapping), where, rope, "must be a map")
        theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
        given = {name: value for name, value in {**config, **theta}.items() if name != "yarn"}
        c = ModelConfig(**_read(ModelConfig, given), yarn=_read_yarn(rope, where))
        _check(c)
        heads, kv_heads = c.num_attention_heads, config.get("num_key_value_heads") or c.num_attention_heads
        _require(kv_heads == heads, "num_key_value_heads", kv_heads, f"must equal num_attention_heads ({heads})")
        return c


def _require(holds: bool, field: str, value: Any, reason: str) -> None:
    if not holds:
        raise ValueError(f"{short(field)}: {short(value)}: {reason}")


def _read(cls: type, config: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The fields of `cls` that `config` sets, each checked against its annotation."""
    values = {}
    for field in fields(cls):
        name, kind = where + field.name, field.type
        if field.name not in config:
            _require(field.default is not MISSING, name, "missing", "needed")
            continue
        value = values[field.name] = config[field.name]
        if value is None and kind in (int | None, float | None):
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind is bool:
            _require(isinstance(value, bool), name, value, "must be true or false")
        elif kind in (int, int | None):
            _require(number and isinstance(value, int), name, value, "must be an integer")
            most = LONGEST if name.endswith("max_position_embeddings") else LARGEST
            _require(value <= most, name, value, f"must be at most {most}")
        else:
            finite = number and (isinstance(value, int) or math.isfinite(value))
            _require(finite, name, value, "must be a finite number")
            _require(value == 0 or LEAST <= abs(value) <= MOST, name, value, f"must lie in {LEAST}…{MOST}")
    return values


def _read_yarn(rope: Mapping[str, Any], where: str) -> Yarn | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    _require(kind in ("default", "yarn"), f"{where}.rope_type", kind, "only default and yarn are supported")
    if kind == "default":
        return None
    known = {"type", "rope_type", "rope_theta", *(field.name for field in fields(Yarn))}
    for name in rope:
        _require(name in known, f"{where}.{name}", rope[name], "not supported")
    given = {name: value for name, value in rope.items() if value is not None}  # transformers takes null as absent
    yarn = Yarn(**_read(Yarn, given, f"{where}."))
    for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"):
        value = getattr(yarn, name)
        _require(value is None or value > 0, f"{where}.{name}", value, "must be positive")
    for name in ("mscale", "mscale_all_dim"):
        _require(getattr(yarn, name) >= 0, f"{where}.{name}", getattr(yarn, name), "must not be negative")
    return yarn


def _check(c: ModelConfig) -> None:
    """Values out of range or against each other."""
    for name, value in vars(c).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            may_be_zero = name in ("n_shared_experts", "first_k_dense_replace")
            _require(value > 0 or (value == 0 and may_be_zero), name, value, "must be positive")
    _require(c.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", c.qk_rope_head_dim, "must be even")
    _require(c.rope_theta > 1, "rope_theta", c.rope_theta, "must exceed 1")
    experts, group = c.n_routed_experts, c.n_routed_experts // c.n_group
    _require(experts % c.n_group == 0, "n_group", c.n_group, f"must divide n_routed_experts ({experts})")
    _require(c.n_group == 1 or group > 1, "n_group", c.n_group, "leaves one expert a group; a score needs two")
    _require(c.topk_group <= c.n_group, "topk_group", c.topk_group, f"exceeds n_group ({c.n_group})")
    top_k, eligible = c.num_experts_per_tok, c.topk_group * group
    _require(top_k <= eligible, "num_experts_per_tok", top_k, f"exceeds the {eligible} experts of topk_group groups")
