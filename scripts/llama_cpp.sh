#!/usr/bin/env bash
# Builds examples/llama_cpp with a llama.cpp of its own, in build/llama.cpp, and fetches the small
# real model's GGUF file for it: prompt_store and smollm2.gguf are ready afterwards. PyPI's source
# package of llama-cpp-python (77 MB) carries llama.cpp; nothing of it is installed. What is there
# already is not made again.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
there=$root/build/llama.cpp
package=llama_cpp_python-0.3.36
sum=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
jobs=${JOBS:-$(nproc)}
mkdir -p "$there"

if [ ! -f "$there/llama/lib/libllama.so" ]; then
  if ! echo "$sum  $there/$package.tar.gz" | sha256sum --check --status 2>/dev/null; then
    echo "llama.cpp: fetching $package.tar.gz (77 MB)"
    "$root/.venv/bin/pip" download -q --disable-pip-version-check --progress-bar off --no-deps \
      --no-binary :all: --no-build-isolation -d "$there" "llama-cpp-python==${package##*-}"
    echo "$sum  $there/$package.tar.gz" | sha256sum --check --quiet
  fi
  tar -xzf "$there/$package.tar.gz" -C "$there" "$package/vendor/llama.cpp"
  echo "llama.cpp: building libllama for this machine's processor (some ten minutes on two cores)"
  cmake -S "$there/$package/vendor/llama.cpp" -B "$there/objects" -G Ninja \
    -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DCMAKE_INSTALL_PREFIX="$there/llama" '-DCMAKE_INSTALL_RPATH=$ORIGIN' >"$there/llama.log"
  cmake --build "$there/objects" -j "$jobs" >>"$there/llama.log"
  cmake --install "$there/objects" >>"$there/llama.log"
  rm -rf "${there:?}/$package" "$there/objects"
fi

cmake --install "$root/build/release" --prefix "$there/prefixd" >"$there/install.log"
cmake -S "$root/examples/llama_cpp" -B "$there/example" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  "-DCMAKE_PREFIX_PATH=$there/prefixd;$there/llama" \
  "-DCMAKE_BUILD_RPATH=$there/prefixd/lib;$there/llama/lib" >"$there/example.log"
cmake --build "$there/example" -j "$jobs" >>"$there/example.log"

if [ ! -f "$there/smollm2.gguf" ]; then
  (cd "$root/python" && "$root/.venv/bin/python" -m prefixd.models smollm2 "$there/model" --keep)
  "$root/.venv/bin/python" -m zipfile -e "$there"/model/.parts/*.whl "$there/model/wheel"
  mv "$there"/model/wheel/*/*.gguf "$there/smollm2.gguf"
  rm -rf "$there/model"
fi
echo "llama.cpp: ready: $there/example/prompt_store $there/smollm2.gguf STORE DOCUMENT"
