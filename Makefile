# `make demo`, `make serve` and `make test` create .venv themselves.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
BIN := $(VENV)/bin
# one test worker more than cores: tests of processes and pages wait part of the time
WORKERS = $(shell $(PYTHON) -c "import os; print((os.cpu_count() or 1) + 1)")

.PHONY: demo serve test setup lint types tests docs notebooks reference pictures faults dist sbom clean

demo: $(VENV)/.core
	$(BIN)/headstock demo --overwrite

serve: $(VENV)/.serve
	$(BIN)/headstock serve --open

test: lint types tests docs

setup: $(VENV)/.all
	@echo "ready: activate with 'source $(VENV)/bin/activate', then 'headstock --help'"

lint: $(VENV)/.all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.all
	$(BIN)/mypy
	cd benchmarks && ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache --explicit-package-bases *.py
	cd scripts && ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache --explicit-package-bases *.py

# Every worker and every command that a test starts imports the same modules: keep their bytecode, whatever the
# environment says, and load no pytest plugins of other packages.
tests: export PYTHONDONTWRITEBYTECODE =
tests: export PYTEST_DISABLE_PLUGIN_AUTOLOAD = 1
tests: $(VENV)/.all
	$(BIN)/python -m pytest -p xdist -p hypothesispytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The documentation site, in build/site; fails on broken links and anchors.
docs: $(VENV)/.docs
	$(BIN)/python scripts/build_site.py

# The outputs of docs/notebooks, executed at full size (about ten minutes on two cores); `make notebooks ONLY=translation`.
notebooks: $(VENV)/.all
	$(BIN)/python scripts/notebooks.py $(ONLY)

# The pages of docs/reference and the verdicts of recipes/results, which follow from the code; tests fail until they
# are current.
reference: $(VENV)/.all
	$(BIN)/python scripts/reference.py
	$(BIN)/python scripts/verdicts.py

# The diagrams and screenshots of README and docs, the latter from real runs in build/pictures;
# `make pictures ONLY=serve-fill` makes some of them.
pictures: $(VENV)/.all
	$(BIN)/python scripts/diagrams.py
	$(BIN)/python scripts/pictures.py $(ONLY)

# The fault tests at full size; `make faults ONLY="fault_01 or fault_08"` runs some of them.
faults: export HEADSTOCK_FAULTS = full
faults: export HEADSTOCK_FAULTS_RESULTS = $(CURDIR)/.faults.jsonl
faults: export PYTHONDONTWRITEBYTECODE =
faults: $(VENV)/.all
	rm -f .faults.jsonl
	$(BIN)/python -m pytest tests/faults --durations=30 $(if $(ONLY),-k "$(ONLY)")
	$(BIN)/python benchmarks/faults.py .faults.jsonl

# Wheel and sdist, checked; the wheel is built from the sdist.
dist: $(VENV)/.all
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# What the wheel and its required packages are, in an environment of their own, as CycloneDX: dist/headstock.cdx.json
sbom: dist
	rm -rf dist/.environment
	$(PYTHON) -m venv --without-pip dist/.environment
	$(BIN)/python -m pip --python dist/.environment/bin/python install --quiet -c constraints.txt dist/*.whl
	$(PIP) 'cyclonedx-bom>=7'
	sed "s/^dynamic = .*/version = \"$$($(BIN)/headstock --version | cut -d' ' -f2)\"/" pyproject.toml > dist/.environment/pyproject.toml
	$(BIN)/cyclonedx-py environment --pyproject dist/.environment/pyproject.toml --mc-type application \
		--output-reproducible --output-format JSON --output-file dist/headstock.cdx.json dist/.environment/bin/python
	rm -rf dist/.environment

# Install torch first, at the version in constraints.txt, so that no other requirement selects another build.
$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (several minutes the first time)"
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.core: $(VENV)/.torch pyproject.toml
	$(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.serve: $(VENV)/.core
	$(PIP) -c constraints.txt -e '.[serve]'
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	$(PIP) -c constraints.txt -e '.[docs]'
	@touch $@

$(VENV)/.all: $(VENV)/.core
	$(PIP) -c constraints.txt -e '.[all]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
