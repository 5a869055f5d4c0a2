# What the rungs share: the checked config, closures of sources, what a run calls, and the rules' inputs and params.
import functools
import importlib.metadata
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, workflow.basedir)
from engine.config import check, float_bundle
from engine.sanitize import FLAVOURS, compile_flags


def output_of(*command):
    """What a tool prints; empty if there is no such tool, or if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


# What this machine can do: compile CUDA (nvcc), run it (a GPU), both or neither.
NVCC = re.sub(r"(?s).*release \S+ (V[\d.]+).*", r"nvcc \1", output_of("nvcc", "--version"))
GPU = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")

config_file, *overlays = reversed(workflow.configfiles)
if errors := check(
    config,
    Path(workflow.basedir, "config.schema.yaml"),
    [config_file, *reversed(overlays)],
    no_cuda="no nvcc on the PATH" if not NVCC else "no GPU answers nvidia-smi" if not GPU else None,
):
    sys.exit("\n".join(errors))
RUN_BACKENDS = {"auto": ["cpu", "cuda"] if NVCC and GPU else ["cpu"], "cpu": ["cpu"], "cuda": ["cuda"]}[
    config["device"]
]

# `python` and the tools are those of snakemake's own environment, activated or not. Threads that wait sleep: jobs share
# the cores, and a spinning one would hold up another's.
shell.prefix(
    "set -euo pipefail; export OMP_WAIT_POLICY=passive PATH={}:$PATH; ".format(
        shlex.quote(str(Path(sys.executable).parent))
    )
)

# The scheduler's chatter would drown what the stages print.
CHATTER = re.compile(
    r"Select jobs to execute|Execute \d+ jobs|Using shell|Singularity containers|Assuming unrestricted"
)
logging.getLogger("snakemake.logging").addFilter(lambda record: not CHATTER.match(record.getMessage()))

DECODE = config["decode"]
BUNDLES = {model: {"model": model, "dtype": "float32", "quant": None} for model in config["models"]} | config["bundles"]
FLOAT_BUNDLES = [name for name, bundle in BUNDLES.items() if not bundle["quant"]]
QUANTISED_BUNDLES = [name for name, bundle in BUNDLES.items() if bundle["quant"]]


wildcard_constraints:
    bundle="|".join(BUNDLES),
    backend="cpu|cuda",
    activations="float32|bfloat16",


def one_of(names):
    """A wildcard constraint; matches nothing when there are no names."""
    return "|".join(names) or "(?!)"


def as_json(value):
    """Snakemake compares params by repr and without their names, so a structured one is a plain string."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


# ---- closures of sources: a rung depends on the files it reaches, not on their folder


def py_sources(*entries):
    """The Python files and every module of this repository that they import, at any depth."""
    seen, todo = set(), list(entries)
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += local_imports(path)
    return sorted(seen)


# `from a.b import c, d`, with or without parentheses, or `import a.b`. A docstring's example counts, which does no harm.
IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]*(\([^)]*\)|[^\n]*)|import[ \t]+([^\n]*))", re.MULTILINE
)


@functools.cache
def local_imports(file):
    """The files that it imports: modules, or their packages, of this repository."""
    folder = Path(file).parent
    modules = [folder]
    for base, names, plain in IMPORT.findall(Path(file).read_text()):
        modules += [Path(*name.split(".")) for name in re.findall(r"[\w.]+", plain)]
        if base:
            dots = len(base) - len(base.lstrip("."))
            package = Path(folder, *[".."] * (dots - 1)) if dots else Path()
            package = package.joinpath(*filter(None, base.split(".")))
            modules += [package, *(package / name for name in re.findall(r"\w+", names))]
    files = (file for module in modules for file in (module.with_suffix(".py"), module / "__init__.py"))
    return [os.path.normpath(file) for file in files if file.is_file()]


INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def c_headers(source):
    """Every local header that the C++ file reaches."""
    seen, todo = set(), [source]
    while todo:
        path = os.path.normpath(todo.pop())
        if path not in seen and os.path.exists(path):
            seen.add(path)
            folder = os.path.dirname(path)
            todo += [os.path.join(folder, header) for header in INCLUDE.findall(Path(path).read_text())]
    return sorted(seen - {source})


# ---- operators: the rules' word on what a run calls; verify holds the engine to it

OPERATORS = sorted(path.parent.name for path in Path("engine/ops").glob("*/op.h"))

