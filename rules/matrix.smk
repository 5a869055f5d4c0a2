# The exactness matrix: tree decoding equals plain decoding by bytes, whatever the budget, block size, drafter, thread
# count and prefill chunks, wherever the output ends. results/matrix/<bundle>.json takes every cell;
# results/matrix/<bundle>.pairs.json just enough of them that every pair of two values meets.
rule matrix_variant:
    input:
        py=py_sources("engine/matrix.py"),
        core=core_digest,
        operators=ddtree_digests,
        bundle="results/bundles/{bundle}.safetensors",
        golden="results/golden/{bundle}.safetensors",
        library=ancient("results/build/{backend}/libkdtree_{backend}.so"),
    output:
        "results/matrix/{backend}.{activations}/{bundle}{cover}.json",
    log:
        "results/logs/matrix/{backend}.{activations}/{bundle}{cover}.log",
    benchmark:
        "results/benchmarks/matrix/{backend}.{activations}/{bundle}{cover}.tsv"
    wildcard_constraints:
        cover="|[.]pairs",
    threads: 2
    resources:
        gpu=gpus,
    params:
        options=matrix_options,
        env=machine,
    shell:
        "python -m engine.matrix --library {input.library} --bundle {input.bundle} --golden {input.golden}"
        " --activations {wildcards.activations} {params.options} --output {output} 2>&1 | tee {log} >&2"


rule matrix:
    input:
        py=py_sources("engine/matrix.py"),
        variants=matrix_variants,
    output:
        "results/matrix/{bundle}{cover}.json",
    log:
        "results/logs/matrix/{bundle}{cover}.log",
    wildcard_constraints:
        cover="|[.]pairs",
    shell:
        "python -m engine.matrix --merge {input.variants} --output {output} 2>&1 | tee {log} >&2"
