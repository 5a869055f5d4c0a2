# The checks of every operator, and decoding, with the CPU library under AddressSanitizer and UndefinedBehaviorSanitizer
# (flavour `address`) and under ThreadSanitizer (`thread`): results/sanitize.json, only if all is clean.
rule sanitize_compile:
    input:
        source=sanitized_source,
        headers=sanitized_headers,
        script=COMPILE_OPERATOR,
    output:
        "results/sanitize/{flavour}/build/{unit}.o",
    log:
        "results/logs/sanitize_compile/{flavour}/{unit}.log",
    benchmark:
        "results/benchmarks/sanitize_compile/{flavour}/{unit}.tsv"
    params:
        compile=unit_compiler,
        flags=sanitized_flags,
        env=VERSIONS["g++"],
    shell:
        "{{ {params.compile} {output}.$$ {input.source} {params.flags} && mv {output}.$$ {output}; }}"
        " 2>&1 | tee {log} >&2"


rule sanitize_link:
    input:
        expand("results/sanitize/{{flavour}}/build/{unit}.o", unit=SANITIZED_UNITS),
    output:
        "results/sanitize/{flavour}/libkdtree_cpu.so",
    log:
        "results/logs/sanitize_link/{flavour}.log",
    benchmark:
        "results/benchmarks/sanitize_link/{flavour}.tsv"
    params:
        flags=sanitizer,
        env=VERSIONS["g++"],
    shell:
        "{{ g++ -shared {params.flags} -Wl,-Bsymbolic -Wl,--no-undefined {input} -o {output}.$$"
        " && mv {output}.$$ {output}; }} 2>&1 | tee {log} >&2"


rule sanitize:
    input:
        py=subject_sources,
        library="results/sanitize/{flavour}/libkdtree_cpu.so",
        bundles=subject_bundles,
    output:
        "results/sanitize/{flavour}/{subject}.json",
    log:
        "results/logs/sanitize/{flavour}/{subject}.log",
    benchmark:
        "results/benchmarks/sanitize/{flavour}/{subject}.tsv"
    wildcard_constraints:
        subject=one_of(SUBJECTS),
    params:
        env=NUMPY,
    shell:
        "python -m engine.sanitize --flavour {wildcards.flavour} --library {input.library}"
        " --subject {wildcards.subject} --bundles {input.bundles} --output {output} 2>&1 | tee {log} >&2"


rule sanitize_report:
    input:
        py=py_sources("engine/sanitize/report.py"),
        records=expand("results/sanitize/{flavour}/{subject}.json", flavour=FLAVOURS, subject=SUBJECTS),
    output:
        "results/sanitize.json",
    log:
        "results/logs/sanitize_report.log",
    benchmark:
        "results/benchmarks/sanitize_report.tsv"
    shell:
        "python -m engine.sanitize.report {input.records} --output {output} 2>&1 | tee {log} >&2"
