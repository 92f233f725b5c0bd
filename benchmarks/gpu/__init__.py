"""Everything that has to be measured on a GPU, in one command: `python -m benchmarks.gpu`."""
