"""Named calls of draft_script, each for the mistake it would show."""

from dataclasses import dataclass

import numpy as np

from engine import contract
from engine.measure import Case, Exact, Refusal, padded
from engine.operators import Call, Output, decode_state
from reference import drafters

KINDS = {
    kind: contract.contract("draft_script").constants["k" + kind.capitalize()]
    for kind in ("oracle", "noisy", "adversarial")
}


@dataclass(frozen=True, kw_only=True)
class DraftScriptCase(Case):
    kind: str
    p: float = 0.0
    seed: int = 1
    levels: int = 7
    vocab: int = 400
    prefix: int = 9
    script: int = 40  # tokens

    def call(self) -> Call:
        script = self.rng().integers(0, self.vocab, self.script, np.int32)
        script[-1] = 0
        return Call(
            dict(levels=self.levels, vocab=self.vocab, kind=KINDS[self.kind], p=self.p, seed=self.seed),
            dict(
                state=decode_state(prefix=self.prefix, n_rows=1),
                script=padded(script, self.script + 8),
                script_length=self.script,
                logits=Output((self.levels, self.vocab)),
            ),
        )

    def expected(self, call, outputs):
        script = call.args["script"][: self.script].tolist()
        logits = drafters.draft_script(self.kind, self.p, self.seed, script, self.prefix, self.levels, self.vocab)
        return {"logits": Exact(logits)}


CASES = [
    DraftScriptCase(name="oracle", risk="level 0 drafts position prefix + 1", kind="oracle"),
    DraftScriptCase(name="adversarial", risk="the script's token is -inf", kind="adversarial"),
    DraftScriptCase(name="never_wrong", risk="p = 0", kind="noisy", p=0.0),
    DraftScriptCase(
        name="sometimes_wrong",
        risk="64-bit hash, ranks of the script's token",
        kind="noisy",
        p=0.4,
        levels=15,
    ),
    DraftScriptCase(name="always_wrong", risk="p = 1", kind="noisy", p=1.0, levels=15),
    DraftScriptCase(name="other_seed", risk="the seed is 64 bits wide", kind="noisy", p=0.5, seed=2**61 + 12345),
    DraftScriptCase(name="negative_seed", risk="a signed seed", kind="noisy", p=0.5, seed=-3),
    DraftScriptCase(name="script_ends", risk="uniform past the script", kind="noisy", p=0.5, prefix=36, levels=7),
    DraftScriptCase(name="past_script", risk="no script left", kind="oracle", prefix=39),
    DraftScriptCase(name="two_tokens", risk="decoys modulo vocab - 1 = 1", kind="noisy", p=0.7, vocab=2, levels=12),
    DraftScriptCase(
        name="three_tokens",
        risk="both decoys coincide: the later wins",
        kind="noisy",
        p=1.0,
        vocab=3,
        levels=15,
    ),
    DraftScriptCase(name="odd_vocabulary", risk="tail of a vector", kind="adversarial", vocab=37),
    DraftScriptCase(name="one_level", risk="block size 2", kind="oracle", levels=1),
]

_SHAPE = DraftScriptCase(name="", risk="", kind="oracle").call().shape

REFUSALS = [
    Refusal("kind", dict(_SHAPE, kind=3), "kind"),
    Refusal("p", dict(_SHAPE, p=1.5), "p"),
    Refusal("one_token", dict(_SHAPE, vocab=1), "vocab"),
]
