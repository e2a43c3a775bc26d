"""The registry of sources: names, digests and readers."""

import json

import made_up
import pytest
import small_data

from synthq_jax.data import beir, collection, jsonl, sources
from synthq_jax.retrieval import measures


@pytest.fixture
def folder(tmp_path):
  data = collection.Collection(
    documents=(collection.Document("d1", "apples are red"),),
    queries=(collection.Query("q1", "colour of apples"),),
    qrels={"test": {"q1": {"d1": 1}}},
  )
  beir.write_beir(tmp_path / "fruit", data)
  return tmp_path / "fruit"


@pytest.mark.parametrize("kind", sorted(sources.KINDS))
def test_every_kind_is_opened_by_its_own_form_alone(kind):
  form = sources.KINDS[kind].form
  assert sources.open(form).kind == kind
  assert form == sources.open(form).kind + form.removeprefix(kind)
  wrong = kind if ":" in form else f"{kind}:DIR"
  with pytest.raises(ValueError, match=f"S must be .*got source='{wrong}'"):
    sources.open(wrong, "S")


def test_data_of_a_kind_that_this_version_does_not_know_is_one_line():
  assert sources.kind_of("beir:/data") is sources.KINDS["beir"]
  with pytest.raises(
    ValueError, match="got 'stone' of another version: delete"
  ):
    made_up.prepared(source="stone:tablet")


def test_an_at_sign_parts_a_place_only_where_the_form_has_one(tmp_path):
  path = tmp_path / "a@b" / "log.jsonl"
  path.parent.mkdir()
  path.write_text('{"query": "red", "document": "apples are red"}\n')
  sources.check(f"jsonl:{path}")
  with pytest.raises(ValueError, match="no.jsonl"):
    sources.check(f"jsonl:{tmp_path}/a@b/no.jsonl")
  with pytest.raises(ValueError, match="expected"):
    sources.check(f"log:{path}")  # the log "a", and the corpus "b/log.jsonl"


@pytest.mark.parametrize("place", ["me@corp.com", "a@b@c", "plain"])
def test_folders_of_a_log_and_its_corpus_may_have_at_signs(tmp_path, place):
  folder = tmp_path / place
  folder.mkdir()
  rows = [{"_id": f"d{i}", "text": f"thing {i}"} for i in range(60)]
  log = [{"query": f"word {i}", "document": f"d{i}"} for i in range(60)]
  for name, lines in (("log.jsonl", log), ("corpus.jsonl", rows)):
    (folder / name).write_text("".join(f"{json.dumps(x)}\n" for x in lines))
  source = sources.open(f"log:{folder / 'log.jsonl'}@{folder / 'corpus.jsonl'}")
  assert source.title == "log.jsonl" and source.digest()
  assert len(source.read().queries) == 60


def test_a_setting_may_take_some_kinds_only():
  with pytest.raises(
    ValueError, match="S must be beir:DIR or msmarco:DIR, got"
  ):
    sources.open("jsonl:x", "S", kinds=("beir", "msmarco"))


def test_the_digest_follows_the_content_and_not_the_place(folder, tmp_path):
  source = sources.open(f"beir:{folder}")
  assert source.read().pairs("test") == [("q1", "d1")]
  assert source.title == "fruit" and source.packages() == ""
  before = source.digest()
  moved = folder.rename(tmp_path / "moved")
  assert sources.open(f"beir:{moved}").digest() == before
  with (moved / "corpus.jsonl").open("a") as stream:
    stream.write(json.dumps({"_id": "d2", "text": "pears"}) + "\n")
  assert sources.open(f"beir:{moved}").digest() != before


def test_fields_and_seed_reach_the_reader_of_lines(tmp_path):
  lines = [{"q": f"word{i}", "document": f"text {i}"} for i in range(60)]
  path = tmp_path / "log.jsonl"
  path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
  fields = jsonl.Fields(query="q")
  read = [
    sources.open(f"jsonl:{path}", seed=seed, fields=fields).read()
    for seed in (0, 1)
  ]
  assert read[0] == jsonl.read_jsonl(path, fields, seed=0) != read[1]


