#!/bin/sh
# Builds fake CUDA libraries into a folder. Programs load them instead of CUDA's:
#
#   sh build.sh DIR
#   LD_LIBRARY_PATH=DIR BATON_NVRTC=DIR baton up --device cuda:0 --weight-cache DIR/cache
#
# FAKE_DEVICES=2 gives two devices, which libnccl.so.2 connects. BATON_NCCL names that file if the loader does not find it.
# They compile kernels for processors, so a GPU must not share their cache of kernels.
set -e
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
build() {
    g++ -shared -fPIC -std=c++17 -O1 -Wall -Wno-unused -fvisibility=hidden -DFAKE_DIR="\"$here\"" "$here/$1" -o "$2"
}
build driver.cpp "$1/libcuda.so.1"
# The same file under the name that programs try first.
ln -f "$1/libcuda.so.1" "$1/libcuda.so"
build nvrtc.cpp "$1/libnvrtc.so.12"
build cublaslt.cpp "$1/libcublasLt.so.12"
build nccl.cpp "$1/libnccl.so.2"
