"""torch.ops.kdtree.*: the operators' bytes on torch tensors, opcheck, meta tensors, errors that name the argument.

KDTREE_LIBRARY=results/build/cuda/libkdtree_cuda.so (beside the CPU's) tests them on a GPU.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engine import torch_ops  # noqa: E402
from engine.bundle import open_bundle  # noqa: E402
from engine.measure import BFLOAT16, FLOAT32  # noqa: E402
from engine.native import MODES, Drafter, Engine  # noqa: E402
from engine.operators import Library, View, decode_state  # noqa: E402
from engine.ops.argmax.cases import ArgmaxCase  # noqa: E402
from engine.ops.draft_script.cases import KINDS, DraftScriptCase  # noqa: E402
from engine.ops.embed.cases import EmbedCase  # noqa: E402
from engine.ops.gemm.cases import GemmCase  # noqa: E402
from engine.ops.kv_compact.cases import KvCompactCase  # noqa: E402
from engine.ops.moe_experts.cases import MoeExpertsCase  # noqa: E402
from engine.ops.moe_route.cases import MoeRouteCase  # noqa: E402
from engine.ops.rms_norm.cases import RmsNormCase  # noqa: E402
from engine.ops.rope.cases import RopeCase  # noqa: E402
from engine.ops.swiglu.cases import SwigluCase  # noqa: E402
from engine.ops.tree_accept.cases import random_case  # noqa: E402
from engine.ops.tree_attention.cases import RAGGED_17, TreeAttentionCase  # noqa: E402
from engine.ops.tree_build.cases import ROOT, TreeBuildCase  # noqa: E402
from engine.ops.w4a16_gemm.cases import W4a16GemmCase  # noqa: E402
from engine.ops.w4a16_moe_experts.cases import W4a16MoeExpertsCase  # noqa: E402
from engine.torch_ops.build import build  # noqa: E402
from reference.weights import generate_bundle  # noqa: E402

ELEMENTS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
DEVICE = "cuda" if Path(os.environ.get("KDTREE_LIBRARY", "")).stem.endswith("cuda") else "cpu"
torch.set_default_device(DEVICE)


@pytest.fixture(scope="session")
def folder(library_path, tmp_path_factory):
    """The extensions beside copies of the libraries, loaded."""
    folder = tmp_path_factory.mktemp("build")
    for backend in dict.fromkeys(("cpu", DEVICE)):
        (folder / backend).mkdir()
        library = folder / backend / f"libkdtree_{backend}.so"
        shutil.copy(library_path.parents[1] / backend / library.name, library)
        build(library, folder / backend / f"libkdtree_torch_{backend}.so")
    torch_ops.load(folder, DEVICE)
    return folder


@pytest.fixture(scope="session")
def library_file(folder) -> Path:
    return folder / DEVICE / f"libkdtree_{DEVICE}.so"


@pytest.fixture(scope="session")
def native(library_file) -> Library:
    return Library(library_file)


def tensor(array):
    """numpy, with bf16 as uint16 -> torch."""
    array = np.ascontiguousarray(array)
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(DEVICE)
    return torch.from_numpy(array).to(DEVICE)


def raw(x) -> bytes:
    return x.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def inputs(call) -> dict:
    """The call's arrays as tensors; a View as its base."""
    values = {n: v.base if isinstance(v, View) else v for n, v in call.args.items()}
    return {n: tensor(v.copy()) for n, v in values.items() if isinstance(v, np.ndarray) and v.dtype.names is None}


def element(type_):
    return ELEMENTS[type_]


# ---- one sample an operator: (case, arguments of the torch operator, outputs of the operator) -----------------------
# Rows fill the call, because a torch operator takes n from the tensors.


def embed(dtype):
    case = EmbedCase(name="sample", risk="", rows=9, max_rows=9, hidden=37, type=element(dtype))
    a = inputs(case.call())
    return case, (a["tokens"], a["table"]), ["y"]


def rms_norm(dtype):
    case = RmsNormCase(
        name="sample", risk="", rows=7, max_rows=7, cols=48, x_stride=71, x_offset=16, eps=1e-6, type=element(dtype)
    )
    a = inputs(case.call())
    return case, (a["x"][:, 16:64], a["weight"], case.eps), ["y"]


