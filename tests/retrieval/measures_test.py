import math
import re

import numpy as np
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


def test_the_querys_own_document_is_dropped_on_request():
  qrels = {"q": {"a": 1}}
  run = {"q": {"q": 9.0, "a": 1.0}}
  dropped = measures.evaluate(qrels, run, ("RR@10",))
  kept = measures.evaluate(qrels, run, ("RR@10",), drop_identical=False)
  assert (dropped.mean["RR@10"], kept.mean["RR@10"]) == (1.0, 0.5)
  assert (dropped.drop_identical, dropped.num_dropped) == (True, 1)
  assert (kept.drop_identical, kept.num_dropped) == (False, 0)
  assert run == {"q": {"q": 9.0, "a": 1.0}}


@pytest.mark.parametrize("order", ["azb", "zab"])
@pytest.mark.parametrize("name", ["RR@10", "nDCG@1"])
def test_ties_keep_the_order_of_the_run_in_every_measure(order, name):
  run = {"q": dict.fromkeys(order, 0.5)}
  got = measures.evaluate({"q": {"a": 1}}, run, (name,)).mean[name]
  rank = order.index("a") + 1
  assert got == (1 / rank if name == "RR@10" else float(rank == 1))


def test_scores_equal_in_single_precision_are_still_ranked():
  run = {"q": {"z": 1.0, "a": 1.0 + 1e-13}}
  got = measures.evaluate({"q": {"a": 1}}, run, ("nDCG@1", "RR@1"))
  assert got.mean == {"nDCG@1": 1.0, "RR@1": 1.0}


@pytest.mark.parametrize(
  "name",
  ["foo@10", "R", "R@0", "nDCG@2.5", "nDCG@"]
  + ["MFR@0", "MFR@", "MFR(rel=0)", "mfr", "MFR@1.5"]
  + ["P(rel=0)@5", "R(rel=0)@10", "RR(rel=-1)@10", "SetP(rel=0)"]
  + ["P(rel=1000001)@5", "R(rel=9999999999)@10", "MFR(rel=1000001)"],
)
def test_a_name_that_is_no_measure_is_named(name):
  message = f"a measure such as .* got {re.escape(repr(name))}"
  with pytest.raises(ValueError, match=message):
    measures.evaluate(QRELS, RUN, (name,))
  with pytest.raises(ValueError, match=message):
    measures.check((name,))


def test_a_split_without_judgements_is_refused():
  with pytest.raises(ValueError, match="expected judged queries"):
    measures.evaluate({}, RUN)


def test_a_score_that_is_not_finite_is_refused():
  with pytest.raises(ValueError, match="finite scores"):
    measures.evaluate({"q": {"a": 1}}, {"q": {"a": float("nan")}})


@pytest.mark.parametrize("level", [0, -1])
def test_a_level_that_makes_unjudged_documents_relevant_is_refused(level):
  with pytest.raises(ValueError, match=f"level >= 1, got level={level}"):
    measures.evaluate(QRELS, RUN, level=level)


