"""The checks can fail: a line of a CPU kernel is broken, and the case that names the risk must be above its budget.

A mutation names the line as it stands; when the kernel changes, so does the entry here.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.check import cases_of
from engine.measure import measure_case, measure_invariance
from engine.operators import Library

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fopenmp", "-ffp-contract=off", "-DNDEBUG", "-Wno-psabi"]


@dataclass(frozen=True)
class Mutation:
    name: str
    operator: str
    old: str
    new: str
    case: str  # that must show it; "row_invariance.<case>" for the bytes
    file: str = ""  # under engine/ops; the operator's cpu.cpp if empty


LINEAR = "cpu/linear.h"
ONE_ROW_BACKWARDS = (
    "for (int64_t i = 0; i < steps; ++i) {",
    "for (int64_t f = 0; f < steps; ++f) { const int64_t i = rows > 1 ? f : steps - 1 - f;",
)

MUTATIONS = [
    Mutation("offset_7", "w4a16_gemm", "^ 0x88888888u : 0;", "^ 0x99999999u : 0;", "code_8", LINEAR),
    Mutation("nibbles_swapped", "w4a16_gemm", "w[t] = step[t][j];", "w[t] = step[t][j ^ 1];", "g32", LINEAR),
    Mutation("one_scale", "w4a16_gemm", "return {scales,", "return {(const S*)blocks,", "three_decades", LINEAR),
    Mutation("dropped_scale", "w4a16_gemm", "fma(scale, sums[r][t],", "(sums[r][t] +", "g128", LINEAR),
    Mutation("last_block_dropped", "gemm", "begin < strip.k;", "begin + inputs <= strip.k;", "odd", LINEAR),
    Mutation("last_tile_dropped", "gemm", "tile < strip.tiles;", "tile + beside <= strip.tiles;", "odd", LINEAR),
    Mutation("order_follows_rows", "gemm", *ONE_ROW_BACKWARDS, "row_invariance.square", LINEAR),
    Mutation("order_follows_rows", "w4a16_gemm", *ONE_ROW_BACKWARDS, "row_invariance.g32", LINEAR),
    Mutation("add_dropped", "gemm", "if (args.add)", "if (false)", "in_place"),
    Mutation("add_twice", "w4a16_gemm", "+ at, outputs) + y;", "+ at, outputs) + y + y;", "add"),
    Mutation(
        "rounded_twice",
        "gemm",
        "if (args.add) y =",
        "y = rounded(static_cast<Y*>(nullptr), y); if (args.add) y =",
        "bf16_add.rounding",
    ),
    Mutation("batch_stride", "gemm", "b * shape.x_batch_stride", "b * shape.k", "heads"),
    Mutation("all_rows", "swiglu", "i < *args.n_rows", "i < shape.max_rows", "rows"),
    Mutation("silu", "swiglu", "g * sigmoid(g) *", "sigmoid(g) *", "rows", "cpu/swiglu.h"),
    Mutation("no_eps", "rms_norm", "+ shape.eps", "", "small"),
    Mutation(
        "row_of_pool", "rms_norm", "(first + i) * shape.y_row_stride", "i * shape.y_row_stride", "latent_into_pool"
    ),
    Mutation(
        "half_split", "rope", "x[2 * p]), odd = to_float(x[2 * p + 1])", "x[p]), odd = to_float(x[p + pairs])", "heads"
    ),
    Mutation("position_is_row", "rope", "+ args.depths[i]", "+ i", "heads"),
    Mutation("in_place_order", "rope", "even * sin[p]", "to_float(y[2 * p]) * sin[p]", "in_place"),
    Mutation("no_softmax_scale", "tree_attention", "sum(sums[h][j]) * scale", "sum(sums[h][j])", "ragged"),
    Mutation("rows_not_ancestors", "tree_attention", "path[d] = node", "path[d] = d", "ragged"),
    Mutation("no_maximum", "tree_attention", "load(scores + j) - top", "load(scores + j)", "sharp"),
    Mutation(
        "not_itself",
        "tree_attention",
        "int64_t{*args.prefix} + depth + 1,",
        "int64_t{*args.prefix} + depth,",
        "prefix_0",
    ),
    Mutation("other_head", "tree_attention", "p = scratch.scores + h *", "p = scratch.scores + 0 *", "many_heads"),
    Mutation("other_group", "tree_attention", "first_head + h) * rank, q", "h) * rank, q", "many_heads"),
    Mutation(
        "block_follows_the_row",
        "tree_attention",
        "std::fill_n(scratch.total, heads * rank, 0.0f);",
        "const int64_t kKeyBlock = 64 - row % 8; std::fill_n(scratch.total, heads * rank, 0.0f);",
        "row_invariance.ragged",
    ),
    Mutation("tie_to_the_higher", "moe_route", "values[j] > values[best]", "values[j] >= values[best]", "ties.experts"),
    Mutation("biased_weights", "moe_route", "weights[slot] = scores[e]", "weights[slot] = choice[e]", "plain.weights"),
    Mutation("not_scaled", "moe_route", "/ total * shape.scaling", "/ total", "plain.weights"),
    Mutation("group_by_its_best", "moe_route", "first + second : first", "first : first", "groups.experts"),
    Mutation("dropped_weight", "moe_experts", "splat(args.weights[pair])", "splat(1)", "plain", "cpu/experts.h"),
    Mutation(
        "wrong_slot",
        "w4a16_moe_experts",
        "args.weights[pair])",
        "args.weights[row * shape.top_k])",
        "zero_weight",
        "cpu/experts.h",
    ),
    Mutation("shared_dropped", "moe_experts", "if (shared) sum =", "if (false) sum =", "plain", "cpu/experts.h"),
    Mutation("table_row", "embed", "args.tokens[i] * row", "(args.tokens[i] + 1) * row", "rows"),
    Mutation("tie_to_the_last", "argmax", "x[c] > x[best]", "x[c] >= x[best]", "ties"),
    Mutation(
        "nan_wins",
        "argmax",
        "x[c] == x[c] && (best < 0 || x[c] > x[best])",
        "best < 0 || !(x[c] <= x[best])",
        "not_numbers",
    ),
    Mutation(
        "larger_rank_first",
        "tree_build",
        "rank_at(a, level) > rank_at(b, level)",
        "rank_at(a, level) < rank_at(b, level)",
        "bf16_grid.tokens",
    ),
    Mutation("no_siblings", "tree_build", "push(node.parent, node.depth, node.rank + 1);", "", "normal.tokens"),
    Mutation("tie_to_the_higher_token", "tree_build", "&& a < b)", "&& a > b)", "few.top_tokens"),
    Mutation(
        "budget_counts_the_root", "tree_build", "rows <= shape.budget &&", "rows < shape.budget &&", "normal.state"
    ),
    Mutation(
        "pushes_minus_inf",
        "tree_build",
        "if (!(score > kNever)) return;",
        "if (score != score) return;",
        "minus_inf.state",
    ),
    Mutation("stop_only_at_the_end", "tree_accept", "if (is_stop(args, token))", "if (false)", "stop_inside.output"),
    Mutation(
        "limit_one_late",
        "tree_accept",
        "state.generated >= state.limit",
        "state.generated > state.limit",
        "limit_bonus.state",
    ),
    Mutation("any_child", "tree_accept", "args.parents[child] == row && ", "", "cousin_token.state"),
    Mutation(
        "off_by_one",
        "kv_compact",
        "int64_t i = 0; i < args.state->accepted",
        "int64_t i = 0; i + 1 < args.state->accepted",
        "gaps",
    ),
    Mutation(
        "descending",
        "kv_compact",
        "int64_t i = 0; i < args.state->accepted; ++i",
        "int64_t i = args.state->accepted - 1; i >= 0; --i",
        "overlap",
    ),
    Mutation(
        "base",
        "kv_compact",
        "int64_t{args.state->prefix} - args.state->accepted",
        "int64_t{args.state->prefix}",
        "gaps",
    ),
    Mutation("one_layer", "kv_compact", "layer * shape.pool_rows", "0 * shape.pool_rows", "gaps"),
    Mutation("level_of_the_root", "draft_script", "->prefix} + 1 + level", "->prefix} + level", "oracle"),
]


@pytest.fixture(scope="module")
def objects(library, library_path) -> list[Path]:
    """The objects of the unbroken library."""
    found = sorted(library_path.parent.rglob("*.o"))
    if library.backend_name != "cpu" or not found:
        pytest.skip("mutates CPU kernels and links them with the ladder's objects")
    return found


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.operator}-{m.name}")
def test_a_broken_kernel_is_above_its_budget(mutation, objects, tmp_path):
    operator = _broken(mutation, objects, tmp_path).operator(mutation.operator)
    name = mutation.case.removeprefix("row_invariance.")
    case = next(c for c in cases_of(mutation.operator).CASES if c.name == name.split(".")[0])
    if name != mutation.case:
        measurements = [measure_invariance(operator, case)]
        assert all(m.within for m in measure_case(operator, case)), "the values should still be near"
    else:
        measurements = [m for m in measure_case(operator, case) if m.name == mutation.case]
    assert measurements and not any(m.within for m in measurements), measurements


def _broken(mutation: Mutation, objects: list[Path], folder: Path) -> Library:
    shutil.copytree(ROOT / "engine", folder / "engine", ignore=shutil.ignore_patterns("*.py", "*.cu", "__pycache__"))
    file = folder / "engine/ops" / (mutation.file or f"{mutation.operator}/cpu.cpp")
    text = file.read_text()
    assert text.count(mutation.old) == 1, f"{file.name} holds {mutation.old!r} {text.count(mutation.old)} times"
    file.write_text(text.replace(mutation.old, mutation.new))
    broken, library = folder / "broken.o", folder / "libkdtree_broken.so"
    source = folder / "engine/ops" / mutation.operator / "cpu.cpp"
    subprocess.run([folder / "engine/ops/cpu/compile.sh", broken, source, *FLAGS], check=True)
    others = [o for o in objects if o.name != f"{mutation.operator}.o"]
    subprocess.run(["g++", "-shared", "-fopenmp", *others, broken, "-o", library], check=True)
    return Library(library)
