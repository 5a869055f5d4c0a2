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


# What bf16 activations are judged by: float64 on bf16-rounded weights after the golden's tokens, and how far plain torch
# bf16 is from it.
rule golden_bf16:
    input:
        py=py_sources("reference/bf16.py"),
        bundle="results/bundles/{bundle}.safetensors",
        golden="results/golden/{bundle}.safetensors",
    output:
        "results/golden/{bundle}.bfloat16.safetensors",
    log:
        "results/logs/golden_bf16/{bundle}.log",
    benchmark:
        "results/benchmarks/golden_bf16/{bundle}.tsv"
    params:
        env="{}, torch {}".format(NUMPY, TORCH),
    shell:
        "python -m reference.bf16 --bundle {input.bundle} --golden {input.golden} --output {output} 2>&1 | tee {log} >&2"
