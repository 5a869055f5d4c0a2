"""What bf16 activations are judged by: float64 on bf16-rounded weights, and the error of plain torch bf16 against it.

python -m reference.bf16 --bundle FILE --golden FILE --output FILE

Teacher-forced: row t of the logits follows the prompt and the first t golden tokens, whatever bf16 would have chosen.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from reference import ops, rope, stage
from reference.bundle import Bundle, as_float, read_safetensors, round_to_bf16, write_safetensors
from reference.golden import teacher_forced_logits
from reference.model import LORA_NORM_EPS, Model
from reference.tensors import PROJECTIONS

BF16 = torch.bfloat16


def rounded(bundle: Bundle) -> Bundle:
    """Every float weight rounded to bf16, as the engine rounds them for bf16 activations; the router's bias is not."""
    tensors = {
        name: x if x.dtype == np.int32 or name.endswith("_bias") else round_to_bf16(as_float(x))
        for name, x in bundle.tensors.items()
    }
    return Bundle(bundle.fields, bundle.quant, tensors)


class TorchModel:
    """The same transformer in eager torch, every tensor bf16 but the router's logits and the softmax (as published)."""

    def __init__(self, bundle: Bundle):
        self.config, group = bundle.config, bundle.quant and bundle.quant["group_size"]
        self.softmax_scale = rope.softmax_scale(self.config)
        self.weights = {}
        for name, x in bundle.tensors.items():
            if name.endswith(".sc"):
                continue
            if name.endswith(".qw"):
                name, stem = name.removesuffix(".qw") + ".weight", name.removesuffix(".qw")
                x = ops.dequantize(x, as_float(bundle.tensors[stem + ".sc"]), group)
            self.weights[name] = torch.tensor(as_float(x)).to(torch.float32 if name.endswith("_bias") else BF16)

    def forward(self, tokens: np.ndarray) -> np.ndarray:
        """tokens [rows] -> logits float32 [rows, vocab]."""
        cos, sin = (torch.tensor(t).to(BF16) for t in rope.rope_tables(self.config, len(tokens)))
        x = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for layer in range(self.config.num_hidden_layers):
            p = f"model.layers.{layer}."
            x = x + self.attention(p + "self_attn.", self.norm(p + "input_layernorm", x), cos, sin)
            mlp = self.moe if self.config.is_moe(layer) else self.mlp
            x = x + mlp(p + "mlp.", self.norm(p + "post_attention_layernorm", x))
        return self.linear("lm_head", self.norm("model.norm", x)).float().numpy()

    def linear(self, name, x):
        return F.linear(x, self.weights[name + ".weight"])

    def norm(self, name, x, eps=None):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + (eps or self.config.rms_norm_eps))
        return self.weights[name + ".weight"] * wide.to(BF16)

    def attention(self, p, x, cos, sin):
        c, rows = self.config, len(x)
        if c.q_lora_rank is None:
            q = self.linear(p + "q_proj", x)
        else:
            latent = self.norm(p + "q_a_layernorm", self.linear(p + "q_a_proj", x), LORA_NORM_EPS)
            q = self.linear(p + "q_b_proj", latent)
        q = q.view(rows, c.num_attention_heads, c.qk_head_dim).transpose(0, 1)
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        latent, k_rope = self.linear(p + "kv_a_proj_with_mqa", x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        latent = self.norm(p + "kv_a_layernorm", latent, LORA_NORM_EPS)
        kv = self.linear(p + "kv_b_proj", latent).view(rows, c.num_attention_heads, -1).transpose(0, 1)
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_rope = rotate(k_rope, cos, sin).expand(c.num_attention_heads, -1, -1)
        scores = torch.cat((q_nope, rotate(q_rope, cos, sin)), -1) @ torch.cat((k_nope, k_rope), -1).transpose(1, 2)
        hidden = torch.full((rows, rows), float("-inf"), dtype=BF16).triu(1)
        weights = torch.softmax(scores * self.softmax_scale + hidden, -1, dtype=torch.float32).to(BF16)
        return self.linear(p + "o_proj", (weights @ v).transpose(0, 1).reshape(rows, -1))

    def mlp(self, p, x):
        gate, up, down = (p + projection for projection in PROJECTIONS)
        return self.linear(down, F.silu(self.linear(gate, x)) * self.linear(up, x))

    def moe(self, p, x):
        c = self.config
        logits = F.linear(x.float(), self.weights[p + "gate.weight"].float()).numpy()
        bias = self.weights[p + "gate.e_score_correction_bias"].numpy()
        routing = (c.num_experts_per_tok, c.n_group, c.topk_group, c.norm_topk_prob, c.routed_scaling_factor)
        experts, weights = ops.moe_route(logits, bias, *routing)
        y = torch.zeros_like(x)
        for row in range(len(x)):
            for expert, weight in zip(experts[row], weights[row], strict=True):
                y[row] += (self.mlp(f"{p}experts.{expert}.", x[row]) * float(weight)).to(BF16)
        return y + self.mlp(p + "shared_experts.", x) if c.n_shared_experts else y


def rotate(x, cos, sin):
    """x [..., rows, dim], pairs (2i, 2i+1)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def golden(bundle: Bundle, goldens: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
    """Per prompt: .logits float64 rounded to float32 [tokens, vocab], .errors [tokens]: max |torch bf16 - float64|.

    By position, because bf16 sends a token whose router nearly ties to another expert now and then: that position is
    far off (over 1), in torch as in the engine, but not the same one. So the judge compares medians.
    """
    bundle = rounded(bundle)
    exact, plain = Model(bundle, np.float64), TorchModel(bundle)
    tensors = {}
    for name in names:
        prompt, tokens = goldens[f"{name}.prompt"], goldens[f"{name}.tokens"]
        logits = teacher_forced_logits(exact, prompt, tokens)
        with torch.inference_mode():
            torch_logits = plain.forward(np.array([*prompt, *tokens[:-1]]))[len(prompt) - 1 :]
        errors = np.abs(torch_logits - logits).max(axis=-1)
        print(f"{name}: plain torch bf16 is {np.median(errors):.3g} (median; at most {errors.max():.3g}) from float64")
        tensors |= {f"{name}.logits": logits.astype(np.float32), f"{name}.errors": errors}
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--golden", type=Path, required=True, help="whose prompts and tokens to follow")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the order of torch's sums must not depend on the machine's cores
    goldens, metadata = read_safetensors(args.golden)
    names = json.loads(metadata["names"])
    tensors = golden(Bundle.read(args.bundle), goldens, names)
    write_safetensors(args.output, tensors, {"names": json.dumps(names)})


if __name__ == "__main__":
    stage.run(main)
