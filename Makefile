# Everything from a bare clone; `make help` lists the targets.
PYTHON  ?= python3.11
PROFILE ?= smoke
JOBS    ?= 2
BIN     := .venv/bin
READY   := .venv/ready
# nbdev exports nothing, and says nothing, while this is set.
unexport IN_TEST

.PHONY: help env site test lab bench sync clean always
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Settings: PROFILE=smoke (the default), laptop or paper; JOBS=2, pages to run side by side; PYTHON=python3.11"

env: $(READY)  ## make the environment in .venv
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; install it, or name one with PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .venv
	@echo "Installing into .venv; this takes a minute or a few"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

site: build/site/$(PROFILE)/_site/index.html  ## run all notebooks at PROFILE and build the site; only at smoke are their runs trained, else they are shown as far as they are stored
build/site/%/_site/index.html: $(READY) always  # what is up to date is found out by spt
	$(BIN)/spt reproduce --profile $* --jobs $(JOBS) $(if $(filter smoke,$*),,--stored)
	$(BIN)/spt site --profile $*

test: build/site/smoke/_site/index.html  ## run all notebooks with their checks, and all tests
	$(BIN)/pytest -n 2 --dist loadfile

lab: $(READY)  ## open JupyterLab; ARGS goes to it, such as --no-browser
	$(BIN)/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/nbs $(ARGS)

bench: $(READY)  ## measure the speed on this machine; ARGS goes to it
	$(BIN)/python -m spt_nbdev.bench $(ARGS)

sync: $(READY)  ## format the notebooks and clear their outputs, export the package, and write the README's table
	$(BIN)/jupyter nbconvert --clear-output --inplace --log-level WARN nbs/*.ipynb
	$(BIN)/ruff format --quiet
	$(BIN)/nbdev_clean
	$(BIN)/nbdev_export
	$(BIN)/python -c 'from spt_nbdev.summary import write_readme; write_readme()'

clean:  ## remove executed notebooks and sites, but not the environment and not the runs
	rm -rf build
