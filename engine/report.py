"""All verdicts on one page: results/summary.json and .md.

python -m engine.report results/*.pass --json FILE --markdown FILE
"""

import argparse
import json
from pathlib import Path

from reference.files import write_text

COLUMNS = (
    "| bundle | backend | tokens | logit error / bound | drafter | steps | committed | avg_accept | exact | bitwise |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
)


def row(bundle: str, backend: str, ar: dict, drafter: str, tree: dict) -> str:
    bitwise = tree["bitwise_logits"] and tree["bitwise_kv"]
    cells = (
        bundle,
        backend,
        f"{ar['exact']:g}/{ar['tokens']:g}",
        f"{ar.get('median_logit_diff', ar['max_abs_logit_diff']):.1e} / {ar['bound']:.1e}",  # what was judged
        drafter,
        f"{tree['steps']:g}",
        f"{tree['committed']:g}",
        f"{tree['avg_accept']:.2f}",
        "yes" if tree["exact"] else "no",
        "yes" if bitwise else "no",
    )
    return f"| {' | '.join(cells)} |\n"


def markdown(verdicts: list[dict]) -> str:
    """One line a bundle, backend and drafter. Counts are means per prompt, the error is the largest."""
    lines = [
        row(verdict["bundle"], backend, part["ar"], drafter, tree)
        for verdict in verdicts
        for backend, part in verdict["backends"].items()
        for drafter, tree in {part["ddtree"]["drafter"]: part["ddtree"], **part["drafters"]}.items()
    ]
    return "# Verdicts\n\n" + COLUMNS + "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verdicts", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--markdown", type=Path, required=True)
    args = parser.parse_args()
    verdicts = [json.loads(file.read_text()) for file in args.verdicts]
    kept = ("bundle", "verdict", "backends", "fp32_divergence")
    write_text(args.json, json.dumps([{key: verdict[key] for key in kept} for verdict in verdicts], indent=2) + "\n")
    page = markdown(verdicts)
    write_text(args.markdown, page)
    print(page, end="")


if __name__ == "__main__":
    main()
