"""The study of what is read out of vectors: on a tiny collection."""

import dataclasses
import math
import pathlib

import numpy as np
import pytest
import random_t5

from synthq_jax.audit import inversion
from synthq_jax.data import beir, collection, shipped
from synthq_jax.storage import artifacts
from synthq_jax.studies import frame, vectors


@pytest.fixture(autouse=True, scope="module")
def _of_chance(tmp_path_factory):
  """Vectors and decoder are those of a T5 that nobody trained."""
  place = pathlib.Path(random_t5.save(tmp_path_factory.mktemp("t5")))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(shipped, "DIRECTORY", place)
    yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  """Two clients with made-up sentences, and next to no training."""
  rng = np.random.default_rng(0)
  words = [f"{a}{b}{c}" for a in "bdgk" for b in "aeiou" for c in "lmnr"]
  documents = [
    collection.Document(
      id=f"{client}{number}",
      text=f"{' '.join(rng.choice(words, 6).tolist())} is known.",
      client=client,
    )
    for client, total in (("victim", 12), ("other", 60))
    for number in range(total)
  ]
  folder = tmp_path_factory.mktemp("source") / "tiny"
  asked = collection.Query(id="q", text="what is known")
  qrels = {"test": {"q": {"other0": 1}}}
  beir.write_beir(
    folder, collection.Collection(tuple(documents), (asked,), qrels)
  )
  return vectors.Config(
    source=f"beir:{folder}", victim="victim", noise=(0.0, 1.0), steps=2,
    language_steps=2, batch_size=8, length=32, num_sentences=40,
    num_victims=10, num_secrets=8, num_candidates=4,
  )  # fmt: skip


@pytest.mark.slow
def test_a_raw_vector_gives_secrets_away_and_nothing_is_made_twice(
  config, tmp_path, monkeypatch
):
  said = frame.run(vectors.STUDY, config, tmp_path)
  study = artifacts.load(tmp_path / "private", vectors.Study)
  assert study.victim == "victim" and study.num_read == 10
  raw = {one.kind: one for one in study.secrets if not one.noise}
  assert set(raw) == {"digits", "words"} and len(study.secrets) == 4
  for one in raw.values():
    assert one.first.mean == 1.0 and one.mean_rank.mean == 1.0
    assert one.other.mean < 1.0
  assert all(one.first.mean < 1.0 for one in study.secrets if one.noise)
  assert len(study.reading.perplexity) == len(study.reading.bleu) == 3
  assert "Secrets" in said and "A decoder's reading" in said
  short = dataclasses.replace(study.reading, bleu=(math.nan, 0.0, 0.0))
  page = repr(vectors._make_page(dataclasses.replace(study, reading=short)))
  assert "nan" not in page and "A dash: no sentence written" in page
  # The victim's text lies below private/ alone.
  outside = {path.name for path in tmp_path.iterdir()}
  assert outside == {".lock", "private"}

  def fail(*arguments, **options):
    raise AssertionError("trained again")

  monkeypatch.setattr(inversion, "train", fail)
  assert frame.run(vectors.STUDY, config, tmp_path) == said
  fewer = dataclasses.replace(config, noise=(1.0,), decoders=False)
  frame.run(vectors.STUDY, fewer, tmp_path)
  with pytest.raises(AssertionError, match="trained again"):
    frame.run(vectors.STUDY, dataclasses.replace(config, steps=3), tmp_path)


def test_a_victim_that_is_not_there_is_named(config, tmp_path):
  wrong = dataclasses.replace(config, victim="nobody")
  with pytest.raises(ValueError, match="got 'nobody' of 2 in"):
    frame.run(vectors.STUDY, wrong, tmp_path)


@pytest.mark.parametrize(
  "fields, words",
  [
    ({"noise": (0.1, -1.0)}, "noise in .0, inf., got .*noise=-1.0"),
    ({"num_secrets": 1}, "num_secrets must be at least 2, got 1"),
  ],
)
def test_settings_that_measure_nothing_are_refused(config, fields, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(config, **fields)


@pytest.mark.parametrize(
  "fields, words",
  [
    ({"length": 3}, "of the victim in 3 tokens, got none"),
    ({"noise": ()}, "noise must have an entry"),
  ],
)
def test_a_study_of_nothing_is_refused(config, tmp_path, fields, words):
  """And not written to config.gin, which may be that of finished results."""
  empty, accepted = dataclasses.replace(config, **fields), []
  with pytest.raises(ValueError, match=words):
    frame.run(
      vectors.STUDY, empty, tmp_path, on_accepted=lambda: accepted.append(1)
    )
  assert not accepted


def test_any_encoder_can_be_attacked(config, tmp_path):
  """A T5 that is named makes the vectors that it makes when it is shipped."""
  small = dataclasses.replace(config, decoders=False)
  named = dataclasses.replace(
    small,
    checkpoint=str(shipped.DIRECTORY),
    vocabulary=str(shipped.VOCABULARY),
  )
  found = []
  for number, one in enumerate((small, named)):
    frame.run(vectors.STUDY, one, tmp_path / str(number))
    place = tmp_path / str(number) / "private"
    found.append(artifacts.load(place, vectors.Study).secrets)
  assert found[0] == found[1]


@pytest.mark.parametrize("place", ["prepare_data", "private/prepare_data"])
def test_the_directory_of_a_run_is_left_alone(place, config, tmp_path):
  (tmp_path / place).mkdir(parents=True)
  accepted = []
  with pytest.raises(ValueError, match="got that of a run"):
    frame.run(
      vectors.STUDY, config, tmp_path, on_accepted=lambda: accepted.append(1)
    )
  assert not accepted


def test_the_control_is_another_row_each_once():
  others = vectors._get_others(9, 0)
  assert sorted(others.tolist()) == list(range(9))
  assert (others != np.arange(9)).all()
  with pytest.raises(ValueError, match="number >= 2"):
    vectors._get_others(1, 0)
