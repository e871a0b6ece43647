#!/usr/bin/env bash
# Run a program as on a processor with AVX2 and nothing above, at full speed: avx2.sh PROGRAM ARGUMENT...
#
#     tests/emulators/avx2.sh .venv/bin/python -m pytest -q tests/unit tests/backends
#
# CPUID and /proc/cpuinfo show every library such a processor, in child processes too; no variable is set. This needs an
# Intel processor of 2012 or later and Linux on x86-64; on others the script ends with status 3.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
sed -E '/^flags/s/ (avx512|avx_vnni|avx_ifma|amx_)[a-z0-9_]*//g' /proc/cpuinfo >"$folder/cpuinfo"
"${CC:-cc}" -O2 -shared -fPIC -DCPUINFO="\"$folder/cpuinfo\"" -o "$folder/avx2_only.so" "$here/avx2_only.c" -ldl
LD_PRELOAD="$folder/avx2_only.so" "$@"
