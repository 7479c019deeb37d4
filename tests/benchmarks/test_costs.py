"""The table of what each layer costs."""

from __future__ import annotations

from benchmarks.costs import COMMIT_BUNDLES, LAYERS, PARTITIONS, SHAPES, Shape, measure, table


def test_every_layer_is_measured_for_every_shape() -> None:
    for shape in SHAPES:
        # As many bundles that each partition has two snapshots of a long run.
        bundles = 2 * PARTITIONS if shape.runs == 1 else COMMIT_BUNDLES
        small = Shape(shape.name, shape.runs, shape.rows, bundles)
        costs = measure(small, 1)
        assert set(costs) == set(LAYERS)
        assert min(costs.values()) > 0


def test_the_table_has_a_line_for_each_layer() -> None:
    costs = [dict.fromkeys(LAYERS, 64_000.0) for _ in SHAPES]
    lines = list(table(costs, costs))
    assert len(lines) == 2 + len(SHAPES) * len(LAYERS)
    assert lines[2] == "| 64 runs of 16 | ingest | 64 | 1.0 | 62 | 62 |"
