# The engine decodes the golden's prompts. Runs depend on the digests of the operators they call and of the core, not
# on the library as a whole: editing an operator reruns what uses it. One thread here and two there must not matter.
rule ar:
    input:
        py=py_sources("engine/run.py"),
        core=core_digest,
        operators=ar_digests,
        bundle="results/bundles/{bundle}.safetensors",
        golden="results/golden/{bundle}.safetensors",
        library=ancient("results/build/{backend}/libkdtree_{backend}.so"),
    output:
        "results/runs/{backend}.{activations}/{bundle}.ar.safetensors",
    log:
        "results/logs/ar/{backend}.{activations}/{bundle}.log",
    benchmark:
        "results/benchmarks/ar/{backend}.{activations}/{bundle}.tsv"
    threads: 1
    resources:
        gpu=gpus,
    params:
        options=AR_OPTIONS,
        env=machine,
    shell:
        "python -m engine.run --library {input.library} --bundle {input.bundle} --golden {input.golden}"
        " --mode ar --activations {wildcards.activations} {params.options} --output {output}"
        " 2>&1 | tee {log} >&2"


# The plain run is the drafters' script.
rule ddtree:
    input:
        py=py_sources("engine/run.py"),
        core=core_digest,
        operators=ddtree_digests,
        bundle="results/bundles/{bundle}.safetensors",
        golden="results/golden/{bundle}.safetensors",
        script="results/runs/{backend}.{activations}/{bundle}.ar.safetensors",
        library=ancient("results/build/{backend}/libkdtree_{backend}.so"),
    output:
        "results/runs/{backend}.{activations}/{bundle}.ddtree{drafter}.safetensors",
    log:
        "results/logs/ddtree/{backend}.{activations}/{bundle}{drafter}.log",
    benchmark:
        "results/benchmarks/ddtree/{backend}.{activations}/{bundle}{drafter}.tsv"
    wildcard_constraints:
        drafter="|[.](oracle|noisy|adversarial)",
    threads: 2
    resources:
        gpu=gpus,
    params:
        options=DDTREE_OPTIONS,
        env=machine,
        drafter=drafter,
    shell:
        "python -m engine.run --library {input.library} --bundle {input.bundle} --golden {input.golden}"
        " --mode ddtree --activations {wildcards.activations} {params.options} --drafter {params.drafter:q}"
        " --script {input.script} --output {output} 2>&1 | tee {log} >&2"
