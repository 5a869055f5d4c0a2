# A float bundle -> the same model with INT4 weights in its MLPs and experts.
rule quantize:
    input:
        py=py_sources("reference/quantize.py"),
        bundle=float_bundle_file,
    output:
        "results/bundles/{bundle}.safetensors",
    log:
        "results/logs/quantize/{bundle}.log",
    benchmark:
        "results/benchmarks/quantize/{bundle}.tsv"
    wildcard_constraints:
        bundle=one_of(QUANTISED_BUNDLES),
    params:
        group_size=group_size,
        env=NUMPY,
    shell:
        "python -m reference.quantize --bundle {input.bundle} --group-size {params.group_size} --output {output}"
        " 2>&1 | tee {log} >&2"
