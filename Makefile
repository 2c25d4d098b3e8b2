# Two commands: `make demo` shows the whole pipeline, `make test` runs every check.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test house soak test-vllm docs release-check clean

demo:
	@start=$$(date +%s); $(MAKE) --no-print-directory $(VENV)/.installed && \
	ready=$$(date +%s); echo "set up in $$((ready - start)) s" && \
	$(BIN)/proximo pipeline demo --overwrite && \
	echo "ran in $$(($$(date +%s) - ready)) s"

test: $(VENV)/.installed-test
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/ty check --error-on-warning
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not soak"

soak: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m soak -s

# The size of the project beside its limits: CONTRIBUTING.md. HOUSE_OPTIONS=--lower writes the limits that can be lowered.
house: $(VENV)/.installed-test
	$(BIN)/python tests/house/budgets.py $(HOUSE_OPTIONS)

# The documentation as a site, in site/index.html. No page of it needs a network.
docs: $(VENV)/.installed-docs
	$(BIN)/python docs/theme/stage.py build/docs
	NO_MKDOCS_2_WARNING=1 PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/mkdocs build

# The wheel as users get it, on each Python that is found here: CONTRIBUTING.md, "Release".
# PYTHONS="python3.11 /path/to/python3.14", TORCH=any or TORCH=2.13.0 (may download gigabytes), RELEASE_OPTIONS=--demo
release-check: build/tools/.installed
	PATH=$$PATH:$(CURDIR)/build/tools/bin build/tools/bin/python tests/release/check.py --torch="$(TORCH)" \
		$(RELEASE_OPTIONS) -- $(PYTHONS)

build/tools/.installed:
	@$(PYTHON) -m venv build/tools
	@build/tools/bin/python -m pip install --quiet --disable-pip-version-check uv
	@touch $@

# Against vLLM itself, in the environment of `proximo engine install`, or the one that PROXIMO_TEST_VLLM names.
test-vllm: $(VENV)/.installed-test
	PROXIMO_TEST_VLLM=$${PROXIMO_TEST_VLLM:-$${XDG_CACHE_HOME:-$$HOME/.cache}/proximo/vllm} \
		$(BIN)/python -m pytest -s tests/rollout/test_real_vllm.py

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version); say make PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@# torch goes in first, by itself. PIP_EXTRA_INDEX_URL decides the build: README.
	$(PIP) torch
	@touch $@

$(VENV)/.installed: $(VENV)/.python pyproject.toml constraints.txt
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.python pyproject.toml constraints.txt
	$(PIP) -e ".[test,docs]"
	@touch $@ $(VENV)/.installed $(VENV)/.installed-docs

$(VENV)/.installed-docs: $(VENV)/.python pyproject.toml constraints.txt
	$(PIP) -e ".[docs]"
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) runs build site
