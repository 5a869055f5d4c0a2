"""The process that runs cases: python -m tests.fuzz.worker LIBRARY SEED START STOP STEP; one JSON line a case."""

import json
import sys
import tempfile
import traceback
from pathlib import Path

from tests.fuzz.cases import Fuzzer, Malformed


def main(library: str, seed: str, start: str, stop: str, step: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(library), Path(folder, "bundle.safetensors"), int(seed))
        for number in range(int(start), int(stop), int(step)):
            result = {"case": number, "kind": fuzzer.kind_of(number)}
            try:
                result["outcome"] = fuzzer.run(number)
            except Malformed as error:
                result |= {"outcome": "refusal of the wrong form", "detail": ascii(str(error))}
            except Exception:
                result |= {"outcome": "exception", "detail": traceback.format_exc()}
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