AR_OPERATORS = ["argmax", "embed", "gemm", "moe_route", "rms_norm", "rope", "swiglu", "tree_accept", "tree_attention"]
DDTREE_OPERATORS = ["draft_script", "kv_compact", "tree_build"]
FLOAT_OPERATORS = ["moe_experts"]
QUANTISED_OPERATORS = ["w4a16_gemm", "w4a16_moe_experts"]


def operators(bundle, mode):
    """The operators that decoding `bundle` may call."""
    weights = QUANTISED_OPERATORS if BUNDLES[bundle]["quant"] else FLOAT_OPERATORS
    return sorted([*AR_OPERATORS, *weights, *(DDTREE_OPERATORS if mode == "ddtree" else [])])


# ---- what a result depends on besides files

VERSIONS = {
    "python": ".".join(map(str, sys.version_info[:3])),
    "numpy": importlib.metadata.version("numpy"),
    "g++": subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip(),
}
NUMPY = "numpy {numpy}".format(**VERSIONS)
TORCH = "".join(found.version for found in importlib.metadata.distributions(name="torch"))

# Contraction is off because it would let two instances of one kernel round differently (docs/numerics.md).
CXX_FLAGS = "-std=c++17 -O3 -fPIC -fopenmp -ffp-contract=off -DNDEBUG -Wall -Wextra -Wno-psabi"

# Machine code for Hopper and for Blackwell workstations; no PTX, so that no driver compiles anything else.
CUDA_FLAGS = (
    "-std=c++17 -O3 --fmad=false -DNDEBUG -Xcompiler -fPIC,-Wall,-Wextra -Xptxas -v"
    " -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_120a,code=sm_120a"
)


# ---- weights, quantize


def model_config(wildcards):
    return as_json(config["models"][BUNDLES[wildcards.bundle]["model"]])


def bundle_dtype(wildcards):
    return BUNDLES[wildcards.bundle]["dtype"]


def group_size(wildcards):
    return BUNDLES[wildcards.bundle]["quant"]["group_size"]


def float_bundle_file(wildcards):
    bundle = BUNDLES[wildcards.bundle]
    return "results/bundles/{}.safetensors".format(float_bundle(config, bundle["model"], bundle["dtype"]))


# ---- build


def sources_in(folder, prefix):
    """{name of the object: source} of every C++ and CUDA file in a folder."""
    return {"{}/{}".format(prefix, path.stem): str(path) for path in sorted(Path(folder).glob("*.c[pu]*"))}


# The C interface and the backend, which checks go through; and the rest of the core, which only decoding does.
INTERFACE_UNITS = {
    backend: sources_in("engine/backend/{}".format(backend), "backend") | {"core/api": "engine/core/api.cpp"}
    for backend in ("cpu", "cuda")
}
CORE_UNITS = {name: source for name, source in sources_in("engine/core", "core").items() if name != "core/api"}
OPERATOR_UNITS = {
    "cpu": {name: "engine/ops/{}/cpu.cpp".format(name) for name in OPERATORS},
    "cuda": {name: "engine/ops/{}/cuda.cu".format(name) for name in OPERATORS},
}
UNITS = {backend: CORE_UNITS | INTERFACE_UNITS[backend] | OPERATOR_UNITS[backend] for backend in INTERFACE_UNITS}
CUDA_UNITS = [name for name, source in UNITS["cuda"].items() if source.endswith(".cu")]


# Without a GPU the CUDA backend is built all the same where there is nvcc.
CUDA_BUILD = ["results/build/cuda/resources.json"] if NVCC else []


def unit_source(wildcards):
    return UNITS[wildcards.backend][wildcards.unit]


def unit_headers(wildcards):
    return c_headers(unit_source(wildcards))


# Object, source and flags -> the source compiled once per instruction set.
COMPILE_OPERATOR = "engine/ops/cpu/compile.sh"


def unit_compiler(wildcards):
    """The command that takes object, source and flags."""
    return COMPILE_OPERATOR if wildcards.unit in OPERATORS else "g++ -c -o"


def cuda_source(wildcards):
    return UNITS["cuda"][wildcards.unit]


def cuda_headers(wildcards):
    return c_headers(cuda_source(wildcards))


def interface_objects(wildcards):
    return objects(INTERFACE_UNITS[wildcards.backend], wildcards.backend)


def linker(wildcards):
    return (
        "nvcc -shared -Xcompiler -fopenmp" if wildcards.backend == "cuda" else "g++ -shared -fopenmp -Wl,--no-undefined"
    )


