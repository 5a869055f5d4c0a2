"""Prints what on_gpu.sh recorded: one line a file, then every measurement above its budget."""

import json
import sys
from pathlib import Path


def main() -> int:
    above = []
    for path in sorted(Path(sys.argv[1]).glob("*/*.json")):
        record = json.loads(path.read_text())
        over = [case for case in record["cases"] if not float(case["max_abs_error"]) <= case["budget"]]
        shares = [float(c["max_abs_error"]) / c["budget"] for c in record["cases"] if c["budget"]]
        worst = max(shares, default=0.0)
        print(f"{path.parent.name}/{path.stem:32} {len(record['cases']):5} measurements, {len(over):4} above, "
              f"worst {worst:.0%} of its budget")
        above += [(path.stem, case) for case in over]
    for name, case in above[:60]:
        print(f"ABOVE {name}: {case['name']}: {case['max_abs_error']} > {case['budget']} {case.get('message', '')}")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
