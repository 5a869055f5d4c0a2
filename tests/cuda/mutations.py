"""Breaks the CUDA kernels on purpose, one way at a time: a named check must notice each.

    python -m tests.cuda.mutations --build results/build/cuda --output FILE [--jobs N] [--arch 90a]

Needs the objects and the program `device` that on_gpu.sh builds. The record counts, for each mutation, 1 if no check
noticed it and 0 if one did; `message` names the first that did.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
OPS = Path("engine/ops")


@dataclass(frozen=True)
class Mutation:
    """`edits`: (file below engine/ops, text, replacement); every text stands in its file."""

    name: str
    operator: str  # whose object is compiled again and whose checks run
    edits: tuple[tuple[str, str, str], ...]
    by: str = "cases"  # what is to notice it: the operator's cases, the program `device`, or `racecheck` over the cases


def one(name, operator, old, new, file=None, by="cases"):
    return Mutation(name, operator, ((file or f"{operator}/cuda.cu", old, new),), by)


MUTATIONS = [
    one("missing_barrier_tile", "tree_attention", "      __syncthreads();\n\n      float4 dot", "\n      float4 dot"),
    one("missing_barrier_scan", "moe_experts", "    __syncthreads();\n    pairs_before[expert] += p;",
        "    pairs_before[expert] += p;", "cuda/experts.cuh", by="racecheck"),
    one("gather_off_by_one", "tree_attention", "path[j - prefix]", "path[max(j - prefix - 1, 0)]"),
    one("gather_by_row", "tree_attention", "path[j - prefix]", "(j - prefix)"),
    one("last_key_left_out", "tree_attention", "args.depths[row] + 1;", "args.depths[row];"),
    one("stale_partials", "tree_attention", "const int splits = ceil_div(keys, keys_per_split(keys));",
        "const int splits = max_splits;", by="device"),
    Mutation("split_by_rows", "tree_attention", (
        ("tree_attention/cuda.cu", "const int first_key = split * keys_per_split(keys), last_key = min(keys, first_key "
         "+ keys_per_split(keys));", "const int size = keys_per_split(keys) * (n_rows > 1 ? 2 : 1), first_key = split * "
         "size, last_key = min(keys, first_key + size);"),
        ("tree_attention/cuda.cu", "ceil_div(keys, keys_per_split(keys));",
         "ceil_div(keys, keys_per_split(keys) * (*args.n_rows > 1 ? 2 : 1));")), by="device"),
    one("keys_past_the_end", "tree_attention", "begin + lane < last_key ?", "begin + lane < last_key + 1 ?"),
    one("rope_by_row", "rope", "args.depths[row]", "row"),
    Mutation("ties_to_the_higher_index", "argmax", (
        ("cuda/numbers.cuh", "(0xFFFFFFFFu - static_cast<uint32_t>(index))", "static_cast<uint32_t>(index)"),
        ("cuda/numbers.cuh", "static_cast<int32_t>(0xFFFFFFFFu - static_cast<uint32_t>(key))",
         "static_cast<int32_t>(static_cast<uint32_t>(key))"))),
    one("minus_7", "w4a16_gemm", "& 15) - 8)", "& 15) - 7)", "cuda/dot.cuh"),
    one("scale_of_the_next_group", "w4a16_moe_experts", "eight / words_per_group", "(eight + 1) / words_per_group",
        "cuda/dot.cuh"),
    one("rows_past_n", "gemm", "if (r < rows && output < shape.n)", "if (output < shape.n)"),
    one("sum_by_rows", "gemm", "for (int eight = lane_id(); 8 * eight < k; eight += 32) {",
        "for (int eight = (lane_id() + (rows > 1)) % 32; 8 * eight < k; eight += 32) {", "cuda/dot.cuh"),
    one("offset_32_experts", "w4a16_moe_experts", "const int64_t before = (3 * expert + which) * one_matrix;",
        "const int before = static_cast<int>((3 * expert + which) * one_matrix);", by="device"),
    one("offset_32_compact", "kv_compact", "(blockIdx.y * pool_rows + base) * width",
        "static_cast<int>((blockIdx.y * pool_rows + base) * width)", by="device"),
    one("offset_32_key", "tree_attention", "kv[pool_row * width + c]", "kv[static_cast<int>(pool_row * width) + c]",
        by="device"),
    one("offset_32_gemm", "gemm", "{w + i * padded}", "{w + static_cast<int>(i * padded)}", "cuda/dot.cuh", by="device"),
    one("compact_off_by_one", "kv_compact", "int64_t{state->prefix} - accepted", "int64_t{state->prefix} - accepted + 1"),
    one("accept_past_the_limit", "tree_accept", "max(before.limit - before.generated, 1)", "count"),
    one("accept_past_the_stop", "tree_accept", "min(count, first_stop + 1)", "count"),
    one("runs_on_when_done", "tree_accept", "after.done == kRunning ? 1 : 0", "1"),
    one("accept_any_child", "tree_accept", "args.tokens[row] == args.next_tokens[parent]", "true"),
    one("tree_ties_by_the_larger_tuple", "tree_build", "its.bits < code",
        "its.bits > code || code == ~uint64_t{0}"),
    one("tree_ties_by_the_later_row", "tree_build", "if (equal > 1)", "if (equal < 0)"),
    one("tree_pushes_nan_levels", "tree_build", "if (loaded[i] != -INFINITY)", "if (loaded[i] > -INFINITY)"),
    one("tree_forgets_a_candidate", "tree_build", "larger += keys[other] > key", "larger += keys[other] >= key"),
    one("route_by_unbiased", "moe_route", "scores[e] + args.bias[e]", "scores[e]"),
    one("route_groups_by_best", "moe_route", "best + value_of(static_cast<uint32_t>(second >> 32))", "best"),
    one("norm_without_eps", "rms_norm", " + shape.eps", ""),
    one("noisy_is_certain", "draft_script", "hash.uniform(-1) >= shape.p", "true"),
    one("silu_is_sigmoid", "swiglu", "gate / (1.0f + expf(-gate))", "1.0f / (1.0f + expf(-gate))", "cuda/swiglu.cuh"),
    one("embed_next_token", "embed", "int64_t{tokens[row]} * hidden", "int64_t{tokens[row] ^ 1} * hidden"),
]


def first_above(record: Path) -> str | None:
    for case in json.loads(record.read_text())["cases"]:
        if not float(case["max_abs_error"]) <= case["budget"]:
            return case["name"]
    return None


def noticed(mutation: Mutation, build: Path, arch: str, work: Path) -> str | None:
    """The check that notices the mutation."""
    shutil.copytree(REPOSITORY / "engine", work / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in mutation.edits:
        path = work / OPS / file
        text = path.read_text()
        if old not in text:
            sys.exit(f"{mutation.name}: {file}: does not hold: {old}")
        path.write_text(text.replace(old, new))
    library = work / "results/build/cuda/libkdtree_cuda.so"
    library.parent.mkdir(parents=True)
    changed = library.with_name("changed.o")
    subprocess.run(["nvcc", "-std=c++17", "-O3", "--fmad=false", "-DNDEBUG", "-Xcompiler", "-fPIC", "-gencode",
                    f"arch=compute_{arch},code=sm_{arch}", "-c", OPS / mutation.operator / "cuda.cu", "-o", changed],
                   cwd=work, check=True)
    objects = [path for path in (*build.glob("*.o"), *build.glob("backend/*.o")) if path.stem != mutation.operator]
    subprocess.run(["nvcc", "-shared", "-Xcompiler", "-fopenmp", "-o", library, changed, *objects], check=True)
    record = work / "record.json"
    command = [build / "device", record] if mutation.by == "device" else [
        sys.executable, "-m", "engine.check", "--library", library, "--operator", mutation.operator, "--output", record]
    if mutation.by == "racecheck":
        command = ["compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "9", *command]
    try:
        # From `work`: the program finds the library by its path below the folder it runs in.
        ended = subprocess.run(command, cwd=work if mutation.by == "device" else REPOSITORY, capture_output=True, text=True,
                               timeout=120, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    except subprocess.TimeoutExpired:
        return "a run without end"
    if ended.returncode:
        return "racecheck" if mutation.by == "racecheck" else f"error: {ended.stderr.strip().splitlines()[-1]}"
    return first_above(record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--arch", default="90a")
    options = parser.parse_args()
    build = options.build.resolve()

    def judge(mutation: Mutation) -> dict:
        with tempfile.TemporaryDirectory() as work:
            by = noticed(mutation, build, options.arch, Path(work))
        print(f"{mutation.name:32} {by or 'NOT NOTICED'}", flush=True)
        return {"name": mutation.name, "max_abs_error": float(by is None), "budget": 0.0, "message": by or ""}

    with ThreadPoolExecutor(options.jobs) as pool:
        cases = list(pool.map(judge, MUTATIONS))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    record = {"operator": "mutations", "backend": "cuda", "cases": cases}
    options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
