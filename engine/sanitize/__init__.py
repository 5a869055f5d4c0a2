"""The CPU library under gcc's sanitizers: how it is compiled, and how Python runs with it."""

import os
import subprocess
import sys

# A flavour's flags. Nothing recovers: the first finding ends the process, and its report names it.
FLAVOURS = {
    "address": "-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all",
    "thread": "-fsanitize=thread",
}
COMMON = "-O0 -g"
PATHS = ("portable", "avx2", "avx512")  # of the CPU kernels, as KDTREE_CPU names them
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    # Python leaks on purpose; memory that cannot be had is null, as it is without the sanitizer.
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=1024",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
    "OPENBLAS_NUM_THREADS": "1",  # numpy's own threads, whose locks the sanitizer does not see
}


def compile_flags(release_flags: str, flavour: str) -> str:
    """The release flags, sanitized; no optimisation removes what would be found."""
    kept = [flag for flag in release_flags.split() if flag not in ("-O3", "-DNDEBUG")]
    return " ".join([*kept, COMMON, FLAVOURS[flavour]])


def environment(flavour: str) -> dict[str, str]:
    """The environment in which Python can load a library of this flavour. libstdc++ has to be there from the start,
    or exceptions could not be thrown through the sanitizer."""
    return {**os.environ, **OPTIONS, "LD_PRELOAD": f"{_library(RUNTIMES[flavour])} {_library('libstdc++.so.6')}"}


def python(flavour: str, *arguments: str) -> list[str]:
    """The command that runs Python with `arguments`. ThreadSanitizer's shadow memory needs addresses where they are
    without randomisation; not every kernel setting leaves room otherwise."""
    fixed = ["setarch", "--addr-no-randomize"] if flavour == "thread" else []
    return [*fixed, sys.executable, *arguments]


def _library(name: str) -> str:
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
