"""The registry of sources: names, digests and readers."""

import json

import pytest

from synthq_jax.data import beir, collection, jsonl, sources


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


def test_an_at_sign_parts_a_place_only_where_the_form_has_one(tmp_path):
  path = tmp_path / "a@b" / "log.jsonl"
  path.parent.mkdir()
  path.write_text('{"query": "red", "document": "apples are red"}\n')
  sources.check(f"jsonl:{path}")
  with pytest.raises(ValueError, match="no.jsonl"):
    sources.check(f"jsonl:{tmp_path}/a@b/no.jsonl")
  with pytest.raises(ValueError, match="expected"):
    sources.check(f"log:{path}")  # the log "a", and the corpus "b/log.jsonl"


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
