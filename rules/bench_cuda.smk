# How fast the CUDA kernels are, beside their peers and beside reading memory. Its own targets; -f repeats the measurement.
# Needs a GPU that does nothing else, and what envs/requirements-bench.txt lists; with Humming, what it names by hand.


# The expert kernels from inside, and a kernel that only reads.
rule bench_probes:
    input:
        source="engine/bench_cuda/probes.cu",
        headers=c_headers("engine/bench_cuda/probes.cu"),
    output:
        "results/build/bench/libprobes_cuda.so",
    log:
        "results/logs/bench/probes.log",
    params:
        flags=CUDA_FLAGS.replace(" -Xptxas -v", ""),
        env=NVCC,
    shell:
        "nvcc {params.flags} -shared {input.source} -o {output} 2>&1 | tee {log} >&2"


# What was measured before a subject failed stays in the record beside the log.
rule bench_cuda:
    input:
        a_gpu,
        py=py_sources("engine/bench_cuda/__main__.py"),
        probes="results/build/bench/libprobes_cuda.so",
        library=ancient("results/build/cuda/libkdtree_cuda.so"),
    output:
        "results/bench/cuda.json",
    log:
        text="results/logs/bench/cuda.log",
        record="results/logs/bench/cuda.json",
    benchmark:
        "results/benchmarks/bench/cuda.tsv"
    threads: 64  # all that the call has
    shell:
        "python -m engine.bench_cuda --library {input.library} --probes {input.probes} --output {log.record}"
        " 2>&1 | tee {log.text} >&2 && cp {log.record} {output}"


rule plot_cuda:
    input:
        record="results/bench/cuda.json",
        py=py_sources("engine/bench_cuda/plot.py"),
    output:
        "results/bench/cuda.png",
    log:
        "results/logs/bench/plot_cuda.log",
    shell:
        "python -m engine.bench_cuda.plot {input.record} {output} 2>&1 | tee {log} >&2"
