"""The DeepSeek-V3 / Kimi-K2 transformer over a latent KV cache, in float32 or float64."""

from collections.abc import Callable

import numpy as np
from numpy import ndarray as Array

from reference import ops, rope
from reference.bundle import Bundle, as_float
from reference.tensors import PROJECTIONS

LORA_NORM_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps is


class Model:
    """Weights in `dtype` and the forward pass. INT4 matrices stay packed: `linear` and `moe` know them."""

    def __init__(self, bundle: Bundle, dtype: type = np.float64):
        self.config, self.dtype = bundle.config, dtype
        self.group = bundle.quant and bundle.quant["group_size"]
        self.softmax_scale = rope.softmax_scale(self.config)
        self.parts = (".qw", ".sc") if self.group else (".weight",)  # of each matrix of an expert
        self.weights = {}
        for name, x in bundle.tensors.items():
            self.weights[name] = x if x.dtype == np.int32 else as_float(x).astype(dtype)
        for layer in filter(self.config.is_moe, range(self.config.num_hidden_layers)):
            p = f"model.layers.{layer}.mlp.experts."
            for name in (projection + part for projection in PROJECTIONS for part in self.parts):
                experts = range(self.config.n_routed_experts)
                self.weights[p + name] = np.stack([self.weights.pop(f"{p}{e}.{name}") for e in experts])

    def empty_kv(self, rows: int) -> Array:
        """[layers, rows, kv_lora + rope]."""
        return np.zeros((self.config.num_hidden_layers, rows, self.config.kv_width), self.dtype)

    def forward(self, tokens: Array, kv: Array, prefix: int, parents: Array, mla: Callable | None = None) -> Array:
        """Logits [rows, vocab] of a tree behind `prefix` cached rows; a sequence is the tree `chain(rows)`.

        Row i stands at position prefix + its depth and writes its keys to kv[:, prefix + i].
        """
        mla = mla or self.mla_absorbed
        positions = prefix + ops.depths(parents)
        tables = rope.rope_tables(self.config, int(positions.max()) + 1)
        x = ops.embed(tokens, self.weights["model.embed_tokens.weight"])
        for layer in range(self.config.num_hidden_layers):
            p, a = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
            h = self.norm(p + "input_layernorm", x)
            kv[layer, prefix : prefix + len(x)] = self.keys(a, h, positions, tables)
            y = mla(a, *self.queries(a, h, positions, tables), kv[layer], prefix, parents)
            x = self.linear(a + "o_proj", y.reshape(len(x), -1), x)
            mlp = self.moe if self.config.is_moe(layer) else self.mlp
            x = mlp(p + "mlp.", self.norm(p + "post_attention_layernorm", x), x)
        return self.linear("lm_head", self.norm("model.norm", x))

    def norm(self, name: str, x: Array) -> Array:
        return ops.rms_norm(x, self.weights[name + ".weight"], self.config.rms_norm_eps)

    def lora_norm(self, name: str, x: Array) -> Array:
        return ops.rms_norm(x, self.weights[name + ".weight"], LORA_NORM_EPS)

    def linear(self, name: str, x: Array, add: Array | None = None) -> Array:
        if name + ".qw" in self.weights:
            return ops.w4a16_gemm(x, self.weights[name + ".qw"], self.weights[name + ".sc"], self.group, add)
        return ops.gemm(x, self.weights[name + ".weight"], add)

    def queries(self, p: str, x: Array, positions: Array, tables: tuple[Array, Array]) -> tuple[Array, Array]:
        """[rows, heads, nope] and, roped, [rows, heads, rope]."""
        c = self.config
        if c.q_lora_rank is None:
            q = self.linear(p + "q_proj", x)
        else:
            latent = self.lora_norm(p + "q_a_layernorm", self.linear(p + "q_a_proj", x))
            q = self.linear(p + "q_b_proj", latent)
        q_nope, q_rope = np.split(q.reshape(len(x), c.num_attention_heads, -1), [c.qk_nope_head_dim], axis=-1)
        return q_nope, ops.rope(q_rope, positions, *tables)

    def keys(self, p: str, x: Array, positions: Array, tables: tuple[Array, Array]) -> Array:
        """What the cache holds, [rows, kv_lora + rope]: normed latent, then the roped key that all heads share."""
        new = self.linear(p + "kv_a_proj_with_mqa", x)
        latent, k_rope = np.split(new, [self.config.kv_lora_rank], axis=-1)
        k_rope = ops.rope(k_rope[:, None], positions, *tables)[:, 0]
        return np.concatenate((self.lora_norm(p + "kv_a_layernorm", latent), k_rope), axis=-1)

    def kv_b(self, p: str) -> tuple[Array, Array]:
        """Up-projections of the latent, W_UK [heads, nope, kv_lora] and W_UV [heads, v, kv_lora]: kv_b_proj holds
        them head by head, keys before values."""
        c = self.config
        w = self.weights[p + "kv_b_proj.weight"].reshape(c.num_attention_heads, -1, c.kv_lora_rank)
        return w[:, : c.qk_nope_head_dim], w[:, c.qk_nope_head_dim :]

    def mla_absorbed(self, p: str, q_nope: Array, q_rope: Array, kv: Array, prefix: int, parents: Array) -> Array:
        """W_UK moved to the query, W_UV to the output: attention runs in the latent. -> [rows, heads, v]."""
        w_uk, w_uv = self.kv_b(p)
        q_latent = ops.gemm(q_nope.swapaxes(0, 1), w_uk.swapaxes(1, 2)).swapaxes(0, 1)
        y = ops.tree_attention(q_latent, q_rope, kv, prefix, parents, self.softmax_scale)
        return ops.gemm(y.swapaxes(0, 1), w_uv).swapaxes(0, 1)

    def mla_naive(self, p: str, q_nope: Array, q_rope: Array, kv: Array, prefix: int, parents: Array) -> Array:
        """Keys and values of every head expanded, and a mask instead of a gather. -> [rows, heads, v]."""
        latent, k_rope = np.split(kv[: prefix + len(parents)], [self.config.kv_lora_rank], axis=-1)
        keys, values = (np.einsum("hdr,kr->hkd", w, latent) for w in self.kv_b(p))
        scores = np.einsum("qhd,hkd->hqk", q_nope, keys) + np.einsum("qhd,kd->hqk", q_rope, k_rope)
        visible = np.zeros(scores.shape[1:], bool)
        visible[:, :prefix] = True
        for row, parent in enumerate(parents):
            if parent >= 0:
                visible[row] = visible[parent]
            visible[row, prefix + row] = True
        weights = ops.softmax(np.where(visible, scores * self.dtype(self.softmax_scale), -np.inf))
        return np.einsum("hqk,hkd->qhd", weights, values)

    def mlp(self, p: str, x: Array, residual: Array | None = None) -> Array:
        gate_up = np.stack((self.linear(p + "gate_proj", x), self.linear(p + "up_proj", x)), axis=1)
        return self.linear(p + "down_proj", ops.swiglu(gate_up), residual)

    def moe(self, p: str, x: Array, residual: Array) -> Array:
        c, bias = self.config, self.weights[p + "gate.e_score_correction_bias"]
        routing = (c.num_experts_per_tok, c.n_group, c.topk_group, c.norm_topk_prob, c.routed_scaling_factor)
        experts, weights = ops.moe_route(self.linear(p + "gate", x), bias, *routing)
        shared = self.mlp(p + "shared_experts.", x) if c.n_shared_experts else None
        matrices = [self.weights[f"{p}experts.{name}{part}"] for name in PROJECTIONS for part in self.parts]
        if self.group:
            return ops.w4a16_moe_experts(x, experts, weights, *matrices, self.group, shared, residual)
        return ops.moe_experts(x, experts, weights, *matrices, shared, residual)


def chain(rows: int) -> Array:
    """Parents of a sequence: each row the child of the one before."""
    return np.arange(rows, dtype=np.int32) - 1
