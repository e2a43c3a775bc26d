"""Statistics of the study against scipy, by hand, and on simulated scores."""

import numpy as np
import pytest
from scipy import stats

from synthq_jax.leakage import study
from synthq_jax.retrieval import significance


def values(rng, mean: float, number: int = 50) -> dict[str, float]:
  drawn = np.clip(rng.normal(mean, 0.3, number), 0, 1)
  return {f"q{i}": float(x) for i, x in enumerate(drawn)}


def test_folds_hold_every_query_once_and_depend_on_the_seed_alone():
  queries = [f"q{i}" for i in range(23)]
  folds = study.make_folds(queries, 5, seed=0)
  assert sorted(map(len, folds)) == [4, 4, 5, 5, 5]
  assert sorted(q for fold in folds for q in fold) == sorted(queries)
  assert study.make_folds(queries[::-1], 5, seed=0) == folds
  assert study.make_folds(queries, 5, seed=1) != folds
  for number in (1, 24):
    with pytest.raises(ValueError, match=f"got {number}"):
      study.make_folds(queries, number, seed=0)


def test_a_size_is_chosen_on_the_other_folds():
  # Size 2 is best on a and b, size 1 on c alone: c is scored with size 2, and
  # a and b with the best of the fold without them.
  of_size = {
    1: {"a": 0.0, "b": 0.0, "c": 1.0},
    2: {"a": 0.5, "b": 0.5, "c": 0.0},
  }
  chosen = study.choose_sizes(of_size, [["a", "b"], ["c"]])
  assert chosen.sizes == (1, 2)
  assert chosen.per_query == {"a": 0.0, "b": 0.0, "c": 0.0}
  fewer = study.choose_sizes(of_size, [["a", "b"], ["c"]], fewer_is_better=True)
  assert fewer.sizes == (2, 1)
  assert fewer.per_query == {"a": 0.5, "b": 0.5, "c": 1.0}


def test_tests_are_scipys_with_bonferronis_correction():
  rng = np.random.default_rng(1)
  base = values(rng, 0.4)
  pairs = {f"s{i}": (values(rng, 0.4 + 0.04 * i), base) for i in range(4)}
  found = significance.compare(pairs, alpha=0.05, seed=0)
  for each, (system, _) in zip(found, pairs.values(), strict=True):
    want = stats.ttest_rel(list(system.values()), list(base.values()))
    assert each.p_value == pytest.approx(want.pvalue, rel=1e-9)
    assert each.corrected == pytest.approx(min(1, 4 * want.pvalue), rel=1e-9)
    assert each.is_significant == (4 * want.pvalue < 0.05)
    gap = each.difference
    assert gap.low < gap.mean < gap.high
    differences = [system[q] - base[q] for q in base]
    assert gap.mean == pytest.approx(np.mean(differences))
  assert [each.label for each in found] == list(pairs)


def test_a_planted_effect_is_found_and_a_null_one_is_not():
  rng = np.random.default_rng(2)
  found = false = 0
  for _ in range(300):
    base = values(rng, 0.5)
    null = {f"n{i}": (values(rng, 0.5), base) for i in range(9)}
    helped = {q: min(1.0, x + 0.2) for q, x in base.items()}
    noisy = {q: x + rng.normal(0, 0.1) for q, x in helped.items()}
    *nulls, planted = significance.compare(
      {**null, "p": (noisy, base)}, samples=9, seed=0
    )
    found += planted.is_significant and planted.difference.mean > 0
    false += any(each.is_significant for each in nulls)
  assert found == 300
  # At most 5% of the families may hold a false alarm (4 standard errors more).
  assert false / 300 <= 0.05 + 4 * np.sqrt(0.05 * 0.95 / 300)


RUN = {
  "q1": {"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0},
  "q2": {"x": 1.0, "y": 0.5},
}


def test_ranks_offsets_and_scores_are_means_over_a_querys_leaks():
  found = study.measure_memory(
    RUN, RUN, [("q1", "b", "d"), ("q1", "a", "c"), ("q2", "y", "x")]
  )
  assert found.ranks == {"q1": 1.5, "q2": 2.0}
  assert found.offsets == {"q1": 2.0, "q2": -1.0}
  assert found.scores == {"q1": 4.5, "q2": 0.5}


def test_a_document_that_was_missed_is_inserted_among_the_candidates():
  scored = {"q": {f"d{i}": 9.0 - i for i in range(8)}}
  candidates = {"q": {"d1": 0.0, "d3": 0.0, "d5": 0.0}}
  found = study.measure_memory(scored, candidates, [("q", "d4", "d7")])
  assert found.ranks == {"q": 3.0}  # behind d1 and d3; d0 and d2 do not count
  assert found.offsets == {"q": 4.0 - 3.0}
  assert study.measure_memory(
    scored, candidates, [("q", "d0", "d1")]
  ).offsets == {"q": 0.0}


def test_repetitions_are_averaged_query_by_query():
  found = study.average([{"a": 1.0, "b": 3.0}, {"b": 1.0, "a": 2.0}])
  assert list(found.items()) == [("a", 1.5), ("b", 2.0)]
  backwards = study.average([{"b": 3.0, "a": 1.0}, {"b": 1.0, "a": 2.0}])
  assert list(backwards) == ["a", "b"]  # a bootstrap depends on the order
  with pytest.raises(ValueError, match="the same queries in every repetition"):
    study.average([{"a": 1.0}, {"a": 1.0, "b": 3.0}])
