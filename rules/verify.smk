# The judge. Writes results/<bundle>.pass only when everything holds; otherwise says what failed first, and leaves a
# case under results/cases/ that replays it.
rule plan:
    output:
        "results/plans/{bundle}.json",
    log:
        "results/logs/plan/{bundle}.log",
    params:
        plan=plan,
    shell:
        "python -m json.tool --no-ensure-ascii - {output} <<<{params.plan:q} 2>&1 | tee {log} >&2"


rule verify:
    input:
        py=py_sources("engine/verify.py"),
        plan="results/plans/{bundle}.json",
        bundle="results/bundles/{bundle}.safetensors",
        golden="results/golden/{bundle}.safetensors",
        float32_golden=float32_golden,
        bf16_golden=bf16_golden,
        runs=judged_runs,
        checks=judged_checks,
    output:
        "results/{bundle}.pass",
    log:
        "results/logs/verify/{bundle}.log",
    benchmark:
        "results/benchmarks/verify/{bundle}.tsv"
    shell:
        "python -m engine.verify --plan {input.plan} --output {output} 2>&1 | tee {log} >&2"