def swiglu(dtype):
    case = SwigluCase(name="sample", risk="", rows=7, max_rows=7, cols=33, type=element(dtype))
    return case, (inputs(case.call())["gate_up"],), ["y"]


def argmax(_):
    case = ArgmaxCase(name="sample", risk="", rows=7, max_rows=7, cols=50)
    return case, (inputs(case.call())["x"],), ["indices"]


def rope(dtype):
    case = RopeCase(name="sample", risk="", rows=9, max_rows=9, heads=3, dim=16, x_gap=32, type=element(dtype))
    a = inputs(case.call())
    return case, (a["x"][:, :, 32:], a["depths"] + case.prefix, a["cos"], a["sin"]), ["y"]


def gemm(dtype):
    case = GemmCase(
        name="sample", risk="", rows=7, max_rows=7, n=24, k=40, batch=3, x_gap=8, add="given", type=element(dtype)
    )
    call = case.call()
    a = inputs(call)
    packed = torch.ops.kdtree.gemm_prepare(tensor(call.weights["w"]), dtype)
    return case, (a["x"][..., :40], packed, 24, dtype, a["add"]), ["y"]


def gemm_logits(dtype):
    case = GemmCase(name="sample", risk="", rows=7, max_rows=7, n=24, k=40, type=element(dtype), y_type=FLOAT32)
    call = case.call()
    packed = torch.ops.kdtree.gemm_prepare(tensor(call.weights["w"][0]), dtype)
    return case, (inputs(call)["x"][:, 0], packed, 24, dtype, None, torch.float32), ["y"]


def w4a16_gemm(dtype):
    case = W4a16GemmCase(
        name="sample", risk="", rows=7, max_rows=7, n=24, k=96, x_gap=5, type=element(dtype), scale_type=element(dtype)
    )
    call = case.call()
    weights = tensor(call.weights["qw"]), tensor(call.weights["sc"])
    packed = torch.ops.kdtree.w4a16_gemm_prepare(*weights, 32, dtype)
    return case, (inputs(call)["x"][:, :96], packed, 24, 32, dtype), ["y"]


def moe_route(_):
    case = MoeRouteCase(name="sample", risk="", rows=7, max_rows=7, n_experts=16, top_k=3, n_group=4, topk_group=2)
    a = inputs(case.call())
    return case, (a["logits"], a["bias"], 3, 4, 2, True, case.scaling), ["experts", "weights"]


def moe_experts(dtype):
    case = MoeExpertsCase(name="sample", risk="", rows=7, max_rows=7, type=element(dtype))
    call = case.call()
    a = inputs(call)
    matrices = (tensor(np.stack([w[m] for w in call.weights])) for m in ("gate", "up", "down"))
    packed = torch.ops.kdtree.moe_experts_prepare(*matrices, dtype)
    rows = a["x"], a["experts"], a["weights"]
    return case, (*rows, packed, case.n_experts, case.intermediate, dtype, a["shared"], a["residual"]), ["y"]


def w4a16_moe_experts(dtype):
    scale_type = element(dtype)
    case = W4a16MoeExpertsCase(name="sample", risk="", rows=7, max_rows=7, type=scale_type, scale_type=scale_type)
    call = case.call()
    a = inputs(call)
    names = [f"{m}_{kind}" for m in ("gate", "up", "down") for kind in ("qw", "sc")]
    weights = (tensor(np.stack([w[name] for w in call.weights])) for name in names)
    packed = torch.ops.kdtree.w4a16_moe_experts_prepare(*weights, 32, dtype)
    rows = a["x"], a["experts"], a["weights"]
    return case, (*rows, packed, case.n_experts, case.intermediate, 32, dtype, a["shared"], a["residual"]), ["y"]


def tree_attention(dtype):
    case = TreeAttentionCase(name="sample", risk="", parents=RAGGED_17, prefix=20, type=element(dtype))
    call = case.call()
    a = inputs(call)
    tree = a["parents"], a["depths"], call.shape["softmax_scale"]
    return case, (a["q_latent"], a["q_rope"][:, :, case.nope_dim :], a["kv"], case.prefix, *tree), ["y"]


