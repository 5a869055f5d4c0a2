"""The judge: operator checks, plain decoding against the goldens, tree decoding against plain decoding by bytes.

python -m engine.verify --plan results/plans/<bundle>.json --output results/<bundle>.pass
python -m engine.verify --replay results/cases/<bundle>/<prompt>/<step>
python -m engine.verify --checks results/checks/*/*.json

The plan names the evidence and the tolerances; nothing else knows tolerances. The verdict is written only when
everything holds. Otherwise: exit status 1, every failing operator, what else is wrong, then one line
`first divergence: …` and the command that replays it.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from statistics import fmean

from engine import judge
from engine.case import replay, write_case
from engine.evidence import Golden, read_bf16_goldens, read_goldens, read_run
from engine.judge import Findings
from reference import stage
from reference.files import read_json, write_text


def judge_runs(plan: dict, variant: str, goldens: dict[str, Golden], findings: Findings) -> dict[str, dict]:
    """One backend and activation type -> {prompt: {"ar": …, drafter kind: …}}."""
    evidence, decode = plan["variants"][variant], plan["decode"]
    made = {key: evidence[key] for key in ("backend", "activations")} | {"block_size": decode["block_size"]}
    ar_run = read_run(evidence["ar"])
    judge.judge_settings(ar_run, made | {"mode": "ar"}, evidence["operators"]["ar"], findings)
    plain = {name: ar_run.prompts[name] for name in plan["prompts"]}
    if evidence["bf16_golden"]:
        bf16 = read_bf16_goldens(evidence["bf16_golden"])
        judged = judge.judge_ar_bf16(variant, goldens, bf16, plain, plan, findings)
    else:
        judged = {name: judge.judge_ar(variant, name, goldens[name], ar, plan, findings) for name, ar in plain.items()}
    records = {name: {"ar": record} for name, record in judged.items()}
    for name, ar in plain.items():
        judge.judge_rounds(variant, "ar", name, ar, findings)
    configured = decode["drafter"]["kind"]
    for kind in sorted(evidence["ddtree"], key=lambda kind: (kind != configured, kind)):
        drafted = {"tree_budget": decode["tree_budget"], "drafter": decode["drafter"] | {"kind": kind}}
        tree_run, run = read_run(evidence["ddtree"][kind]), f"ddtree ({kind})"
        judge.judge_settings(tree_run, made | drafted | {"mode": "ddtree"}, evidence["operators"]["ddtree"], findings)
        for name in plan["prompts"]:
            ar, tree = ar_run.prompts[name], tree_run.prompts[name]
            records[name][kind] = judge.judge_ddtree(variant, run, name, ar, tree, findings)
            judge.judge_rounds(variant, run, name, tree, findings)
            prompt = goldens[name].prompt
            judge.judge_acceptance(variant, run, name, prompt, ar, tree, decode | drafted, findings)
    return records


def summary_line(variant: str, prompt: str, record: dict, expected: int) -> str:
    """What a person wants to see of one prompt."""
    ar = record["ar"]
    judged = judged_error(ar)
    parts = [f"{variant} {prompt}: tokens={ar['exact']}/{expected} {judged}={ar[judged]:.2e} bound={ar['bound']:.2e}"]
    for kind, tree in record.items():
        if kind != "ar":
            same = "bitwise" if tree["bitwise_logits"] and tree["bitwise_kv"] else "NOT bitwise"
            parts.append(
                f"{kind} steps={tree['steps']} committed={tree['committed']} avg_accept={tree['avg_accept']:.2f} {same}"
            )
    return " | ".join(parts)


def means(records: list[dict]) -> dict:
    """Of one mode over the prompts: counts as means, flags as all(), the error of the prompt nearest its bound."""
    result = {}
    for key, first in records[0].items():
        values = [record[key] for record in records]
        whole = isinstance(first, int) and sum(values) % len(values) == 0
        result[key] = all(values) if isinstance(first, bool) else sum(values) // len(values) if whole else fmean(values)
    if "bound" in result:
        result |= max(records, key=lambda record: record[judged_error(record)] / record["bound"]) | {
            key: result[key] for key in ("tokens", "exact")
        }
    return result


def judged_error(ar: dict) -> str:
    """The key of what is held against the bound: bf16 is judged by its median position."""
    return "median_logit_diff" if "median_logit_diff" in ar else "max_abs_logit_diff"


def sections(record: dict, decode: dict) -> dict:
    """{"ar", kind …} -> the verdict's ar, ddtree (the configured drafter) and drafters (all others)."""
    kind, tree = decode["drafter"]["kind"], {key: decode[key] for key in ("block_size", "tree_budget")}
    others = {name: part for name, part in record.items() if name not in ("ar", kind)}
    return {"ar": record["ar"], "ddtree": {"drafter": kind} | record[kind] | tree, "drafters": others}


