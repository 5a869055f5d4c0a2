# All verdicts on one page.
rule report:
    input:
        py=py_sources("engine/report.py"),
        verdicts=expand("results/{bundle}.pass", bundle=BUNDLES),
    output:
        json="results/summary.json",
        markdown="results/summary.md",
    log:
        "results/logs/report.log",
    benchmark:
        "results/benchmarks/report.tsv"
    shell:
        "python -m engine.report {input.verdicts} --json {output.json} --markdown {output.markdown}"
        " 2>&1 | tee {log} >&2"
