import math

import pytest

from synthq_jax.retrieval import measures, trec

QRELS = {
  "q1": {"a": 3, "b": 1, "c": 2},  # found: x, c, a
  "q2": {"a": 1},  # found third
  "q3": {"b": 1},  # no result at all
  "q4": {"c": 0},  # judged, nothing relevant
}
RUN = {
  "q1": {"x": 9.0, "c": 8.0, "a": 7.0},
  "q2": {"c": 3.0, "b": 2.0, "a": 1.0},
  "q4": {"c": 1.0},
  "q9": {"a": 1.0},  # nobody judged it
}
NDCG1 = (2 / math.log2(3) + 3 / 2) / (3 + 2 / math.log2(3) + 1 / 2)


def test_values_are_those_computed_by_hand():
  got = measures.evaluate(QRELS, RUN, ("nDCG@10", "R@10", "RR@10"))
  expected = {
    "nDCG@10": {"q1": NDCG1, "q2": 0.5, "q3": 0, "q4": 0},
    "R@10": {"q1": 2 / 3, "q2": 1, "q3": 0, "q4": 0},
    "RR@10": {"q1": 1 / 2, "q2": 1 / 3, "q3": 0, "q4": 0},
  }
  assert got.per_query.keys() == expected.keys()
  for name, values in expected.items():
    assert got.per_query[name] == pytest.approx(values, abs=1e-9)


def test_the_mean_is_over_all_judged_queries():
  got = measures.evaluate(QRELS, RUN, ("RR@10", "R@10")).mean
  assert got["RR@10"] == pytest.approx((1 / 2 + 1 / 3) / 4)
  assert got["R@10"] == pytest.approx((2 / 3 + 1) / 4)


def test_the_cutoff_cuts():
  got = measures.evaluate(QRELS, RUN, ("RR@2", "R@2", "nDCG@1")).per_query
  assert got["RR@2"]["q2"] == got["R@2"]["q2"] == got["nDCG@1"]["q1"] == 0
  assert got["R@2"]["q1"] == pytest.approx(1 / 3)


def test_the_common_names_are_aliases():
  got = measures.evaluate(QRELS, RUN, ("Recall@10", "MRR@10", "R@10", "RR@10"))
  assert list(got.mean) == ["Recall@10", "MRR@10", "R@10", "RR@10"]
  assert got.per_query["Recall@10"] == got.per_query["R@10"]
  assert got.per_query["MRR@10"] == got.per_query["RR@10"]


def test_the_level_moves_binary_measures_only():
  names = ("R@10", "RR@10", "nDCG@10", "R(rel=1)@10")
  one = measures.evaluate(QRELS, RUN, names).per_query
  three = measures.evaluate(QRELS, RUN, names, level=3)
  assert three.level == 3
  assert three.per_query["R@10"] == {"q1": 1.0, "q2": 0, "q3": 0, "q4": 0}
  assert three.per_query["RR@10"]["q1"] == pytest.approx(1 / 3)
  assert three.per_query["nDCG@10"] == one["nDCG@10"]
  assert three.per_query["R(rel=1)@10"] == one["R@10"]


def test_the_querys_own_document_is_dropped_on_request():
  qrels = {"q": {"a": 1}}
  run = {"q": {"q": 9.0, "a": 1.0}}
  dropped = measures.evaluate(qrels, run, ("RR@10",))
  kept = measures.evaluate(qrels, run, ("RR@10",), drop_identical=False)
  assert (dropped.mean["RR@10"], kept.mean["RR@10"]) == (1.0, 0.5)
  assert (dropped.drop_identical, dropped.num_dropped) == (True, 1)
  assert (kept.drop_identical, kept.num_dropped) == (False, 0)
  assert run == {"q": {"q": 9.0, "a": 1.0}}


def test_a_relevant_document_is_never_dropped_silently():
  qrels, run = {"7": {"7": 1}}, {"7": {"7": 1.0}}
  with pytest.raises(ValueError, match="got '7'; pass drop_identical=False"):
    measures.evaluate(qrels, run, ("RR@10",))
  kept = measures.evaluate(qrels, run, ("RR@10",), drop_identical=False)
  assert kept.mean == {"RR@10": 1.0}


@pytest.mark.parametrize("order", ["azb", "baz", "zab"])
@pytest.mark.parametrize("name", ["RR@10", "nDCG@1", "R@1"])
def test_ties_keep_the_order_of_the_run_in_every_measure(order, name):
  run = {"q": dict.fromkeys(order, 0.5)}
  got = measures.evaluate({"q": {"a": 1}}, run, (name,)).mean[name]
  rank = order.index("a") + 1
  assert got == (1 / rank if name == "RR@10" else float(rank == 1))


def test_scores_equal_in_single_precision_are_still_ranked():
  run = {"q": {"z": 1.0, "a": 1.0 + 1e-13}}
  got = measures.evaluate({"q": {"a": 1}}, run, ("nDCG@1", "RR@1"))
  assert got.mean == {"nDCG@1": 1.0, "RR@1": 1.0}


def test_a_run_from_a_file_scores_the_same(tmp_path):
  trec.write_run(tmp_path / "run", RUN)
  read = trec.read_run(tmp_path / "run")
  assert measures.evaluate(QRELS, read) == measures.evaluate(QRELS, RUN)


@pytest.mark.parametrize("name", ["foo@10", "R", "R@0", "nDCG@2.5", "nDCG@"])
def test_a_name_that_is_no_measure_is_named(name):
  with pytest.raises(ValueError, match=f"a measure such as .* got '{name}'"):
    measures.evaluate(QRELS, RUN, (name,))


def test_a_split_without_judgements_is_refused():
  with pytest.raises(ValueError, match="expected judged queries"):
    measures.evaluate({}, RUN)


def test_a_score_that_is_not_finite_is_refused():
  with pytest.raises(ValueError, match="finite scores"):
    measures.evaluate({"q": {"a": 1}}, {"q": {"a": float("nan")}})
