# make train   set up, then train a small GPT on this machine's CPU and show the results
# make test    set up, then run the tests that every change must pass: about 18 minutes on two cores
# make test-slice SLICE=3/10  set up, then run slice 3 of 10 of the tests that `make test` leaves out (10 to 14 minutes)
# make test-all  set up, then run the full matrix (about two hours on two cores)
# make test-newest  set up, then run a part of the tests with the newest torch of NEWEST_TORCH (5 GB of packages)
# make setup   only make the virtual environment .venv, with PyTorch for CPUs; GPU=1: PyPI's PyTorch, for CUDA (README);
#              GPU=0: for CPUs again
# make wheelhouse PYTHON_VERSION=3.12  collect in wheelhouse/ what nodes without a network install with
#              make setup WHEELHOUSE=wheelhouse (docs/cluster.md)
# make lint    set up, then format check, lint and types
# make site    set up, then write the documentation to site/, with every link checked
# make dist    set up, then write the source distribution and the wheel of a release to dist/

PYTHON ?= python3
# The processes among which the test files are shared out.
TEST_PROCESSES ?= 2
VENV := .venv
# A finished setup records its GPU, EXTRAS and WHEELHOUSE, and later commands keep them: `make train` keeps CUDA's torch.
# EXTRAS are what pyproject.toml installs beside the package; eval: the tasks of tools/evaluate.py and their tests.
ifeq ($(WHEELHOUSE)$(filter wheelhouse,$(MAKECMDGOALS)),)
-include $(VENV)/settings.mk
EXTRAS ?= dev,bitsandbytes
endif
EXTRAS ?= bitsandbytes
override GPU := $(filter-out 0,$(GPU))
STAMP := $(VENV)/.installed-$(EXTRAS)
TORCH_STAMP := $(VENV)/.torch-$(or $(GPU),cpu)
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(VENV)/constraints.txt \
	$(if $(WHEELHOUSE),--no-index --find-links $(WHEELHOUSE))
# Succeeds if the environment sees a torch that setup keeps, an image's for example.
SEES_TORCH = $(VENV)/bin/python -c 'import importlib.util, sys; torch = importlib.util.find_spec("torch"); \
	sys.exit(not torch or not "$(WHEELHOUSE)" and torch.origin.startswith(sys.prefix))'
# pip prefers a CPU build in its find-links (2.13.0+cpu) to the release. torch cannot be imported yet.
CHECK_CUDA = $(VENV)/bin/python -c 'import importlib.util, runpy, sys; torch = importlib.util.find_spec("torch"); \
	build = runpy.run_path(torch.submodule_search_locations[0] + "/version.py"); \
	sys.exit(not build["cuda"] and "error: GPU=$(GPU): expected a PyTorch with CUDA, found " + build["__version__"] \
	+ ". Remove this build from the find-links of pip (pip config list), or choose GPU=0.")'
PYTORCH := https://download.pytorch.org/whl
TORCH_PIP = $(PIP) --no-deps $(if $(wildcard $(TORCH_STAMP)),,--force-reinstall) torch
ifdef WHEELHOUSE
INSTALL_TORCH = $(TORCH_PIP) 2>/dev/null || { echo "error: neither $(WHEELHOUSE) nor $(PYTHON) has PyTorch. If a virtual \
	environment of the image has it, set VENV=/opt/venv to its folder, otherwise run: make wheelhouse TORCH=1" >&2; exit 1; }
else ifdef GPU
INSTALL_TORCH = $(TORCH_PIP) $(if $(filter-out 1,$(GPU)),--index-url $(PYTORCH)/$(GPU))
else # PyPI's torch for Linux has gigabytes of CUDA: a file in one of pip's find-links is preferred to PyTorch's index.
INSTALL_TORCH = $(TORCH_PIP) --no-index 2>/dev/null || $(TORCH_PIP) --index-url $(PYTORCH)/cpu
endif
# Files are started in the order of their names, slow ones first. The tests start hundreds of Python processes: bytecode
# is written once, also where the environment forbids it.
PYTEST := PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

.PHONY: setup wheelhouse train test setup-newest test-newest test-slice test-all lint site dist
setup: $(STAMP)

# Stamps are touched last: an installation that was interrupted is taken up again. Until version 0.2 the distribution had
# another name: two distributions with the same commands would delete each other's.
$(TORCH_STAMP): constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(if $(WHEELHOUSE),--system-site-packages) $(VENV)
	@sed -E "$$(! $(SEES_TORCH) || echo '/^(torch|triton)==/d')" constraints.txt >$(VENV)/constraints.txt
	rm -f $(VENV)/.torch-*
	! grep -q ^torch== $(VENV)/constraints.txt || $(INSTALL_TORCH)
	$(if $(GPU),@$(CHECK_CUDA))
	touch $@

$(STAMP): pyproject.toml $(TORCH_STAMP)
	$(PIP) setuptools wheel
	$(VENV)/bin/python -m pip uninstall -qq --yes megatron-gpt-pretraining
	$(PIP) --no-build-isolation --editable '.[$(EXTRAS)]'
	printf '%s ?= %s\n' GPU '$(GPU)' EXTRAS '$(EXTRAS)' WHEELHOUSE '$(WHEELHOUSE)' >$(VENV)/settings.mk
	touch $@

wheelhouse:
	test -x build/pip/bin/python || $(PYTHON) -m venv build/pip
	build/pip/bin/python .ci/wheelhouse.py $(or $(WHEELHOUSE),wheelhouse) --extras '$(EXTRAS)' $(if $(TORCH),--torch) \
		$(PYTHON_VERSION:%=--python-version %) $(PLATFORM:%=--machine %)

train: setup
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" examples/quickstart.sh

test: setup
	$(PYTEST)

# --- the newest torch: an environment with its packages, and for the rest the packages of $(VENV) ---
NEWEST_TORCH ?= 2.14.1
NEWEST := .venv-torch-$(NEWEST_TORCH)
# What depends on torch and Triton: the API, private names, kernels, and the collectives of each kind of parallelism.
NEWEST_TESTS := tests/kernels tests/unit/test_torch_versions.py tests/simulated/test_torch_patches.py \
	tests/unit/checkpoint/test_archive_writer.py \
	$(addprefix tests/distributed/test_,layout_parity.py zero.py traffic.py tp_overlap.py device_progress.py)

test-newest: setup-newest
	$(subst $(VENV)/,$(NEWEST)/,$(PYTEST)) $(NEWEST_TESTS)

setup-newest: setup $(NEWEST)/.installed

$(NEWEST)/.installed: | setup
	$(VENV)/bin/python -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(NEWEST_TORCH)
	for folder in $(NEWEST)/lib/python*/site-packages; do \
		echo "import site; site.addsitedir('$(CURDIR)/$(VENV)/lib/$${folder#$(NEWEST)/lib/}')" >$$folder/rest.pth; done
	touch $@
# --- end of the newest torch ---

test-slice: setup
	$(PYTEST) -m full --slice $(SLICE)

test-all: setup
	$(PYTEST) -m ''

lint: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

site: setup
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# The wheel is built from the source distribution: a file that the source distribution lacks is an error.
dist: setup
	rm -rf dist
	$(VENV)/bin/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")'
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
