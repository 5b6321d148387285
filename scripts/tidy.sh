#!/usr/bin/env bash
# Runs clang-tidy with the checks of .clang-tidy; every finding is an error.
#   tidy.sh          the files that a change touches: what differs from TIDY_BASE, or from where this
#                    branch left origin/main, or from the commit before; changes not committed count
#   tidy.sh --all    every file
#   tidy.sh FILE...  these
# A file that was only renamed is not touched. A header is checked through the .cc file of the same
# name, or the first that includes it. With TIDY_SECONDS=N it begins no file after N seconds and
# says how many it left out. TIDY_CHECKS adds checks or takes them away. JOBS=N files are checked at
# once.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${TIDY_SECONDS:-0} jobs=${JOBS:-$(nproc)} build=build/tidy
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

base() {
  if [ -n "${TIDY_BASE:-}" ]; then echo "$TIDY_BASE"; return; fi
  local fork
  fork=$(git merge-base HEAD origin/main 2>/dev/null || true)
  if [ -n "$fork" ] && [ "$fork" != "$(git rev-parse HEAD)" ]; then echo "$fork"; return; fi
  git rev-parse --verify --quiet HEAD~1 || true
}

changed() {
  local from
  from=$(base)
  if [ -z "$from" ]; then
    echo "tidy: there is no commit to compare with (a shallow clone?), so all files count" >&2
    cat "$work/known"
    return
  fi
  echo "tidy: files that differ from $(git rev-parse --short "$from")" >&2
  # R100 is a pure rename.
  git diff --name-status -M --diff-filter=AMRC "$from" -- '*.cc' '*.h' |
    awk -F '\t' '$1 != "R100" && $1 != "C100" {print $NF}'
  git ls-files --others --exclude-standard -- '*.cc' '*.h'
}

# Configuring is enough: it writes each file's compile command and the one generated header.
cmake --preset tidy >"$work/configure" || { cat "$work/configure" >&2; exit 1; }
cmake --build "$build" --target prefixd_commit >"$work/configure" || { cat "$work/configure" >&2; exit 1; }
python3 - "$build" >"$work/known" <<'PYTHON'
import json, os, sys
for entry in json.load(open(sys.argv[1] + "/compile_commands.json")):
    name = os.path.relpath(entry["file"])
    if not name.startswith(("..", "build")):
        print(name)
PYTHON
sort -u -o "$work/known" "$work/known"

case ${1:-} in
  --all) cp "$work/known" "$work/files" ;;
  '') changed | sort -u >"$work/files" ;;
  *) printf '%s\n' "$@" >"$work/files" ;;
esac

# Prints the .cc file that stands for a header; nothing where the build has none that includes it.
stands_for() {
  local source=${1%.h}.cc
  if grep -qxF "$source" "$work/known"; then echo "$source"; return; fi
  xargs grep -lF "#include \"${1#include/}\"" <"$work/known" 2>/dev/null | sed -n 1p || true
}

: >"$work/list"
while read -r file; do
  case $file in *.h) found=$(stands_for "$file") ;; *) found=$file ;; esac
  if [ -n "$found" ] && grep -qxF "$found" "$work/known"; then
    echo "$found" >>"$work/list"
  else
    echo "tidy: $file is not compiled by this build, so it is not looked at"
  fi
done <"$work/files"
awk '!seen[$0]++' "$work/list" >"$work/once"

export TIDY_WORK=$work TIDY_BUILD=$build TIDY_END=0
if [ "$seconds" -gt 0 ]; then TIDY_END=$(($(date +%s) + seconds)); fi
check() {
  if [ "$TIDY_END" -gt 0 ] && [ "$(date +%s)" -ge "$TIDY_END" ]; then
    echo "$1" >>"$TIDY_WORK/left"
    return
  fi
  local out
  if out=$(clang-tidy-16 -p "$TIDY_BUILD" --checks="${TIDY_CHECKS:-}" --quiet "$1" 2>&1); then
    echo "$1" >>"$TIDY_WORK/clean"
  else
    echo "$1" >>"$TIDY_WORK/bad"
    printf '%s\n' "$out" | grep -vE '^[0-9]+ warnings? ' || true
  fi
}
export -f check
touch "$work/clean" "$work/bad" "$work/left"
xargs -r -P "$jobs" -I{} bash -c 'check {}' <"$work/once"
count() { wc -l <"$work/$1" | tr -d ' '; }
echo "tidy: $(count clean) files are clean, $(count bad) are not"
if [ -s "$work/left" ]; then
  echo "tidy: $(count left) files were NOT looked at, the $seconds seconds being over"
fi
if [ -s "$work/bad" ]; then
  sed 's/^/  /' "$work/bad"
  exit 1
fi
