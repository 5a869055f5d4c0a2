# How fast the CPU kernels are, beside torch and beside reading memory. Its own targets; -f repeats the measurement.
# Needs what envs/requirements-bench.txt lists, and a machine that does nothing else.
rule bench_reader:
    input:
        "engine/bench_cpu/read.cpp",
    output:
        "results/build/bench/libread.so",
    log:
        "results/logs/bench/reader.log",
    shell:
        "g++ -std=c++17 -O3 -fopenmp -shared -fPIC {input} -o {output} 2>&1 | tee {log} >&2"


rule bench_cpu:
    input:
        reader="results/build/bench/libread.so",
        library=ancient("results/build/cpu/libkdtree_cpu.so"),
    output:
        "results/bench/cpu.json",
    log:
        "results/logs/bench/cpu.log",
    benchmark:
        "results/benchmarks/bench/cpu.tsv"
    threads: 64  # all that the call has
    shell:
        "python -m engine.bench_cpu --library {input.library} --read-library {input.reader} --output {output}"
        " 2>&1 | tee {log} >&2"


rule plot_cpu:
    input:
        record="results/bench/cpu.json",
        py=py_sources("engine/bench_cpu/plot.py"),
    output:
        "results/bench/cpu.png",
    log:
        "results/logs/bench/plot_cpu.log",
    shell:
        "python -m engine.bench_cpu.plot {input.record} {output} 2>&1 | tee {log} >&2"
