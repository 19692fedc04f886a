# Everything runs in the project's own virtual environment, .venv; nothing needs to be activated.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# What is installed where no torch is. TORCH_INDEX names another package index: PyTorch's own has builds without CUDA.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROTOC := $(BIN)/python -m grpc_tools.protoc -I.
MESSAGES := protos/fleet.proto protos/inference.proto protos/ranks.proto
SERVICES := protos/fleet.proto protos/inference.proto

.PHONY: demo test check format setup model protos check-protos clean

demo: setup
	@$(BIN)/splitserve demo

test: setup model
	$(BIN)/pytest -q --durations=15

check: setup check-protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)

# torch comes first and alone: a range would pull in the newest build.
$(READY): pyproject.toml constraints.txt $(wildcard engine/native/*)
	@echo "== Setting up $(VENV) (some minutes the first time)"
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed')"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== 1/2 torch"
	@$(BIN)/python -c "import sys, torch; sys.exit(tuple(map(int, torch.__version__.split('.')[:2])) < (2, 13))" 2>/dev/null \
		|| $(PIP) install --no-deps $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	@echo "== 2/2 SplitServe and what it needs"
	@$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@

# The tests of the real model skip where it cannot be fetched.
model: setup
	-@$(BIN)/python -m splitserve.models

protos: setup
	$(PROTOC) --python_out=. --pyi_out=. $(MESSAGES)
	$(PROTOC) --grpc_python_out=. $(SERVICES)

check-protos: setup
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT \
		&& $(PROTOC) --python_out="$$fresh" --pyi_out="$$fresh" $(MESSAGES) \
		&& $(PROTOC) --grpc_python_out="$$fresh" $(SERVICES) \
		&& for file in "$$fresh"/protos/*; do diff -u "protos/$${file##*/}" "$$file" \
		|| { echo "protos/$${file##*/} is not what protoc writes: make protos"; exit 1; }; done

clean:
	rm -rf $(VENV) build dist *.egg-info engine/*.so .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