FIVE = {"q": {"v": 5.0, "w": 4.0, "x": 3.0, "y": 2.0, "z": 1.0}}
BY_HAND = {
  "Recall@10": (1 / 5, {"v": 1, "l1": 1, "l2": 1, "l3": 1, "l4": 1}),
  "MRR@10": (1 / 5, {"v": 0, "z": 1}),
  "RR@4": (0, {"z": 1}),
  "P@10": (2 / 10, {"v": 1, "x": 1}),
  "MFR@100": (101, {"v": 0, "lost": 1}),
  "MFR@3": (4, {"y": 1}),
  "MFR(rel=3)@10": (5, {"y": 2, "z": 3}),
  "nDCG@1": (2 / 3, {"v": 2, "lost": 3}),
  "nDCG@10": (
    (2 / math.log2(3) + 1 / math.log2(6)) / (2 + 1 / math.log2(3)),
    {"w": 2, "z": 1, "v": 0},
  ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_five_lines_score_what_a_hand_computes(name):
  expected, grades = BY_HAND[name]
  got = measures.evaluate({"q": grades}, FIVE, (name,)).mean[name]
  assert got == pytest.approx(expected, abs=1e-15)


GRADED = {"q": {"a": 3, "b": 1, "c": 2, "d": 0}, "p": {"a": 1, "e": 2}}
GRADED_RUN = {
  "q": {"b": 5.0, "x": 4.0, "c": 3.0, "a": 2.0, "d": 1.0},
  "p": {"x": 3.0, "a": 2.0, "y": 1.0},
}


@pytest.mark.parametrize(
  "first, second",
  [
    ("nDCG@{}", "nDCG(gains={{1:1,2:3,3:7}})@{}"),
    ("nDCG(gains={{1:1,2:3}})@{}", "nDCG(gains={{1:5,2:5}})@{}"),
    ("nDCG@{}", "nDCG(dcg='log2')@{}"),
    ("nDCG@{}", "nDCG(judged_only=True)@{}"),
    ("NumRet", "P(judged_only=True)@{}"),
    ("NumQ", "P(judged_only=True)@{}"),
    ("P@{}", "P(judged_only=False)@{}"),
    ("IPrec@0.{}", "IPrec@0.{}01"),
    ("SetF", "SetF(beta=2.0)"),
    ("Judged@{}", "Compat(p=0.{})"),
  ],
)
def test_a_measure_has_its_value_whatever_else_is_asked(first, second):
  """Of ir-measures' calls, the order of a set decides which value is lost."""
  for cut in (2, 5):
    names = (first.format(cut), second.format(cut))
    both = measures.evaluate(GRADED, GRADED_RUN, names).per_query
    for name in names:
      alone = measures.evaluate(GRADED, GRADED_RUN, (name,)).per_query
      assert both[name] == alone[name]


def test_the_gains_of_a_measure_are_its_own():
  gained = "nDCG(gains={1:1,2:3,3:7})@10"
  got = measures.evaluate(GRADED, GRADED_RUN, ("nDCG@10", gained)).per_query
  for name, gain in (("nDCG@10", lambda g: g), (gained, lambda g: 2**g - 1)):
    a, b, c = gain(3), gain(1), gain(2)
    found = discounted([b, 0, c, a])
    assert got[name]["q"] == pytest.approx(found / discounted([a, c, b]))
    found = discounted([0, gain(1)])
    assert got[name]["p"] == pytest.approx(found / discounted([gain(2), b]))


def overlap(ranking, ideal, p):
  """Clarke et al.'s rank biased overlap of two rankings, to the deeper's end."""
  depths = range(1, max(len(ranking), len(ideal)) + 1)
  shares = [len({*ranking[:n]} & {*ideal[:n]}) / n for n in depths]
  weights = [p ** (n - 1) for n in depths]
  return np.dot(weights, shares) / sum(weights)


@pytest.mark.parametrize("shift", [0.0, -10.0])
def test_compat_puts_documents_that_were_not_found_last(shift):
  """Of equal grades, the ideal ranking has those of the run first."""
  run = {"q": {"x": 4.0 + shift, "b": 3.0 + shift, "a": 2.0 + shift}}
  grades = {"lost": 1, "a": 1, "b": 1, "gone": 1}
  got = measures.evaluate({"q": grades}, run, ("Compat(p=0.8)",))
  ideal = ["b", "a", "lost", "gone"]
  best = overlap(ideal, ideal, 0.8)
  expected = overlap(["x", "b", "a"], ideal, 0.8) / best
  assert got.mean["Compat(p=0.8)"] == pytest.approx(expected)


def test_grades_below_0_alone_are_no_relevant_document():
  """ir-measures' C code reads beyond an array there, or never ends."""
  qrels = {"spam": {"d2": -2, "d3": -1}, "q": {"d1": 1}}
  run = {query: {"d2": 2.0, "d1": 1.0} for query in qrels}
  for names in (("nDCG@10", "R@10", "RR@10"), ("nDCG",)):
    for _ in range(9):
      got = measures.evaluate(qrels, run, names)
    assert {got.per_query[name]["spam"] for name in names} == {0.0}
    assert all(got.per_query[name]["q"] > 0 for name in names)


def test_what_was_met_is_counted_and_said():
  qrels = {**QRELS, "q2": {"a": 1, "q2": 0}}
  run = {**RUN, "q2": {"q2": 1.0}}
  got = measures.evaluate(qrels, run, split="dev")
  assert (got.num_queries, got.num_without_results) == (4, 2)
  assert (got.num_without_relevant, got.num_dropped, got.depth) == (1, 1, 3)
  averages, level, identical, ties = got.traps
  met = got.met
  assert "over all judged queries" in averages
  assert met.startswith("4 judged queries of split 'dev', 2 of them without")
  assert "and 1 without a relevant document" in met
  assert "a grade of 1 or more" in level and "nobody judged" in level
  assert identical == (
    "A result with its query's own id is dropped, unless it is judged relevant."
  )
  assert "strictly ordered" in ties
  assert "own id: 1;" in met and "3 at most" in met
  searched = trec.without_own(run, 9, qrels)  # as the stages search
  assert "own id" not in measures.evaluate(qrels, searched).met
  other = measures.evaluate(qrels, run, drop_identical=False, level=2)
  assert (other.num_without_results, other.num_without_relevant) == (1, 3)
  assert other.met.startswith("4 judged queries, 1 of them without results")
  assert "a grade of 2 or more" in other.traps[1]
  assert other.traps[2] == "A result with its query's own id is kept."


@pytest.mark.parametrize(
  ("qrels", "run"),
  [
    ({"1": {"10": 1}}, {1: {"10": 0.5}}),
    ({"1": {"10": 1}}, {"1": {10: 0.5}}),
    ({1: {"10": 1}}, {"1": {"10": 0.5}}),
    ({"1": {10: 1}}, {"1": {"10": 0.5}}),
    ({"1": {"10": 1}}, {"1": {np.int64(10): 0.5}}),
  ],
)
def test_ids_that_are_numbers_on_one_side_are_refused(qrels, run):
  """A run of positions scored 0, or raised pytrec_eval's TypeError."""
  with pytest.raises(
    ValueError, match=r"ids that are texts, got an? int.*str\("
  ):
    measures.evaluate(qrels, run)


def test_grades_of_numpy_are_read_and_others_are_refused():
  run = {"q": {"a": 0.5, "b": 0.4}}
  read = measures.evaluate({"q": {"a": np.int64(1), "b": np.int8(2)}}, run)
  assert read.mean == measures.evaluate({"q": {"a": 1, "b": 2}}, run).mean
  for grade in (1.0, "1", None, 2_000_000):
    with pytest.raises(ValueError, match="whole number.* as the grade"):
      measures.evaluate({"q": {"a": grade}}, run)


def oracle(qrels, run, *, drop_identical, level):
  """Every measure of the papers by its formula: name -> query -> value."""
  found = {name: {} for name in measures.ALL}
  for query, grades in qrels.items():
    places = enumerate(run.get(query, {}).items())
    ordered = sorted(places, key=lambda place: (-place[1][1], place[0]))
    ids = [id_ for _, (id_, _) in ordered]
    if drop_identical and grades.get(query, 0) < 1:
      ids = [id_ for id_ in ids if id_ != query]
    relevant = {id_ for id_, grade in grades.items() if grade >= level}
    ranks = [rank for rank, id_ in enumerate(ids, 1) if id_ in relevant]
    first = ranks[0] if ranks else math.inf
    for cut in (1, 10, 20, 100):
      hits = sum(rank <= cut for rank in ranks)
      found[f"R@{cut}"][query] = hits / len(relevant) if relevant else 0.0
    found["RR@10"][query] = 1 / first if first <= 10 else 0.0
    found["P@1"][query] = float(first == 1)
    found["MFR"][query] = float(first if first <= 100 else 101)
    gains = [max(0, grades.get(id_, 0)) for id_ in ids]
    ideal = sorted((max(0, grade) for grade in grades.values()), reverse=True)
    best = discounted(ideal[:10])
    found["nDCG@10"][query] = discounted(gains[:10]) / best if best else 0.0
  return found


def discounted(gains):
  return math.fsum(
    gain / math.log2(rank + 1) for rank, gain in enumerate(gains, 1)
  )


def random_case(rng):
  """Judgements and a run with everything that makes evaluations differ.

  Ties, grades from -1 to 3, queries without results, without judgements and
  without anything relevant, the query's own id, documents nobody judged, runs
  shorter and longer than every cut.
  """
  documents = [f"d{i}" for i in range(rng.choice([3, 15, 130]))]
  qrels, run = {}, {}
  for query in (f"q{i}" for i in range(rng.integers(1, 6))):
    pool = [*documents, query]
    if rng.random() < 0.85:
      judged = rng.choice(pool, rng.integers(1, len(pool) + 1), replace=False)
      top = rng.choice([0, 1, 3])
      qrels[query] = {
        str(id_): int(rng.integers(-1, top + 1)) for id_ in judged
      }
    if rng.random() < 0.85:
      found = rng.choice(pool, rng.integers(0, len(pool) + 1), replace=False)
      scores = rng.normal(size=len(found)).round(rng.integers(0, 3))
      run[query] = {
        str(i): float(s) for i, s in zip(found, scores, strict=True)
      }
  return qrels or {"q0": {"d0": 1}}, run


@pytest.mark.parametrize("drop_identical", [True, False])
@pytest.mark.parametrize("level", [1, 2])
def test_random_runs_score_what_the_formulas_say(level, drop_identical):
  rng = np.random.default_rng([level, drop_identical])
  seen = {name: set() for name in measures.ALL}
  for _ in range(150):
    qrels, run = random_case(rng)
    options = {"drop_identical": drop_identical, "level": level}
    got = measures.evaluate(qrels, run, measures.ALL, **options)
    expected = oracle(qrels, run, **options)
    for name, values in expected.items():
      assert got.per_query[name] == pytest.approx(values, rel=0, abs=1e-12)
      mean = math.fsum(values.values()) / len(qrels)
      assert got.mean[name] == pytest.approx(mean, rel=0, abs=1e-12)
      seen[name] |= set(values.values())
  # The cases are no trivial ones: each measure took many values.
  assert {0.0, 1.0} < seen["nDCG@10"] and len(seen["nDCG@10"]) > 100
  assert {0.0, *(1 / rank for rank in range(1, 7))} < seen["RR@10"]
  assert {1.0, 2.0, 101.0} < seen["MFR"]
  assert any(20 < rank <= 100 for rank in seen["MFR"])
