"""One module per command of python -m cupy_fp8, each with main(argv) -> exit code."""
