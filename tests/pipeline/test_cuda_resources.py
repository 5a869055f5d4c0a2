"""What ptxas prints, read and held to its limits."""

import json
import sys

import pytest

from engine import cuda_resources

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4fast' for 'sm_120a'
ptxas info    : Function properties for _Z4fast
    0 bytes stack frame, {spill} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, {shared} bytes smem
ptxas info    : Compile time = 20.1 ms
ptxas info    : Compiling entry function '_Z4fast' for 'sm_90a'
ptxas info    : Function properties for _Z4fast
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers, used 0 barriers, 16 bytes cumulative stack size
"""


def run(monkeypatch, tmp_path, text):
    file, output = tmp_path / "gemm.ptxas", tmp_path / "resources.json"
    file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["cuda_resources", str(file), "--output", str(output)])
    status = cuda_resources.main()
    assert (status == 0) == output.exists()
    return json.loads(output.read_text())["kernels"] if not status else None


def test_records_every_kernel_and_architecture(monkeypatch, tmp_path):
    blackwell, hopper = run(monkeypatch, tmp_path, PTXAS.format(spill=0, shared=2048))
    assert {k: blackwell[k] for k in ("unit", "arch", "registers", "shared_bytes", "stack_bytes", "spill_bytes")} == {
        "unit": "gemm",
        "arch": "sm_120a",
        "registers": 40,
        "shared_bytes": 2048,
        "stack_bytes": 0,
        "spill_bytes": 0,
    }
    assert (hopper["arch"], hopper["registers"], hopper["shared_bytes"], hopper["stack_bytes"]) == ("sm_90a", 38, 0, 16)


@pytest.mark.parametrize(
    ("spill", "shared", "message"),
    [(8, 0, "spills: 8 bytes"), (0, 101_377, "shared memory: 101377 bytes: a block has 101376")],
)
def test_a_spill_and_a_block_too_large_are_errors(monkeypatch, tmp_path, capsys, spill, shared, message):
    assert run(monkeypatch, tmp_path, PTXAS.format(spill=spill, shared=shared)) is None
    assert f"(sm_120a): {message}" in capsys.readouterr().err


def test_silence_is_not_a_pass(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, "nothing\n") is None
    assert "no kernel" in capsys.readouterr().err
