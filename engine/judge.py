"""What must hold of the evidence, one function a demand. Faults go to `Findings`; none stops the other demands."""

import hashlib
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from engine.evidence import Bf16Golden, Decoded, Golden, Run, read_check
from engine.localize import locate
from reference.ddtree import build_tree, log_probs_top_k
from reference.drafters import draft_script


@dataclass(frozen=True)
class Divergence:
    """The first place where two decodings that must agree do not.

    `row` counts committed rows from the prompt's last token, whose logits choose the first new token; rows before it
    are the prompt's own, negative, and belong to step 0. `tokens`: how many have to be decoded to see it.
    """

    variant: str
    run: str
    against: str
    prompt: str
    tokens: int
    step: int
    row: int
    layer: int | str
    tensor: str
    got: object
    want: object
    hint: str = ""

    def __str__(self) -> str:
        return (
            f"first divergence: {self.variant} {self.run} against {self.against}: prompt {self.prompt}, "
            f"step {self.step}, row {self.row}, layer {self.layer}, tensor {self.tensor}: "
            f"{self.got} against {self.want}{self.hint and '; ' + self.hint}"
        )


@dataclass
class Findings:
    """What is wrong, in the order it was found."""

    operators: list[str] = field(default_factory=list)  # over their budget: the likely root
    faults: list[str] = field(default_factory=list)
    divergence: Divergence | None = None

    @property
    def none(self) -> bool:
        return not (self.operators or self.faults or self.divergence)

    def diverged(self, divergence: Divergence) -> None:
        self.divergence = self.divergence or divergence


# ---- operators -------------------------------------------------------------------------------------------------------


def judge_check(file: str, findings: Findings) -> None:
    """One operator within its budgets. A NaN is over any budget, and no cases are no check."""
    check = read_check(file)
    over = [case for case in check.cases if not case["max_abs_error"] <= case["budget"]]
    name = f"operator {check.operator} ({check.backend})"
    if not check.cases:
        findings.operators.append(f"{name}: no case was checked")
    elif over:
        first = over[0]
        findings.operators.append(
            f"{name}: {len(over)} of {len(check.cases)} cases over budget, first {first['name']}: "
            f"error {first['max_abs_error']:.3g}, budget {first['budget']:.3g}"
            + (f": {first['message']}" if first.get("message") else "")
        )


def judge_settings(run: Run, expected: dict, listed: list[str], findings: Findings) -> None:
    """The run was made as the plan says, and calls no operator whose edits would not rerun it."""
    for key, value in expected.items():
        if run.settings[key] != value:
            findings.faults.append(f"{run.file}: {key}: {run.settings[key]}: the plan says {value}")
    for operator in sorted(set(run.settings["operators"]) - set(listed)):
        findings.faults.append(f"{run.file}: operators: {operator}: called, but not listed in rules/common.smk")


# ---- plain decoding against the golden -------------------------------------------------------------------------------


def judge_ar(variant: str, name: str, golden: Golden, ar: Decoded, plan: dict, findings: Findings) -> dict:
    """Equal tokens, and logits within the bound: a floor, or a multiple of float32's own noise if that is larger."""
    floor, factor = plan["verify"]["logit_floor"], plan["verify"]["noise_factor"]
    bound = max(floor, factor * golden.noise)
    count = min(len(golden.tokens), len(ar.tokens))
    equal = golden.tokens[:count] == ar.tokens[:count]
    row = count if equal.all() else int(equal.argmin())  # the first token that differs; later rows follow another token
    error = np.abs(ar.logits[: row + 1][:count].astype(np.float64) - golden.logits[: row + 1])
    record = {
        "tokens": len(ar.tokens),
        "exact": int(equal.sum()),
        "max_abs_logit_diff": float(error.max(initial=0)),
        "bound": bound,
        "noise": golden.noise,
    }
    over = np.argwhere(~(error <= bound))
    if not len(over) and record["exact"] == len(golden.tokens) == len(ar.tokens):
        return record
    findings.faults.append(
        f"{variant} ar, prompt {name}: tokens={record['exact']}/{len(golden.tokens)} "
        f"max_abs_logit_diff={record['max_abs_logit_diff']:.3g} bound={bound:.3g}"
    )
    if findings.divergence:
        return record
    layer, hint, visible = "head", "", row
    tensor, got, want = "tokens", *(int(x[row]) if row < len(x) else None for x in (ar.tokens, golden.tokens))
    if len(over):
        row, column = map(int, over[0])
        visible = row
        tensor, got, want = f"logits[{column}]", ar.logits[row, column], golden.logits[row, column]
        origin = locate(plan["bundle_file"], golden, ar, row + 1, floor, factor)
        layer, hint = origin.layer, origin.hint
        if origin.position is not None:
            row = origin.position - (len(golden.prompt) - 1)
            tensor, got, want = f"kv[{origin.position}, {origin.column}]", origin.got, origin.want
    place = (visible + 1, max(row, 0), row, layer, tensor)
    findings.diverged(Divergence(variant, "ar", "golden", name, *place, got, want, hint))
    return record


