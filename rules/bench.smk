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
