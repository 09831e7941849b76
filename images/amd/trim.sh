#!/bin/sh
# Takes out of the ROCm image what serving does not need: the C++ toolchain, libraries to link against, and kernels for
# GPUs that are not asked for. The C compiler stays: Triton compiles a small launcher with it for each kernel; so does
# ld.lld, which links the kernels. usage: trim.sh "ARCHITECTURE..."   (ROOT=folder to work below, for tests)
set -eu
architectures=$1
root=${ROOT:-}
case $architectures in
    gfx*) ;;
    *) echo "trim.sh: ARCHITECTURES must name GPUs such as gfx950, not '$architectures'" >&2; exit 2 ;;
esac

for folder in "$root"/usr/bin "$root"/usr/local/bin "$root"/opt/rocm*; do
    [ -d "$folder" ] || continue
    find "$folder" \( -name '*g++*' -o -name 'c++*' -o -name '*-c++*' -o -name '*clang*' -o -name 'flang*' -o -name 'hipcc*' \
        -o -name 'amdflang*' -o -name 'make' -o -name 'cmake' -o -name 'ninja' \) -path '*/bin/*' ! -type d -delete
done
[ ! -d "$root/usr" ] || find "$root/usr" -name cc1plus ! -type d -delete
for folder in "$root"/opt/rocm*; do
    [ ! -d "$folder" ] || find "$folder" -name '*.a' ! -type d -delete
done

# Files of kernels carry the GPU's name: TensileLibrary_..._gfx942.co and the like.
for folder in "$root"/opt/rocm* "$root"/opt/venv; do
    [ -d "$folder" ] || continue
    find "$folder" -type f -name '*gfx[0-9]*' \( -path '*/rocblas/library/*' -o -path '*/hipblaslt/library/*' \
        -o -path '*/hipsparselt/library/*' -o -path '*/miopen/db/*' \) >"${TMPDIR:-/tmp}/kernels"
    while read -r file; do
        for architecture in $architectures; do
            case ${file##*/} in *"$architecture"*) continue 2 ;; esac
        done
        rm "$file"
    done <"${TMPDIR:-/tmp}/kernels"
    rm "${TMPDIR:-/tmp}/kernels"
done