def judge_ar_bf16(
    variant: str,
    goldens: dict[str, Golden],
    bf16: dict[str, Bf16Golden],
    decoded: dict[str, Decoded],
    plan: dict,
    findings: Findings,
) -> dict[str, dict]:
    """{prompt: record}: logits after the golden's tokens as near to float64 as plain torch bf16 comes, within a factor.

    Judged by the median over all positions of all prompts: bf16 sends a token whose router nearly ties to another
    expert now and then, in torch as here, but not at the same positions; such a position, and those that attend to it
    from near, say nothing about the arithmetic.
    """
    errors, records = {}, {}
    for name, ar in decoded.items():
        count = len(goldens[name].tokens)
        errors[name] = np.abs(ar.forced_logits.astype(np.float64) - bf16[name].logits[:count]).max(axis=-1)
        records[name] = {
            "tokens": len(ar.tokens),
            "exact": int((goldens[name].tokens[: len(ar.tokens)] == ar.tokens[:count]).sum()),
            "max_abs_logit_diff": float(errors[name].max()),
        }
    median = float(np.median(np.concatenate(list(errors.values()))))
    noise = float(np.median(np.concatenate([bf16[name].errors[: len(errors[name])] for name in decoded])))
    bound = plan["verify"]["bf16_factor"] * noise
    if not median <= bound:
        findings.faults.append(f"{variant} ar, all prompts: median_logit_diff={median:.3g} bound={bound:.3g}")
        name = max(errors, key=lambda name: np.nan_to_num(np.median(errors[name]), nan=np.inf))
        row = int((~(errors[name] <= bound)).argmax())
        got, want = decoded[name].forced_logits[row], bf16[name].logits[row]
        column = int(np.abs(got - want).argmax())
        place = (name, row + 1, row, row, "head", f"logits[{column}]", got[column], want[column])
        findings.diverged(Divergence(variant, "ar", "bf16 golden", *place))
    return {
        name: record | {"median_logit_diff": median, "bound": bound, "noise": noise} for name, record in records.items()
    }


# ---- tree decoding against plain decoding ----------------------------------------------------------------------------


def judge_ddtree(variant: str, run: str, name: str, ar: Decoded, tree: Decoded, findings: Findings) -> dict:
    """Equal tokens, and the same bytes in the logits and the KV cache of every committed row."""
    rows, steps = int(tree.starts[-1]), len(tree.rounds) - 1
    record = {
        "steps": steps,
        "committed": rows,
        "avg_accept": (rows - 1) / steps if steps else 0.0,
        "exact": np.array_equal(ar.tokens, tree.tokens),
        "bitwise_logits": same_bytes(tree.logits, ar.logits[:rows]),
        "bitwise_kv": same_bytes(tree.kv, ar.kv[:, : tree.kv.shape[1]]),
    }
    if not (record["exact"] and record["bitwise_logits"] and record["bitwise_kv"]):
        findings.faults.append(
            f"{variant} {run}, prompt {name}: exact={record['exact']} "
            f"bitwise_logits={record['bitwise_logits']} bitwise_kv={record['bitwise_kv']}"
        )
        row, *place = first_difference(ar, tree)
        findings.diverged(Divergence(variant, run, "ar", name, max(row, 0) + 1, tree.round_of(row), row, *place))
    return record


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def first_difference(ar: Decoded, tree: Decoded) -> tuple[int, int | str, str, object, object]:
    """(row, layer, tensor, tree's value, plain value): rows in order, in each the layers in order, then the logits."""
    before = tree.before
    for position in range(min(ar.kv.shape[1], tree.kv.shape[1])):
        row = position - before
        for layer in range(len(ar.kv)):
            at = first_unequal(tree.kv[layer, position], ar.kv[layer, position])
            if at is not None:
                return row, layer, f"kv[{position}, {at}]", tree.kv[layer, position, at], ar.kv[layer, position, at]
        if 0 <= row < min(len(ar.logits), len(tree.logits)):
            at = first_unequal(tree.logits[row], ar.logits[row])
            if at is not None:
                return row, "head", f"logits[{at}]", tree.logits[row, at], ar.logits[row, at]
    if not np.array_equal(tree.tokens, ar.tokens):
        count = min(len(tree.tokens), len(ar.tokens))
        unequal = np.flatnonzero(tree.tokens[:count] != ar.tokens[:count])
        row = int(unequal[0]) if len(unequal) else count
        return row, "head", "tokens", *(int(x[row]) if row < len(x) else None for x in (tree.tokens, ar.tokens))
    return min(len(tree.logits), len(ar.logits)), "head", "rows", len(tree.logits), len(ar.logits)


