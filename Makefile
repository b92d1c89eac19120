# `make demo` and `make test` do everything on a fresh machine that has Python and a package index.

SHELL := /bin/bash
VENV ?= .venv
CACHE ?= .cache
BIN := $(VENV)/bin
PYTHON := $(BIN)/python
UV := $(BIN)/uv pip install --quiet --compile-bytecode --python $(PYTHON)
# uv does not read pip's settings; where pip is told of local wheels, so is uv.
LINKS := $(or $(PIP_FIND_LINKS),$(shell python3 -m pip config get global.find-links 2>/dev/null))
FIND_LINKS := $(if $(LINKS),--find-links $(LINKS))
BENCH ?= $(if $(shell command -v nvidia-smi),overhead-1b,overhead-tiny)
RELEASES ?= 0.12.0 0.13.0 0.18.1 0.22.1 0.24.0 0.26.0 0.28.0 0.32.0 0.33.0
# The compatibility suite's columns.
COMPAT ?= 0.12.0 0.13.0 0.18.1 0.26.0 0.32.0
# Tests run in as many processes. Not on a GPU, whose memory an engine takes whole.
WORKERS ?= $(if $(shell command -v nvidia-smi),0,2)
RUNNER_ENGINE = --cache $(CACHE)/benchmarks --env 0.26.0=$(CACHE)/engine-0.26.0/env.sh
SOAK_RUNNER = $(PYTHON) -m benchmarks soak 0.26.0-V1-CPU_ATTN $(RUNNER_ENGINE)
FEATURES_RUNNER = $(PYTHON) -m benchmarks features --cpu --release 0.26.0 $(RUNNER_ENGINE)
FLASHINFER := 0.6.8.post1 0.6.14 0.7.0.post1 0.7.2.post1
NVCC := $(addsuffix ==13.*,nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl)

.PHONY: demo bench models test test-slow coverage test-releases test-transformers test-planner test-upstream test-runner compat docs wheel publish lint clean

demo: $(VENV)/.ready  ## the main job: four ways of serving, one table, the same tokens
	$(BIN)/vllm-async-spec demo --cache $(CACHE)/demo

bench: $(VENV)/.ready  ## the plugin on, off and not loaded: a model of 1b on a GPU, a tiny one on a CPU
	$(PYTHON) -m benchmarks run $(BENCH) --fresh --out $(CACHE)/benchmarks --cache $(CACHE)/benchmarks
	$(PYTHON) -m benchmarks plot $(CACHE)/benchmarks/$(BENCH).json

test: $(VENV)/.ready lint models  ## what must hold before every commit
	$(PYTHON) -m pytest -m "not slow" -n $(WORKERS) --dist loadfile

# Where no test waits for them within its time limit. They are trained once; where there is a GPU, tests train their own.
models: $(VENV)/.ready
	test -n "$(shell command -v nvidia-smi)" || $(PYTHON) -m vllm_async_spec.demo.train .cache/demo

coverage: $(VENV)/.ready  ## the default tests, and which lines of the package they run
	$(PYTHON) -m pytest -m "not slow" --cov --cov-report=term

test-slow: $(VENV)/.ready
	$(PYTHON) -m pytest -m slow

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-releases: $(VENV)/.ready  ## the plugin against the real Python of nine vLLM releases, fetched once
	$(PYTHON) -m vllm_async_spec.compat.fetch --cache $(CACHE)/releases $(RELEASES)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target $(addprefix test-release-,$(RELEASES))

test-release-%:
	@echo "vLLM $*"
	$(PYTHON) -m pytest tests/releases --vllm-source $(CACHE)/releases/$*

