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
# The distribution was called bough, which is somebody else's name: neither may stay beside bough-llm.
forget_bough = rm -rf bough.egg-info; $(1)/bin/python -m pip uninstall -qq --yes bough

.PHONY: demo serve test test-kernels test-package test-browser test-ray screenshots package lint fix bench docs docs-serve clean

demo: $(READY)
	$(BIN)/bough bench demo

serve: $(READY)
	$(BIN)/bough serve

test: $(READY) $(DEV)
	$(BIN)/python -m pytest -q -m "not alone and not browser and not package and not ray" -n 2 --dist loadscope
	$(BIN)/python -m pytest -q -m "alone and not browser and not package and not ray" -n 2 --dist loadscope

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

lint: $(READY) $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(READY) $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) $(DEV)
	$(BIN)/bough bench switch --png bench-switch.png

docs: $(READY) $(DEV)
	$(BIN)/python -m tests.settings_reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(READY) $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

$(READY): $(PACKAGES) setup.py $(KERNELS)/kernels.c
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

$(PACKAGES): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call forget_bough,$(VENV))
	BOUGH_NO_KERNELS=1 $(PIP) -e '.[$(EXTRAS)]' 'setuptools>=77'
	touch $@

$(DEV): $(PACKAGES)
	$(PIP) 'bough-llm[dev]'
	touch $@

$(INTERPRETER)/.packages: pyproject.toml
	test -x $(INTERPRETER)/bin/python || $(PYTHON) -m venv $(INTERPRETER)
	$(call forget_bough,$(INTERPRETER))
	$(INTERPRETER)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[torch]' \
	    'triton>=3.6' 'numpy<2.3' 'pytest>=8.3' 'pytest-timeout>=2.3'
	touch $@

$(RAY)/.packages: pyproject.toml
	test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	$(call forget_bough,$(RAY))
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[torch,ray,store]' \
	    'anthropic>=2.8' 'hypothesis>=6.120' 'ollama>=0.6.3' 'openai>=2.54' 'pytest>=8.3' 'pytest-timeout>=2.3'
	touch $@

clean:
	rm -rf $(VENV) $(INTERPRETER) $(RAY) site .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info \
	    $(KERNELS)/_kernels.*
