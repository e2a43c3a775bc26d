"""Small files in the layout that Maluuba's scripts write."""

import gzip
import hashlib
import json

import pytest

from synthq_jax.data import newsqa
from synthq_jax.federated import clients, partitions, passages

TEXT = "NAIROBI (CNN) -- A ship came on Monday.\n\n\nIts crew of 12 is safe."
URL = "http://web.archive.org/web/2015id_/http://www.cnn.com/2009/WORLD/africa/"
SHIP = f"{URL}05/04/ship/index.html"


def name_of(url):
  return hashlib.sha1(url.encode()).hexdigest()


def story_id(url):
  return f"./cnn/stories/{name_of(url)}.story"


def span(text):
  return {"s": TEXT.index(text), "e": TEXT.index(text) + len(text)}


def questions():
  return [
    {"q": "What came?", "consensus": span("A ship")},
    {"q": "How many?", "consensus": {"s": span("12")["s"], "e": 999}},
    {"q": "Why?", "consensus": {"noAnswer": True}},
    {"q": "Who who?", "consensus": {"badQuestion": True}},
    {"q": "Where?", "consensus": {"s": 9, "e": 9}},
    {"q": "When?", "consensus": span("Monday")},
  ]


def packed_json(path, asked=None, **changes):
  story = {
    "storyId": story_id(SHIP),
    "text": TEXT,
    "type": "dev",
    "questions": questions() if asked is None else asked,
  }
  content = {"data": [story | changes], "version": "1"}
  text = json.dumps(content, ensure_ascii=False)
  if path.suffix == ".gz":
    path.write_bytes(gzip.compress(text.encode()))
  else:
    path.write_text(text)
  return path


@pytest.mark.parametrize("name", ["n.json", "n.json.gz"])
def test_json_gives_the_questions_that_readers_agree_on(tmp_path, name):
  (story,) = newsqa.read(packed_json(tmp_path / name))
  assert (story.id, story.text, story.split) == (name_of(SHIP), TEXT, "dev")
  found = {q.text: TEXT[q.start : q.end] for q in story.questions}
  assert found == {
    "What came?": "A ship",
    "How many?": "12 is safe.",  # it ended behind the text
    "When?": "Monday",
  }
  assert [q.id.split("-")[1] for q in story.questions] == ["0", "1", "5"]


def test_urls_are_found_by_the_names_of_their_stories(tmp_path):
  path = tmp_path / "wayback_training_urls.txt"
  path.write_text(f"{SHIP}\n")
  assert newsqa.read_urls([path]) == {name_of(SHIP): SHIP}


@pytest.mark.parametrize(
  "url, genre",
  [
    (SHIP, "world"),
    ("http://www.cnn.com/2015/04/01/europe/crash-main/", "europe"),
    ("http://edition.cnn.com/2009/SPORT/football/08/05/x.y/index.html?e=1",
     "sport"),
    ("http://www.cnn.com/2014/", ""),
  ],
)  # fmt: skip
def test_a_genre_is_the_part_of_the_path_that_is_no_date(url, genre):
  assert newsqa.genre(url) == genre


def test_stories_become_clients_of_genres_with_sentences_that_answer(tmp_path):
  stories = newsqa.read(packed_json(tmp_path / "n.json"))
  judged = passages.from_stories(stories)
  data = partitions.by_genre(judged, {name_of(SHIP): SHIP})
  (client,), _ = clients.build(data)
  assert client.name == "world"
  assert client.sentences == (
    "NAIROBI (CNN) -- A ship came on Monday.",
    "Its crew of 12 is safe.",
  )
  assert client.splits["dev"].answers == ((0,), (1,), (0,))


def test_files_of_another_layout_are_refused(tmp_path):
  (tmp_path / "other.json").write_text('{"data": [{"text": "x"}]}')
  with pytest.raises(ValueError, match="KeyError: 'questions'"):
    newsqa.read(tmp_path / "other.json")
  with pytest.raises(ValueError, match=r"expected a split of .* got 'valid'"):
    newsqa.read(packed_json(tmp_path / "n.json", type="valid"))