def verdict(plan: dict, records: dict[str, dict[str, dict]], leaves: dict | None) -> dict:
    """The content of results/<bundle>.pass: deterministic, no times."""
    decode = plan["decode"]
    backends = {}
    for variant, prompts in records.items():
        modes = next(iter(prompts.values()))
        backends[variant] = sections({mode: means([p[mode] for p in prompts.values()]) for mode in modes}, decode)
    per_prompt = [
        {
            "name": name,
            "backends": {variant: sections(prompts[name], decode) for variant, prompts in records.items()},
        }
        for name in plan["prompts"]
    ]
    return {
        "bundle": plan["bundle"],
        "verdict": "pass",
        "backends": backends,
        "prompts": per_prompt,
        "fp32_divergence": leaves,
        "inputs": {file: sha256(file) for file in evidence_files(plan)},
        "versions": plan["versions"],
    }


def evidence_files(plan: dict) -> list[str]:
    files = [plan["bundle_file"], plan["golden"], *([plan["float32_golden"]] if plan["float32_golden"] else [])]
    for evidence in plan["variants"].values():
        files += [evidence["ar"], *evidence["ddtree"].values(), *evidence["checks"]]
        files += [evidence["bf16_golden"]] if evidence["bf16_golden"] else []
    return files


def sha256(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def report(findings: Findings) -> None:
    """Root cause first: operators, then what follows from them, then the first divergence."""
    for line in (*findings.operators, *findings.faults):
        print(line)
    if findings.divergence:
        if not findings.operators:
            print("every operator passes its check: look at what joins them (engine/core, reference/model.py)")
        print(findings.divergence)


def judge_bundle(plan: dict, output: Path) -> Findings:
    """The whole judgement; writes the verdict if nothing is wrong, else the case of the first divergence."""
    findings = Findings()
    goldens = read_goldens(plan["golden"])
    for evidence in plan["variants"].values():
        for file in evidence["checks"]:
            judge.judge_check(file, findings)
    records = {variant: judge_runs(plan, variant, goldens, findings) for variant in plan["variants"]}
    leaves = None
    if plan["float32_golden"]:
        leaves = judge.judge_quantised(goldens, read_goldens(plan["float32_golden"]), findings)
    for variant, prompts in records.items():
        for name, record in prompts.items():
            print(plan["bundle"], summary_line(variant, name, record, len(goldens[name].tokens)))
    report(findings)
    if findings.none:
        write_text(output, json.dumps(verdict(plan, records, leaves), indent=2) + "\n")
    elif found := findings.divergence:
        print(f"replay it: {write_case(plan, found.variant, found.prompt, found.step, found.tokens)}")
    print(f"{plan['bundle']}: {'pass' if findings.none else 'fail'}")
    return findings


def judge_again(case: Path) -> Findings:
    """Runs and judges one case of an earlier failure."""
    findings, plan = Findings(), replay(case)
    for variant in plan["variants"]:
        judge_runs(plan, variant, read_goldens(plan["golden"]), findings)
    report(findings)
    if findings.none:
        print(f"{case}: does not diverge any more")
    return findings


def judge_checks(files: list[str]) -> Findings:
    """Operator checks alone, for when no verdict could be reached."""
    findings = Findings()
    for file in files:
        judge.judge_check(file, findings)
    report(findings)
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--plan", type=Path)
    what.add_argument("--replay", type=Path, metavar="CASE")
    what.add_argument("--checks", nargs="+", metavar="FILE")
    parser.add_argument("--output", type=Path, help="the verdict; with --plan")
    args = parser.parse_args()
    if args.checks:
        findings = judge_checks(args.checks)
    elif args.replay:
        findings = judge_again(args.replay)
    elif args.output:
        findings = judge_bundle(read_json(args.plan), args.output)
    else:
        parser.error("--plan needs --output")
    return 0 if findings.none else 1


if __name__ == "__main__":
    stage.run(lambda: sys.exit(main()))
