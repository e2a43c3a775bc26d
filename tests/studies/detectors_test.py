"""The study of detectors: docs/experiments.md, from the labels of SPIRE 2022."""

import pathlib
import shutil
import types

import numpy as np
import pytest
import shared_data

from synthq_jax import artifacts
from synthq_jax.data import query_pairs, shipped
from synthq_jax.leakage import calibration, near_duplicates
from synthq_jax.studies import detectors, frame

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder():
  return shared_data.folder("query_leakage")


@pytest.fixture(scope="module")
def labelled(folder):
  return detectors.Labelled.read(folder)


def test_a_precision_that_no_rounded_cosine_has_is_said(folder, labelled):
  config = detectors.Config(
    folder=str(folder), encoder=False, precision=1.0, public_data=True
  )
  study = detectors._result(types.SimpleNamespace(config=config), labelled, ())
  assert study.rounded_cosine is None
  assert "none with three decimals" in detectors._rounded(study.rounded_cosine)


def test_another_checkpoint_is_another_embedding(folder, tmp_path, monkeypatch):
  config = detectors.Config(folder=str(folder), public_data=True)
  task = types.SimpleNamespace(config=config, root=tmp_path)

  def digests():
    return {
      job.directory.name: job.digest for job in detectors._jobs(task, None)
    }

  before = digests()
  shutil.copytree(shipped.DIRECTORY, tmp_path / "t5")
  with (tmp_path / "t5" / "params.safetensors").open("ab") as weights:
    weights.write(b" ")
  monkeypatch.setattr(shipped, "DIRECTORY", tmp_path / "t5")
  after = digests()
  assert {name for name in before if before[name] != after[name]} == {
    "embedding_variant", "embedding_title"
  }  # fmt: skip


def test_a_precision_that_no_half_of_the_topics_reaches_is_none(folder):
  topics = [str(i) for i in range(8)]
  wrong = detectors.Labelled(
    pairs=(), labels=np.zeros(8, bool), topics=topics, cosines=np.ones(8)
  )
  config = detectors.Config(folder=str(folder), draws=3, public_data=True)
  assert detectors._kept_apart(np.linspace(0, 1, 8), wrong, config) is None


def test_the_study_finds_what_its_page_in_the_docs_says(folder, tmp_path):
  config = detectors.Config(
    folder=str(folder), encoder=False, draws=4, public_data=True
  )
  said = frame.run(detectors.STUDY, config, tmp_path, progress=False)
  study = artifacts.load(tmp_path, detectors.Study)
  assert (study.num_pairs, study.num_positive) == (827, 721)
  assert study.lowest_cosine == pytest.approx(0.92603, abs=1e-5)
  assert study.rounded_cosine == 0.926
  at = {one.threshold: one for one in study.cosines}
  assert (at[0.926].found, at[0.926].right) == (701, 631)
  assert at[0.91].precision.mean == pytest.approx(0.8788, abs=1e-4)
  found = {
    one.name: (one.default.found, one.default.right)
    for one in study.detectors
    if one.side == "variant" and one.default
  }
  assert (
    found.items()
    >= {
      "exact": (229, 226),
      "token set": (330, 316),
      "containment": (529, 476),
      "trigrams": (599, 556),
    }.items()
  )
  assert "trigrams" in said and "lowest" in said
  page = (tmp_path / "study.md").read_text()
  assert "study.svg" in page and "variant, or different topic" in page
  # What is finished is read: another number of draws alone is measured anew.
  times = {
    path: path.stat().st_mtime_ns
    for path in tmp_path.glob("detectors/*/result.json")
  }
  assert len(times) == 1 + 2 * 5
  frame.run(detectors.STUDY, config, tmp_path, progress=False)
  assert times == {path: path.stat().st_mtime_ns for path in times}


def test_no_sample_of_these_pairs_alone_can_give_a_threshold_below_90(
  labelled,
):
  cosines = np.array([pair.cosine for pair in labelled.pairs])
  lowest = calibration.threshold(cosines, labelled.labels, precision=0.8)
  assert lowest == cosines.min()  # what lies below was never labelled


def test_the_index_finds_each_labelled_pair_that_scores_enough(labelled):
  queries = [pair.query for pair in labelled.pairs]
  variants = [pair.variant for pair in labelled.pairs]
  for detector in (
    near_duplicates.TokenSet(threshold=0.5),
    near_duplicates.Containment(),
  ):
    left, right, scores = detector.index(variants).match(queries)
    own = {i: s for i, j, s in zip(left, right, scores, strict=True) if i == j}
    expected = detector.scores(queries, variants)
    assert own == {
      i: score
      for i, score in enumerate(expected)
      if score >= detector.threshold
    }


def test_kappa_of_the_two_annotators(folder):
  kappa = {k: round(v[0], 4) for k, v in detectors.agreement(folder).items()}
  assert kappa == {
    "different topic or not": 0.5589,
    "relation to the title": 0.4424,
    "relation to the variant": 0.7417,
    "title, or different topic": 0.4219,
    "variant, or different topic": 0.672,
    "all labels together": 0.4595,
  }


def test_table_2_of_the_paper_is_counted_from_the_labels(labelled):
  assert [
    (one.collection, one.leaks, one.leak_topics, one.others, one.other_topics)
    for one in detectors.candidates(labelled)
  ] == [
    ("robust04", 648, 172, 93, 53),
    ("core17", 138, 37, 21, 11),
    ("core18", 157, 38, 19, 7),
  ]


def test_the_rule_of_relations_is_as_often_right_as_the_page_says(labelled):
  variant = detectors.confusion(labelled, "variant")
  assert variant.accuracy.mean == pytest.approx(0.6985, abs=1e-4)
  assert variant.accuracy.mean > variant.commonest
  title = detectors.confusion(labelled, "title")
  assert title.accuracy.mean == pytest.approx(0.5061, abs=1e-4)


def test_every_file_is_read_whole(folder):
  assert len(query_pairs.topics(folder / "trec_topics.jsonl")) == 350
  log = query_pairs.query_log(folder / "msmarco_queries.tsv")
  assert sum(1 for _ in log) == 20_856
