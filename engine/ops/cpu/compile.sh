#!/usr/bin/env bash
# compile.sh OBJECT SOURCE FLAGS…: compiles a CPU operator once per path (instruction set) into one object.
#
# An inline function or a template, compiled here with a path's instructions, must not become the definition that
# another path, another operator or the core is linked with: only the entries of the operator table stay global.
set -euo pipefail
object=$1 source=$2
shift 2
operator=$(basename "$(dirname "$source")")
compiler=${CXX:-g++}

declare -A instructions=([portable]="")
if [[ $($compiler -dumpmachine) == x86_64* ]]; then
    instructions[avx2]="-mavx2 -mfma"
    instructions[avx512]="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma"
fi

work=$(mktemp -d "$object.XXXXXX")
trap 'rm -rf "$work"' EXIT
for path in "${!instructions[@]}"; do
    # shellcheck disable=SC2086
    $compiler "$@" ${instructions[$path]} -DKDTREE_PATH="$path" -c "$source" -o "$work/$path.o"
    ld -r --force-group-allocation "$work/$path.o" -o "$work/$path.local.o"
    objcopy --keep-global-symbol="_ZN6kdtree${#path}$path${#operator}${operator}E" "$work/$path.local.o"
done
ld -r "$work"/*.local.o -o "$work/all.o"
mv "$work/all.o" "$object"
