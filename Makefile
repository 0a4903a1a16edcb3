# Two commands matter: `make demo` and `make test`. Each does all of its own set-up, in .venv, and asks nothing.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Programs that tests and the demo use, with Debian's package for each: installed only where the program is missing.
PROGRAMS := kcat:kcat cc:gcc curl:curl java:openjdk-17-jre-headless thrift:thrift-compiler sqlite3:sqlite3
APT = $(if $(filter 0,$(shell id -u)),,sudo) env DEBIAN_FRONTEND=noninteractive apt-get

# Compiled modules are kept, whatever the environment says: the tests start hundreds of brokers and commands.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup spark-oldest demo test test-fast test-all soak check format bench docs clean

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/:/' | column -t -s ':'

setup: $(VENV)/.ready  ## everything into .venv; nothing to do when nothing changed

$(VENV)/.ready: pyproject.toml setup.py $(wildcard src/millstream/*/_*.pyx src/millstream/*/*/_*.pyx) Makefile
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python"; exit 1; }
	@packages=$$(for pair in $(PROGRAMS); do command -v $${pair%%:*} >/dev/null || echo $${pair##*:}; done; \
	  ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || echo postgresql; \
	  $(PYTHON) -c 'import ensurepip' 2>/dev/null || echo python3-venv; \
	  $(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null \
	    || echo python3-dev libc6-dev); \
	  test -z "$$packages" || { $(APT) update -qq && $(APT) install -y -qq --no-install-recommends $$packages; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# Spark is tested with the newest PySpark, in .venv, and with the oldest that pyproject.toml declares.
OLDEST := $(shell sed -n 's/.*"pyspark>=\([0-9.]*\).*/\1.0/p' pyproject.toml)
spark-oldest: $(VENV)/pyspark-oldest/.$(OLDEST)  ## the oldest PySpark that is declared, unpacked for the tests

$(VENV)/pyspark-oldest/.$(OLDEST): | setup
	rm -rf $(@D)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(@D) 'pyspark==$(OLDEST)'
	tar xzf $(@D)/pyspark-$(OLDEST).tar.gz --directory $(@D) --strip-components 1
	rm $(@D)/pyspark-$(OLDEST).tar.gz
	@touch $@

demo: setup  ## a broker, real clients, a pipeline on Spark, and the counts of it all
	$(BIN)/python -m millstream.demo

test: setup spark-oldest check  ## every test but the slow ones, in about fifteen minutes
	$(PYTEST) --numprocesses 4 --dist loadgroup -m 'not slow' tests

test-fast: setup  ## the unit tests, in two minutes, for the inner loop
	$(PYTEST) --numprocesses 4 --dist loadgroup -m 'not slow' tests/unit

test-all: setup spark-oldest check  ## every test, with all rounds and records of the long ones
	$(PYTEST) --numprocesses 4 --dist loadgroup tests

soak: setup  ## the tests that kill things, for longer
	SOAK_BROKER_KILLS=20 SOAK_RECORDS=100000 $(PYTEST) -s tests/crash/test_queue_chaos.py
	SOAK_KILLS=12 $(PYTEST) -s tests/spark/test_exactly_once.py

check: setup  ## format, lint, strict types, import directions, generated documents
	$(BIN)/ruff format --check src tests bench
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m millstream.doors.kafka.compatibility --check docs/compatibility.md

format: setup  ## let the tools tidy up
	$(BIN)/ruff format src tests bench
	$(BIN)/ruff check --fix src tests bench

docs: setup  ## write the generated pages anew
	$(BIN)/python -m millstream.doors.kafka.compatibility > docs/compatibility.md

bench: setup  ## every measurement, as ratios to references of the same run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,bench]'
	$(BIN)/python -m bench

clean:  ## remove what was built, not data
	rm -rf $(VENV) build dist bench/build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src -name '*.so' -delete
	find . -name __pycache__ -prune -exec rm -rf {} +
