"""README's table of what an edit reruns: the jobs that ran, and no other. Verdicts are cheap and not counted."""

import pytest
from driver import VERDICTS

BUNDLES = ("tiny", "int4_tiny")
NEW_SYMBOL = '\nextern "C" const int kdtree_edited = 1;\n'  # the object changes, its arithmetic does not


def compiled(*operators: str) -> set[str]:
    return {"link/cpu", *(f"compile/cpu/{operator}" for operator in operators)}


VARIANTS = ("cpu.float32", "cpu.bfloat16")


def ar(*bundles: str) -> set[str]:
    return {f"ar/{variant}/{bundle}" for variant in VARIANTS for bundle in bundles}


def ddtree(*bundles: str) -> set[str]:
    kinds = ("", ".noisy", ".adversarial")
    return {f"ddtree/{variant}/{bundle}{kind}" for variant in VARIANTS for bundle in bundles for kind in kinds}


def without_verdicts(jobs: set[str]) -> set[str]:
    return {job for job in jobs if not job.startswith(("plan/", "verify/"))}


EDITS = {
    "comment in an operator": (
        "engine/ops/w4a16_gemm/cpu.cpp",
        "\n// a comment\n",
        compiled("w4a16_gemm"),
    ),
    "INT4 operator": (
        "engine/ops/w4a16_gemm/cpu.cpp",
        NEW_SYMBOL,
        compiled("w4a16_gemm") | {"check/cpu/w4a16_gemm"} | ar("int4_tiny") | ddtree("int4_tiny"),
    ),
    "float operator": (
        "engine/ops/moe_experts/cpu.cpp",
        NEW_SYMBOL,
        compiled("moe_experts") | {"check/cpu/moe_experts"} | ar("tiny") | ddtree("tiny"),
    ),
    "tree operator": (
        "engine/ops/tree_build/cpu.cpp",
        NEW_SYMBOL,
        compiled("tree_build") | {"check/cpu/tree_build"} | ddtree(*BUNDLES),
    ),
    "quantiser": (
        "reference/quantize.py",
        "\n# a comment\n",
        {"quantize/int4_tiny", "golden/int4_tiny", "golden_bf16/int4_tiny"} | ar("int4_tiny") | ddtree("int4_tiny"),
    ),
    "CUDA operator": ("engine/ops/w4a16_gemm/cuda.cu", NEW_SYMBOL, set()),
    "judge": ("engine/judge.py", "\n# a comment\n", set()),
    "an operator's cases": ("engine/ops/rope/cases.py", "\n# a comment\n", {"check/cpu/rope"}),
    "docs": ("docs/ladder.md", "\nMore.\n", set()),
    "tests": ("tests/pipeline/test_rerun.py", "\n# a comment\n", set()),
}


@pytest.mark.parametrize(("file", "text", "expected"), EDITS.values(), ids=EDITS)
def test_edit(ladder, file, text, expected):
    ladder.append(file, text)
    assert without_verdicts(ladder.ran(*VERDICTS)) == expected
    assert ladder.ran(*VERDICTS) == set()


OVERLAYS = {
    "a tolerance": ({"verify": {"noise_factor": 3.0}}, set()),
    "tree budget": ({"decode": {"tree_budget": 9}}, ddtree(*BUNDLES)),
    "drafter's seed": ({"decode": {"drafter": {"seed": 2}}}, ddtree(*BUNDLES)),
    "block size": ({"decode": {"block_size": 4}}, ar(*BUNDLES) | ddtree(*BUNDLES)),
    "another model": ({"models": {"tiny2": {"seed": 7}}}, set()),
}


@pytest.mark.parametrize(("content", "expected"), OVERLAYS.values(), ids=OVERLAYS)
def test_config(ladder, content, expected):
    assert without_verdicts(ladder.ran(*ladder.overlay(content), *VERDICTS)) == expected


def test_nothing_to_do(ladder):
    assert ladder.ran(*VERDICTS) == set()


def test_touched_sources(ladder):
    """Content counts, not time: a fresh checkout of the same files reruns nothing."""
    for source in (*ladder.root.glob("engine/**/*.*"), *ladder.root.glob("reference/*.py")):
        source.touch()
    assert ladder.ran(*VERDICTS) == set()
