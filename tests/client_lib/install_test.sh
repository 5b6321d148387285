#!/usr/bin/env bash
# Installs the build into a directory of its own and uses it from outside: the C example through
# pkg-config and through find_package, the C++ example through find_package. Then it moves the tree,
# which must still work.
#   install_test.sh BUILD_DIR SOURCE_DIR C_COMPILER CXX_COMPILER
set -euo pipefail
build=$1 source=$2 cc=$3 cxx=$4
work=$(mktemp -d "${TMPDIR:-/tmp}/prefixd-install.XXXXXX")
trap 'rm -rf "$work"' EXIT

DESTDIR=$work/staged cmake --install "$build" --prefix /usr/prefixd >"$work/install.log" ||
  { cat "$work/install.log"; exit 1; }
mkdir "$work/moved" && mv "$work/staged/usr/prefixd" "$work/moved/here"
root=$work/moved/here
library=$(find "$root" -name 'libprefixd.so' | head -1)
lib=$(dirname "$library")
export PKG_CONFIG_PATH=$lib/pkgconfig LD_LIBRARY_PATH=$lib

echo "== the C library exports pfx_ and nothing else"
if nm -D --defined-only "$library" | awk '{print $3}' | grep -vE '^(pfx_|PREFIXD_0)'; then exit 1; fi
readelf -d "$library" | grep -q 'SONAME.*libprefixd.so.0.2' || { echo "wrong soname"; exit 1; }

echo "== every installed header compiles alone"
(cd "$root/include" && find prefixd -name '*.h' | sort) | while read -r header; do
  echo "#include <$header>" |
    "$cxx" -std=c++20 -Wall -Wextra -Werror -fsyntax-only -I"$root/include" -x c++ - ||
    { echo "$header does not stand alone"; exit 1; }
done

echo "== it needs the C and C++ runtime and nothing else"
if readelf -d "$library" | sed -n 's/.*NEEDED.*\[\(.*\)\].*/\1/p' |
  grep -vE '^(libc|libm|libstdc\+\+|libgcc_s|ld-linux-x86-64)\.so'; then exit 1; fi

echo "== C99 through pkg-config, embedded"
# shellcheck disable=SC2046
"$cc" -std=c99 -Wall -Wextra -pedantic -Werror "$source/examples/c/splice.c" \
  $(pkg-config --cflags --libs prefixd) -lm -o "$work/splice"
"$work/splice" "$work/store"

echo "== a directory without the embedded store beside, and with one of another version"
mkdir "$work/alone" && cp -L "$library" "$work/alone/libprefixd.so.0.2"
refused() {
  if LD_LIBRARY_PATH=$work/alone "$work/splice" "$work/none" 2>"$work/refused"; then exit 1; fi
  grep -q "$1" "$work/refused" || { cat "$work/refused"; exit 1; }
}
refused 'needs libprefixd-embedded.so.0.2'
echo 'static const struct { const char* version; void* open; } entry = {"9.9.9", 0};
      const void* prefixd_embedded_entry(void) { return &entry; }' |
  "$cc" -shared -fPIC -x c - -o "$work/alone/libprefixd-embedded.so.0.2"
refused 'of version 9.9.9'

echo "== C99 through find_package, against a daemon"
cmake -S "$source/examples/c" -B "$work/c" -DCMAKE_C_COMPILER="$cc" -DCMAKE_PREFIX_PATH="$root" >"$work/c.log" &&
  cmake --build "$work/c" >>"$work/c.log" || { cat "$work/c.log"; exit 1; }
"$root/bin/prefixd" --dir "$work/daemon-store" --socket "$work/socket" >"$work/daemon.log" 2>&1 &
daemon=$!
trap 'kill $daemon 2>/dev/null; wait $daemon 2>/dev/null; rm -rf "$work"' EXIT
for _ in $(seq 600); do [ -S "$work/socket" ] && break; sleep 0.1; done
"$work/c/splice" "unix:$work/socket" || { cat "$work/daemon.log"; exit 1; }

echo "== C++ through find_package"
cmake -S "$source/examples/cpp" -B "$work/cpp" -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_PREFIX_PATH="$root" >"$work/cpp.log" &&
  cmake --build "$work/cpp" >>"$work/cpp.log" || { cat "$work/cpp.log"; exit 1; }
"$work/cpp/list_prefixes" "unix:$work/socket" | grep '1000 tokens of c-example'

if [ -e "$lib/libprefixd-gpu.a" ]; then
  echo "== the step on CUDA through find_package"
  cmake -S "$source/examples/gpu" -B "$work/gpu" -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_PREFIX_PATH="$root" >"$work/gpu.log" &&
    cmake --build "$work/gpu" >>"$work/gpu.log" || { cat "$work/gpu.log"; exit 1; }
  "$work/gpu/plan_step" || [ $? = 3 ]  # 3: no device
fi