compat: $(VENV)/.ready  ## the compatibility suite on five releases, stock and with the plugin, into the documentation
	$(PYTHON) -m vllm_async_spec.compat.fetch --cache $(CACHE)/releases $(COMPAT)
	mkdir -p $(CACHE)/compat
	@for release in $(COMPAT); do for way in stock plugin; do \
		echo "vLLM $$release, $$way"; \
		$(BIN)/vllm-async-spec compat $$([ $$way = stock ] || echo --plugin) --vllm-source $(CACHE)/releases/$$release \
			--json $(CACHE)/compat/$$release-$$way.json > $(CACHE)/compat/$$release-$$way.txt || [ $$? = 1 ] || exit 2; \
	done; done
	$(PYTHON) -m vllm_async_spec.compat.publish $(CACHE)/compat/*.json

test-transformers: $(VENV)/.ready  ## generation with the oldest and the newest transformers that it is for, beside the installed one
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target $(addprefix test-transformers-,4.57.3 5.24.0)

test-transformers-%: $(VENV)/.ready
	@echo "transformers $*"
	test -d $(CACHE)/transformers-$* || $(UV) $(FIND_LINKS) --target $(CACHE)/transformers-$* 'transformers==$*'
	PYTHONPATH=$(CACHE)/transformers-$* $(PYTHON) -m pytest tests/generation/test_*.py $(patsubst %,tests/generation/batching/test_batching_%.py,tokens requests settings drafts attention_backends)

test-planner: $(VENV)/.ready  ## plans for CUDA graphs by FlashInfer's own planner, compiled for the host; fetched once, half a gigabyte
	test -d $(CACHE)/planner/cuda || $(UV) --target $(CACHE)/planner/cuda $(NVCC)
	@for release in $(FLASHINFER); do \
		test -d $(CACHE)/planner/$$release || $(UV) --no-deps --target $(CACHE)/planner/$$release flashinfer-python==$$release || exit 1; \
	done
	PLANNER=$(CACHE)/planner $(PYTHON) -m pytest -m slow tests/attention/test_flashinfer_planner.py

test-upstream: $(VENV)/.ready  ## vLLM's own tests that need no GPU, with the plugin and without; UPSTREAM="v1/core" runs a part
	test -d $(CACHE)/upstream/packages || $(UV) $(FIND_LINKS) --no-deps --target $(CACHE)/upstream/packages tblib==3.2.2 pytest-asyncio==1.5.0
	$(PYTHON) tests/upstream --cache $(CACHE)/upstream $(UPSTREAM)

test-runner: $(VENV)/.ready  ## the V1 runner of vLLM 0.26.0 in an engine on a CPU, as the plugin changes it on a GPU; 11 minutes, fetched once, 6 GB
	test -e $(CACHE)/engine-0.26.0/env.sh || ./tests/older_engine.sh $(BIN)/uv 0.26.0 2.11.0 $(CACHE)/engine-0.26.0
	$(SOAK_RUNNER) --seconds 60
	@for control in carried moved; do \
		echo "$$control must be noticed"; $(SOAK_RUNNER) --seconds 5 --control $$control | grep --max-count=3 'differs from token' || exit 1; \
	done
	$(FEATURES_RUNNER) eagle draft_model penalties logprobs preemption structured-output min-tokens
	@echo "moved must be noticed"; $(FEATURES_RUNNER) eagle --control moved | grep 'requests differ'

docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(VENV)/.ready  ## build wheel, source and release notes into dist/, check them, and try the wheel in an empty environment
	./tests/check_wheel.sh $(BIN)/uv "$(FIND_LINKS)"

publish: wheel  ## upload to PyPI what `make wheel` made, once the changelog has a date; needs an account's token
	! grep '(unreleased)' dist/release-notes.md || { echo "CHANGELOG.md calls this version unreleased; write its date" >&2; exit 1; }
	$(BIN)/uv tool run --from 'twine==6.*' twine upload dist/vllm_async_spec-*

# With a GPU: vLLM itself. Without: vLLM's CPU build, and PyTorch's from the local wheels or else from PyTorch's CPU index.
$(VENV)/.ready: pyproject.toml Makefile
	test -x $(PYTHON) || python3 -m venv $(VENV)
	test -x $(BIN)/uv || $(PYTHON) -m pip install --quiet uv
	if command -v nvidia-smi >/dev/null; then \
		$(UV) $(FIND_LINKS) -e '.[cuda,test,bench,docs]'; \
	elif $(UV) --no-index --no-deps $(FIND_LINKS) 'torch==2.13.0+cpu' 2>/dev/null; then \
		$(UV) $(FIND_LINKS) -e '.[cpu,test,bench,docs]'; \
	else \
		$(UV) --torch-backend cpu -e '.[cpu,test,bench,docs]'; \
	fi
	touch $@

clean:  ## what the other targets made in this checkout; a VENV or CACHE with another name is its owner's
	rm -rf .venv .cache site
	@$(foreach each,$(filter-out .venv .cache,$(VENV) $(CACHE)),echo "left alone: $(each)";)
