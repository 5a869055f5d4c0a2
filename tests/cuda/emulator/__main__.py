"""Builds the CUDA operators for the CPU: every CUDA thread is a fiber (cuda_runtime.h beside this file).

    python -m tests.cuda.emulator --build DIR [--operators NAME …] [--no-warpgroups]

Makes DIR/libkdtree_emulated.so, which engine.check takes for a library (and tests.cuda.decode, for models of a few
thousand weights): so the kernels' logic, barriers and warp operations included, is checked on a machine without a
GPU. Arithmetic is the host's, and nothing here says anything about speed.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cuda.emulator.build import HERE, REPOSITORY, compile_host, compile_kernels, link, translate_tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True)
    names = sorted(path.parent.name for path in REPOSITORY.glob("engine/ops/*/cuda.cu"))
    parser.add_argument("--operators", nargs="*", choices=names, metavar="NAME", help="compile only these again")
    parser.add_argument("--no-warpgroups", action="store_true", help="the products of GPUs that have none, as sm_120")
    options = parser.parse_args()
    build, flags = options.build.resolve(), ["-DKDTREE_NO_WARPGROUPS"] if options.no_warpgroups else []
    if options.operators and not (build / "flags").exists():
        parser.error(f"--operators: {build}: holds no build yet: leave it out once")
    translate_tree(REPOSITORY / "engine", build / "engine")
    kernels = {path.parent.name: path for path in (build / "engine/ops").glob("*/cuda.cu")}
    host = [HERE / "backend.cpp", *REPOSITORY.glob("engine/backend/cuda/*.cpp"), *REPOSITORY.glob("engine/core/*.cpp")]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(compile_kernels, source, build / f"{name}.o", *flags) for name, source in kernels.items()
                if not options.operators or name in options.operators]
        if not options.operators:
            jobs += [pool.submit(compile_host, source, build / f"{source.stem}.host.o") for source in host]
        for job in jobs:
            job.result()
    (build / "flags").write_text("\n".join(flags))
    link(sorted(build.glob("*.o")), build / "libkdtree_emulated.so")


if __name__ == "__main__":
    main()
