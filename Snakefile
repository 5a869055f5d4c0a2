# The ladder's table of contents: each file is one rung, in the order they are climbed.
from snakemake.utils import min_version

min_version("9.25.1")


configfile: "config.yaml"


container: "docker://python:3.13"  # only with --sdm apptainer; otherwise what ./ladder installs


include: "rules/common.smk"
include: "rules/weights.smk"  # a model's entry -> a bundle of seeded weights
include: "rules/quantize.smk"  # a float bundle -> an INT4 bundle
include: "rules/golden.smk"  # what the numpy reference decodes from a bundle
include: "rules/build.smk"  # C++ sources -> objects -> one library a backend, and digests
include: "rules/check.smk"  # every operator against its numpy twin
include: "rules/run.smk"  # the engine decodes: plain (ar) and with a draft tree (ddtree)
include: "rules/verify.smk"  # the judge: results/<bundle>.pass, or the first divergence
include: "rules/matrix.smk"  # tree = plain, by bytes, over everything that must not matter
include: "rules/mutations.smk"  # one-line faults and the checks that catch them
include: "rules/report.smk"  # all verdicts on one page
include: "rules/sanitize.smk"  # the checks under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer
include: "rules/fuzz.smk"  # mutated bundles, configs and arguments
include: "rules/bench.smk"  # what an edit costs
include: "rules/bench_cpu.smk"  # the CPU kernels against torch and against memory
include: "rules/bench_cuda.smk"  # the CUDA kernels against their peers and against memory


rule all:
    default_target: True
    input:
        verdicts=expand("results/{bundle}.pass", bundle=BUNDLES),
        summary="results/summary.json",
        cuda=CUDA_BUILD,


onstart:
    if not NVCC:
        print("notice: no nvcc on the PATH: CUDA kernels are neither compiled nor run", file=sys.stderr)


onerror:
    discard_stale_verdicts()
    name_failing_operators()
