# make demo | test | test-full | gpu-test | gpu-fuzz | gpu-sanitize | emulator-sanitize | notebooks | bench | lint | clean
#
# Each target first builds and installs what it needs: into a virtual environment (VENV), or, with PYTHON=python3, into
# BUILD/site for that interpreter as it is. The second way uses no network; it needs meson, ninja, Cython and a C++
# compiler beside the Python packages of the target.

VENV ?= .venv
BUILD ?= build
PYTHON ?=
BASE_PYTHON ?= python3
PYTEST_ARGS ?=

ifeq ($(strip $(PYTHON)),)

PY := $(abspath $(VENV))/bin/python
SCRIPTS := $(abspath $(VENV))/bin
# A driver decides which CuPy is installed; without one none is.
DRIVER_EXTRA := import ctypes; v = ctypes.c_int(); f = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion; \
  f(ctypes.byref(v)) == 0 and print("cuda13" if v.value >= 13000 else "cuda12" if v.value >= 12000 else "")
ifndef CUDA_EXTRA
CUDA_EXTRA := $(shell $(BASE_PYTHON) -c '$(DRIVER_EXTRA)' 2>/dev/null)
endif
READY := $(VENV)/.installed$(addprefix -,$(CUDA_EXTRA))

else

PY := $(PYTHON)
SCRIPTS := $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
SITE := $(abspath $(BUILD))/site
READY := site
# The source folder cupyfa/ has no extension module: the built package has to come before the working directory.
export PYTHONSAFEPATH := 1
export PYTHONPATH := $(SITE):$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

endif

export PATH := $(SCRIPTS):$(PATH)

PYTEST = $(PY) -m pytest $(PYTEST_ARGS)
TIMEOUT = $(shell $(PY) -c 'import pytest_timeout' 2>/dev/null && echo --timeout=$(1) --timeout-method=thread)
# A process for each core; a file's tests stay together, and share the kernels that they have compiled.
PARALLEL = $(shell $(PY) -c 'import xdist' 2>/dev/null && echo --numprocesses=auto --dist=loadfile)
FORMATTED = $(shell find cuda cupyfa/emulator/core -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.hpp' -o -name '*.cpp')

.PHONY: demo test test-full gpu-test gpu-fuzz gpu-sanitize emulator-sanitize notebooks bench lint clean site
.DEFAULT_GOAL := demo

demo: $(READY)
	$(PY) -m cupyfa demo

test: $(READY)
	$(PYTEST) -m "not gpu" $(PARALLEL) $(call TIMEOUT,600)

test-full: export CUPYFA_TEST_FULL = 1
test-full: test

gpu-test: $(READY)
	$(PYTEST) -m gpu --require-gpu $(call TIMEOUT,300)

# Random problems; FUZZ_ARGS="--help" says what there is, and what fails says how to repeat it. They are too small for
# several threads of a BLAS.
FUZZ_ARGS ?=
gpu-fuzz: $(READY)
	OPENBLAS_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/tests:$$PYTHONPATH $(PY) -m fuzz $(FUZZ_ARGS)

# After 300 s an instrumented kernel counts as hanging: not run, and not clean.
SANITIZE ?= compute-sanitizer
gpu-sanitize: $(READY)
	for tool in memcheck synccheck; do \
	  timeout 300 $(SANITIZE) --tool $$tool --error-exitcode 1 $(PY) tests/gpu/sanitize.py || exit 1; \
	done

# The emulator under AddressSanitizer and UndefinedBehaviorSanitizer, in a build of its own. The interpreter is not
# instrumented, so the runtimes are loaded before it, and what it never frees is no leak of ours.
emulator-sanitize: $(READY)
	$(MAKE) site PYTHON=$(PY) BUILD=$(BUILD)/sanitized \
	  MESON_ARGS="-Db_sanitize=address,undefined -Db_lundef=false -Dbuildtype=debugoptimized"
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 PYTHONSAFEPATH=1 \
	  PYTHONPATH=$(abspath $(BUILD))/sanitized/site:$(CURDIR) $(PY) -m pytest tests/emulator $(PYTEST_ARGS)

notebooks: $(READY)
	$(PY) -m pytest --nbmake notebooks $(call TIMEOUT,300)

bench: $(READY)
	$(PY) -m cupyfa bench forward

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	cython-lint cupyfa
	clang-format --dry-run -Werror $(FORMATTED)
	numpydoc lint $(wildcard cupyfa/*.py cupyfa/bench/*.py cupyfa/testing/*.py)

clean:
	rm -rf $(VENV) $(BUILD) .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(wildcard cupyfa tests) -name __pycache__ -prune -exec rm -rf {} +

# --no-build-isolation: an editable install rebuilds itself at import, with the tools it was built with. The warnings of
# the extension are errors here and not for a user, whose compiler may know warnings that ours does not.
comma := ,
EXTRAS = test,lint,notebooks$(addprefix $(comma),$(CUDA_EXTRA))
$(VENV)/.installed $(VENV)/.installed-cuda12 $(VENV)/.installed-cuda13: pyproject.toml meson.build
	$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cupyfa needs Python 3.11 or newer")'
	test -x $(PY) || $(BASE_PYTHON) -m venv $(VENV)
	rm -rf $(BUILD)/editable
	mkdir -p $(BUILD)
	$(PY) -m pip install --quiet --disable-pip-version-check "meson-python>=0.17" "meson>=1.4" ninja "Cython>=3.1"
	$(PY) -c '$(NATIVE)' > $(BUILD)/editable.ini
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	  --config-settings=build-dir=$(BUILD)/editable --config-settings=setup-args=-Dwerror=true \
	  --config-settings=setup-args=--native-file=$(abspath $(BUILD))/editable.ini \
	  --editable ".[$(EXTRAS)]"
	touch $@

# meson and Cython as modules of the interpreter where it has them, else from PATH.
MESON = $(shell $(PY) -c 'import mesonbuild' 2>/dev/null && echo $(PY) -m mesonbuild.mesonmain || echo meson)
NATIVE := import sys, importlib.util as u; run = [sys.executable, "-m", "cython"]; print("[binaries]"); \
  print(f"python = {sys.executable!r}"); u.find_spec("Cython") and print(f"cython = {run!r}")

site:
	@mkdir -p $(BUILD)
	@$(PY) -c '$(NATIVE)' > $(BUILD)/native.new
	@cmp -s $(BUILD)/native.new $(BUILD)/native.ini || { rm -rf $(BUILD)/meson; cp $(BUILD)/native.new $(BUILD)/native.ini; }
	@{ test -f $(BUILD)/meson/build.ninja || $(MESON) setup $(BUILD)/meson --native-file=$(BUILD)/native.ini \
	    --prefix=$(abspath $(BUILD))/prefix -Dpython.platlibdir=$(SITE) -Dpython.purelibdir=$(SITE) \
	    $(MESON_ARGS); } \
	  > $(BUILD)/site.log 2>&1 && rm -rf $(SITE) && $(MESON) install -C $(BUILD)/meson >> $(BUILD)/site.log 2>&1 \
	  || { cat $(BUILD)/site.log; echo "PYTHON=$(PYTHON) needs meson, ninja, Cython and a C++ compiler"; exit 1; }
