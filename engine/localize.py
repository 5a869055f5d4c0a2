"""Which layer a wrong logit comes from: the engine's KV cache against the reference's, position by position."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.evidence import Decoded, Golden
from reference.bundle import Bundle
from reference.model import Model, chain


@dataclass(frozen=True)
class Origin:
    """The first cache entry out of bounds (layer, position, column), or the place after the last layer's cache."""

    layer: int
    hint: str
    position: int | None = None
    column: int | None = None
    got: float = 0.0
    want: float = 0.0


def locate(bundle_file: str, golden: Golden, ar: Decoded, rows: int, floor: float, noise_factor: float) -> Origin:
    """Decodes the golden's first `rows` rows with the reference and compares what each layer cached.

    An entry is out of bounds as a logit is: by more than `floor` and `noise_factor` times float32's own noise.
    """
    bundle = Bundle.read(Path(bundle_file))
    sequence = np.concatenate((golden.prompt, golden.tokens[: rows - 1]))
    exact, single = (cache(Model(bundle, dtype), sequence) for dtype in (np.float64, np.float32))
    bound = max(floor, noise_factor * float(np.abs(single - exact).max()))
    error = np.abs(ar.kv[:, : len(sequence)].astype(np.float64) - exact)
    layers = len(exact)
    over = np.argwhere(~(error <= bound).swapaxes(0, 1))  # position, layer, column
    if not len(over):
        hint = f"every layer's cache agrees, so look at layer {layers - 1} after its cache, the last norm and lm_head"
        return Origin(layers - 1, hint)
    position, layer, column = map(int, over[0])
    if layer:
        hint = (
            f"layer {layer - 1}'s cache agrees, so look between it and layer {layer}'s: attention, o_proj, MLP, norms"
        )
    else:
        hint = "look at embed_tokens, input_layernorm, kv_a_proj_with_mqa, kv_a_layernorm and RoPE"
    return Origin(layer, hint, position, column, ar.kv[layer, position, column], exact[layer, position, column])


def cache(model: Model, sequence: np.ndarray) -> np.ndarray:
    kv = model.empty_kv(len(sequence))
    model.forward(sequence, kv, 0, chain(len(sequence)))
    return kv
