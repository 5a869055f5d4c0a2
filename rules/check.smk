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
