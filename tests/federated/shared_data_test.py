"""The collections that studies use, as clients: what is in them."""

import pytest
import shared_data

from synthq_jax.data import beir
from synthq_jax.federated import clients, partitions, passages, ranking

MEDQUAD = {  # passages; sentences; questions of train, dev, test
  "CDC": (256, 2678, 205, 15, 32),
  "CancerGov": (701, 23556, 530, 62, 91),
  "GARD": (5323, 50941, 4323, 517, 517),
  "GHR": (4967, 33109, 3892, 380, 476),
  "MPlus_Health_Topics": (981, 10569, 696, 103, 98),
  "NHLBI": (559, 16431, 349, 27, 70),
  "NIDDK": (1134, 15459, 576, 84, 108),
  "NINDS": (1085, 5432, 715, 100, 76),
  "SeniorHealth": (769, 9703, 147, 32, 49),
}


def counts(client):
  questions = (len(client.splits[split]) for split in ("train", "dev", "test"))
  return len(client.passage_ids), len(client.sentences), *questions


def test_medquad_has_nine_sites_with_these_sentences_and_questions():
  collection = beir.read_beir(shared_data.folder("medquad"))
  built, found = clients.build(passages.from_documents(collection))
  assert {c.name: counts(c) for c in built} == MEDQUAD
  # All documents and questions are there; judgements across sites are not.
  assert sum(row[0] for row in MEDQUAD.values()) == 15775
  assert sum(sum(row[2:]) for row in MEDQUAD.values()) == 14270
  assert found["num_foreign_judgements"] == 1414
  assert found["num_lost_questions"] == 0
  cdc = ranking.evaluate_bm25(built[0], "test")
  assert cdc.values().mean() == pytest.approx(0.400, abs=0.01)


def test_wikiqas_labelled_sentences_become_ten_skewed_clients():
  path = shared_data.folder("wikiqa_sent")
  judged = passages.from_sentences(
    beir.read_beir(path), beir.read_key(path, "doc")
  )
  labels = partitions.label_by_questions(judged)
  data = partitions.dirichlet(judged, labels, num_clients=10, alpha=0.5, seed=0)
  built, _ = clients.build(data)
  assert len(built) == 10
  rows = [counts(client) for client in built]
  assert sum(row[1] for row in rows) == 26325
  assert [sum(column) for column in zip(*rows, strict=True)][2:] == [
    873, 126, 243,
  ]  # fmt: skip
  answers = [a for c in built for a in c.splits["test"].answers]
  assert sum(map(len, answers)) == 293
  mean = sum(
    ranking.evaluate_bm25(client, "test").values("MRR@10").sum()
    for client in built
  )
  assert mean / 243 == pytest.approx(0.491, abs=0.01)
