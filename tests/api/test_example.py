"""The example runs, and its second turn begins where the first one ended."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_chat(checkpoint, library_path):
    command = [sys.executable, ROOT / "examples/chat.py", checkpoint, "one", "two", "--max-new-tokens", "12"]
    done = subprocess.run([*command, "--library", library_path], capture_output=True, text=True, cwd=ROOT,
                          env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    kept = [(int(n), int(k)) for n, k in re.findall(r"\[(\d+) prompt tokens, (\d+) of them kept", done.stdout)]
    assert len(kept) == 2 and kept[0][1] == 0 and kept[1][1] >= kept[0][0]
