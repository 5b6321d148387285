# One word per task. `make demo` and `make test` work on a fresh Debian 12 with only git and make.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.PHONY: help setup setup-python build dev test test-cpp test-python asan tsan fuzz torture demo bench format python-module wheel \
        check-format tidy install gpu-only model phi quality golden clean

BUILD := build/release
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup:  ## install missing Debian packages
	@scripts/setup_debian.sh

setup-python: setup  ## create .venv for training and the Python tests
	@scripts/setup_python.sh

$(BUILD)/build.ninja: | setup
	@cmake --preset release

build: setup $(BUILD)/build.ninja  ## optimised build in build/release
	@cmake --build $(BUILD) -j $(JOBS)

dev: setup  ## build with assertions and debug symbols in build/dev
	@cmake --preset dev && cmake --build --preset dev -j $(JOBS)

demo: build  ## the main job on a real document: prefill, persist, restart, decode; writes demo-report/
	@scripts/demo.sh $(DEMO_ARGS)

test: test-cpp test-python  ## build, then all tests

test-cpp: build  ## the C++ tests
	@ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS)

python-module: setup-python $(BUILD)/build.ninja  ## the extension module of the Python package, in place
	@cmake --preset release -DPREFIXD_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python >/dev/null
	@cmake --build $(BUILD) -j $(JOBS) --target prefixd_python prefixd_python_stub

wheel: setup-python  ## the Python package as a wheel in build/wheels, linked with this system's libraries
	@.venv/bin/pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w build/wheels ./python
	@ls build/wheels

test-python: build python-module  ## the Python tests, and the types of the package
	@cd python && ../.venv/bin/python -m pytest -q
	@cd python && ../.venv/bin/python -m mypy

asan: setup  ## unit tests under address and undefined-behaviour sanitizers
	@cmake --preset asan && cmake --build --preset asan -j $(JOBS) && ctest --preset asan -j $(JOBS)

tsan: setup  ## unit tests under the thread sanitizer
	@cmake --preset tsan && cmake --build --preset tsan -j $(JOBS) && ctest --preset tsan -j $(JOBS)

fuzz: setup  ## fuzz what is decoded: FUZZ_SECONDS=60 for the store's formats, or FUZZ_RUNS=N executions (resumable)
	@cmake --preset fuzz && cmake --build --preset fuzz -j $(JOBS) && scripts/fuzz.sh

torture: setup $(BUILD)/build.ninja  ## long reliability runs, Ctrl-C stops, again goes on; TORTURE_ARGS="disk --cycles 1000"
	@cmake --build $(BUILD) -j $(JOBS) --target prefixd_torture
	@LD_BIND_NOW=1 $(BUILD)/tests/reliability/prefixd_torture --resume --json build/torture/figures.json $(TORTURE_ARGS)

install: build  ## daemon, C and C++ libraries, headers: PREFIX=/usr/local, DESTDIR for packagers
	@cmake --install $(BUILD) --prefix $(PREFIX)

gpu-only:  ## attention/ and gpu/ alone: needs a compiler, CMake and CUDA
	@cmake --preset gpu-only && cmake --build --preset gpu-only -j $(JOBS) && ctest --preset gpu-only

bench: build  ## benchmarks, one after the other (tables; see bench/ for --json)
	@scripts/bench.sh $(BUILD)

format:  ## format the C++ sources in place
	@scripts/sources.sh | xargs -r clang-format -i

check-format: setup  ## fail if a C++ source is not formatted
	@scripts/sources.sh | xargs clang-format --dry-run --Werror

tidy: build  ## clang-tidy over the sources (slow)
	@scripts/sources.sh | grep '\.cc$$' | xargs -r -P $(JOBS) -n 4 clang-tidy -p $(BUILD) --quiet

model: setup-python  ## train the small model anew into build/model (an hour or two on a CPU)
	@cd python && ../.venv/bin/python -m prefixd.train.model --out ../build/model --minutes 60 $(TRAIN_ARGS)

phi: setup-python  ## train its feature maps anew into build/phi; TRAIN_ARGS="--minutes 10"
	@cd python && ../.venv/bin/python -m prefixd.train.prompts --out ../build/phi-prompts --length 8192 --length 2048
	@cd python && for n in 8192 2048; do ../.venv/bin/python -m prefixd.train --model ../models/prefixd-tiny \
	  --text ../build/phi-prompts/$$n --from-start --length $$n --out ../build/phi $(TRAIN_ARGS); done

quality: python-module  ## quality of the small model by method, budget and length, into build/quality (an hour); resumable
	@cd python && ../.venv/bin/python -m prefixd.evaluate --out ../build/quality $(QUALITY_ARGS)

golden: setup-python  ## make the golden logits of tests/data again
	@cd python && ../.venv/bin/python -m prefixd.golden --data ../tests/data --model ../models/prefixd-tiny

clean:  ## remove build folders and the demo's report
	@rm -rf build demo-report
