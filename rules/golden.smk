# What the numpy reference decodes, greedily and in float64: tokens, logits, and float32's own noise.
rule golden:
    input:
        py=py_sources("reference/golden.py"),
        bundle="results/bundles/{bundle}.safetensors",
    output:
        "results/golden/{bundle}.safetensors",
    log:
        "results/logs/golden/{bundle}.log",
    benchmark:
        "results/benchmarks/golden/{bundle}.tsv"
    params:
        prompts=as_json(DECODE["prompts"]),
        limits=LIMITS,
        env=NUMPY,
    shell:
        "python -m reference.golden --bundle {input.bundle} --prompts {params.prompts:q} {params.limits}"
        " --output {output} 2>&1 | tee {log} >&2"
