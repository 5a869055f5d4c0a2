# A model's entry in config.yaml -> results/bundles/<bundle>.safetensors, the same bytes on every machine.
rule weights:
    input:
        py=py_sources("reference/weights.py"),
    output:
        "results/bundles/{bundle}.safetensors",
    log:
        "results/logs/weights/{bundle}.log",
    benchmark:
        "results/benchmarks/weights/{bundle}.tsv"
    wildcard_constraints:
        bundle=one_of(FLOAT_BUNDLES),
    params:
        config=model_config,
        dtype=bundle_dtype,
    shell:
        "python -m reference.weights --config {params.config:q} --dtype {params.dtype} --output {output}"
        " 2>&1 | tee {log} >&2"
