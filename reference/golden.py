"""Golden outputs: greedy float64 decoding of every prompt, and numpy float32's own distance from it.

python -m reference.golden --bundle FILE --prompts JSON --max-new-tokens N --stop-token-ids JSON --output FILE
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from reference import stage
from reference.bundle import Bundle, write_safetensors
from reference.decode import decode_ar
from reference.model import Model, chain

FLOOR = 1e-5  # least bound on |engine - golden|
LOGIT_STD = (0.5, 2.0)


def bound(noise: float) -> float:
    """How far float32 logits may be from the golden ones."""
    return max(FLOOR, 2 * noise)


def prompt_tokens(prompt: dict, vocab: int) -> list[int]:
    """{name, text | tokens}: the UTF-8 bytes of a text are its tokens. Raises ValueError naming the prompt."""
    field = "text" if "text" in prompt else "tokens"
    tokens = list(prompt["text"].encode()) if field == "text" else prompt["tokens"]
    where = f"prompts.{prompt['name']}.{field}"
    if field == "text" and vocab < 256:
        raise ValueError(f"{where}: {prompt['text']!r}: bytes are tokens, which needs vocab_size >= 256, not {vocab}")
    if not tokens:
        raise ValueError(f"{where}: empty: needs a token")
    for token in tokens:
        if not 0 <= token < vocab:
            raise ValueError(f"{where}: {token}: outside the vocabulary of {vocab}")
    return tokens


def teacher_forced_logits(model: Model, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """[len(tokens), vocab]: row t chooses tokens[t] after prompt and tokens[:t]."""
    sequence = np.array([*prompt, *tokens[:-1]])
    logits = model.forward(sequence, model.empty_kv(len(sequence)), 0, chain(len(sequence)))
    return logits[len(prompt) - 1 :]


def check(name: str, logits: np.ndarray, margins: np.ndarray, noise: float) -> None:
    """Golden tokens must be decided by the model, not by rounding. Raises ValueError naming prompt and step."""
    std = float(logits.std())
    if not LOGIT_STD[0] <= std <= LOGIT_STD[1]:
        raise ValueError(f"prompt {name}: logit std {std:.3g} is outside {LOGIT_STD}: choose another seed or scale")
    step = int(margins.argmin())
    if not margins[step] > 10 * bound(noise):
        raise ValueError(
            f"prompt {name}, step {step}: top-1/top-2 margin {margins[step]:.3g} is not above 10 x bound "
            f"{bound(noise):.3g}: choose another seed"
        )


def golden(
    bundle: Bundle, prompts: Sequence[dict], max_new_tokens: int, stop_ids: Sequence[int]
) -> dict[str, np.ndarray]:
    """Per prompt: .prompt and .tokens int32, .logits float64 rounded to float32 [tokens, vocab], .noise (the largest
    |float32 - float64| of them) and .margin [tokens] (top-1 minus top-2) float64."""
    exact, single = Model(bundle, np.float64), Model(bundle, np.float32)
    context = exact.config.max_position_embeddings
    tensors = {}
    for entry in prompts:
        name, prompt = entry["name"], prompt_tokens(entry, exact.config.vocab_size)
        if len(prompt) + max_new_tokens > context:
            raise ValueError(
                f"prompts.{name}: {len(prompt)} tokens: with {max_new_tokens} new ones over the context of {context}"
            )
        output = decode_ar(exact, prompt, max_new_tokens, stop_ids)
        logits = np.stack(output.logits)
        noise = float(np.abs(teacher_forced_logits(single, prompt, output.tokens) - logits).max())
        top = np.sort(logits, axis=-1)
        margins = top[:, -1] - top[:, -2]
        check(name, logits, margins, noise)
        print(
            f"{name}: {len(prompt)} + {len(output.tokens)} tokens, logit std {logits.std():.3f}, "
            f"least margin {margins.min():.2e}, noise {noise:.2e}, bound {bound(noise):.2e}"
        )
        tensors |= {
            f"{name}.prompt": np.array(prompt, np.int32),
            f"{name}.tokens": np.array(output.tokens, np.int32),
            f"{name}.logits": logits.astype(np.float32),
            f"{name}.noise": np.array([noise]),
            f"{name}.margin": margins,
        }
    return tensors


def prompt_list(text: str) -> list[dict]:
    prompts = json.loads(text)
    sound = isinstance(prompts, list)
    for prompt in prompts if sound else ():
        sound &= isinstance(prompt, dict) and "name" in prompt and ("text" in prompt) != ("tokens" in prompt)
    if not sound:
        raise argparse.ArgumentTypeError(f"{text}: must be a list of maps with a name and a text or tokens")
    return prompts


def main() -> None:
    parser = stage.Parser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--prompts", type=prompt_list, required=True, help='JSON: [{"name": …, "text" | "tokens": …}]')
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--stop-token-ids", type=json.loads, default=[])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens: {args.max_new_tokens}: must be at least 1")
    tensors = golden(Bundle.read(args.bundle), args.prompts, args.max_new_tokens, args.stop_token_ids)
    names = [prompt["name"] for prompt in args.prompts]
    metadata = {"names": names, "max_new_tokens": args.max_new_tokens, "stop_token_ids": args.stop_token_ids}
    write_safetensors(args.output, tensors, {name: json.dumps(value) for name, value in metadata.items()})


if __name__ == "__main__":
    stage.run(main)
