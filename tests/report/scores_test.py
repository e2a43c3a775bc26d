"""Tables of scores."""

import made_up

from synthq_jax.report import scores
from synthq_jax.runtime import comparison_results, results


def test_rows_of_synthetic_queries_count_the_training_of_their_writer():
  rows = [
    comparison_results.Row(
      evaluation=results.Evaluation(
        directory="", name=name, label="", test_set="test", private=True,
        measures={}, num_queries=9, traps=(), seconds=4.0,
      ),
    )
    for name in ("synthetic_eps8", "public_only")
  ]  # fmt: skip
  comparison = comparison_results.QueryComparison(
    directory="", measures=("nDCG@10",), test_set="test", rows=tuple(rows),
    differences=(), side_by_side=(), shareable_side_by_side=(), generators=(),
    asked=(), similarity=(),
  )  # fmt: skip
  generator = results.Checkpoint(
    directory="", kind="generator", name="eps8", statement=made_up.claim(),
    steps=1, batch_size=1, num_parameters=1, metrics="", seconds=1.0,
  )  # fmt: skip
  (table,) = scores.TIMES.build(comparison, [generator], [])
  assert [row[1:] for row in table.rows] == [
    ("1.0 s", "-", "-", "4.0 s", "5.0 s"),
    ("-", "-", "-", "4.0 s", "4.0 s"),
  ]