def test_stories_of_newsqa_are_documents_of_any_stage(tmp_path):
  story = {
    "storyId": "./cnn/stories/42d01e.story",
    "text": "The fire began at noon. Nobody was hurt.",
    "type": "dev",
    "questions": [
      {"q": "When did it begin?", "consensus": {"s": 18, "e": 22}},
      {"q": "Why?", "consensus": {"noAnswer": True}},
    ],
  }
  path = tmp_path / "newsqa.json"
  path.write_text(json.dumps({"data": [story]}))
  data = sources.open(f"newsqa:{path}").read()
  assert data.qrels == {"dev": {"42d01e-0": {"42d01e": 1}}}
  assert [query.text for query in data.queries] == ["When did it begin?"]


def write_wild(kind, place):
  """Writes a set that lacks judged documents, and has one without text."""
  documents = [collection.Document(f"d{i}", f"text {i}") for i in range(5)]
  data = collection.Collection(
    documents=(*documents, collection.Document("empty", "")),
    queries=tuple(collection.Query(f"q{i}", f"query {i}") for i in range(3)),
    qrels={
      "test": {
        "q0": {"d0": 1},
        "q1": {"gone": 1},
        "q2": {"d1": 1, "gone2": 1, "empty": 0},
      }
    },
    lacking=frozenset(("gone", "gone2")),
  )
  if kind == "beir":
    beir.write_beir(place, data)
  elif kind == "msmarco":
    small_data.write_msmarco(place, data)
  else:
    tables = {
      "corpus/corpus": [{"_id": d.id, "text": d.text} for d in data.documents],
      "queries/queries": [{"_id": q.id, "text": q.text} for q in data.queries],
      "qrels/test": [
        {"query-id": query, "corpus-id": document, "score": grade}
        for query, grades in data.qrels["test"].items()
        for document, grade in grades.items()
      ],
    }
    for name, rows in tables.items():
      path = place / f"{name}.jsonl"
      path.parent.mkdir(parents=True)
      path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return data


KINDS_OF_SETS = ("beir", "hf", "msmarco")


@pytest.mark.parametrize("kind", KINDS_OF_SETS)
def test_judged_documents_that_the_corpus_lacks_count(kind, tmp_path, capsys):
  """BEIR's ArguAna has five of them; beir 2.2.0 says .46228 and .5 here."""
  written = write_wild(kind, tmp_path / "set")
  source = sources.open(f"{kind}:{tmp_path / 'set'}")
  read = source.read()
  assert read.qrels == written.qrels and read.lacking == written.lacking
  assert read.pairs("test") == [("q0", "d0"), ("q2", "d1")]
  run = {f"q{i}": {"d0": 3.0, "d1": 2.0} for i in range(3)}
  found = measures.evaluate(read.qrels["test"], run, ("nDCG@10", "R@10"))
  assert found.mean == pytest.approx(
    {"nDCG@10": 0.46228, "R@10": 0.5}, abs=5e-6
  )
  assert found.num_queries == 3
  assert source.left_out == {"document": 2}
  said = capsys.readouterr().err
  assert "2 judgements name documents that the corpus lacks: they count" in said
  with pytest.raises(ValueError, match="expected the id of a known document"):
    sources.open(f"{kind}:{tmp_path / 'set'}", strict=True).read()


@pytest.mark.parametrize("kind", KINDS_OF_SETS)
def test_an_empty_document_stays_and_is_counted(kind, tmp_path, capsys):
  """BEIR's FiQA has several."""
  written = write_wild(kind, tmp_path / "set")
  read = sources.open(f"{kind}:{tmp_path / 'set'}").read()
  assert [d.id for d in read.documents] == [d.id for d in written.documents]
  assert "1 of 6 documents have no text; they stay" in capsys.readouterr().err


def test_what_trains_knows_no_document_that_the_corpus_lacks(tmp_path):
  write_wild("beir", tmp_path / "set")
  data = sources.open(f"beir:{tmp_path / 'set'}").read()
  trained = data.without_lacking(["test"])
  assert trained.qrels["test"] == {
    "q0": {"d0": 1},
    "q2": {"d1": 1, "empty": 0},
  }
  assert data.without_lacking([]).qrels == data.qrels
