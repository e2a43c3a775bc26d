"""Learned weights leave a run with a program that ranks as the run does."""

import dataclasses
import importlib.util
import json
import pathlib
import types

import numpy as np
import pytest
import sentence_folder
import small_data

from synthq_jax.cli import main
from synthq_jax.data import vocabulary
from synthq_jax.models import t5_checkpoints
from synthq_jax.models.checkpoints import sentence_folders
from synthq_jax.retrieval import encode
from synthq_jax.runtime import (
  encoder_start,
  model_files,
  prepared_files,
  results,
  rows,
  system_results,
  workspace,
)
from synthq_jax.storage import artifacts
from synthq_jax.tools import export, search

ROWS = {
  "ltr_public_only": "learn_to_rank/public_only",
  "ltr_synthetic_eps8": "learn_to_rank/synthetic_eps8",
  "ltr_adapter_eps8": "learn_to_rank/adapter_eps8",
}
QUERIES = ("station of row 3", "the report on row 5", "zzzz", "row", " ", "a 0")


def load(path: pathlib.Path):
  """Imports the program of an export."""
  spec = importlib.util.spec_from_file_location("ranker", path / "ranker.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def ours(root: pathlib.Path, row: rows.Row):
  """Returns our own encoder in the place of a SentenceTransformer."""
  prepared = artifacts.load(root / "private/prepare_data", results.PreparedData)
  pieces = vocabulary.load(root / prepared.vocabulary, extra_ids=32)
  made = search.read_systems(workspace.Folders(root), private=False)[row]

  def encoded(texts, length, role):
    params, config = encoder_start.load(workspace.Folders(root), made, role)
    rows = vocabulary.tokenize(pieces, texts, length=length)
    return encode.encode(params, config, rows)

  class Model(list):
    def encode_query(self, text):
      role = sentence_folders.QUERY
      return encoded([text], prepared.query_length, role)[0]

    def encode_document(self, texts):
      role = sentence_folders.DOCUMENT
      return encoded(texts, prepared.document_length, role)

  return Model([types.SimpleNamespace()])


def documents(root: pathlib.Path):
  corpus = root / "prepare_data" / "corpus.jsonl"
  with open(corpus, encoding="utf-8") as stream:
    ids = [json.loads(line)["_id"] for line in stream]
  return ids, list(prepared_files.document_texts(corpus))


def assert_ranks_as_the_run(root, row, ranker, k=15, queries=QUERIES):
  searcher = search.open_run(str(root), row)
  for query in queries:
    hits = searcher.search(query, k)
    found = ranker.search(query, k)
    assert [one.id for one in hits] == [id_ for id_, _ in found], query
    scores = [score for _, score in found]
    np.testing.assert_allclose([x.score for x in hits], scores, atol=1e-4)


def again(folder, result):
  """Saves a result as if a stage had made it."""
  artifacts.save(folder, result, artifacts.read_fingerprint(folder))


@pytest.mark.parametrize("row", ROWS)
def test_an_exported_ranker_ranks_as_the_run_does(finished_run, tmp_path, row):
  root, to = finished_run.root, tmp_path / "ranker"
  said = export.run(root / ROWS[row], to, format="ranker")
  made = artifacts.load(root / ROWS[row], system_results.Ranking)
  assert "for one query: see PRIVACY.txt" in said
  ranker = load(to).Ranker(*documents(root), model=ours(root, made.retriever))
  assert_ranks_as_the_run(root, row, ranker)
  # What other engines found is ordered alike, whoever found it.
  best = ranker.search("station of row 3", 10)
  places = [ranker.ids.index(id_) for id_, _ in best]
  again = ranker.rank("station of row 3", places, places[::-1])
  assert sorted(again) != [] and {id_ for id_, _ in again} == dict(best).keys()
  assert ranker.rank("station of row 3", [], []) == []


def test_an_export_holds_its_retriever_and_says_what_it_weighs(
  finished_run, tmp_path
):
  root, to = finished_run.root, tmp_path / "ranker"
  folder = root / ROWS["ltr_synthetic_eps8"]
  flags = [f"--ranking={folder}", "--format=ranker", f"--to={to}"]
  assert main.main(["export", *flags]) == 0
  made = artifacts.load(folder, system_results.Ranking)
  settings = json.loads((to / "ranking.json").read_text())
  named = {one["name"]: one["weight"] for one in settings["features"]}
  assert tuple(named) == made.features and [*named.values()] == [*made.weights]
  assert (to / "retriever" / "modules.json").is_file()
  alone = t5_checkpoints.claim(to / "retriever")  # for who starts from it
  assert alone is not None and not alone.is_public
  with pytest.raises(ValueError, match="trained on private queries"):
    model_files.refuse_private(to / "retriever")
  card, claim = ((to / n).read_text() for n in ("README.md", "PRIVACY.txt"))
  assert "| stop words, too |" in card and "ranker.search(" in card
  # The claim of both together, with each release by its name.
  assert all(one.identifier in claim for one in made.statement.ledger)
  assert len(made.statement.ledger) == 2


def test_odd_collections_have_a_line_or_an_answer(finished_run, tmp_path):
  root, to = finished_run.root, tmp_path / "ranker"
  export.run(root / ROWS["ltr_public_only"], to, format="ranker")
  program, model = load(to), ours(root, rows.PUBLIC_ONLY)
  for ids, texts in (([], []), (["a"], ["x", "y"])):
    with pytest.raises(ValueError, match="an id for each"):
      program.Ranker(ids, texts, model=model)
  alone = program.Ranker(["only one"], [""], model=model)  # no word anywhere
  [(found, score)] = alone.search("station", 5)
  assert found == "only one" and np.isfinite(score)
  equal = program.Ranker(["a", "b"], ["the same text"] * 2, model=model)
  assert [id_ for id_, _ in equal.search("the same text")] == ["a", "b"]
  assert equal.search("") == equal.search(" \n") == []


def test_what_is_private_or_not_whole_is_refused(finished_run, tmp_path):
  root, to = finished_run.copy(tmp_path), tmp_path / "never"
  private = root / "private/learn_to_rank/original"
  with pytest.raises(ValueError, match="may be shared"):
    export.run(private, to, format="ranker")
  export.run(private, tmp_path / "own", format="ranker", allow_private=True)
  with pytest.raises(ValueError, match="one of ranker"):
    export.run(root / ROWS["ltr_adapter_eps8"], to, format="huggingface")
  folder = root / ROWS["ltr_synthetic_eps8"]
  data = root / "private/prepare_data"
  prepared = artifacts.load(data, results.PreparedData)
  again(data, dataclasses.replace(prepared, passage_stride=8))
  with pytest.raises(ValueError, match="whole documents"):
    export.run(folder, to, format="ranker")
  again(data, prepared)
  retriever = root / "train_retriever/synthetic_eps8"
  found = artifacts.load(retriever, results.Checkpoint)
  [release] = found.statement.ledger
  later = dataclasses.replace(release, identifier="another training")
  claim = dataclasses.replace(found.statement, ledger=(later,))
  again(retriever, dataclasses.replace(found, statement=claim))
  with pytest.raises(ValueError, match="an earlier training of it"):
    export.run(folder, to, format="ranker")
  retriever.rename(tmp_path / "moved")
  with pytest.raises(ValueError, match="expected its retriever"):
    export.run(folder, to, format="ranker")
  assert not to.exists()


def test_sentence_transformers_encodes_for_an_exported_ranker(
  finished_run, tmp_path
):
  pytest.importorskip("sentence_transformers")
  root, to = finished_run.root, tmp_path / "ranker"
  row = "ltr_adapter_eps8"
  export.run(root / ROWS[row], to, format="ranker")
  assert_ranks_as_the_run(root, row, load(to).Ranker(*documents(root)))


def test_a_ranker_of_a_folder_of_static_vectors_ranks_as_its_run(tmp_path):
  """Its queries were cut at the T5's length, and its vectors not normalized."""
  pytest.importorskip("sentence_transformers")
  numbers = range(60)
  texts = {f"d{i}": small_data.document(i) for i in numbers}
  queries = {f"q{i}": small_data.query(i) for i in numbers}
  judged = {
    split: [(f"q{i}", f"d{i}", 1) for i in numbers if i % 3 == at]
    for at, split in enumerate(("train", "dev", "test"))
  }
  source = small_data.write_beir(tmp_path / "beir", texts, queries, judged)
  words = " ".join(texts.values())
  model = sentence_folder.save(tmp_path / "model", words, is_normal=False)
  root, to = tmp_path / "run", tmp_path / "ranker"
  settings = {
    "SOURCE": source,
    "ENCODER": model,
    "EPSILONS": "(8.0,)",
    "LTR": "('untrained',)",
    "learn_to_rank.Config.steps": 2,
    "learn_adapter.Config.steps": 2,
    "learn_adapter.Config.pool": 8,
    "prepare_data.Config.query_length": 8,
    "prepare_data.Config.public_test_documents": 20,
  }
  flags = [f"--gin.{name}={value}" for name, value in settings.items()]
  recipe = "--gin_file=gin_configs/recipes/encoder.gin"
  argv = ["learn_to_rank", recipe, *flags, f"--workdir={root}", "--quiet"]
  assert main.main(argv) == 0
  export.run(root / "learn_to_rank/untrained", to, format="ranker")
  asked = [f"{text} {texts['d7']}" for text in queries.values()]
  ranker = load(to).Ranker(*documents(root))
  assert_ranks_as_the_run(root, "ltr_untrained", ranker, queries=asked[:20])
  vectors = ranker.model.encode_document([*texts.values()])
  np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
  card = (to / "retriever/README.md").read_text()
  assert "queries were cut at 64" in card
