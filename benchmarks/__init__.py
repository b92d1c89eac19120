"""Every measurement of this project: `python -m benchmarks --help`, and docs/benchmarks.md on how to read one."""
