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
