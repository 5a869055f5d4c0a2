"""Breaks the CUDA kernels on purpose, one way at a time: a named check must notice each.

    python -m tests.cuda.mutations --build results/build/on_gpu --output FILE [--jobs N] [--arch 90a]

Needs the objects and the program `device` that on_gpu.sh builds; with --emulate, the objects of tests.cuda.emulator
and no GPU. The record counts, for each mutation, 1 if no check noticed it and 0 if one did; `message` names the first
that did. What is not mutated must pass the same checks. One not noticed, or a check that fails without: exit status 1.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from reference.files import write_text
from tests.cuda.emulator import build as emulator

REPOSITORY = Path(__file__).resolve().parents[2]
OPS = Path("engine/ops")
SECONDS, SLOW_SECONDS = 60, 240  # of one mutation's checks; of those that run to their end, or under racecheck
FOR_RACECHECK = ["-DKDTREE_ARRIVALS_OF_A_WARP=32"]  # engine/ops/cuda/stream.cuh says why


@dataclass(frozen=True)
class Mutation:
    """`edits`: (file below engine/ops, text, replacement), whose text stands in its file. None: the source as it is."""

    name: str
    operator: str  # whose object is compiled again and whose checks run
    edits: tuple[tuple[str, str, str], ...]
    # What is to notice it: the operator's cases, these on emulated threads alone (reads past what was written), the
    # program `device`, or `racecheck` over the cases.
    by: str = "cases"
    rung: str = "plain"  # of the matrix kernels


def one(name, operator, old, new, file=None, by="cases", rung="plain"):
    return Mutation(name, operator, ((file or f"{operator}/cuda.cu", old, new),), by, rung)


def streaming(name, operator, old, new, file, by="cases"):
    return one(f"stream_{name}", operator, old, new, f"cuda/{file}.cuh", by, "stream")


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
        ("tree_attention/cuda.cu",
         "const int first_key = split * keys_per_split(keys), last_key = min(keys, first_key + keys_per_split(keys));",
         "const int size = keys_per_split(keys) * (n_rows > 1 ? 2 : 1), first_key = split * size, "
         "last_key = min(keys, first_key + size);"),
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
        "const int lane = rows > 1 ? lane_id() / 2 | (lane_id() & 1) << 4 : lane_id();\n"
        "  for (int eight = lane; 8 * eight < k; eight += 32) {", "cuda/dot.cuh"),
    one("offset_32_experts", "w4a16_moe_experts", "const int64_t before = (3 * expert + which) * one_matrix;",
        "const int before = static_cast<int>((3 * expert + which) * one_matrix);", by="device"),
    one("offset_32_compact", "kv_compact", "(blockIdx.y * pool_rows + base) * width",
        "static_cast<int>((blockIdx.y * pool_rows + base) * width)", by="device"),
    one("offset_32_key", "tree_attention", "kv[pool_row * width + c]", "kv[static_cast<int>(pool_row * width) + c]",
        by="device"),
    one("offset_32_gemm", "gemm", "{w + i * padded}", "{w + static_cast<int>(i * padded)}", "cuda/dot.cuh",
        by="device"),
    one("compact_off_by_one", "kv_compact", "int64_t{state->prefix} - accepted",
        "int64_t{state->prefix} - accepted + 1"),
    one("accept_past_the_limit", "tree_accept", "max(before.limit - before.generated, 1)", "count"),
    one("accept_past_the_stop", "tree_accept", "min(count, first_stop + 1)", "count"),
    one("runs_on_when_done", "tree_accept", "after.done == kRunning ? 1 : 0", "1"),
    one("accept_any_child", "tree_accept", "args.tokens[row] == args.next_tokens[parent]", "true"),
    one("tree_ties_by_the_larger_tuple", "tree_build", "high = static_cast<uint32_t>(code >> 32), least",
        "high = ~code ? ~static_cast<uint32_t>(code >> 32) : ~0u, least"),
    one("tree_ties_by_the_later_row", "tree_build", "if (equal > 1)", "if (equal < 0)"),
    one("tree_pushes_nan_levels", "tree_build", "if (loaded[i] != -INFINITY)", "if (loaded[i] > -INFINITY)"),
    one("tree_forgets_a_candidate", "tree_build", "larger += keys[other] > key", "larger += keys[other] >= key"),
    one("tree_takes_crowded_levels_for_others", "tree_build", "if (n_candidates > kMaxCandidates) {", "if (false) {"),
    one("tree_stops_at_bit_32", "tree_build", "count = 0; bit >= 0", "count = 0; bit >= 32"),
    one("accept_stops_behind_the_limit", "tree_accept", "first_stop < emitted", "first_stop < count"),
    one("route_by_unbiased", "moe_route", "scores[e] + args.bias[e]", "scores[e]"),
    one("route_groups_by_best", "moe_route", "best + value_of(static_cast<uint32_t>(second >> 32))", "best"),
    one("norm_without_eps", "rms_norm", " + shape.eps", ""),
    one("noisy_is_certain", "draft_script", "hash.uniform(-1) >= shape.p", "true"),
    one("silu_is_sigmoid", "swiglu", "gate / (1.0f + expf(-gate))", "1.0f / (1.0f + expf(-gate))", "cuda/swiglu.cuh"),
    streaming("offset_32_experts", "w4a16_moe_experts", "expert * expert_bytes",
              "static_cast<int>(expert * expert_bytes)", "stream_experts", by="device"),
    streaming("offset_32_strips", "gemm",
              "int64_t{tile.strip} * job.tiling.units + int64_t{tile.unit} * tile.strips) *",
              "int64_t{0}) * W::kUnitBytes + (tile.strip * job.tiling.units + tile.unit * tile.strips) *",
              "stream_dense",
              by="device"),
    streaming("before_the_grid_in_front", "w4a16_gemm", "  wait_for_grid_in_front();\n", "", "stream_dense",
              by="device"),
    streaming("copies_without_an_end", "w4a16_gemm", "return take_back<Most>(ahead);", "return;", "stream_dense",
              by="emulated"),
    streaming("before_the_others_begin", "w4a16_gemm", "  if (kSplits) cluster_wait();  // all have begun\n", "",
              "stream_dense", by="emulated"),
    Mutation("stream_over_the_others_rings", "gemm", (
        ("cuda/stream_dense.cuh", "  if (S::kReceivesInRing && warp_id() < kStrips) cluster_arrive_relaxed();\n", ""),
        ("cuda/stream_dense.cuh", "  if (S::kReceivesInRing && warp_id() == kStrips) cluster_arrive();\n", ""),
        ("cuda/stream_dense.cuh", "  if (S::kReceivesInRing) cluster_wait();", "")), by="emulated", rung="stream"),
    streaming("before_the_copy", "w4a16_gemm", "wait_phase(ring.full(), ring.phase);\n    if", "if", "stream_dense"),
    streaming("experts_before_the_copy", "w4a16_moe_experts", "wait_phase(ring.full(), ring.phase);", "",
              "stream_gathered", by="emulated"),
    streaming("before_it_is_empty", "w4a16_gemm", "wait_phase(ring.empty(), ring.phase ^ 1);", "", "stream_dense",
              by="emulated"),
    streaming("weights_before_it_is_empty", "w4a16_moe_experts",
              "wait_phase(ring.empty(), ring.phase ^ 1);\n      arrive_expecting", "arrive_expecting",
              "stream_gathered",
              by="emulated"),
    streaming("rows_before_it_is_empty", "moe_experts", "wait_phase(ring.empty(), ring.phase ^ 1);\n      char* to",
              "char* to", "stream_gathered"),
    Mutation("stream_released_before_it_is_read", "moe_experts", (
        ("cuda/stream_gathered.cuh", "    ring.release();\n", ""),
        ("cuda/stream_gathered.cuh", "wait_phase(ring.full(), ring.phase);",
         "wait_phase(ring.full(), ring.phase), ring.release();")), by="racecheck", rung="stream"),
    streaming("splits_by_rows", "w4a16_gemm", "if (s < splits) add(", "if (s < splits - (item.count > 8)) add(",
              "stream_dense"),
    streaming("splits_from_the_own_on", "w4a16_gemm", "add(sum, of[s]);", "add(sum, of[(own + s) % splits]);",
              "stream_dense"),
    streaming("own_share_as_the_others", "w4a16_gemm", "s == own || s >= splits ?", "s >= splits ?", "stream_dense"),
    streaming("before_the_splits", "w4a16_gemm", "  wait_phase(sums_received(), notes().phase);\n", "", "stream_dense"),
    streaming("sent_before_they_lie_there", "w4a16_gemm",
              "  __syncthreads();\n  if (S::kReceivesInRing)", "  if (S::kReceivesInRing)", "stream_dense",
              by="emulated"),
    Mutation("stream_gone_before_it_is_received", "w4a16_gemm", (
        ("cuda/stream_dense.cuh", "notes().phase);\n  cluster_arrive_relaxed();\n", "notes().phase);\n"),
        ("cuda/stream_dense.cuh", "  cluster_wait();  // the others have received", "  //")),
        by="emulated", rung="stream"),
    streaming("phase_of_the_last_sums", "w4a16_gemm", "notes.phase = notes.phase ^ 1;", "", "stream_dense",
              by="device"),
    streaming("sums_over_the_ring", "w4a16_gemm",
              "cluster_arrive_relaxed();\n  __syncthreads();", "cluster_arrive_relaxed();", "stream_dense",
              by="emulated"),
    streaming("ring_over_the_sums", "w4a16_gemm", "  cluster_arrive();\n  cluster_wait();\n", "", "stream_dense",
              by="emulated"),
    streaming("minus_7", "w4a16_moe_experts", "kMinus8 = 0xBE00BE00", "kMinus8 = 0xBDE0BDE0", "strips"),
    streaming("scale_of_the_other_output", "w4a16_moe_experts", "fmaf(high, sum[2]", "fmaf(low, sum[2]", "strips"),
    streaming("scale_of_the_other_half", "w4a16_gemm", "add_scaled(total[tile + r], scales[i],",
              "add_scaled(total[tile + r], scales[0],", "stream_dense"),
    streaming("half_of_the_rows", "w4a16_gemm", "h / 2 * kRowTiles * kTileBytes + h % 2 * 64",
              "h / 2 * kRowTiles * kTileBytes", "stream_dense"),
    streaming("unit_of_the_rows", "w4a16_gemm", "h / 2 * kRowTiles * kTileBytes + h % 2 * 64", "h % 2 * 64",
              "stream_dense"),
    streaming("second_half_alone", "gemm", "begin_products<true>(total, second.a,",
              "begin_products<false>(total, second.a,",
              "stream_dense"),
    streaming("before_products_end", "w4a16_gemm", "        wait_for_products();\n", "", "stream_dense", by="emulated"),
    streaming("tail_as_a_whole_stage", "w4a16_gemm", "if (units >= S::kUnits)", "if (true)", "stream_dense"),
    streaming("weights_ahead_twice", "w4a16_gemm", "if (ahead-- > 0) {", "if (false) {", "stream_dense", by="emulated"),
    streaming("ahead_of_other_items", "w4a16_gemm", "    ahead = 0;\n    __syncwarp();", "    __syncwarp();",
              "stream_dense", by="emulated"),
    streaming("rows_ahead_twice", "w4a16_gemm", "if (S::kRowTiles == kMostTiles) continue;", "", "stream_dense",
              by="emulated"),
    streaming("blocks_of_one_class", "w4a16_moe_experts",
              "for (int c = 0; c < rest_class; ++c) at += blocks_of(all_blocks, c);", "", "stream_experts"),
    streaming("order_of_slots", "w4a16_moe_experts", "const int64_t pair = row * top_k + slot;",
              "const int64_t pair = row * top_k + (*n_rows > 1 ? top_k - 1 - slot : slot);", "stream_experts"),
    streaming("last_gathered_row", "moe_experts", "if (turn * kRowsAtOnce >= block.count) break;",
              "if (turn * kRowsAtOnce >= block.count - 1) break;", "stream_gathered"),
    streaming("rows_of_the_next_class", "w4a16_gemm", "      Ring<0, kMaxStages>::init_again(kFillers);\n", "",
              "stream_dense", by="emulated"),
    streaming("fours_past_the_outputs", "w4a16_gemm", "(y_stride | tiling.outputs) % 4 == 0", "y_stride % 4 == 0",
              "stream_dense"),
    streaming("fours_at_odd_addresses", "w4a16_gemm", " && address % 8 == 0", "", "stream_dense"),
    streaming("some_strips_at_a_time", "gemm", "kStrips * static_cast<int>(std::max<int64_t>(1,",
              "3 + static_cast<int>(std::max<int64_t>(1,", "pack_strips", by="device"),
    streaming("one_by_one", "gemm", "store(at + i, v[i])", "store(at + i, v[0])", "stream_dense"),
    streaming("share_of_the_last_split", "w4a16_gemm", "share = ceil_div(all, splits)", "share = all / splits",
              "stream_dense"),
    streaming("a_row_past_its_class", "w4a16_gemm", "rows > 16 ? 1", "rows > 17 ? 1", "stream"),
    streaming("past_the_inputs", "w4a16_moe_experts", "if (done + 8 * piece < inputs) {", "{", "stream_gathered",
              by="emulated"),
    streaming("past_the_units", "w4a16_gemm", "const int bytes = min(S::kUnits, units) * unit_bytes;",
              "const int bytes = S::kUnits * unit_bytes;", "stream_dense", by="emulated"),
    streaming("past_the_pairs", "moe_experts", "min(first_row + turn * kRowsAtOnce, block.count - 1)",
              "first_row + turn * kRowsAtOnce", "stream_gathered", by="emulated"),
    streaming("before_the_pieces", "w4a16_moe_experts", "arrive_when_copied(ring.full());", "arrive(ring.full());",
              "stream_gathered"),
    streaming("tiles_of_whole_strips", "w4a16_gemm", "here = min(kStrips, strips - first)", "here = kStrips",
              "pack_strips"),
    streaming("order_of_the_experts", "w4a16_gemm", "return 8 * p + 2 * t;", "return 8 * t + 2 * p;", "strips"),
    streaming("add_by_fours_forgotten", "w4a16_gemm", "v[i] = add ? before[i] + v[i] : v[i];", "v[i] = v[i];",
              "stream_dense"),
    one("embed_next_token", "embed", "int64_t{tokens[row]} * hidden", "int64_t{tokens[row] ^ 1} * hidden"),
]


def first_above(record: Path) -> str | None:
    for case in json.loads(record.read_text())["cases"]:
        if not float(case["max_abs_error"]) <= case["budget"]:
            return case["name"]
    return None


def mutated_tree(edits, work: Path) -> None:
    """work/engine: the engine's sources with (file below engine/ops, text, replacement) put in."""
    shutil.copytree(REPOSITORY / "engine", work / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in edits:
        path = work / OPS / file
        text = path.read_text()
        if old not in text:
            raise LookupError(f"{file} does not hold: {old}")
        path.write_text(text.replace(old, new))


def other_objects(mutation: Mutation, build: Path) -> list[Path]:
    return [path for path in (*build.glob("*.o"), *build.glob("backend/*.o")) if path.stem != mutation.operator]


def build_cuda(mutation: Mutation, build: Path, arch: str, work: Path) -> Path:
    changed, library = work / "changed.o", work / build.relative_to(REPOSITORY) / "libkdtree_cuda.so"  # for `device`
    library.parent.mkdir(parents=True)
    flags = FOR_RACECHECK if mutation.by == "racecheck" else []
    subprocess.run(["nvcc", "-std=c++17", "-O3", "--fmad=false", "-DNDEBUG", "-Xcompiler", "-fPIC", *flags, "-gencode",
                    f"arch=compute_{arch},code=sm_{arch}", "-c", OPS / mutation.operator / "cuda.cu", "-o", changed],
                   cwd=work, check=True)
    subprocess.run(["nvcc", "-shared", "-Xcompiler", "-fopenmp", "-o", library, changed,
                    *other_objects(mutation, build)], check=True)
    return library


def build_emulated(mutation: Mutation, build: Path, work: Path) -> Path:
    library, changed = work / "libkdtree_emulated.so", work / "changed.o"
    emulator.translate_tree(work / "engine", work / "translated")
    flags = (build / "flags").read_text().split()
    emulator.compile_kernels(work / "translated/ops" / mutation.operator / "cuda.cu", changed, *flags)
    emulator.link([changed, *other_objects(mutation, build)], library)
    return library


def ends(command: list, folder: Path, rung: str, seconds: float) -> tuple[int | None, str]:
    """(exit status, the line of the errors that says what it was); no status if it had to be stopped."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "KDTREE_CUDA": rung}
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               start_new_session=True, env=environment)
    try:
        errors = process.communicate(timeout=seconds)[1].strip()
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it started: a sanitizer's program holds the pipe too
        process.communicate()
        return None, ""
    lines = errors.splitlines() or [""]
    return process.returncode, next((line for line in lines if "runtime error" in line), lines[-1])


def noticed(mutation: Mutation, options: argparse.Namespace, work: Path) -> str | None:
    """The check that notices the mutation, or that fails."""
    mutated_tree(mutation.edits, work)
    build, record, folder = options.build.resolve(), work / "record.json", REPOSITORY
    if options.emulate:
        library = build_emulated(mutation, build, work)
    else:
        library = build_cuda(mutation, build, options.arch, work)
    seconds = SECONDS if mutation.edits else SLOW_SECONDS
    command = [sys.executable, "-m", "engine.check", "--library", library, "--operator", mutation.operator,
               "--output", record]
    if mutation.by == "device":
        command, folder = [build / "device", record], work  # which finds the library by its path below this folder
    elif mutation.by == "racecheck" and not options.emulate:
        command = ["compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "9", *command]
        seconds = SLOW_SECONDS
    status, error = ends(command, folder, mutation.rung, seconds)
    if status is None:
        if mutation.edits and "compute-sanitizer" in command:
            raise LookupError(f"racecheck did not end in {seconds} s")
        return "no end"
    if status:
        return "racecheck" if status == 9 else f"error: {error}"
    return first_above(record)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--arch", default="90a")
    parser.add_argument("--emulate", action="store_true", help="--build is the emulator's; leaves out what needs a GPU")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutations whose name holds it")
    options = parser.parse_args()
    elsewhere = "device" if options.emulate else "emulated"
    chosen = [m for m in MUTATIONS if options.only in m.name and m.by != elsewhere]
    if not chosen:
        place = "on emulated threads" if options.emulate else "on a GPU"
        parser.error(f"--only: {options.only}: no mutation to try {place} has it in its name")
    if options.jobs < 1:
        parser.error(f"--jobs: {options.jobs}: must be at least 1")
    if not list(options.build.glob("*.o")):
        parser.error(f"--build: {options.build}: holds no build")
    if not options.emulate and not options.build.resolve().is_relative_to(REPOSITORY):
        parser.error(f"--build: {options.build}: must lie below {REPOSITORY}, where `device` finds its library")

    as_it_is = {}  # once for all mutations that the same check is to notice; `device` has no operator of its own
    for mutation in chosen:
        by = "cases" if options.emulate else mutation.by
        name = ".".join(["nothing", *([mutation.operator] if by != "device" else []), mutation.rung, by])
        as_it_is[name] = replace(mutation, name=name, edits=(), by=by)

    def judge(mutation: Mutation) -> dict:
        by, message = None, "no check noticed it" if mutation.edits else "passes"
        with tempfile.TemporaryDirectory() as work:
            try:
                by = noticed(mutation, options, Path(work))
            except LookupError as error:
                message = str(error)
        wrong = (by is None) == bool(mutation.edits)
        text = by or message
        print(f"{mutation.name:32} {text.upper() if wrong else text}", flush=True)
        return {"name": mutation.name, "max_abs_error": float(wrong), "budget": 0.0, "message": text}

    with ThreadPoolExecutor(options.jobs) as pool:
        unchanged, cases = (list(pool.map(judge, some)) for some in (as_it_is.values(), chosen))
    record = {"operator": "mutations", "backend": "cuda", "cases": unchanged + cases}
    write_text(options.output, json.dumps(record, indent=1) + "\n")
    failed, missed = (sum(case["max_abs_error"] > 0 for case in some) for some in (unchanged, cases))
    score = f"{len(cases) - missed}/{len(cases)} mutations noticed"
    print(f"score: {f'none: {failed} checks fail without a mutation' if failed else score}")
    return int(failed + missed > 0)


if __name__ == "__main__":
    sys.exit(main())
