"""What UPR costs, measured beside its peers: on one machine, in one run, on the same work.

`python -m benchmarks [ROW ...]` measures; `python -m benchmarks.report` writes the table of
docs/performance.md. The rows stand in `rows`, the clients they start in `clients`.
"""
