# What an edit costs: clean build, INT4 kernel edit and no-op call, timed in a scratch copy. Its own target; -f repeats it.
rule bench_ladder:
    output:
        "results/bench/ladder.json",
    log:
        "results/logs/bench/ladder.log",
    benchmark:
        "results/benchmarks/bench/ladder.tsv"
    threads: 64  # all that the call has
    params:
        bundle="".join(QUANTISED_BUNDLES[-1:]),
    shell:
        "python -m engine.bench --cores {threads} --bundle {params.bundle} --output {output} 2>&1 | tee {log} >&2"


# How fast a checkpoint loads, beside reading its files. 4 GB, gone again afterwards.
rule bench_checkpoint:
    input:
        py=py_sources("tests/checkpoint/large.py"),
    output:
        temp(directory("results/bench/checkpoint")),
    log:
        "results/logs/bench/checkpoint.log",
    shell:
        "rm -rf {output} && python -m tests.checkpoint.large --output {output} 2>&1 | tee {log} >&2"


rule bench_load:
    input:
        py=py_sources("engine/bench_load.py"),
        checkpoint="results/bench/checkpoint",
        library=ancient("results/build/cpu/libkdtree_cpu.so"),
    output:
        "results/bench/load.json",
    log:
        "results/logs/bench/load.log",
    threads: 64  # all that the call has
    shell:
        "python -m engine.bench_load --library {input.library} --checkpoint {input.checkpoint} --output {output}"
        " 2>&1 | tee {log} >&2"
