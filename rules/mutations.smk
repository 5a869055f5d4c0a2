# One-line faults, put in one by one: each must be caught, by the check that tests/mutations/faults.yaml names.
rule mutations:
    input:
        py=py_sources("tests/mutations/run.py"),
        faults="tests/mutations/faults.yaml",
        verdicts=expand("results/{bundle}.pass", bundle=MUTATED_BUNDLES),
    output:
        "results/mutations.json",
    log:
        "results/logs/mutations.log",
    benchmark:
        "results/benchmarks/mutations.tsv"
    threads: 2
    shell:
        "python -m tests.mutations.run --targets {input.verdicts} --output {output} 2>&1 | tee {log} >&2"


# The CUDA kernels for the CPU, every CUDA thread a fiber: their logic, barriers and warp operations without a GPU.
rule emulator:
    input:
        py=py_sources("tests/cuda/emulator/__main__.py"),
        sources=emulated_sources,
    output:
        "results/build/emulator/libkdtree_emulated.so",
    log:
        "results/logs/emulator.log",
    benchmark:
        "results/benchmarks/emulator.tsv"
    threads: 2
    params:
        env=VERSIONS["g++"],
    shell:
        "python -m tests.cuda.emulator --build results/build/emulator > {log} 2>&1 || {{ cat {log} >&2; exit 1; }}"


# The same for the CUDA kernels, on emulated threads; tests/cuda/on_gpu.sh runs them all on a GPU.
rule mutations_cuda:
    input:
        py=py_sources("tests/cuda/mutations.py"),
        library="results/build/emulator/libkdtree_emulated.so",
    output:
        "results/mutations.cuda.json",
    log:
        "results/logs/mutations.cuda.log",
    benchmark:
        "results/benchmarks/mutations.cuda.tsv"
    threads: 2
    shell:
        "python -m tests.cuda.mutations --emulate --build results/build/emulator --jobs {threads} --output {output}"
        " 2>&1 | tee {log} >&2"
