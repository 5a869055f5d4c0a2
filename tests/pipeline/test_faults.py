"""One broken line: the ladder fails and names the place. (`results/mutations.json` holds many more.)"""

import subprocess
import sys

import pytest

# name: (file, the line, the fault, what the ladder must say)
FAULTS = {
    "nibble offset": (
        "engine/ops/cpu/linear.h",
        "^ 0x88888888u : 0;",
        "^ 0x99999999u : 0;",
        "operator w4a16_gemm (cpu): ",
    ),
    "softmax scale": (
        "engine/ops/tree_attention/cpu.cpp",
        "sum(sums[h][j]) * scale",
        "sum(sums[h][j])",
        "operator tree_attention (cpu): ",
    ),
    "tie rule": ("engine/ops/argmax/cpu.cpp", "x[c] > x[best]", "x[c] >= x[best]", "operator argmax (cpu): "),
    "RoPE pairing": (
        "engine/ops/rope/cpu.cpp",
        "odd = to_float(x[2 * p + 1])",
        "odd = to_float(x[p + pairs])",
        "operator rope (cpu): ",
    ),
    "compaction": (
        "engine/ops/kv_compact/cpu.cpp",
        "args.accepted_rows[i]) * row, row)",
        "args.accepted_rows[i] - 1) * row, row)",
        "operator kv_compact (cpu): ",
    ),
    "reference's softmax scale": (
        "reference/rope.py",
        "return config.qk_head_dim**-0.5 * m * m",
        "return config.qk_head_dim**-0.5 * m",
        "first divergence: cpu ar against golden: ",
    ),
}


@pytest.mark.parametrize(("file", "line", "fault", "report"), FAULTS.values(), ids=FAULTS)
def test_fault(ladder, file, line, fault, report):
    ladder.replace(file, line, fault)
    failed = ladder.snakemake("results/int4_tiny.pass")
    assert failed.returncode != 0
    assert report in failed.stderr, failed.stderr
    assert not (ladder.root / "results/int4_tiny.pass").exists()


def test_replay(ladder):
    """The case of a divergence shows it again, until the fault is gone."""
    ladder.replace("engine/ops/rope/cpu.cpp", "odd = to_float(x[2 * p + 1])", "odd = to_float(x[p + pairs])")
    stderr = ladder.snakemake("results/int4_tiny.pass").stderr.splitlines()
    divergence = next(line for line in stderr if line.startswith("first divergence: "))
    command = next(line for line in stderr if line.startswith("replay it: ")).removeprefix("replay it: python ")

    def replay():
        return subprocess.run([sys.executable, *command.split()], cwd=ladder.root, capture_output=True, text=True)

    again = replay()
    assert again.returncode == 1 and divergence in again.stdout.splitlines(), again.stdout + again.stderr
    ladder.replace("engine/ops/rope/cpu.cpp", "odd = to_float(x[p + pairs])", "odd = to_float(x[2 * p + 1])")
    ladder.run("results/int4_tiny.pass")
    again = replay()
    assert again.returncode == 0 and "does not diverge any more" in again.stdout
