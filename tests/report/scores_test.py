"""Tables of scores."""

import re

import made_up

from synthq_jax import intervals
from synthq_jax.report import scores
from synthq_jax.runtime import comparison_results, results


def _rows(names, measures):
  interval = intervals.Interval(mean=0.55, low=0.53, high=0.57)
  gain = intervals.Interval(mean=0.25, low=-0.125, high=0.5)
  return [
    comparison_results.ScoredRow(
      evaluation=results.Evaluation(
        directory="", row=made_up.row(name), label="a long description " * 4,
        test_set="test", private=True, num_queries=9, traps=(), seconds=4.0,
        measures=dict.fromkeys(measures, interval),
      ),
      over_bm25=gain,
      gain_kept=gain,
    )
    for name in names
  ]  # fmt: skip


def _screen(names, measures, **options):
  rows = _rows(names, measures)
  evaluations = [row.evaluation for row in rows]
  return scores.screen_table(evaluations, measures, rows, **options)


def test_the_table_of_the_screen_fits_100_columns():
  names = ("bm25", "ltr_direct_dp_group_eps8", "fused_synthetic_eps8")
  text = _screen(names, ("nDCG@10", "R@10"))
  assert max(map(len, text.splitlines())) <= 100
  row = text.splitlines()[3]
  assert re.split("  +", row) == [
    "ltr direct dp group eps8", "-", "0.550", "0.550",
    "+0.250 [-0.125, +0.500]", "0.25",
  ]  # fmt: skip


def test_a_table_leaves_out_no_more_than_it_must():
  names, measures = ("bm25", "original"), ("nDCG@10",)
  whole = _screen(names, measures, width=1000)
  assert "Trained on" in whole and "0.25 [-0.12, 0.50]" in whole
  seen = set()
  for width in range(200, 30, -1):
    text = _screen(names, measures, width=width)
    seen.add(text)
    header = text.splitlines()[0].split("  ")
    assert "gain kept" in header[-1] or "Trained on" in header[-1]
    assert "0.550" in text and "+0.250" in text
  assert len(seen) == 5
