import math

import numpy as np
import pytest
from scipy import stats

from synthq_jax.retrieval import tables

GROUPS = {"cqadup": ("cqa/unix", "cqa/gis")}


def per_query(*values):
  return {f"q{i}": value for i, value in enumerate(values)}


BY_HAND = {
  "BM25": {
    "fiqa": per_query(*[0.1, 0.2, 0.3, 0.4] * 3),  # .25
    "cqa/unix": per_query(0.5, 0.5),  # .5
    "touche": per_query(0.9, 0.9, 0.9),  # .9
    "cqa/gis": per_query(0.0, 0.1, 0.2),  # .1, so cqadup is .3
  },
  "original": {
    "fiqa": per_query(*[0.6, 0.7, 0.8, 0.9] * 3),  # +.5 on each query
    "cqa/gis": per_query(0.2, 0.1, 0.0),  # as BM25 in the mean
    "cqa/unix": per_query(0.5, 0.5),
  },
  "direct DP": {
    "fiqa": per_query(*[0.1, 0.2, 0.3, 0.4] * 3),
    "touche": per_query(0.9, 0.9, 0.9),
    "cqa/unix": per_query(0.5, 0.5),
    "cqa/gis": per_query(0.0, 0.1, 0.2),
  },
}


def by_hand(**changes):
  options = {"reference": "BM25", "groups": GROUPS, **changes}
  return tables.compare(BY_HAND, "nDCG@10", **options)


def test_a_small_table_reads_as_written_by_hand():
  table = by_hand()
  assert f"{table.cells().text()}\n\n{table.caption}" == (
    "Row          fiqa  cqadup  touche  Average\n"
    "---------  ------  ------  ------  -------\n"
    "BM25        0.250   0.300   0.900    0.275\n"
    "original   0.750*   0.300       -    0.525\n"
    "direct DP   0.250   0.300   0.900    0.275\n"
    "\n"
    "nDCG@10, means over queries. cqadup is the mean of 2 sets. Average is the"
    " mean of 2 columns, those that every row has: without touche. * differs"
    " from BM25 (p < 0.05, paired t test over queries, Bonferroni for 7 tests)."
    " - not measured: original (touche)."
  )


def test_a_group_with_a_member_missing_is_missing_and_the_member_named():
  partly = {**BY_HAND, "XL": {"cqa/gis": per_query(0, 0, 0), "fiqa": {}}}
  del partly["XL"]["fiqa"]
  table = tables.compare(partly, "nDCG@10", groups=GROUPS)
  assert set(table.means["XL"].values()) == {None}
  assert table.missing["XL"] == ("fiqa", "cqa/unix", "touche")
  assert table.averaged == () and "Average" not in table.columns
  assert "There is no average: fewer than two columns" in table.caption
  assert "XL (fiqa, cqa/unix, touche)." in table.caption


def test_without_a_reference_nothing_is_tested_or_marked():
  table = by_hand(reference=None)
  assert table.p_values == {} and "differs" not in table.caption
  assert "*" not in table.cells().text()
  cells = [cell for row in table.means.values() for cell in row.values()]
  assert sum(cell is not None for cell in cells) == 11


def random_results(rng, sizes):
  """Four systems on four sets; the last one is the reference with noise."""
  base = {name: rng.uniform(size=size) for name, size in sizes.items()}
  shifts = {"BM25": 0, "original": 0.1, "synthetic": 0.06, "direct DP": 0}
  return {
    row: {
      name: values
      + shift
      + 0.15 * rng.normal(size=len(values)) * (row != "BM25")
      for name, values in base.items()
    }
    for row, shift in shifts.items()
  }


def test_means_and_p_values_are_those_of_an_independent_computation():
  rng = np.random.default_rng(0)
  sizes = {"fiqa": 60, "cqa/unix": 90, "cqa/gis": 25, "covid": 50}
  arrays = random_results(rng, sizes)
  results = {
    row: {name: per_query(*values) for name, values in sets.items()}
    for row, sets in arrays.items()
  }
  table = tables.compare(results, "R@10", reference="BM25", groups=GROUPS)
  columns = {
    "fiqa": {"fiqa": 1},
    "cqadup": {"cqa/unix": 1 / 2, "cqa/gis": 1 / 2},
    "covid": {"covid": 1},
    "Average": {
      "fiqa": 1 / 3, "cqa/unix": 1 / 6, "cqa/gis": 1 / 6, "covid": 1 / 3
    },
  }  # fmt: skip
  marked = set()
  for row, sets in arrays.items():
    for title, weights in columns.items():
      mean = sum(w * np.mean(sets[name]) for name, w in weights.items())
      assert table.means[row][title] == pytest.approx(mean, rel=1e-12)
      if row == "BM25":
        assert (row, title) not in table.p_values
        continue
      p_value = min(1, 12 * welch(sets, arrays["BM25"], weights))
      found = table.p_values[row, title]
      assert found == pytest.approx(p_value, rel=1e-9)
      if p_value < 0.05:
        marked.add((row, title))
  assert len(table.p_values) == 12
  assert 3 < len(marked) < 12
  header, _, *lines = table.cells().text().splitlines()
  for line in lines:
    name, *cells = line.split()[-5:]
    row = next(row for row in arrays if line.startswith(row))
    for title, cell in zip(header.split()[1:], cells, strict=True):
      assert cell.endswith("*") == ((row, title) in marked)
      assert float(cell.rstrip("*")) == pytest.approx(
        table.means[row][title], abs=5.1e-4
      )


def welch(first, second, weights):
  """The two-sided p value of a weighted mean of paired differences."""
  terms, means = [], []
  for name, weight in weights.items():
    difference = first[name] - second[name]
    size = len(difference)
    means.append(weight * difference.mean())
    terms.append((weight**2 * difference.var(ddof=1) / size, size - 1))
  variance = sum(term for term, _ in terms)
  freedom = variance**2 / sum(term**2 / df for term, df in terms)
  return 2 * stats.t(freedom).sf(abs(sum(means)) / math.sqrt(variance))


def test_rows_of_other_queries_than_the_reference_are_refused():
  scores = {
    "BM25": {"fiqa": per_query(1.0, 2.0)},
    "original": {"fiqa": {"q0": 1.0, "q9": 1.0}},
  }
  with pytest.raises(ValueError, match="expected the same queries"):
    tables.compare(scores, "nDCG@10", reference="BM25", groups={})


def test_a_set_of_one_query_is_shown_and_not_tested():
  several = {"q1": 0.2, "q2": 0.9, "q3": 0.4}
  results = {
    "a": {"tiny": {"q0": 1.0}, "fiqa": several},
    "b": {"tiny": {"q0": 0.5}, "fiqa": {q: v / 2 for q, v in several.items()}},
  }
  table = tables.compare(results, "nDCG@10", reference="a", groups={})
  assert list(table.p_values) == [("b", "fiqa")]
  assert table.means["b"]["tiny"] == 0.5
