"""Synthetic beside real queries of held-out documents, in exact numbers."""

import json
import sys
import types

import made_up
import numpy as np
import pytest
import sacrebleu
import small_data

from synthq_jax import extras, intervals
from synthq_jax.generation import mauve
from synthq_jax.report import queries
from synthq_jax.retrieval import significance, text_encoders
from synthq_jax.runtime import (
  comparison_results,
  prepared_files,
  results,
  workspace,
)
from synthq_jax.stages import compare_queries, evaluate
from synthq_jax.storage import artifacts

_DOCUMENTS = {"d1": "one two three four five", "d2": "red blue", "d3": "unseen"}
_REAL = {"q1": "one two three four", "q2": "a b", "q3": "a b", "q4": "x"}
_ASKED = [("q1", "d1"), ("q2", "d1"), ("q3", "d2"), ("q4", "d3")]
_WRITTEN = {
  "same": [("one two three four", "d1"), ("a b", "d1"), ("a b", "d2")],
  "other": [("z z z", "d1"), ("z y", "d2"), ("off", "elsewhere")],
  "none": [("off", "elsewhere")],
}


class _Length:
  """Vectors of two kinds: real queries hold no "z"."""

  description = "rule of z"

  def __init__(self):
    self.calls = []

  def encode(self, texts):
    self.calls.append(list(texts))
    return np.array([[float("z" in text), 1.0] for text in texts], np.float32)


def _write(path, *rows):
  small_data.write_lines(path, map(json.dumps, rows))


@pytest.fixture(name="place")
def _place(tmp_path):
  _write(
    tmp_path / "public/corpus.jsonl",
    *({"_id": i, "title": "", "text": t} for i, t in _DOCUMENTS.items()),
  )
  _write(
    tmp_path / "private/queries.jsonl",
    *({"_id": i, "text": text} for i, text in _REAL.items()),
  )
  rows = [f"{query}\t{document}\t1" for query, document in _ASKED]
  small_data.write_lines(
    tmp_path / "private/qrels/test.tsv", ["query-id\tcorpus-id\tscore", *rows]
  )
  for name, pairs in _WRITTEN.items():
    _write(
      tmp_path / name / "queries.jsonl",
      *({"_id": "", "text": text, "document": d} for text, d in pairs),
    )
  return tmp_path


def _similarity(place, featurizer=None, limit=100):
  texts = compare_queries.HeldOut(
    place,
    types.SimpleNamespace(
      directory="public", private_directory="private", test_split="test"
    ),
    [types.SimpleNamespace(name=name, directory=name) for name in _WRITTEN],
  )
  found = compare_queries.compute_similarity(
    texts, featurizer, limit=limit, seed=0
  )
  return {one.name: one for one in found}


def test_both_sides_are_measured_on_the_same_documents(place):
  found = _similarity(place)
  same = found["same"]
  assert (same.num_queries, same.num_compared) == (3, 3)
  assert same.real == same.synthetic
  assert same.real.words == (4 + 2 + 2) / 3
  assert same.real.distinct == 4 / 5  # "a b" twice
  assert same.real.copied == 1.0  # one 4-gram, and d1 holds it
  assert same.bleu == pytest.approx(100)


def test_the_sides_are_as_large_as_the_smaller_one(place):
  found = _similarity(place)
  assert (found["other"].num_queries, found["other"].num_compared) == (2, 2)
  assert found["other"].synthetic.words == 2.5
  assert found["other"].synthetic.distinct == 2 / 3
  assert found["none"].num_queries == found["none"].num_compared == 0
  assert _similarity(place, limit=1)["same"].num_compared == 1


def test_queries_of_train_pairs_stand_one_beside_one(place):
  (place / "private/qrels/test.tsv").rename(place / "private/qrels/train.tsv")
  texts = compare_queries.HeldOut(
    place,
    types.SimpleNamespace(
      directory="public", private_directory="private", test_split="test"
    ),
    [types.SimpleNamespace(name=name, directory=name) for name in _WRITTEN],
    split="train",
  )
  found = compare_queries.compute_similarity(
    texts, _Length(), limit=100, seed=0, one_to_one=True
  )
  same, other, none = found
  assert (same.num_queries, same.num_compared) == (3, 3)
  assert same.bleu == pytest.approx(100) and same.one_to_one
  # Each against one real query alone: "z z z" beside q1, "z y" beside q3.
  assert other.num_queries == 2
  assert other.real.words == (4 + 2) / 2
  assert none.num_queries == 0
  _, told, *_ = queries.similarity(found)
  assert "training pairs" in told.text and "held-out" not in told.text
  swapped = {"d1": ["a b", "one two three four"], "d2": ["a b"]}
  texts.written = {"swapped": swapped}
  (one,) = compare_queries.compute_similarity(
    texts, None, limit=100, seed=0, one_to_one=True
  )
  assert one.bleu < 50