def first_unequal(a: np.ndarray, b: np.ndarray) -> int | None:
    """Index of the first entry whose bytes differ (so that -0 is not 0, and a NaN is itself)."""
    bits = f"u{a.itemsize}"
    unequal = np.flatnonzero(a.view(bits) != b.view(bits))
    return int(unequal[0]) if len(unequal) else None


def judge_rounds(variant: str, run: str, name: str, decoded: Decoded, findings: Findings) -> None:
    """The run's own counts and its hashes, taken round by round, hold at its end: nothing was overwritten later."""
    where, stats, starts = f"{variant} {run}, prompt {name}", decoded.stats, decoded.starts
    if (stats["steps"], stats["committed"]) != (len(decoded.rounds) - 1, starts[-1]):
        findings.faults.append(f"{where}: steps={stats['steps']} committed={stats['committed']} are not its rounds'")
    for step, (start, end) in enumerate(pairwise(starts)):
        kv = decoded.kv[:, decoded.before + start : decoded.before + end]
        for tensor, data in (("logits", decoded.logits[start:end]), ("kv", kv)):
            now, then = hashlib.sha256(data.tobytes()).hexdigest(), stats[f"{tensor}_sha256"][step]
            if now != then:
                findings.faults.append(f"{where}: {tensor} of step {step} changed after they were committed")
                place = (len(decoded.tokens), step, int(start), "all", f"{tensor} sha256", now[:12], then[:12])
                findings.diverged(Divergence(variant, run, "its own round", name, *place))
                return


def judge_acceptance(
    variant: str, run: str, name: str, prompt: np.ndarray, ar: Decoded, tree: Decoded, decode: dict, findings: Findings
) -> None:
    """Every round accepts what the drafter's tree holds of the plain continuation.

    Without this, a verify call that gets every row but the root wrong would pass: it accepts nothing, and what it
    commits is right. Two nodes whose scores tie to rounding may change places at the edge of the budget, so one node
    more or less is allowed for.
    """
    script = np.concatenate((prompt, ar.tokens, ar.overrun))
    levels, vocab, budget = decode["block_size"] - 1, tree.logits.shape[1], decode["tree_budget"]
    for step in range(1, len(tree.rounds)):
        row, accepted = int(tree.starts[step]), int(tree.rounds[step, 1])
        prefix = len(prompt) - 1 + row
        logits = draft_script(**decode["drafter"], script=script, prefix=prefix, levels=levels, vocab=vocab)
        least, due, most = (rows_on_path(logits, budget + slack, script[prefix + 1 :]) for slack in (-1, 0, 1))
        if not least <= accepted <= most:
            findings.faults.append(f"{variant} {run}, prompt {name}: step {step} accepts {accepted} rows, not {due}")
            place = (row + due + 1, step, row + min(accepted, due), "head", "accepted rows", accepted, due)
            findings.diverged(Divergence(variant, run, "the drafted tree", name, *place))
            return


def rows_on_path(logits: np.ndarray, budget: int, continuation: np.ndarray) -> int:
    """Rows of the tree that is drafted from `logits`, the root included, that follow `continuation`."""
    if not len(logits) or budget < 1:
        return 1
    tree = build_tree(*log_probs_top_k(logits, min(budget, logits.shape[1])), budget)
    children = {(int(tree.parents[row]), int(tree.tokens[row])): row for row in range(1, len(tree.tokens))}
    row, count = 0, 1
    for token in continuation:
        row = children.get((row, int(token)))
        if row is None:
            break
        count += 1
    return count


# ---- quantised against float32 ---------------------------------------------------------------------------------------


def judge_quantised(
    goldens: dict[str, Golden], float32: dict[str, Golden], findings: Findings
) -> dict[str, int | None]:
    """{prompt: first token at which the quantised golden leaves the float32 one}. Few tokens may well be the same;
    logits that are the same for every prompt are no INT4's."""
    leaves, same = {}, []
    for name, golden in goldens.items():
        other = float32[name]
        count = min(len(golden.tokens), len(other.tokens))
        unequal = np.flatnonzero(golden.tokens[:count] != other.tokens[:count])
        leaves[name] = int(unequal[0]) if len(unequal) else None
        same.append(np.array_equal(golden.logits[:count], other.logits[:count]))
    if all(same):
        findings.faults.append("the quantised golden has the float32 golden's logits, for every prompt: not quantised")
    return leaves
