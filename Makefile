# `make run` starts the service, `make quick` checks a change, `make test` checks everything. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
STAMP := .venv/.installed
TOOLS := .venv/tools
TOOLS_STAMP := $(TOOLS)/.installed
GUIDE := $(or $(FOLDER),serve_app/web/guide/site)/llms.txt
JUPYTER := .venv/jupyter
JUPYTER_STAMP := $(JUPYTER)/.installed
export HF_HUB_OFFLINE := 1
export RAY_USAGE_STATS_ENABLED := 0
unexport PYTHONDONTWRITEBYTECODE  # or each of some hundred processes of the tests would compile the sources again

.PHONY: help setup run guide notebook quick test check lint types imports tests manifests schema coverage soak chart image pin-image sbom audit screenshots gpu clean

WORKERS ?= auto
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup
QUICK := -m 'not slow and not ray and not soak and not gpu' --ignore tests/faults --ignore tests/models --ignore tests/deployments --ignore tests/manifests

# Runs pytest with the static checks beside it (pyright alone uses one core for most of a minute), and prints the output
# of the checks in one piece.
define pytest_beside_checks
report=$$(mktemp); \
{ status=0; $(MAKE) --no-print-directory --keep-going check >$$report 2>&1 || status=$$?; printf '\n%s\n' "$$(cat $$report)"; exit $$status; } & \
checks=$$!; trap 'kill $$checks 2>/dev/null || true; rm -f $$report' EXIT; \
status=0; $(1) || status=$$?; \
wait $$checks || { echo 'The static checks failed: see above, or run `make check`.' >&2; status=1; }; \
exit $$status
endef

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make the environment (.venv) and nothing else

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Atelier needs Python 3.11 or later (set PYTHON=/path/to/python3)" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing (a few minutes the first time) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0 2> >(grep -v '^WARNING: Location' >&2)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' 2> >(grep -v '^WARNING: Location' >&2)
	@touch $@

guide: $(GUIDE) ## build the guide that the service shows at /guide, from docs/; FOLDER=… builds it alone, for any web server

# The second command names the files outside docs/ that build.py lists; a folder is newer where a file of it has gone.
$(GUIDE): $(shell find docs configs/guide) $(shell sed -n 's/^    "\(.*\)": ".*",$$/\1/p' configs/guide/build.py) | $(STAMP)
	@$(BIN)/python configs/guide/build.py $(@D)

run: setup guide ## start everything, make a first image, print keys and curl lines (Ctrl-C stops)
	@exec $(BIN)/atelier up $(ARGS)

notebook: setup $(JUPYTER_STAMP) ## open the notebooks in JupyterLab; they draw with the service that `make run` has started
	@exec $(JUPYTER)/bin/jupyter-lab --ServerApp.ip=127.0.0.1 --LabApp.news_url=None \
		--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate --LabApp.extension_manager=readonly \
		$(ARGS) notebooks

quick: WORKERS = logical
quick: setup guide ## lint, types, import contracts and the fast tests, in about three minutes on two cores
	@$(call pytest_beside_checks,$(PYTEST) $(QUICK) $(ARGS))

test: setup guide ## the whole check: ruff, pyright, import-linter, pytest
	@$(call pytest_beside_checks,$(PYTEST) $(ARGS))

check: lint types imports ## the static checks alone: ruff, pyright, import-linter

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup
	@$(BIN)/pyright --warnings

imports: setup
	@$(BIN)/lint-imports

tests: setup guide ## the tests alone; ARGS="tests/api -k retention" chooses
	@$(PYTEST) $(ARGS)

manifests: setup ## check the Dockerfile and the Helm chart (part of `make test`)
	@$(BIN)/python -m pytest tests/manifests $(ARGS)

schema: setup ## write the names of settings and Serve arguments into the Helm chart's schema
	@$(BIN)/python -m tests.manifests.values_schema

coverage: setup guide ## the tests with branch coverage of serve_app, deployments and the Lua scripts; also .coverage/html/index.html
	@$(PYTEST) -p tests.lua_coverage --cov --cov-report=term:skip-covered --cov-report=html $(ARGS)

screenshots: setup guide ## pictures of every page by Chromium, into var/screenshots; ARGS=--docs also those of the README
	@$(BIN)/python -m tests.browser.screenshots $(ARGS)

soak: setup ## the long tests: chaos, fuzzing, big simulations, training
	@$(BIN)/python -m pytest -m soak --timeout 7200 $(ARGS)

chart: setup ## pack the Helm chart into var/ (FOLDER=…), for `helm push` and `helm install`
	@mkdir -p $(or $(FOLDER),var)
	@$(BIN)/python -c 'import helm_python, sys; print(helm_python.package("configs/helm/atelier", destination=sys.argv[1]))' $(or $(FOLDER),var)

image: guide ## build the image (IMAGE=atelier:dev) where a Docker daemon answers; else say so
	@if ! timeout 20 docker info >/dev/null 2>&1; then echo 'No Docker daemon answers here: the image is not built'; exit 0; fi; \
	grep -q '^ARG PYTHON_IMAGE=.*@sha256:' Dockerfile || echo 'The base image is named by its tag alone: `make pin-image` writes its digest into the Dockerfile'; \
	docker build --quiet --tag $(or $(IMAGE),atelier:dev) .

pin-image: ## write the digest that the base image's tag has now into the Dockerfile; needs docker and a network
	@name=$$(sed -n 's/^ARG PYTHON_IMAGE=\([^@]*\).*/\1/p' Dockerfile); \
	digest=$$(docker buildx imagetools inspect "$$name" --format '{{.Manifest.Digest}}'); \
	[[ $$digest =~ ^sha256:[0-9a-f]{64}$$ ]] || { echo "no digest of $$name: $$digest" >&2; exit 1; }; \
	sed -i "s|^ARG PYTHON_IMAGE=.*|ARG PYTHON_IMAGE=$$name@$$digest|" Dockerfile; echo "$$name@$$digest"

# Installs what a file of hashes names into an environment of its own, which neither `make run` nor `make test` needs.
define install_tools
$(BIN)/python -m venv $(@D)
$(@D)/bin/pip install --quiet --disable-pip-version-check --require-hashes --requirement $< 2> >(grep -v '^WARNING: Location' >&2)
endef

$(TOOLS_STAMP): configs/tools/requirements.txt | $(STAMP)
	@$(install_tools)
	@touch $@

$(JUPYTER_STAMP): configs/tools/jupyter.txt | $(STAMP)
	@$(install_tools)
	@$(BIN)/python -m ipykernel install --prefix $(JUPYTER) --name python3 >/dev/null 2> >(grep -v 'may not be found' >&2)  # so that kernels run the Python of .venv
	@touch $@

sbom: setup $(TOOLS_STAMP) ## write what the environment consists of as a CycloneDX SBOM (SBOM=sbom.json)
	@$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file $(or $(SBOM),sbom.json) $(BIN)/python
	@echo "$(or $(SBOM),sbom.json)"

audit: setup $(TOOLS_STAMP) ## look up known holes of every package of the environment; needs a network
	@$(TOOLS)/bin/python configs/tools/audit.py $(TOOLS)/bin/pip-audit "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

gpu: setup ## measure the engine on this machine's GPU for eleven minutes, into benchmarks/gpu/ and RESULTS.md; ARGS=--tiny rehearses on a CPU
	@$(BIN)/python -m benchmarks.gpu $(ARGS)
	@$(BIN)/python -m benchmarks.gpu_tables

clean: ## remove the environment, caches and what builds left; data under var/ stays
	rm -rf .venv .coverage .pytest_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info