def test_mauve_sees_every_text_once_and_says_who_made_the_vectors(place):
  featurizer = _Length()
  found = _similarity(place, featurizer)
  (texts,) = featurizer.calls
  assert len(texts) == len(set(texts))
  assert [one.score for one in found["same"].mauve] == [1] * 5
  assert max(one.score for one in found["other"].mauve) < 0.01
  assert found["other"].mauve[0].featurizer == "rule of z"
  assert found["other"].mauve[0].num_texts == (2, 2)
  assert found["none"].mauve == ()
  assert _similarity(place)["same"].mauve == ()


def test_the_report_says_how_every_number_was_made(place):
  found = list(_similarity(place, _Length()).values())
  table, *paragraphs = queries.similarity(found)
  assert table.header[:4] == ("Generator", "Queries", "BLEU", "MAUVE")
  same, other = table.rows  # "none" has nothing to show
  assert same[:4] == ("same", "3", "100.00", "1.000 ± 0.000")
  assert same[4:] == ("2.7 (2.7)", "0.80 (0.80)", "1.000 (1.000)")
  assert other[1] == "2" and other[3].startswith("0.00")
  text = " ".join(f"{one.lead} {one.text}" for one in paragraphs)
  version = f"tok:13a|smooth:exp|version:{sacrebleu.__version__}"
  assert version in text and "nrefs:var|case:lc" in text
  assert "vectors from the rule of z, in 2 clusters" in text
  assert "use 2 to 3 queries of each side" in text


def test_mauve_compares_the_vectors_that_settings_name(monkeypatch, tmp_path):
  monkeypatch.setattr(mauve, "is_installed", lambda: True)
  prepared = types.SimpleNamespace(vocabulary="pieces.model", query_length=24)

  def chosen(encoder, **settings):
    config = compare_queries.Config(**settings)
    return compare_queries._featurizer(config, tmp_path, prepared, encoder)

  monkeypatch.setattr(text_encoders, "load_own", lambda *a, length: (a, length))
  paths = tmp_path / "t5", tmp_path / "pieces.model"
  assert chosen(tmp_path / "t5") == (paths, 24)
  assert chosen(None) is None
  gpt2 = text_encoders.Gpt2(folder="gpt2-large")
  assert chosen(tmp_path / "t5", mauve_gpt2="gpt2-large") == gpt2
  assert chosen(None, mauve_gpt2="gpt2-large") == gpt2


def test_every_clustering_has_a_seed_of_its_own(place, monkeypatch):
  seeds = []
  whole = mauve.from_vectors

  def noted(*vectors, seed, featurizer):
    seeds.append(seed)
    return whole(*vectors, seed=seed, featurizer=featurizer)

  monkeypatch.setattr(mauve, "from_vectors", noted)
  _similarity(place, _Length())
  assert seeds == [0, 1, 2, 3, 4] * 2


def _scored(root, name, values, epsilon=None):
  directory = f"private/{name}"
  artifacts.write_atomically(
    root / directory / "per_query.json", json.dumps({"nDCG@10": values})
  )
  mean = float(np.mean(list(values.values())))
  return results.Evaluation(
    directory=directory,
    row=made_up.row(name),
    label="",
    test_set="test",
    private=True,
    statement=made_up.promise(epsilon),
    measures={"nDCG@10": intervals.Interval(mean=mean, low=mean, high=mean)},
    num_queries=len(values),
    traps=(),
  )