def tree_build(_):
    case = TreeBuildCase(name="sample", risk="", vocab=60, budget=12)
    outputs = ["tokens", "parents", "depths", None, "top_tokens", "top_log_probs"]
    return case, (inputs(case.call())["logits"], ROOT, 12), outputs


def tree_accept(_):
    case = random_case(9)
    call = case.call()
    a = inputs(call)
    state = tensor(call.args["state"].view(np.int32).copy())
    a["accepted_rows"] = torch.full((case.max_depth + 1,), -1, dtype=torch.int32)
    names = ["tokens", "parents", "next_tokens", "stop_ids", "accepted_rows", "output"]
    return case, (state, *(a[name] for name in names)), []


def kv_compact(dtype):
    case = KvCompactCase(name="sample", risk="", accepted=(0, 2, 5, 9), type=element(dtype))
    call = case.call()
    a = inputs(call)
    return case, (tensor(call.args["state"].view(np.int32).copy()), a["accepted_rows"], a["kv"]), []


def draft_script(_):
    case = DraftScriptCase(name="sample", risk="", kind="noisy", p=0.5, seed=7)
    call = case.call()
    script = inputs(call)["script"][: case.script]
    state = tensor(call.args["state"].view(np.int32).copy())
    return case, (state, script, case.levels, case.vocab, KINDS["noisy"], case.p, case.seed), ["logits"]


FLOATING = [embed, rms_norm, swiglu, rope, gemm, gemm_logits, w4a16_gemm, moe_experts, w4a16_moe_experts]
FLOATING += [tree_attention, kv_compact]
OTHER = [argmax, moe_route, tree_build, tree_accept, draft_script]
SAMPLES = [(s, t) for s in FLOATING for t in ELEMENTS] + [(s, torch.float32) for s in OTHER]
PREPARE = ["gemm_prepare", "w4a16_gemm_prepare", "moe_experts_prepare", "w4a16_moe_experts_prepare"]

samples = pytest.mark.parametrize(
    ("sample", "dtype"), SAMPLES, ids=[f"{s.__name__}-{str(t).removeprefix('torch.')}" for s, t in SAMPLES]
)


def op_of(sample):
    return getattr(torch.ops.kdtree, sample.__name__.removesuffix("_logits"))


def test_every_operator_is_registered_and_sampled(folder):
    from engine.contract import operator_names

    assert {op_of(sample)._qualified_op_name.removeprefix("kdtree::") for sample, _ in SAMPLES} == set(operator_names())


@samples
def test_the_bytes_are_the_operators(folder, native, sample, dtype):
    case, arguments, names = sample(dtype)
    name = sample.__name__.removesuffix("_logits")
    call = case.call()
    want = native.operator(name).run(call)
    got = op_of(sample)(*arguments)
    if not names:  # mutates its arguments
        schema = [argument.name for argument in op_of(sample).default._schema.arguments]
        got = [arguments[schema.index(n)] for n in want if n in schema]
        names = [n for n in want if n in schema]
    elif not isinstance(got, tuple):
        got = (got,)
    for output, n in zip(got, names, strict=True):
        if n is not None:
            assert raw(output) == want[n].tobytes(), n


@samples
def test_opcheck(folder, sample, dtype):
    _, arguments, _ = sample(dtype)
    torch.library.opcheck(op_of(sample).default, arguments)


@samples
def test_meta_tensors(folder, sample, dtype):
    _, arguments, _ = sample(dtype)
    real = op_of(sample)(*arguments)
    meta = op_of(sample)(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments))
    described = [[(x.shape, x.dtype) for x in ((y,) if isinstance(y, torch.Tensor) else y or ())] for y in (real, meta)]
    assert described[0] == described[1]


