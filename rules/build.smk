# C++ sources -> one object each -> results/build/<backend>/libkdtree_<backend>.so and a digest of every object.
# An operator's object holds its code for every instruction set; which one runs is the library's choice.
# Objects are byte-stable, so after a comment's edit the digests stand and nothing that runs the library runs again.
rule compile:
    input:
        source=unit_source,
        headers=unit_headers,
        script=COMPILE_OPERATOR,
    output:
        "results/build/{backend}/{unit}.o",
    log:
        "results/logs/compile/{backend}/{unit}.log",
    benchmark:
        "results/benchmarks/compile/{backend}/{unit}.tsv"
    params:
        compile=unit_compiler,
        flags=CXX_FLAGS,
        env=VERSIONS["g++"],
    shell:
        "{{ {params.compile} {output}.$$ {input.source} {params.flags} && mv {output}.$$ {output}; }}"
        " 2>&1 | tee {log} >&2"


# --keep: without it nvcc names its temporary files, and with them symbols in the object, by its process id.
rule compile_cuda:
    input:
        source=cuda_source,
        headers=cuda_headers,
    output:
        object="results/build/cuda/{unit}.o",
        ptxas="results/build/cuda/{unit}.ptxas",
    log:
        "results/logs/compile/cuda/{unit}.log",
    benchmark:
        "results/benchmarks/compile/cuda/{unit}.tsv"
    wildcard_constraints:
        unit=one_of(CUDA_UNITS),
    params:
        flags=CUDA_FLAGS,
        env=NVCC,
    shell:
        "{{ mkdir -p {output.object}.keep && nvcc {params.flags} --keep --keep-dir {output.object}.keep"
        " -c {input.source} -o {output.object} && rm -r {output.object}.keep; }} > {log} 2>&1"
        " && grep -v warning {log} > {output.ptxas} || {{ cat {log} >&2; exit 1; }}"


ruleorder: compile_cuda > compile


# Registers, shared memory and spills of every CUDA kernel; a spill, or a block too large for sm_120, is an error. Made
# without a GPU too: so a CUDA edit that does not compile shows everywhere where there is nvcc.
rule cuda_resources:
    input:
        py=py_sources("engine/cuda_resources.py"),
        ptxas=expand("results/build/cuda/{unit}.ptxas", unit=CUDA_UNITS),
        library="results/build/cuda/libkdtree_cuda.so",
    output:
        "results/build/cuda/resources.json",
    log:
        "results/logs/cuda_resources.log",
    benchmark:
        "results/benchmarks/cuda_resources.tsv"
    shell:
        "python -m engine.cuda_resources {input.ptxas} --output {output} 2>&1 | tee {log} >&2"


# A checkpoint: what follows is judged anew, by the digests' content, once the library is linked.
checkpoint link:
    input:
        operators=objects(OPERATORS),
        core=objects(CORE_UNITS),
        interface=interface_objects,
    output:
        library="results/build/{backend}/libkdtree_{backend}.so",
        operators=expand("results/build/{{backend}}/{operator}.sha256", operator=OPERATORS),
        core="results/build/{backend}/core.sha256",
        interface="results/build/{backend}/interface.sha256",
    log:
        "results/logs/link/{backend}.log",
    benchmark:
        "results/benchmarks/link/{backend}.tsv"
    params:
        linker=linker,
        env=compiler,
    shell:
        "{{ {params.linker} {input} -o {output.library}.$$ && mv {output.library}.$$ {output.library}"
        " && for object in {input.operators}; do sha256sum < $object > ${{object%.o}}.sha256; done"
        " && cat {input.core} {input.interface} | sha256sum > {output.core}"
        " && cat {input.interface} | sha256sum > {output.interface}; }} 2>&1 | tee {log} >&2"


# The operators as torch.ops.kdtree.*, a library beside the backend's. No verdict needs it, nor torch.
rule torch_extension:
    input:
        py=py_sources("engine/torch_ops/build.py"),
        sources=TORCH_SOURCES,
        library=ancient("results/build/{backend}/libkdtree_{backend}.so"),
    output:
        "results/build/{backend}/libkdtree_torch_{backend}.so",
    log:
        "results/logs/torch_extension/{backend}.log",
    benchmark:
        "results/benchmarks/torch_extension/{backend}.tsv"
    params:
        env=TORCH,
    shell:
        "python -m engine.torch_ops.build --library {input.library} --output {output} 2>&1 | tee {log} >&2"
