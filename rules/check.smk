# Every operator against its numpy twin over its named shapes. Records errors; verify judges them.
rule check:
    input:
        py=check_sources,
        interface=interface_digest,
        operator=operator_digest,
        library=ancient("results/build/{backend}/libkdtree_{backend}.so"),
    output:
        "results/checks/{backend}/{operator}.json",
    log:
        "results/logs/check/{backend}/{operator}.log",
    benchmark:
        "results/benchmarks/check/{backend}/{operator}.tsv"
    wildcard_constraints:
        operator=one_of(OPERATORS),
    resources:
        gpu=gpus,
    params:
        env=machine,
    shell:
        "python -m engine.check --library {input.library} --operator {wildcards.operator} --output {output}"
        " 2>&1 | tee {log} >&2"


# That mma.sync m16n8k16 and wgmma give the same bits: docs/numerics.md rests on it. Its own target; for sm_90.
rule mma_parity:
    input:
        py=py_sources("tests/cuda/mma_parity.py"),
        gpu=a_gpu,
    output:
        "results/checks/cuda/mma_parity.json",
    log:
        "results/logs/check/cuda/mma_parity.log",
    benchmark:
        "results/benchmarks/check/cuda/mma_parity.tsv"
    resources:
        gpu=1,
    params:
        env=NVCC,
    shell:
        "python -m tests.cuda.mma_parity --build results/build/mma_parity --output {output} 2>&1 | tee {log} >&2"
