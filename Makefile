# Every target works from a fresh clone: it creates .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test bench docs figures clean

demo: $(INSTALLED)  ## a model of a real table, its predictions and report, and the paper's toy problem; all in demo/
	$(BIN)/mpgelu example demo
	$(BIN)/mpgelu fit demo/train.csv --target progression --fast --output demo/diabetes.mpgelu
	$(BIN)/mpgelu predict demo/diabetes.mpgelu demo/new.csv --output demo/predictions.csv
	$(BIN)/mpgelu report demo/diabetes.mpgelu demo/new.csv --output demo/report.html
	$(BIN)/mpgelu reproduce toy --output demo
	@echo "predictions: demo/predictions.csv   report: demo/report.html   toy figure: demo/toy.png"

test: $(INSTALLED)  ## lint, types, all tests and doctests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

bench: $(INSTALLED)  ## speed, measured in turns: results/bench/ and the table in the README
	$(BIN)/mpgelu bench --output results/bench --readme README.md

docs: $(INSTALLED)  ## the site, in site/: runs the tutorials, and refuses broken links, missing images and raw markup
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

figures: $(INSTALLED)  ## every figure of the README and the documentation, in docs/images/
	OMP_NUM_THREADS=1 $(BIN)/python docs/figures/make.py
	$(BIN)/python docs/hooks/badges.py

# The constraints pin torch: a looser request would download several gigabytes of GPU packages.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .cache demo site
