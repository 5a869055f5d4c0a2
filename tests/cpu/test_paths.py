"""Every instruction set the CPU has: within the budgets, AR = DDTree by bytes; and none that it has not.

Older CPUs are emulated, where qemu-user is installed.
"""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from engine import contract
from engine.bundle import open_bundle
from engine.check import cases_of, check
from engine.native import BackendError, Drafter, Engine
from engine.operators import Library, OperatorError
from engine.run import record
from reference.quantize import quantize_bundle
from reference.weights import generate_bundle

PATHS = ("portable", "avx2", "avx512")
CPUS = {"Nehalem": "portable", "Haswell": "avx2"}  # qemu's names


def choose(library: Library, path: str) -> None:
    os.environ["KDTREE_CPU"] = path
    try:
        library.call(library.init)
    except OperatorError as refused:
        pytest.skip(str(refused))


@pytest.fixture
def restored(library):
    """KDTREE_CPU and the library's path, as they were."""
    if library.backend_name != "cpu":
        pytest.skip("paths are the CPU backend's")
    before = os.environ.pop("KDTREE_CPU", None)
    yield
    os.environ.pop("KDTREE_CPU", None)
    if before is not None:
        os.environ["KDTREE_CPU"] = before
    library.call(library.init)


@pytest.fixture(params=PATHS)
def path(request, restored, library):
    choose(library, request.param)
    return request.param


def test_path_is_recorded(path, library):
    assert library.variant_name == path


@pytest.mark.parametrize("name", contract.operator_names())
def test_operator(path, library, name):
    for measurement in check(library, name):
        assert measurement.within, measurement


@pytest.mark.parametrize("name", contract.operator_names())
def test_avx2_and_avx512_give_the_same_bytes(restored, library, name):
    for case in cases_of(name).CASES:
        call = case.call()
        choose(library, "avx2")
        narrow = library.operator(name).run(call)
        choose(library, "avx512")
        wide = library.operator(name).run(call)
        assert all(narrow[output].tobytes() == wide[output].tobytes() for output in narrow), case.name


# ---- decoding --------------------------------------------------------------------------------------------------------
MODEL = {
    "seed": 3,
    "vocab_size": 331,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 11,
    "q_lora_rank": 64,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "intermediate_size": 160,
    "n_routed_experts": 6,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 512,
}
PROMPT = list(range(3, 90))
NEW, BLOCK = 30, 6


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles")
    made = {}
    for dtype in ("float32", "bfloat16"):
        bundle = generate_bundle(MODEL, dtype)
        for name, form in ((dtype, bundle), (f"int4_{dtype}", quantize_bundle(bundle, 32))):
            form.write(folder / name)
            made[name] = open_bundle(folder / name)
    return made


@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int4_float32", "int4_bfloat16"])
def test_ar_is_ddtree_by_bytes(path, library, library_path, bundles, name, activations):
    drafter = Drafter("noisy", 0.3, 5)
    with Engine(library_path, bundles[name], context=len(PROMPT) + NEW, block_size=BLOCK, tree_budget=13,
                activations=activations, drafter=drafter) as engine:  # fmt: skip
        assert engine.variant == path
        with library.threads(1):
            plain, _ = record(engine, PROMPT, mode="ar", max_new_tokens=NEW, overrun=BLOCK)
        script = [*PROMPT, *plain["tokens"].tolist(), *plain["overrun"].tolist()]
        with library.threads(2):
            tree, stats = record(engine, PROMPT, mode="ddtree", max_new_tokens=NEW, script=script)
    assert 1 < stats["committed"] / stats["steps"] < BLOCK
    assert tree["tokens"].tolist() == plain["tokens"].tolist()
    rows = len(tree["logits"])
    assert tree["logits"].tobytes() == plain["logits"][:rows].tobytes()
    positions = tree["kv"].shape[1]
    assert np.ascontiguousarray(plain["kv"][:, :positions]).tobytes() == tree["kv"].tobytes()


# ---- choosing --------------------------------------------------------------------------------------------------------
def test_default_is_the_best(restored, library):
    usable = []
    for name in PATHS:
        os.environ["KDTREE_CPU"] = name
        try:
            library.call(library.init)
            usable.append(name)
        except OperatorError:
            pass
    for default in (None, ""):
        os.environ.pop("KDTREE_CPU")
        if default is not None:
            os.environ["KDTREE_CPU"] = default
        library.call(library.init)
        assert library.variant_name == usable[-1]
        os.environ["KDTREE_CPU"] = ""


@pytest.mark.parametrize("value", ["sse9", "AVX2", "avx512 "])
def test_unknown_value(restored, library_path, bundles, value):
    os.environ["KDTREE_CPU"] = value
    with pytest.raises(BackendError, match=f"^KDTREE_CPU: {value}: must be portable, avx2 or avx512$"):
        Engine(library_path, bundles["float32"], context=64)


# ---- no instruction that a CPU has not -------------------------------------------------------------------------------
def test_an_operators_object_exports_its_table_entries_only(restored, library_path):
    """Anything else could become another path's definition when the library is linked."""
    for name in contract.operator_names():
        objects = list(library_path.parent.rglob(f"{name}.o"))
        assert objects, name
        listed = subprocess.run(["nm", "--defined-only", objects[0]], check=True, capture_output=True, text=True).stdout
        exported = {symbol for _, kind, symbol in (line.split() for line in listed.splitlines()) if not kind.islower()}
        assert exported <= {f"_ZN6kdtree{len(p)}{p}{len(name)}{name}E" for p in PATHS}


def emulated(cpu: str, *command, **environment) -> subprocess.CompletedProcess:
    if not shutil.which("qemu-x86_64"):
        pytest.skip("qemu-x86_64 is not installed")
    return subprocess.run(
        ["qemu-x86_64", "-cpu", cpu, sys.executable, *command],
        capture_output=True, text=True,
        env=os.environ | {"OPENBLAS_CORETYPE": "Prescott"} | environment,  # numpy's own choice is not under test
    )  # fmt: skip


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("name", ["w4a16_moe_experts", "tree_attention", "rms_norm", "moe_route", "tree_build"])
def test_older_cpu(restored, library_path, tmp_path, cpu, name):
    record = tmp_path / "record.json"
    arguments = ["--library", library_path, "--operator", name, "--output", record]
    done = emulated(cpu, "-m", "engine.check", *map(str, arguments))
    assert done.returncode == 0, done.stderr
    assert ", 0 above budget" in done.stdout and f'"variant": "{CPUS[cpu]}"' in record.read_text()


@pytest.mark.parametrize("cpu", CPUS)
def test_older_cpu_refuses_what_it_has_not(restored, library_path, cpu):
    code = f"from engine.operators import Library; Library({str(library_path)!r})"
    done = emulated(cpu, "-c", code, KDTREE_CPU="avx512")
    assert done.returncode == 1 and "KDTREE_CPU: avx512: this CPU does not have its instructions" in done.stderr