def compiler(wildcards):
    """The version that a library depends on."""
    return VERSIONS["g++"] + (" {}".format(NVCC) if wildcards.backend == "cuda" else "")


TORCH_SOURCES = sorted(
    {file for path in Path("engine/torch_ops").glob("*.cpp") for file in [str(path), *c_headers(str(path))]}
)


def objects(units, backend="{backend}"):
    return ["results/build/{}/{}.o".format(backend, unit) for unit in units]


# ---- check, run


def digests(wildcards, names):
    """Digest files of the linked library, known once it is linked."""
    folder = Path(checkpoints.link.get(backend=wildcards.backend).output.library).parent
    return ["{}/{}.sha256".format(folder, name) for name in names]


def interface_digest(wildcards):
    return digests(wildcards, ["interface"])


def core_digest(wildcards):
    return digests(wildcards, ["core"])


def operator_digest(wildcards):
    return digests(wildcards, [wildcards.operator])


def ar_digests(wildcards):
    return digests(wildcards, operators(wildcards.bundle, "ar"))


def ddtree_digests(wildcards):
    return digests(wildcards, operators(wildcards.bundle, "ddtree"))


def machine(wildcards):
    """What a result depends on besides its inputs: the device and the forced path or rung of its kernels."""
    forced = os.environ.get("KDTREE_{}".format(wildcards.backend.upper()), "")
    return ", ".join([NUMPY, *([GPU] if wildcards.backend == "cuda" else []), forced])


def gpus(wildcards):
    """A check or a run takes one share of the GPU (profiles/default); most of its time is start-up."""
    return int(wildcards.backend == "cuda")


def check_sources(wildcards):
    return py_sources("engine/check.py", "engine/ops/{}/cases.py".format(wildcards.operator))


LIMITS = "--max-new-tokens {max_new_tokens} --stop-token-ids '{stop_token_ids}'".format(**DECODE)
AR_OPTIONS = "{} --block-size {}".format(LIMITS, DECODE["block_size"])
DDTREE_OPTIONS = "{} --tree-budget {}".format(AR_OPTIONS, DECODE["tree_budget"])


def drafter(wildcards):
    kind = wildcards.drafter.lstrip(".") or DECODE["drafter"]["kind"]
    return as_json(DECODE["drafter"] | {"kind": kind})


# ---- sanitize

SANITIZED_UNITS = UNITS["cpu"] | {"openmp": "engine/sanitize/openmp.cpp"}
SUBJECTS = [*OPERATORS, "decode"]


def sanitized_source(wildcards):
    return SANITIZED_UNITS[wildcards.unit]


def sanitized_headers(wildcards):
    return c_headers(SANITIZED_UNITS[wildcards.unit])


def sanitized_flags(wildcards):
    return compile_flags(CXX_FLAGS, wildcards.flavour)


def sanitizer(wildcards):
    return FLAVOURS[wildcards.flavour]


def subject_sources(wildcards):
    cases = [] if wildcards.subject == "decode" else ["engine/ops/{}/cases.py".format(wildcards.subject)]
    return py_sources("engine/sanitize/__main__.py", "engine/sanitize/subject.py", *cases)


def subject_bundles(wildcards):
    return expand("results/bundles/{bundle}.safetensors", bundle=BUNDLES) if wildcards.subject == "decode" else []


# ---- verify

# Name in the verdict -> backend, activations.
VARIANTS = {
    backend if activations == "float32" else "{}_bf16".format(backend): (backend, activations)
    for backend in RUN_BACKENDS
    for activations in DECODE["activations"]
}
DRAFTERS = [DECODE["drafter"]["kind"], *config["verify"]["drafters"]]


def evidence(bundle):
    """What the verdict on `bundle` is made from, by variant."""
    return {
        name: {
            "backend": backend,
            "activations": activations,
            "library": "results/build/{0}/libkdtree_{0}.so".format(backend),
            "bf16_golden": bf16_golden_file(bundle) if activations == "bfloat16" else None,
            "ar": run_file(backend, activations, bundle, "ar"),
            "ddtree": {kind: run_file(backend, activations, bundle, ddtree_name(kind)) for kind in DRAFTERS},
            "checks": ["results/checks/{}/{}.json".format(backend, name) for name in operators(bundle, "ddtree")],
            "operators": {mode: operators(bundle, mode) for mode in ("ar", "ddtree")},
        }
        for name, (backend, activations) in VARIANTS.items()
    }


