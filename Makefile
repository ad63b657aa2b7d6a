# Each target installs what it needs into a virtual environment in this directory, once.
# Another Python: make test PYTHON=python3.12

PYTHON ?= python3
INSTALL := python -m pip install --quiet --constraint constraints.txt

.PHONY: demo test lint clean

demo: .venv/installed
	.venv/bin/python bench/demo.py

test: .venv/installed
	.venv/bin/python -m pytest -n auto --dist worksteal -q

# In the checkout megaflow.tasks and others lie outside the folder megaflow, so mypy reads a copy that pip has laid
# out. build/ goes first: it would bring deleted modules back into that copy.
lint: .venv-lint/installed
	.venv-lint/bin/ruff check .
	rm -rf build .venv-lint/copy
	.venv-lint/bin/$(INSTALL) --no-deps --no-build-isolation --target .venv-lint/copy .
	cd .venv-lint && MYPYPATH=copy bin/mypy --config-file ../pyproject.toml --package megaflow

clean:
	rm -rf .venv .venv-lint build megaflow.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/installed: pyproject.toml constraints.txt
	$(new-venv)
	.venv/bin/$(INSTALL) --editable '.[test]'
	touch $@

.venv-lint/installed: pyproject.toml constraints.txt
	$(new-venv)
	.venv-lint/bin/$(INSTALL) setuptools '.[dev]'
	touch $@

define new-venv
@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) was not found; set PYTHON to Python 3.11 or 3.12"; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || \
	{ echo "error: $$($(PYTHON) --version) is not Python 3.11 or 3.12; set PYTHON to one that is"; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	{ echo "error: $(PYTHON) cannot make virtual environments; apt-get install python3-venv"; exit 1; }
@echo "installing into $(@D) ..."
@$(PYTHON) -m venv $(@D)
endef
