"""Detectors on the labels of SPIRE 2022 do as docs/lab says."""

import numpy as np
import pytest
import shared_data

from synthq_jax.data import query_pairs
from synthq_jax.leakage import calibration
from synthq_jax.tools import leakage_targets
from tests.benchmarks import leakage_labels


@pytest.fixture(scope="module")
def folder():
  return shared_data.folder("query_leakage")


@pytest.fixture(scope="module")
def pairs(folder):
  return leakage_labels.read_pairs(folder)


def test_the_script_prints_what_the_docs_say(folder, monkeypatch, capsys):
  monkeypatch.setattr("sys.argv", ["leakage_labels.py", str(folder)])
  assert leakage_labels.main() == 0
  said = capsys.readouterr().out
  for line in (
    "827 labelled pairs, 721 of them near-duplicates",
    "robust04: 648, 172, 93, 53",
    "core17: 138, 37, 21, 11",
    "core18: 157, 38, 19, 7",
    "identical: 187",
    "generalisation: 124",
    "specialisation: 228",
    "reformulation: 181",  # the paper's 182nd has no label of the title
    "different topic: 106",
    "no label of the title: 1",
    "different topic or not: 0.559",
    "title, or different topic: 0.422",
    "relation to the variant: 0.742",
    "query beside variant: right in 0.699 of",
    "query beside title: right in 0.506 of",
    "cosine of the paper, variant: from 0.926, 701 pairs, 631 right,",
    "exact, variant: from 1.000, 229 pairs, 226 right,",
    "token set, variant: from 1.000, 330 pairs, 316 right,",
    "containment, variant: from 0.900, 529 pairs, 476 right,",
    "trigrams, variant: from 0.600, 599 pairs, 556 right,",
  ):
    assert line in said


def test_the_lowest_cosine_of_a_precision(pairs):
  cosines = np.array([pair.cosine for pair in pairs])
  labels = leakage_labels.get_labels(pairs)
  lowest = calibration.threshold(cosines, labels, precision=0.9)
  assert lowest == pytest.approx(0.92603, abs=1e-5)
  assert labels[cosines >= 0.91].mean() == pytest.approx(0.8788, abs=1e-4)
  # What lies below was never labelled.
  lowest = calibration.threshold(cosines, labels, precision=0.8)
  assert lowest == cosines.min()


def test_kappa_is_that_of_a_table_worked_out_by_hand():
  # Agreement .7; chance .5 * .6 + .5 * .4 = .5.
  first = ["yes"] * 25 + ["no"] * 25
  second = ["yes"] * 20 + ["no"] * 5 + ["yes"] * 10 + ["no"] * 15
  assert leakage_labels.compute_kappa(first, second) == pytest.approx(0.4)
  assert leakage_labels.compute_kappa(first, first) == 1


def test_every_file_is_read_whole(folder):
  targets = leakage_targets.read(f"{folder / 'trec_topics.jsonl'}")
  assert len({(each.topic, each.collection) for each in targets}) == 350
  log = query_pairs.query_log(folder / "msmarco_queries.tsv")
  assert sum(1 for _ in log) == 20_856
