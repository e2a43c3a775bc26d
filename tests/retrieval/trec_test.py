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


@pytest.mark.parametrize("value", [0.0, -3.25, 1e30])
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


BOM = b"\xef\xbb\xbf"
RUN = b"q1 Q0 a 1 2.5 t\nq1 Q0 b 2 -1e-3 t\nq2 Q0 a 1 0 t\n"


@pytest.mark.parametrize(
  "dress",
  [
    lambda data: BOM + data.replace(b"\n", b"\r\n\r\n"),
    lambda data: data.replace(b" ", b"\t"),
    lambda data: data.replace(b" ", b" \t ").rstrip(b"\n"),
    lambda data: gzip.compress(BOM + data),
  ],
  ids=["BOM, CRLF, blank lines", "tabs", "wide, no end", "gzip"],
)
def test_other_systems_files_are_read_as_they_are_meant(tmp_path, dress):
  (tmp_path / "run").write_bytes(dress(RUN))
  assert trec.read_run(tmp_path / "run") == {
    "q1": {"a": 2.5, "b": -0.001},
    "q2": {"a": 0.0},
  }


BAD_RUNS = {
  "five columns": (b"q1 Q0 c 3 2", "expected 'query Q0 document rank score"),
  "a tab in an id": (b"q1 Q0 c\td 3 2 t", "got 7 columns; correct"),
  "judgements": (b"q1 0 c 1", "got 4 columns; correct the line"),
  "a header": (
    b"qid Q0 docno rank score tag",
    "finite number .* got another text",
  ),
  "a comma in a score": (
    b"q1 Q0 c 3 0,5 t",
    "finite number .* got another text",
  ),
  "a number of Python's": (b"q1 Q0 c 3 1_0 t", "finite number .* got another"),
  "digits of another script": (
    "q1 Q0 c 3 \u0661 t".encode(),
    "finite number .* got another text",
  ),
  "NaN": (b"q1 Q0 c 3 nan t", "a finite number as the score, got another"),
  "too large": (b"q1 Q0 c 3 1e999 t", "a finite number .* got another"),
  "a document again": (
    b"q1 Q0 a 3 1 t",
    "each document once for a query, got one again; remove one",
  ),
  "Latin-1": (b"q1 Q0 caf\xe9 3 2 t", "UTF-8, got another byte at position 9"),
  "a BOM in the middle": (BOM + b"q1 Q0 c 3 2 t", "start of the file only"),
}


def test_no_id_with_a_control_character_is_written(tmp_path):
  with pytest.raises(ValueError, match="a document id without control"):
    trec.write_run(tmp_path / "run", {"q": {"a": 2.0, "a\0": 1.0}})
  with pytest.raises(ValueError, match="a query id without control"):
    trec.write_run(tmp_path / "run", {"q\0": {"a": 2.0}})
  with pytest.raises(ValueError, match="without invisible characters"):
    trec.write_run(tmp_path / "run", {"q": {"a\u200db": 2.0}})
  with pytest.raises(ValueError, match="document id without white space"):
    trec.write_run(tmp_path / "run", {"q": {"d 1": 1.0}})


@pytest.mark.parametrize("name", BAD_RUNS)
def test_a_bad_line_of_a_run_is_named(tmp_path, name):
  line, message = BAD_RUNS[name]
  (tmp_path / "run").write_bytes(RUN + line + b"\n")
  with pytest.raises(ValueError, match=f"run:4: .*{message}"):
    trec.read_run(tmp_path / "run")
