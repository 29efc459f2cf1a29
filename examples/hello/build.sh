#!/bin/sh
# Stands for a compiler: reads sources, keeps work in a cache, writes a result.
#   build.sh CACHE OUT
set -eu
cache=$1 out=$2

runs=$(($(cat "$cache/runs" 2>/dev/null || echo 0) + 1))
echo "$runs" >"$cache/runs"

mkdir -p "$out"
{
    cat greeting.txt
    echo "Built in step $runs of this cache, by $(id -un 2>/dev/null || id -u) on $(uname -sm)."
} | tee "$out/message.txt"
