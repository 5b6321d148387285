#!/usr/bin/env bash
# Lists the C++ and CUDA sources of the project, tracked or new.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files --cached --others --exclude-standard -- '*.h' '*.cc' '*.cu' '*.cuh' | sort -u
