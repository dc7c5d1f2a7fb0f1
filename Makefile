# Everyday commands. Each does all of its set-up: .venv, torch, the CUDA compiler where there is none, the library.
# Narrow a development build with HEAD_DIMS="64;128" DTYPES=bf16.
BIN := .venv/bin
export HEAD_DIMS DTYPES PYTHON EXTRAS

.PHONY: build test demo lint format check-sass clean

build:
	scripts/setup.sh

test: build
	$(BIN)/ctest --test-dir build/dev --output-on-failure --no-tests=error
	$(BIN)/python -m pytest

# The demo's model has head_dim 256: a machine with nothing built yet compiles the kernels of that size alone.
demo:
	@$(BIN)/python -c "import flashhopper" 2>/dev/null || HEAD_DIMS=256 scripts/setup.sh
	$(BIN)/python examples/demo.py

lint: EXTRAS := dev
lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m benchmarks.tables --check
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'cpp/*.[ch]pp' 'cpp/*.h' 'tests/cpp/*.[ch]pp')

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'cpp/*.[ch]pp' 'cpp/*.h' 'tests/cpp/*.[ch]pp')

check-sass: EXTRAS := dev
check-sass: build
	$(BIN)/python scripts/check_sass.py build/dev

clean:
	rm -rf build dist .venv