def prepare_arguments(name, dtype=torch.float32):
    if name == "gemm_prepare":
        return torch.randn(3, 24, 40), dtype
    if name == "moe_experts_prepare":
        return torch.randn(4, 32, 64), torch.randn(4, 32, 64), torch.randn(4, 64, 32), dtype
    shapes = [(24, 64)] if name == "w4a16_gemm_prepare" else [(4, 32, 64), (4, 32, 64), (4, 64, 32)]
    pairs = [(torch.zeros(*s[:-1], s[-1] // 8, dtype=torch.int32), torch.ones(*s[:-1], s[-1] // 32)) for s in shapes]
    return *(x for pair in pairs for x in pair), 32, dtype


@pytest.mark.parametrize("name", PREPARE)
def test_preparing_weights(folder, name):
    op, arguments = getattr(torch.ops.kdtree, name), prepare_arguments(name)
    torch.library.opcheck(op.default, arguments)
    meta = op(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments))
    assert meta.dtype == torch.uint8 and meta.dim() == 1


def test_compiles_without_graph_breaks(folder):
    def layer(x, weight, packed):
        return torch.ops.kdtree.gemm(torch.ops.kdtree.rms_norm(x, weight, 1e-5), packed, 24, torch.float32)

    x, weight = torch.randn(5, 40), torch.randn(40)
    packed = torch.ops.kdtree.gemm_prepare(torch.randn(24, 40), torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert raw(compiled(x, weight, packed)) == raw(layer(x, weight, packed))


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_one_row_as_many(folder, dtype):
    """A row that `expand` repeats has a stride of 0."""
    codes = torch.randint(-(2**31), 2**31, (24, 12), dtype=torch.int32)
    int4 = torch.ops.kdtree.w4a16_gemm_prepare(codes, torch.rand(24, 3).to(dtype), 32, dtype)
    floats = torch.ops.kdtree.gemm_prepare(torch.randn(24, 96), dtype)
    row = torch.randn(1, 96).to(dtype)

    def products(x):
        return torch.ops.kdtree.gemm(x, floats, 24, dtype), torch.ops.kdtree.w4a16_gemm(x, int4, 24, 32, dtype)

    many = products(row.expand(7, 96))
    assert [raw(y) for y in many] == [raw(y) for y in products(row.repeat(7, 1))]


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are a GPU's")
def test_a_captured_graph_replays_the_bytes(folder):
    (_, gemm_arguments, _), (_, int4_arguments, _) = gemm(torch.bfloat16), w4a16_gemm(torch.bfloat16)

    def run():
        return torch.ops.kdtree.gemm(*gemm_arguments), torch.ops.kdtree.w4a16_gemm(*int4_arguments)

    want = [raw(y) for y in run()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for _ in range(2):
        for y in outputs:
            y.fill_(float("nan"))
        graph.replay()
        assert [raw(y) for y in outputs] == want


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


X, STATE = torch.randn(3, 64), ints(*[0] * len(decode_state().dtype.names))

ERRORS = [
    ("embed", lambda k: k.embed(ints(1, 9), X), r"embed: tokens: entry 1 is 9, must lie in 0\.\.2"),
    ("embed_int64", lambda k: k.embed(ints(1).long(), X), "embed: tokens: must be Int, is Long"),
    ("rms_norm_size", lambda k: k.rms_norm(X, X[0, :5], 1e-5), "rms_norm: weight: dimension 0 must be 64, is 5"),
    ("rms_norm_type", lambda k: k.rms_norm(X, X[0].bfloat16(), 1e-5), "rms_norm: weight: must be Float, is BFloat16"),
    ("rms_norm_half", lambda k: k.rms_norm(X.half(), X[0].half(), 1e-5), "rms_norm: x: must be Float or BFloat16"),
    ("rms_norm_stride", lambda k: k.rms_norm(X.T, X[:, 0], 1e-5), "rms_norm: x: the last dimension must be contig"),
    ("swiglu_dims", lambda k: k.swiglu(X), "swiglu: gate_up: must have 3 dimensions, has 2"),
    ("swiglu_layout", lambda k: k.swiglu(torch.randn(4, 3, 2).transpose(1, 2)), "swiglu: gate_up: the last dimension"),
    ("rope_odd", lambda k: k.rope(torch.randn(2, 1, 7), ints(0, 1), X[:, :3], X[:, :3].clone()), "rope: "),
    ("rope_position", lambda k: k.rope(torch.randn(1, 1, 128), ints(3), X, X), "rope: positions: entry 0 is 3"),
    (
        "gemm_packed",
        lambda k: k.gemm(X, torch.zeros(8, dtype=torch.uint8), 5, torch.float32),
        "gemm: packed: dimension 0",
    ),
    ("gemm_out", lambda k: k.gemm(X, X, 5, torch.float32, None, torch.bfloat16), "gemm: out_type: must be that of x"),
    ("gemm_w_type", lambda k: k.gemm(X.bfloat16(), X, 5, torch.float32), "gemm: w_type: must be BFloat16 where x is"),
    (
        "w4a16_group",
        lambda k: k.w4a16_gemm_prepare(STATE.new_zeros(4, 8), torch.ones(4, 4), 16, torch.float32),
        "w4a16_gemm: group: ",
    ),
    (
        "w4a16_scales",
        lambda k: k.w4a16_gemm_prepare(STATE.new_zeros(4, 8), torch.ones(4, 3), 32, torch.float32),
        "sc: dimension 1 must be 2",
    ),
    ("moe_route_k", lambda k: k.moe_route(X, X[0], 65, 1, 1, True, 1.0), "moe_route: top_k: "),
    ("tree_attention_parents", lambda k: attention(k, parents=(0, 0)), "parents: row 0 stands before its parent"),
    ("tree_attention_depths", lambda k: attention(k, depths=(0, 0)), "depths: row 1 must be one deeper"),
    ("tree_attention_prefix", lambda k: attention(k, prefix=3), "prefix: prefix and rows must fit the rows of kv"),
    ("tree_build", lambda k: k.tree_build(X, 0, -1), "tree_build: budget: must not be negative"),
    ("kv_compact", lambda k: k.kv_compact(STATE[1:], ints(0), X[None]), "kv_compact: state: dimension 0 must be"),
    ("draft_script", lambda k: k.draft_script(STATE, ints(9), 2, 8, 0, 0.0, 1), "draft_script: script: entry 0 is 9"),
    ("kind", lambda k: k.draft_script(STATE, ints(3), 2, 8, 7, 0.0, 1), "draft_script: kind: "),
]


def attention(k, *, prefix=2, parents=(-1, 0), depths=(0, 1)):
    q = torch.randn(2, 1, 4)
    return k.tree_attention(q, q, torch.randn(4, 8), prefix, ints(*parents), ints(*depths), 1.0)


OF_VALUES = {"embed", "rope_position", "tree_attention_parents", "tree_attention_depths", "draft_script"}


@pytest.mark.parametrize(("name", "run", "message"), ERRORS, ids=[name for name, _, _ in ERRORS])
def test_errors_name_the_argument(folder, name, run, message):
    if name in OF_VALUES and DEVICE != "cpu":
        pytest.skip("values on a GPU are not read: the host would wait")
    with pytest.raises(RuntimeError, match=message):
        run(torch.ops.kdtree)


MODEL = dict(
    seed=3,
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=12,
    intermediate_size=64,
    n_routed_experts=4,
    moe_intermediate_size=32,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
    rope_theta=10000.0,
)


def test_decoding(library_file, tmp_path):
    """The decode entry on torch tensors gives what the engine gives, plain and by a tree."""
    generate_bundle(MODEL, "float32").write(tmp_path / "model.safetensors")
    prompt, none = [5, 17, 2], ints()
    model, drafter = open_bundle(tmp_path / "model.safetensors"), Drafter("oracle")
    with Engine(library_file, model, context=64, drafter=drafter) as engine:
        plain = engine.generate(prompt, mode="ar", max_new_tokens=12)
        handle = engine._handle
        for mode, script in (("ar", none), ("ddtree", ints(*prompt, *plain.tokens))):
            arguments = (ints(*prompt), none, script, handle, MODES[mode], 12)
            tokens, counts = torch.ops.kdtree.generate(*arguments)
            assert tokens.tolist() == plain.tokens and counts[0] == 12
            torch.library.opcheck(torch.ops.kdtree.generate.default, arguments)
        stop = plain.tokens[4]
        tokens, counts = torch.ops.kdtree.generate(ints(*prompt), ints(stop), none, handle, MODES["ar"], 12)
        length = plain.tokens.index(stop) + 1
        assert tokens.tolist() == [*plain.tokens[:length], *[-1] * (12 - length)] and counts[0] == length
        with pytest.raises(RuntimeError, match="kdtree::generate: "):
            torch.ops.kdtree.generate(none, none, none, handle, MODES["ar"], 12)
