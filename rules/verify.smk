# The judge. Writes results/<bundle>.pass only when everything holds; otherwise says what failed first, and leaves a
# case under results/cases/ that replays it.
rule verify:
    input:
        py=py_sources("engine/verify.py"),
        golden="results/golden/{bundle}.safetensors",
        float32_golden=float32_golden,
        bundle="results/bundles/{bundle}.safetensors",
        runs=judged_runs,
        checks=judged_checks,
    output:
        "results/{bundle}.pass",
    log:
        "results/logs/verify/{bundle}.log",
    benchmark:
        "results/benchmarks/verify/{bundle}.tsv"
    params:
        plan=plan,
    shell:
        "python -m engine.verify --plan {params.plan:q} --output {output} 2>&1 | tee {log} >&2"