@pytest.mark.parametrize("users", [False, True])
def test_every_system_is_held_against_bm25_and_its_own_real_queries(
  tmp_path, monkeypatch, users
):
  rng = np.random.default_rng(0)
  base = {f"q{i}": float(x) for i, x in enumerate(rng.uniform(size=200))}

  def moved(by):
    return {q: x + by + 0.1 * rng.normal() for q, x in base.items()}

  rows = [
    _scored(tmp_path, "bm25", base),
    _scored(tmp_path, "untrained", moved(-0.5)),
    _scored(tmp_path, "synthetic_eps8", moved(-0.35), 8.0),
    _scored(tmp_path, "original", moved(-0.3), np.inf),
    _scored(tmp_path, "fused_untrained", moved(0.0)),
    _scored(tmp_path, "fused_public_only", moved(0.05)),
    _scored(tmp_path, "fused_synthetic_eps8", moved(0.1), 8.0),
    _scored(tmp_path, "fused_original", moved(0.2), np.inf),
    _scored(tmp_path, "ltr_synthetic_eps8", moved(0.1), 8.0),
    _scored(tmp_path, "ltr_original", moved(0.0), np.inf),
  ]
  config = compare_queries.Config(measures=("nDCG@10",))
  owners = {query: place // 4 for place, query in enumerate(base)}
  monkeypatch.setattr(
    prepared_files, "read_owners", lambda *_: owners if users else None
  )
  folders = workspace.Folders(tmp_path)
  scored = compare_queries._headlined(
    config, compare_queries._rows(folders, made_up.prepared(), rows)
  )
  found = {one.row.evaluation.name: one.row for one in scored}
  over = {name: row.over_bm25 for name, row in found.items()}
  assert over["bm25"] is None
  at_once = found["fused_synthetic_eps8"].over_bm25_at_once
  one = over["fused_synthetic_eps8"]
  assert at_once.low < one.low < one.mean == at_once.mean < one.high
  # 9 rows: 2.77 standard errors in place of 1.96.
  assert 1.2 < (at_once.high - at_once.low) / (one.high - one.low) < 1.65
  of = {x.row.evaluation.name: x.per_query["nDCG@10"] for x in scored}
  pair = of["fused_synthetic_eps8"], of["bm25"]
  known = owners if users else None
  assert one == significance.paired_bootstrap(*pair, known, seed=0)
  tests = list(compare_queries._differences(config, scored))
  names = ("fused_synthetic_eps8", "bm25")
  [test] = [x for x in tests if (x.first, x.second) == names]
  assert test.interval == one
  expected = significance.stratified_t_test(
    *[[x] for x in pair], owners=[known]
  )
  assert test.p_value == pytest.approx(expected * len(tests))
  assert over["fused_synthetic_eps8"].mean == pytest.approx(0.1, abs=0.03)
  assert over["fused_synthetic_eps8"].low > 0 > over["synthetic_eps8"].high
  kept = {name: row.gain_kept for name, row in found.items()}
  assert kept["synthetic_eps8"].mean == pytest.approx(0.75, abs=0.1)
  assert kept["fused_synthetic_eps8"].mean == pytest.approx(0.5, abs=0.1)
  assert kept["fused_public_only"].mean == pytest.approx(0.25, abs=0.1)
  # Real queries that weigh add nothing that is clear of 0 to the fused start.
  assert kept["ltr_synthetic_eps8"] is None
  assert kept["untrained"] is kept["original"] is kept["fused_original"] is None
  pairs = [(str(a), str(b)) for a, b in comparison_results.list_pairs(rows)]
  assert ("fused_synthetic_eps8", "bm25") in pairs
  assert ("fused_synthetic_eps8", "fused_public_only") in pairs
  assert ("synthetic_eps8", "untrained") in pairs
  assert ("synthetic_eps8", "fused_untrained") not in pairs
  assert len(set(pairs)) == len(pairs)


def test_what_no_row_has_is_refused_before_anything_is_trained(monkeypatch):
  def check(num_queries=2, num_users=None, **settings):
    units = num_users or {"test": num_queries}
    prepared = types.SimpleNamespace(test_split="test", units=units.get)
    config = types.SimpleNamespace(
      compare_queries=compare_queries.Config(**settings),
      evaluate=evaluate.Config(measures=("RR@10",)),
    )
    run = types.SimpleNamespace(config=config, prepared=prepared)
    compare_queries.STAGE.check(run)

  with pytest.raises(ValueError, match=r"measures, RR@10, .*got 'nDCG@10'"):
    check()
  first = {"measures": ("RR@10", "P@1")}
  check(**first)
  for sizes in ({"num_queries": 1}, {"num_users": {"test": 1}}):
    with pytest.raises(ValueError, match="at least 2 queries .* split 'test'"):
      check(**sizes, **first)
  with monkeypatch.context() as patch:
    patch.setitem(sys.modules, "mauve", None)
    with pytest.raises(
      extras.MissingExtraError, match="mauve is not installed"
    ):
      check(**first, mauve_gpt2="gpt2")
  monkeypatch.setattr(extras, "check", lambda *_: None)
  with pytest.raises(ValueError, match="folder='gpt2': no such folder"):
    check(**first, mauve_gpt2="gpt2")


@pytest.mark.parametrize(("gain", "level"), [(0.002, ("b",)), (0.1, ())])
def test_rows_tie_where_their_difference_may_be_chance(gain, level):
  rng = np.random.default_rng(0)
  values = rng.uniform(0.2, 0.6, 200)
  noise = rng.normal(0, 0.05, 200)
  noise -= noise.mean()

  def scored(name, values, private=True):
    row = types.SimpleNamespace(
      name=name, test_set="test", num_queries=200, private=private,
      epsilon=None, directory="", measures={
        "nDCG@10": types.SimpleNamespace(mean=values.mean())
      },
    )  # fmt: skip
    return compare_queries._Scored(
      row=comparison_results.ScoredRow(evaluation=row),
      per_query={"nDCG@10": dict(enumerate(values))},
      owners=None,
    )

  rows = [
    scored("b", values),
    scored("a", values + gain + noise),
    scored("c", values, private=False),  # is compared with no private row
  ]
  found = compare_queries._find_ties(compare_queries.Config(), rows)
  assert [one.row.level for one in found] == [(), level, ()]
