# Mutated bundles, configs and arguments through the loader and the engine, under AddressSanitizer and
# UndefinedBehaviorSanitizer: results/fuzz.json, only if nothing crashed, hung or was refused in the wrong form.
rule fuzz:
    input:
        py=py_sources("tests/fuzz/__main__.py", "tests/fuzz/worker.py"),
        config=["config.yaml", "config.schema.yaml"],
        library="results/sanitize/address/libkdtree_cpu.so",
    output:
        "results/fuzz.json",
    log:
        "results/logs/fuzz.log",
    benchmark:
        "results/benchmarks/fuzz.tsv"
    threads: 2
    params:
        cases=100_000,
        seed=1,
        env=NUMPY,
    shell:
        "python -m tests.fuzz --library {input.library} --cases {params.cases} --seed {params.seed}"
        " --workers {threads} --output {output} 2>&1 | tee {log} >&2"
