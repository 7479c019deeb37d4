"""The clients of the benchmarks, each in a process of its own: see `benchmarks.worker`."""
