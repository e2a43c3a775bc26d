import gzip

import numpy as np
import pytest

from synthq_jax.retrieval import trec


def as_trec_eval_ranks(path):
  """Reads a run as trec_eval does: float32, ties by id descending."""
  rows = [line.split() for line in path.read_text().splitlines()]
  ids = {}
  for query, _, document, _, score, _ in rows:
    ids.setdefault(query, []).append((np.float32(score), document))
  return {
    query: [id_ for _, id_ in sorted(found, reverse=True)]
    for query, found in ids.items()
  }


def test_a_run_has_the_six_columns_of_trec(tmp_path):
  trec.write_run(tmp_path / "run", {"q1": {"d2": 0.25, "d1": 1.5}}, tag="me")
  assert (tmp_path / "run").read_text() == (
    "q1 Q0 d1 1 1.5 me\nq1 Q0 d2 2 0.25 me\n"
  )


@pytest.mark.parametrize("value", [0.0, 1.0, -3.25, 1e30, 0.1])
def test_ties_are_read_in_our_order_by_trec_eval(tmp_path, value):
  ids = ["b", "z", "a", "m", "k"]
  run = {"q": {**dict.fromkeys(ids, value), "first": value + abs(value) + 1}}
  trec.write_run(tmp_path / "run", run)
  expected = ["first", *ids]
  assert as_trec_eval_ranks(tmp_path / "run") == {"q": expected}
  assert trec.ranking(trec.read_run(tmp_path / "run")["q"]) == expected


def test_scores_that_differ_below_float32_keep_their_order(tmp_path):
  run = {"q": {"a": 1.0, "b": 1.0 + 1e-12, "c": 1.0 + 2e-12, "z": 0.9999}}
  trec.write_run(tmp_path / "run", run)
  assert as_trec_eval_ranks(tmp_path / "run") == {"q": ["c", "b", "a", "z"]}
  read = trec.read_run(tmp_path / "run")["q"]
  np.testing.assert_allclose([read[i] for i in "abcz"], [1, 1, 1, 0.9999], 1e-6)


def test_a_run_that_was_written_twice_does_not_move(tmp_path):
  rng = np.random.default_rng(0)
  scores = rng.normal(size=300).round(2)  # many ties
  run = {"q": {f"d{i}": float(score) for i, score in enumerate(scores)}}
  trec.write_run(tmp_path / "one", run)
  trec.write_run(tmp_path / "two", trec.read_run(tmp_path / "one"))
  assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text()


def test_runs_and_judgements_are_read_gzipped(tmp_path):
  path = tmp_path / "x.gz"
  path.write_bytes(gzip.compress(b"q Q0 d 1 0.5 t\n"))
  assert trec.read_run(path) == {"q": {"d": 0.5}}
  path.write_bytes(gzip.compress(b"q 0 d 2\n"))
  assert trec.read_qrels(path) == {"q": {"d": 2}}


def test_judgements_written_are_read_back(tmp_path):
  qrels = {"q1": {"d1": 2, "d2": 0}, "q2": {"d1": -1}}
  trec.write_qrels(tmp_path / "qrels", qrels)
  assert (
    tmp_path / "qrels"
  ).read_text() == "q1 0 d1 2\nq1 0 d2 0\nq2 0 d1 -1\n"
  assert trec.read_qrels(tmp_path / "qrels") == qrels


def test_a_document_found_twice_is_named(tmp_path):
  (tmp_path / "run").write_text("q Q0 d 1 2 t\nq Q0 d 2 1 t\n")
  with pytest.raises(ValueError, match=r"run:2: .* got 'd' again"):
    trec.read_run(tmp_path / "run")


@pytest.mark.parametrize(
  "line, message",
  [("q Q0 d 1 2", "expected 'query Q0"), ("q Q0 d 1 x t", "got 'x'")],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
  (tmp_path / "run").write_text(f"q Q0 c 1 3 t\n{line}\n")
  with pytest.raises(ValueError, match=f"run:2: .*{message}"):
    trec.read_run(tmp_path / "run")


def test_ids_with_white_space_are_not_written(tmp_path):
  with pytest.raises(ValueError, match="document id without white space"):
    trec.write_run(tmp_path / "run", {"q": {"d 1": 1.0}})
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_refused(score):
  with pytest.raises(ValueError, match="finite scores, got .* document 'b'"):
    trec.ranking({"a": 1.0, "b": score})


def test_what_an_index_found_is_named():
  run = trec.to_run(
    ["q1", "q2"],
    ["a", "b", "c"],
    np.array([[3.0, 2.0], [1.0, 0.5]]),
    np.array([[2, 0], [1, 2]]),
  )
  assert run == {"q1": {"c": 3.0, "a": 2.0}, "q2": {"b": 1.0, "c": 0.5}}
  assert list(run["q1"]) == ["c", "a"]
