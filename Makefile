# One command per chore; CI calls the same ones.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
EXTRAS ?= torch,server
READY   = $(VENV)/.ready
PACKAGES = $(VENV)/.packages
DEV     = $(VENV)/.dev
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check
KERNELS = bough/engines/torch/cpu
INTERPRETER = .venv-kernels
RAY     = .venv-ray
NEWEST  = .venv-newest
OLDEST  = .venv-oldest
LOCK    = constraints.txt
SEED   ?= 1
# The Triton that torch 2.11 to 2.13 bring, and a numpy with which its interpreter works.
KERNEL_TESTS = 'triton>=3.6,<3.8' 'numpy<2.3'
BOUNDS_TESTS = tests/contract tests/engines tests/models tests/runner tests/runtime tests/sampling tests/scenarios \
    tests/server/apis tests/server/test_default_model.py tests/cli/test_main.py tests/test_default_model.py
# What is quick and needs neither a model nor a process of its own: tree, cache, scheduling, generation, wire formats.
CHECK_TESTS = tests/cache/tree tests/cache/residency tests/cache/disk tests/scheduling tests/generate \
    $(addprefix tests/scenarios/test_,faults.py loading.py shared_rows.py store.py tier_faults.py) \
    $(addprefix tests/server/apis/ollama/test_,lines.py wire.py) tests/server/apis/anthropic/test_wire.py \
    tests/server/apis/openai/test_responses.py $(addprefix tests/server/http/test_,bounds.py json_routes.py streaming.py) tests/server/test_logs.py
# pip takes exact versions from the lock, for what it installs and for what it builds with.
export PIP_CONSTRAINT = $(CURDIR)/$(LOCK)
export PIP_BUILD_CONSTRAINT = $(PIP_CONSTRAINT)
unlocked = PIP_CONSTRAINT= PIP_BUILD_CONSTRAINT=
# The distribution was called bough, which is somebody else's name: neither may stay beside bough-llm.
forget_bough = rm -rf bough.egg-info; $(1)/bin/python -m pip uninstall -qq --yes bough

# Those that start servers and commands, or need the default model, after the others.
define run_tests
$(1)/bin/python -m pytest -q $(ORDER) -m "not alone and not browser and not package and not ray" -n 2 --dist loadscope $(2)
$(1)/bin/python -m pytest -q $(ORDER) -m "alone and not browser and not package and not ray" -n 2 --dist loadscope $(2)
endef

.PHONY: demo serve check test test-random newest oldest lock test-kernels test-package test-browser test-ray screenshots package \
    lint fix bench docs docs-serve clean FORCE

demo: $(READY)
	$(BIN)/bough bench demo

serve: $(READY)
	$(BIN)/bough serve

test: $(READY) $(DEV)
	$(call run_tests,$(VENV))

check: $(READY) $(DEV)
	$(BIN)/python -m pytest -q $(CHECK_TESTS) -n 2

test-random:
	$(MAKE) test ORDER='-o addopts= --randomly-seed=$(SEED)'

# Without the lock, and without the upper bounds of libraries whose insides we use: what users will have soon.
newest: $(NEWEST)/.packages
	$(call run_tests,$(NEWEST),$(BOUNDS_TESTS))
	$(NEWEST)/bin/python -m pytest -q -m ray tests/ray

# With the lowest versions of pyproject's ranges: what users may have.
oldest: $(OLDEST)/.packages
	$(call run_tests,$(OLDEST),$(BOUNDS_TESTS))

lock:
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	$(unlocked) .venv-lock/bin/python -m pip install --quiet --disable-pip-version-check packaging
	BOUGH_NO_KERNELS=1 $(unlocked) .venv-lock/bin/python -m pip install --quiet --disable-pip-version-check --dry-run \
	    --ignore-installed --report .venv-lock/report.json '.[dev,ray]' 'setuptools>=77' $(KERNEL_TESTS)
	.venv-lock/bin/python packaging/library_versions.py lock .venv-lock/report.json > .venv-lock/$(LOCK)
	mv .venv-lock/$(LOCK) $(LOCK)
	rm -rf .venv-lock

test-kernels: $(INTERPRETER)/.packages
	TRITON_INTERPRET=1 $(INTERPRETER)/bin/python -m pytest -q tests/engines/torch/pooled/*/test_kernels.py

package: $(READY) $(DEV)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

test-package: package
	$(BIN)/python -m pytest -q --packages=dist -m package tests/packages

test-browser: $(READY) $(DEV)
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; } \
	    || { echo "install Chromium and Node first"; exit 1; }
	node --test tests/web/*.test.mjs
	$(BIN)/python -m pytest -q -m browser

test-ray: $(RAY)/.packages
	$(RAY)/bin/python -m pytest -q -m ray tests/ray

screenshots: $(READY) $(DEV)
	SCREENSHOTS=docs/images $(BIN)/python -m pytest -q -m browser
	$(BIN)/python -m tests.browser.recording docs/images/tree-at-work.png
	$(BIN)/python -m tests.browser.hour docs/images

lint: $(READY) $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.names

fix: $(READY) $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# NAME=core and so on: one of the benchmarks of Bough's parts.
bench: $(READY) $(DEV)
	$(if $(NAME),$(BIN)/python -m benchmarks $(NAME),$(BIN)/bough bench switch --png bench-switch.png)

docs: $(READY) $(DEV)
	$(BIN)/python -m tests.settings_reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(READY) $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

$(READY): $(PACKAGES) setup.py $(wildcard $(KERNELS)/kernels/*)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

$(PACKAGES): pyproject.toml $(LOCK)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call forget_bough,$(VENV))
	BOUGH_NO_KERNELS=1 $(PIP) -e '.[$(EXTRAS)]' 'setuptools>=77'
	touch $@

$(DEV): $(PACKAGES)
	$(PIP) 'bough-llm[dev]'
	touch $@

$(INTERPRETER)/.packages: pyproject.toml $(LOCK)
	test -x $(INTERPRETER)/bin/python || $(PYTHON) -m venv $(INTERPRETER)
	$(call forget_bough,$(INTERPRETER))
	$(INTERPRETER)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[torch]' \
	    $(KERNEL_TESTS) 'pytest>=8.3' 'pytest-timeout>=2.3'
	touch $@

$(RAY)/.packages: pyproject.toml $(LOCK)
	test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	$(call forget_bough,$(RAY))
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[torch,ray,store]' \
	    'anthropic>=2.8' 'hypothesis>=6.120' 'ollama>=0.6.3' 'openai>=2.54' 'pytest>=8.3' 'pytest-timeout>=2.3'
	touch $@

$(NEWEST)/.packages: KIND = newest
$(NEWEST)/.packages: FORCE  # what is newest may have changed since
$(OLDEST)/.packages: KIND = oldest
$(NEWEST)/.packages $(OLDEST)/.packages: pyproject.toml packaging/library_versions.py
	rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	$(unlocked) $(@D)/bin/python -m pip install --quiet --disable-pip-version-check packaging
	$(@D)/bin/python packaging/library_versions.py $(KIND) > $(@D)/requirements.txt
	$(unlocked) $(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $(@D)/requirements.txt \
	    'setuptools>=77'
	$(unlocked) $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) $(INTERPRETER) $(RAY) $(NEWEST) $(OLDEST) .venv-lock site .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	    build dist *.egg-info \
	    $(KERNELS)/_kernels.*
