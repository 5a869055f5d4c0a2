"""A divergence as the smallest input that shows it: one prompt, cut at the diverging row, to run again."""

import json
import subprocess
import sys
from pathlib import Path

from reference.bundle import read_safetensors, write_safetensors
from reference.files import read_json, write_text

GOLDEN, CASE = "golden.safetensors", "case.json"


def write_case(plan: dict, variant: str, prompt: str, step: int, tokens: int) -> str:
    """Writes results/cases/<bundle>/<prompt>/<step>/, which decodes `tokens` tokens; returns the command that does."""
    folder = Path("results/cases", plan["bundle"], prompt, str(step))
    tokens = min(tokens, plan["decode"]["max_new_tokens"])
    tensors, _ = read_safetensors(Path(plan["golden"]))
    mine = {
        name: tensor[:tokens] if tensor.ndim and not name.endswith((".prompt", ".noise")) else tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{prompt}.")
    }
    write_safetensors(folder / GOLDEN, mine, {"names": json.dumps([prompt])})
    case = plan | {
        "golden": str(folder / GOLDEN),
        "prompts": [prompt],
        "decode": plan["decode"] | {"max_new_tokens": tokens},
        "variants": {variant: plan["variants"][variant]},
    }
    write_text(folder / CASE, json.dumps(case, indent=2) + "\n")
    return f"python -m engine.verify --replay {folder}"


def replay(folder: Path) -> dict:
    """Runs the case's prompt again, into its folder, and returns the plan that judges it."""
    plan = read_json(folder / CASE)
    decode = plan["decode"]
    for variant in plan["variants"].values():
        common = {
            "library": variant["library"],
            "bundle": plan["bundle_file"],
            "golden": plan["golden"],
            "activations": variant["activations"],
            "block-size": decode["block_size"],
            "max-new-tokens": decode["max_new_tokens"],
            "stop-token-ids": json.dumps(decode["stop_token_ids"]),
        }
        variant["ar"] = run(common | {"mode": "ar"}, folder / "ar.safetensors")
        for kind in variant["ddtree"]:
            drafter = json.dumps(decode["drafter"] | {"kind": kind})
            tree = {"mode": "ddtree", "tree-budget": decode["tree_budget"], "drafter": drafter, "script": variant["ar"]}
            variant["ddtree"][kind] = run(common | tree, folder / f"ddtree.{kind}.safetensors")
    return plan


def run(options: dict, output: Path) -> str:
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    subprocess.run([sys.executable, "-m", "engine.run", *arguments, "--output", str(output)], check=True)
    return str(output)
