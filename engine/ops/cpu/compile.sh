#!/usr/bin/env bash
# compile.sh OBJECT SOURCE FLAGS…: compiles a CPU operator once per path (instruction set) into one object.
#
# An inline function or a template, compiled here with a path's instructions, must not become the definition that
# another path, another operator or the core is linked with: only the entries of the operator table stay global.
# (A "unique" symbol, of a static variable in an inline function, could not be made local.)
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

compile() {
    # shellcheck disable=SC2086
    $compiler "${@:2}" ${instructions[$1]} -fno-gnu-unique "-DKDTREE_PATH=$1" -c "$source" -o "$work/$1.o"
    ld -r --force-group-allocation "$work/$1.o" -o "$work/$1.local.o"
    objcopy --keep-global-symbol="_ZN6kdtree${#1}$1${#operator}${operator}E" "$work/$1.local.o"
}

declare -A running
for path in "${!instructions[@]}"; do
    compile "$path" "$@" 2>"$work/$path.messages" &
    running[$path]=$!
done
for path in "${!instructions[@]}"; do
    status=0
    wait "${running[$path]}" || status=$?
    cat "$work/$path.messages" >&2
    if [ $status != 0 ]; then # the other paths would say the same
        wait
        exit $status
    fi
done
ld -r "$work"/*.local.o -o "$work/all.o"
mv "$work/all.o" "$object"
