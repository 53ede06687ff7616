# Two commands: `make demo` and `make test`. Both create .venv on first use and install the exact tested set;
# when it is there already they start at once.

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
READY  := $(VENV)/.ready
TE     := $(VENV)/transformer-engine-1.12

.PHONY: demo test setup clean

demo: $(READY)
	$(RUN) -m tools.demo

test: $(READY)
	$(RUN) -m pytest tests

setup: $(READY)

$(READY): requirements/constraints.txt requirements/requirements.txt requirements/requirements-dev.txt \
          requirements/requirements-tokenizers.txt requirements/requirements-tensorboard.txt \
          requirements/requirements-te-tests.txt
	@$(PYTHON) tools/check_python.py
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -c requirements/constraints.txt -r requirements/requirements-dev.txt
	$(RUN) -m pip install --disable-pip-version-check --no-deps --upgrade --target $(TE) -r requirements/requirements-te-tests.txt
	@touch $(READY)

clean:
	rm -rf $(VENV) data/pydocs runs