def bf16_golden_file(bundle):
    return "results/golden/{}.bfloat16.safetensors".format(bundle)


def bf16_golden(wildcards):
    """What bf16 runs are judged by, if there are any."""
    return sorted({file for v in evidence(wildcards.bundle).values() if (file := v["bf16_golden"])})


def run_file(backend, activations, bundle, mode):
    return "results/runs/{}.{}/{}.{}.safetensors".format(backend, activations, bundle, mode)


def ddtree_name(kind):
    """The configured drafter's run has the plain name; the others carry their kind."""
    return "ddtree" if kind == DECODE["drafter"]["kind"] else "ddtree.{}".format(kind)


def judged_runs(wildcards):
    variants = evidence(wildcards.bundle).values()
    return [file for variant in variants for file in (variant["ar"], *variant["ddtree"].values())]


def judged_checks(wildcards):
    return [file for variant in evidence(wildcards.bundle).values() for file in variant["checks"]]


def float32_golden(wildcards):
    """The golden that a quantised bundle's golden must leave; none for a float bundle."""
    bundle = BUNDLES[wildcards.bundle]
    return ["results/golden/{}.safetensors".format(bundle["model"])] if bundle["quant"] else []


def plan(wildcards):
    """What to judge and how strictly: all that engine/verify.py knows."""
    bundle = wildcards.bundle
    limits = ("max_new_tokens", "block_size", "tree_budget", "stop_token_ids", "drafter")
    return as_json(
        {
            "bundle": bundle,
            "bundle_file": "results/bundles/{}.safetensors".format(bundle),
            "golden": "results/golden/{}.safetensors".format(bundle),
            "float32_golden": "".join(float32_golden(wildcards)) or None,
            "prompts": [prompt["name"] for prompt in DECODE["prompts"]],
            "decode": {key: DECODE[key] for key in limits},
            "verify": config["verify"],
            "variants": evidence(bundle),
            "versions": VERSIONS,
        }
    )


# ---- matrix, mutations


def matrix_options(wildcards):
    """Threads are OpenMP's: only the CPU has them. The subset's long run is short."""
    axes = {key: values for key, values in config["matrix"].items() if key != "long_run"}
    if wildcards.backend != "cpu":
        axes["threads"] = [1]
    pairs = wildcards.cover == ".pairs"
    long_run = config["matrix"]["long_run"] // 10 if pairs else config["matrix"]["long_run"]
    return "--axes {} --cover {} --long {}".format(shlex.quote(as_json(axes)), "pairs" if pairs else "all", long_run)


def matrix_variants(wildcards):
    return [
        "results/matrix/{}.{}/{}{}.json".format(backend, activations, wildcards.bundle, wildcards.cover)
        for backend, activations in VARIANTS.values()
    ]


# A float bundle and what is quantised from it: between them they run every operator.
MUTATED_BUNDLES = [*FLOAT_BUNDLES[-1:], *QUANTISED_BUNDLES[-1:]]


def emulated_sources(wildcards):
    """What the emulator of CUDA threads compiles."""
    roots = [*UNITS["cuda"].values(), *map(str, Path("tests/cuda/emulator").glob("*.cpp"))]
    emulator_headers = map(str, Path("tests/cuda/emulator").glob("*.h"))
    return sorted({*roots, *emulator_headers, *(header for root in roots for header in c_headers(root))})


# ---- bench


def a_gpu(wildcards):
    """Nothing; ends the call of a target that needs a GPU where there is none."""
    if not NVCC:
        sys.exit("error: nvcc: not on the PATH: this target compiles for a GPU and runs on it")
    if not GPU:
        sys.exit("error: nvidia-smi: no GPU answers: this target runs on one")
    return []


# ---- after a failure


def discard_stale_verdicts():
    """A verdict, the CUDA build's too, must not outlive the failure of what it vouches for."""
    for verdict in [*Path("results").glob("*.pass"), Path("results/build/cuda/resources.json")]:
        verdict.unlink(missing_ok=True)


def name_failing_operators():
    """An operator over its budget is named last of all, even when the failure kept the judge from running."""
    checks = sorted(map(str, Path("results/checks").glob("*/*.json")))
    if checks:
        subprocess.run([sys.executable, "-m", "engine.verify", "--checks", *checks], stdout=sys.stderr)
