# One command per chore; CI calls the same ones.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready
PACKAGES = $(VENV)/.packages
KERNELS = bough/engines/torch/cpu
INTERPRETER = .venv-kernels
RAY     = .venv-ray

.PHONY: demo serve test test-kernels test-ray lint fix bench docs clean

demo: $(READY)
	$(BIN)/bough bench demo

serve: $(READY)
	$(BIN)/bough serve

test: $(READY)
	$(BIN)/python -m pytest -q -m "not alone" -n 2 --dist loadscope
	$(BIN)/python -m pytest -q -m alone

test-kernels: $(INTERPRETER)/.packages
	TRITON_INTERPRET=1 $(INTERPRETER)/bin/python -m pytest -q tests/engines/torch/pooled/*/test_kernels.py

test-ray: $(RAY)/.packages
	$(RAY)/bin/python -m pytest -q -m ray tests/ray

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/bough bench switch --png bench-switch.png

docs: $(READY)
	$(BIN)/python -m tests.settings_reference

$(READY): $(PACKAGES) setup.py $(KERNELS)/kernels.c
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

$(PACKAGES): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	BOUGH_NO_KERNELS=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

$(INTERPRETER)/.packages: pyproject.toml
	test -x $(INTERPRETER)/bin/python || $(PYTHON) -m venv $(INTERPRETER)
	BOUGH_NO_KERNELS=1 $(INTERPRETER)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[torch]' \
	    'triton>=3.6' 'numpy<2.3' 'pytest>=8.3' 'pytest-timeout>=2.3'
	touch $@

$(RAY)/.packages: pyproject.toml
	test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	BOUGH_NO_KERNELS=1 $(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[torch,ray]' \
	    'anthropic>=2.8' 'hypothesis>=6.120' 'ollama>=0.6.3' 'openai>=2.54' 'pytest>=8.3' 'pytest-timeout>=2.3'
	touch $@

clean:
	rm -rf $(VENV) $(INTERPRETER) $(RAY) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info \
	    $(KERNELS)/_kernels.*
