# Two commands matter: `make demo` and `make test`. Each installs what it needs into .venv, without questions.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Programs that the tests and the demo use, with their Debian packages: only missing programs are installed.
PROGRAMS := kcat:kcat cc:gcc curl:curl java:openjdk-17-jre-headless thrift:thrift-compiler sqlite3:sqlite3 \
  etcd:etcd-server
APT = $(if $(filter 0,$(shell id -u)),,sudo) env DEBIAN_FRONTEND=noninteractive apt-get

# Keep compiled modules, whatever the environment says: the tests start hundreds of brokers and commands.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup spark-oldest demo test test-fast test-all soak check format bench docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/:/' | column -t -s ':'

setup: $(VENV)/.ready  ## install everything into .venv; does nothing if nothing changed

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

# The tests run Spark with the newest PySpark, in .venv, and with the oldest that pyproject.toml allows.
OLDEST := $(shell sed -n 's/.*"pyspark>=\([0-9.]*\).*/\1.0/p' pyproject.toml)
spark-oldest: $(VENV)/pyspark-oldest/.$(OLDEST)  ## unpack the oldest supported PySpark for the tests

$(VENV)/pyspark-oldest/.$(OLDEST): | setup
	rm -rf $(@D)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(@D) 'pyspark==$(OLDEST)'
	tar xzf $(@D)/pyspark-$(OLDEST).tar.gz --directory $(@D) --strip-components 1
	rm $(@D)/pyspark-$(OLDEST).tar.gz
	@touch $@

demo: setup  ## run a broker, real clients and a Spark pipeline, and compare the counts
	$(BIN)/python -m millstream.demo

test: setup spark-oldest check  ## run every test but the slow ones, in about fifteen minutes
	$(PYTEST) --numprocesses 4 --dist loadgroup -m 'not slow' tests

test-fast: setup  ## run the unit tests, in two minutes
	$(PYTEST) --numprocesses 4 --dist loadgroup -m 'not slow' tests/unit

test-all: setup spark-oldest check  ## run every test, with all rounds and records of the long ones
	$(PYTEST) --numprocesses 4 --dist loadgroup tests

soak: setup  ## run the tests that kill processes for longer
	SOAK_BROKER_KILLS=20 SOAK_RECORDS=100000 $(PYTEST) -s tests/crash/test_queue_chaos.py
	SOAK_KILLS=12 $(PYTEST) -s tests/spark/test_exactly_once.py

check: setup  ## check format, lint, strict types, import contracts, generated pages
	$(BIN)/ruff format --check src tests bench
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m millstream.doors.kafka.compatibility --check docs/compatibility.md

format: setup  ## format the code and fix what the linter can fix
	$(BIN)/ruff format src tests bench
	$(BIN)/ruff check --fix src tests bench

docs: setup  ## generate docs/compatibility.md
	$(BIN)/python -m millstream.doors.kafka.compatibility > docs/compatibility.md

bench: setup  ## run every benchmark, as ratios to references of the same run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,bench]'
	$(BIN)/python -m bench

clean:  ## remove everything that was built; data stays
	rm -rf $(VENV) build dist bench/build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src -name '*.so' -delete
	find . -name __pycache__ -prune -exec rm -rf {} +
