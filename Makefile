# make demo      the whole path on drawn shapes, ends with a report (11 minutes on 2 cores after installation)
# make demo-lora  teaches the demo's model a new word from six photos and ends with a page of before and after (makes the demo first)
# make fleet-demo  trains twelve small adapters on machines of which one fails; a service, PostgreSQL and S3 on this machine (under 6 minutes on 2 cores)
# make test      the files of tests that take less than a minute (11 minutes on 2 cores); ROOM=checkpoints runs all files of one room
# make test-faults   all of tests/faults (under 20 minutes on 2 cores)
# make test-fast  the files of tests that take less than three seconds: for work in progress
# make test-changed  tests of what differs from origin/main and of what imports it; COMMIT=HEAD compares with another commit
# make test-image   builds and runs the container image without docker; needs root, buildah and mmdebstrap
# make test-slurm   runs launch/slurm on a Slurm of two nodes on this machine; needs root, slurmctld, slurmd, slurm-client and munge
# make test-all  all tests, including long repetitions of what make test does once (over an hour on 2 cores)
# make test-turn  a seventh of the slower files, another seventh every few hours of commits: CI runs it after make test; LONG=yes takes long tests too
# make test-oldest  make test on the oldest supported versions (tests/oldest.txt), in .venv-oldest
# make bench     a small throughput sweep of this machine with a report (3 minutes on 2 cores); run again to resume
# make gpu-check   measures this GPU against the predictions, in slices of 9 minutes; a small form on a CPU (under 6 minutes on 2 cores)
# make image     a container image of this checkout (docs/containers.md); needs docker, or BUILDER=podman
# make lock      updates constraints.txt after a change of setup.py; OPTIONS=--upgrade takes the newest versions of everything
# make lint      lint and type checks; make format fixes most of them
# make docs      builds the documentation site in site/ and stops at a broken link; make docs-serve shows it while you write
# make install   only creates .venv and installs; TORCH=cu128 (or cpu, cu130, ...) takes PyTorch's build for that CUDA from its own index

# A Python that the dependencies support; set PYTHON=... to choose another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# Three processes keep two cores busy, because tests wait for processes that they start. The longest files run first, see tests/selection.py.
ALONE := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PYTEST := $(ALONE) --numprocesses 3 --dist loadfile --no-loadscope-reorder
# On a busy machine a wait may exceed its limit: failed tests run once more alone, and only those that fail twice have failed.
ONCE_MORE = [ $$? -eq 1 ] && echo 'Once more, alone:' && $(ALONE) -v --last-failed --last-failed-no-failures none $(1) && \
	echo 'FLAKY: the tests above failed beside others and passed alone. Find out why, or name them in tests/quarantine.txt with what you saw.'

.PHONY: demo demo-lora fleet-demo test test-changed test-fast test-turn test-faults test-image test-slurm test-all test-oldest bench gpu-check image lock lint format docs docs-serve install

# The thread count of the demo's recipes, for its other stages too.
demo demo-lora fleet-demo: export OMP_NUM_THREADS ?= 1

demo: .venv/installed
	$(BIN)/python -m diffusion.demo

demo-lora: .venv/installed
	$(BIN)/python -m diffusion.demo.lora

# Its S3 server is moto, a development dependency.
fleet-demo: .venv/installed-dev
	$(BIN)/python -m diffusion.demo.fleet

test: .venv/installed-dev
	$(PYTEST) $(if $(ROOM),$(ROOM:%=tests/%),--under 60) || { $(call ONCE_MORE); }

test-faults: .venv/installed-dev
	$(PYTEST) -m '' tests/faults || { $(call ONCE_MORE,-m '' tests/faults); }

test-turn: .venv/installed-dev
	$(PYTEST) --turn $(if $(LONG),-m '') || { $(call ONCE_MORE,--turn $(if $(LONG),-m '')); }

test-changed: .venv/installed-dev
	@tests=$$($(BIN)/python -m tests.changed $(COMMIT)) && test -n "$$tests" || { echo 'Nothing differs.'; exit; }; $(PYTEST) $$tests

test-fast: .venv/installed-dev
	$(PYTEST) --under 3

test-image: .venv/installed-dev
	$(ALONE) -m '' tests/launch/test_container.py || { $(call ONCE_MORE,-m '' tests/launch/test_container.py); }

test-slurm: .venv/installed-dev
	$(ALONE) -m '' tests/launch -k slurm || { $(call ONCE_MORE,-m '' tests/launch -k slurm); }

test-all: .venv/installed-dev
	$(PYTEST) -m '' || { $(call ONCE_MORE,-m ''); }

test-oldest: .venv-oldest/installed
	$(subst $(BIN),.venv-oldest/bin,$(PYTEST) --under 60 || { $(call ONCE_MORE); })

bench: .venv/installed
	$(BIN)/python -m benchmarks.throughput benchmarks/sweeps/quick-cpu.yaml --out runs/bench/results.jsonl
	$(BIN)/python -m benchmarks.report runs/bench/results.jsonl --out runs/bench/report
	@echo "Look at it: open $(CURDIR)/runs/bench/report/report.html in a browser"

# Ends with an error (75) while parts remain: run it again. OPTIONS='--list' and others: python -m benchmarks.gpu_check --help
gpu-check: .venv/installed
	$(BIN)/python -m benchmarks.gpu_check $(OPTIONS)

# docker, podman and buildah have the same options.
BUILDER ?= docker
VERSION := $(shell sed -n "s/^__version__ = '\(.*\)'/\1/p" diffusion/__init__.py)
image:
	$(BUILDER) build --tag text-to-image-recipes:$(VERSION) --build-arg VERSION=$(VERSION) \
		--build-arg COMMIT=$$(git describe --always --dirty '--exclude=*' --abbrev=12) $(OPTIONS) .

# For all versions of Python. Versions in constraints.txt stay if the bounds allow it.
lock: $(BIN)/uv
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --quiet --no-annotate --no-emit-index-url \
		--custom-compile-command 'make lock' --output-file constraints.txt $(OPTIONS)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Three pages are generated from the code first. The variable silences an advertisement.
docs: .venv/installed-dev
	$(BIN)/python docs/pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

install: .venv/installed-dev

# uv, because Composer and Streaming are installed against their own bounds (pyproject.toml). It installs the versions of constraints.txt.
UV := uv>=0.9,<1
UV_INSTALL = pip install --quiet $(if $(TORCH),--torch-backend $(TORCH))

$(BIN)/uv:
	@test -n "$(PYTHON)" || { echo 'Python 3.11, 3.12 or 3.13 is needed and none was found; name one with PYTHON=/path/to/python3.12'; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check --quiet '$(UV)'

# The stamps are written last, so that a broken installation is repeated.
.venv/installed: $(BIN)/uv setup.py pyproject.toml constraints.txt
	$(BIN)/uv $(UV_INSTALL) --python $(BIN)/python --constraint constraints.txt --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/uv $(UV_INSTALL) --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv-oldest/installed: setup.py pyproject.toml tests/oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --disable-pip-version-check --quiet '$(UV)'
	.venv-oldest/bin/uv $(UV_INSTALL) --python .venv-oldest/bin/python --constraint tests/oldest.txt --editable '.[dev]'
	touch $@
