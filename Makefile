# Every target works from a fresh clone: it creates .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

KERNELS := src/mpgelu/native
CFLAGS := -std=c11 -O2 -fopenmp-simd -Wall -Wextra -Werror -I $(KERNELS)

.PHONY: demo test test-engines bench docs figures kernels wheel lint-c sanitize clean

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

test-engines: $(INSTALLED)  ## members over workers and scoring on Ray and Spark (needs Java 17), beside Dask
	@java -version > /dev/null 2>&1 || { echo "test-engines: Spark needs Java 17 (openjdk-17-jre-headless)" >&2; exit 1; }
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dask,ray,spark]'
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/estimators/test_groups.py tests/tables/test_engines.py

kernels: $(INSTALLED)  ## compile the C kernels anew, for this working copy
	$(BIN)/python setup.py --quiet build_ext --inplace --force

wheel: $(INSTALLED)  ## source distribution and wheel, in dist/
	$(BIN)/python -m build

lint-c:  ## every C file compiles on its own, without a warning
	for file in $(KERNELS)/*.c; do $(CC) $(CFLAGS) -fsyntax-only $$file || exit 1; done

sanitize:  ## the kernels on random shapes under the sanitizers of memory and of undefined behaviour
	$(CC) $(CFLAGS) -Wno-pass-failed -g -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all tests/native/sanitize.c \
		$(foreach part,choice baseline avx2 avx512,$(KERNELS)/$(part).c) -lm -o build-sanitize
	./build-sanitize 200; status=$$?; rm -f build-sanitize; exit $$status

bench: $(INSTALLED)  ## speed, measured in turns: results/bench/ and the table in the README
	$(BIN)/mpgelu bench --output results/bench --readme README.md

docs: $(INSTALLED)  ## the site, in site/: runs the tutorials, and refuses broken links, missing images and raw markup
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

figures: $(INSTALLED)  ## every figure of the README and the documentation, in docs/images/
	OMP_NUM_THREADS=1 $(BIN)/python docs/figures/make.py
	$(BIN)/python docs/hooks/badges.py

# The constraints pin torch: a looser request would download several gigabytes of GPU packages.
# Installing compiles the kernels, so that a change of their source installs anew.
$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard $(KERNELS)/*.[ch])
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .cache build demo dist site $(KERNELS)/_kernels*
