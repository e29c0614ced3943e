#!/bin/sh
# Builds fakes of CUDA's libraries into a folder. Programs take them for CUDA's:
#
#   sh build.sh DIR
#   LD_LIBRARY_PATH=DIR BATON_NVRTC=DIR baton up --device cuda:0 --weight-cache DIR/cache
#
# FAKE_DEVICES=2 has two devices, which libnccl.so.2 connects (BATON_NCCL names it where it is not found).
# Kernels that they compile are for processors: caches of kernels must not be shared with a GPU's.
set -e
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
build() {
    g++ -shared -fPIC -std=c++17 -O1 -Wall -Wno-unused -fvisibility=hidden -DFAKE_DIR="\"$here\"" "$here/$1" -o "$2"
}
build driver.cpp "$1/libcuda.so.1"
# The same file by the other name, which is looked for before.
ln -f "$1/libcuda.so.1" "$1/libcuda.so"
build nvrtc.cpp "$1/libnvrtc.so.12"
build cublaslt.cpp "$1/libcublasLt.so.12"
build nccl.cpp "$1/libnccl.so.2"
