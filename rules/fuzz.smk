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


# ./ladder killed at 30 random moments, in a copy: what it makes in the end is what it makes unharmed.
rule kills:
    input:
        py=py_sources("tests/bad_input/kills.py"),
    output:
        "results/kills.json",
    log:
        "results/logs/kills.log",
    benchmark:
        "results/benchmarks/kills.tsv"
    threads: 2
    params:
        kills=30,
        seed=1,
    shell:
        "python -m tests.bad_input.kills --kills {params.kills} --seed {params.seed} --output {output} 2>&1 | tee {log} >&2"
