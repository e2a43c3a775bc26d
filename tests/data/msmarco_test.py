import gzip

import pytest

from synthq_jax.data import collection, msmarco

FILES = {
  "collection.tsv": "7\tseven\n8\teight, or so\n",
  "queries.train.tsv": "1\tuno\n2\tdue\n",
  "qrels.train.tsv": "1\t0\t7\t1\n1 0 8 0\n",
  "queries.dev.small.tsv": "3\ttre\n",
  "qrels.dev.small.tsv": "3\t0\t8\t1\n",
  "queries.eval.tsv": "4\tquattro\n",
}


def folder(tmp_path, zipped=False, **changes):
  for name, text in {**FILES, **changes}.items():
    data = text if isinstance(text, bytes) else text.encode()
    if zipped:
      (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
    else:
      (tmp_path / name).write_bytes(data)
  return tmp_path


@pytest.mark.parametrize("zipped", [False, True])
def test_judged_queries_of_all_splits_are_read(tmp_path, zipped):
  read = msmarco.read_msmarco(folder(tmp_path, zipped))
  assert (
    tuple(read.documents)
    == tuple(read.documents)
    == (
      collection.Document("7", "seven"),
      collection.Document("8", "eight, or so"),
    )
  )
  assert {query.id: query.text for query in read.queries} == {
    "1": "uno",
    "3": "tre",
  }
  assert read.qrels == {
    "train": {"1": {"7": 1, "8": 0}},
    "dev.small": {"3": {"8": 1}},
  }


def test_a_query_of_two_splits_has_one_text(tmp_path):
  changed = {
    "queries.dev.small.tsv": "1\tone\n",
    "qrels.dev.small.tsv": "1 0 8 1",
  }
  with pytest.raises(ValueError, match="one text for each query"):
    msmarco.read_msmarco(folder(tmp_path, **changed))


BAD = {
  "a tab in a text": (
    {"collection.tsv": "7\tseven\n8\teight\tor so\n"},
    r"collection\.tsv:2: expected 2 columns separated by tabs, got 3;",
  ),
  "BEIR's header": (
    {"qrels.train.tsv": "query-id\tcorpus-id\tscore\n1\t7\t1\n"},
    r"qrels\.train\.tsv:1: expected 'query 0 passage grade', got 3 columns",
  ),
  "a ranking": (  # whose ranks are ids of passages, too
    {"qrels.train.tsv": "1\t7\t8\t9\n"},
    r"qrels\.train\.tsv:1: expected 'query 0 passage grade', got '7' in place",
  ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_with_file_and_line(tmp_path, name):
  changes, message = BAD[name]
  with pytest.raises(ValueError, match=message):
    msmarco.read_msmarco(folder(tmp_path, **changes))


HEADERS = {
  "collection.tsv": "pid\tpassage\n",
  "queries.train.tsv": "qid\tquery\n",
  "qrels.train.tsv": "qid\titer\tpid\trel\n",
}


def test_headers_are_no_passages_queries_or_judgements(tmp_path):
  """A passage "passage" stood in the collection, with the id "pid"."""
  (tmp_path / "plain").mkdir()
  plain = msmarco.read_msmarco(folder(tmp_path / "plain"))
  headed = {name: HEADERS.get(name, "") + text for name, text in FILES.items()}
  read = msmarco.read_msmarco(folder(tmp_path, **headed))
  assert tuple(read.documents) == tuple(plain.documents)
  assert (read.queries, read.qrels) == (plain.queries, plain.qrels)


@pytest.mark.parametrize("separator", ["\t", " ", " \t "])
def test_judgements_of_four_levels_stand_between_any_white_space(
  separator, tmp_path
):
  rows = ["1 0 7 3", "1 Q0 8 0", "2 0 7 -1", "2 0 8 2", "2 0 8 2"]
  text = "".join(
    row.replace(" ", separator) + separator + "\r\n" for row in rows
  )
  read = msmarco.read_msmarco(folder(tmp_path, **{"qrels.train.tsv": text}))
  assert read.qrels["train"] == {"1": {"7": 3, "8": 0}, "2": {"7": -1, "8": 2}}


@pytest.mark.parametrize("grade", ["1_0", "\u0661", "1.0", "1e0"])
def test_grades_that_trec_eval_reads_otherwise_are_refused(grade, tmp_path):
  """Python reads 1_0 as 10."""
  changed = {"qrels.train.tsv": f"1 0 7 {grade}\n"}
  with pytest.raises(ValueError, match=r"tsv:1: expected a whole number as"):
    msmarco.read_msmarco(folder(tmp_path, **changed))
