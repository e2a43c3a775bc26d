"""What is prepared for everybody is made without the private queries."""

import dataclasses
import json

import numpy as np
import pytest
import small_data
import tiny_runs

from synthq_jax.data import collection, shipped
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import prepared_files, results, workspace
from synthq_jax.stages import evaluate, generate, prepare_data

COUNT = 40
RARE = "zyzzyva"


def write(folder, query_of):
  """Writes a BEIR folder in which only the queries' texts are to differ."""
  rows = [(f"q{i}", f"d{i}", 1) for i in range(COUNT)]
  small_data.write_beir(
    folder,
    {f"d{i}": small_data.document(i) for i in range(COUNT)},
    {f"q{i}": query_of(i) for i in range(COUNT)},
    {"train": rows[:30], "test": rows[30:]},
  )


def prepare(root, query_of, **changes):
  write(root / "data", query_of)
  return prepare_source(root, f"beir:{root / 'data'}", **changes)


def prepare_source(root, source, **changes):
  config = prepare_data.Config(
    source=source,
    vocabulary="train",
    vocab_size=60,
    document_length=16,
    query_length=12,
    public_test_documents=20,
    **changes,
  )
  space = workspace.Workspace(root / "run", secret_seed=7)
  return tiny_runs.make(prepare_data.STAGE, config, space)


def shared(root):
  """The bytes of every file that may be shared."""
  folder = root / "run/prepare_data"
  paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
  return {
    path.relative_to(folder).as_posix(): path.read_bytes() for path in paths
  }


def rare_query(number):
  """Holds a word of no document, which all of them say 1,000 times."""
  return f"{number} " + f"{RARE} " * 25


def test_documents_asked_about_are_published_where_settings_say_so(tmp_path):
  private = prepare(tmp_path / "all", small_data.query)
  made = prepare(tmp_path / "train", small_data.query, written_for="train")
  prepare(tmp_path / "rare", rare_query, written_for="train")
  assert "asked.npy" not in shared(tmp_path / "all")
  found = shared(tmp_path / "train")["asked.npy"]
  assert found == shared(tmp_path / "rare")["asked.npy"]
  asked = np.load(tmp_path / "train/run/prepare_data/asked.npy")
  pairs = np.load(tmp_path / "train/run/private/prepare_data/train.npz")
  assert asked.tolist() == sorted(set(pairs["documents"].tolist()))
  assert asked.dtype == pairs["documents"].dtype
  assert (private.num_asked, made.num_asked) == (0, 30)
  assert private.statement().not_protected == ()
  assert made.statement().not_protected[0] == "asked"
  told = statement_lib.in_words(results.public_documents(made).statement())
  assert "Which documents the queries for training ask about" in told
  folders = workspace.Folders(tmp_path / "train/run")
  config = generate.Config(num_documents=12)
  chosen = generate._choose(config, folders, made)
  assert len(chosen) == 12 and set(chosen) <= set(asked)


def test_a_test_query_without_any_document_is_scored_all_the_same(tmp_path):
  """BEIR and mteb count it as 0; it has no pair to train or to compare."""
  rows = [(f"q{i}", f"d{i}", 1) for i in range(COUNT)]
  rows[4] = ("q4", "gone", 1)  # of the train split: nothing to be trained on
  rows[35] = ("q35", "gone", 1)
  rows.insert(37, ("q36", "lost", 1))  # beside d36, which is there
  small_data.write_beir(
    tmp_path / "data",
    {f"d{i}": small_data.document(i) for i in range(COUNT)},
    {f"q{i}": small_data.query(i) for i in range(COUNT)},
    {"train": rows[:30], "test": rows[30:]},
  )
  made = prepare_source(tmp_path, f"beir:{tmp_path / 'data'}")
  assert made.num_queries == {"train": 29, "test": 10}
  folders = workspace.Folders(tmp_path / "run")
  judged = evaluate._load(folders, made, "test")
  assert list(judged.qrels) == [
    f"q{i}" for i in (*range(30, 35), *range(36, 40), 35)
  ]
  assert judged.qrels["q36"] == {"d36": 1, "lost": 1}
  assert judged.queries[-1] == small_data.query(35)
  assert judged.query_tokens.shape[0] == 10 and judged.query_tokens[-1].any()
  pairs = np.load(tmp_path / "run/private/prepare_data/test.npz")
  assert len(pairs["ids"]) == 9 and (pairs["documents"] >= 0).all()


def clicks(root, text):
  """A log in which one client clicked on four documents of nobody else's."""
  lines = [
    {"query": f"ask {i}", "client": f"c{i}", "document": f"d{i}"}
    for i in range(3 * COUNT)
  ]
  lines += [
    {"query": text, "client": "one", "document": f"d{3 * COUNT + i}"}
    for i in range(4)
  ]
  root.mkdir(parents=True)
  small_data.write_lines(root / "log.jsonl", map(json.dumps, lines))
  documents = [
    {"_id": f"d{i}", "text": small_data.document(i)}
    for i in range(3 * COUNT + 4)
  ]
  small_data.write_lines(root / "corpus.jsonl", map(json.dumps, documents))
  return f"log:{root / 'log.jsonl'}@{root / 'corpus.jsonl'}"


def one_split(root, text):
  """A BEIR folder with judgements of one split, in which d7 is asked by one."""
  texts = {f"q{i}": f"ask {i}" for i in range(COUNT)} | {"q7": text}
  small_data.write_beir(
    root,
    {f"d{i}": small_data.document(i) for i in range(COUNT)},
    texts,
    {"test": [(f"q{i}", f"d{i}", 1) for i in range(COUNT)]},
  )
  return f"beir:{root}"


@pytest.mark.parametrize("write_source", [clicks, one_split])
def test_the_list_of_documents_asked_about_does_not_move_with_a_text(
  tmp_path, write_source
):
  """Same clients, same clicks, another text: the statement protects the text.

  The division is keyed, so that the list is one of the run's secret.
  """
  seen, kept = set(), set()
  for number in range(12):
    text = f"w{number} x{number}"
    root = tmp_path / str(number)
    prepare_source(root, write_source(root / "data", text), written_for="train")
    pairs = np.load(root / "run/private/prepare_data/train.npz")
    seen.add((root / "run/prepare_data/asked.npy").read_bytes())
    kept.add(tuple(pairs["documents"].tolist()))
  assert len(seen) == 1
  if write_source is clicks:  # nor does what the query is trained with
    assert len(kept) == 1


def test_other_private_queries_change_no_bit_of_what_is_shared(tmp_path):
  prepare(tmp_path / "plain", small_data.query)
  prepare(tmp_path / "rare", rare_query)
  expected, found = shared(tmp_path / "plain"), shared(tmp_path / "rare")
  assert {"vocabulary.model", "public_test.npz", "corpus.jsonl"} <= set(found)
  # Names alone: pytest would take minutes to show how large files differ.
  names = expected.keys() | found.keys()
  assert not sorted(n for n in names if found.get(n) != expected.get(n))
  assert RARE.encode() not in found["vocabulary.model"]


def test_a_vocabulary_that_is_trained_on_queries_is_caught(
  tmp_path, monkeypatch
):
  right = prepare_data._vocabulary

  def wrong(config, data, public):
    queries = [
      collection.Document(id=one.id, text=one.text) for one in data.queries
    ]
    both = dataclasses.replace(data, documents=(*data.documents, *queries))
    return right(config, both, public)

  monkeypatch.setattr(prepare_data, "_vocabulary", wrong)
  with pytest.raises(AssertionError):
    test_other_private_queries_change_no_bit_of_what_is_shared(tmp_path)
  model = shared(tmp_path / "rare")["vocabulary.model"]
  assert RARE.encode() in model


def test_a_logs_text_does_not_choose_its_document(tmp_path):
  kept = []
  for text in ("is my rash contagious", "do i have hiv", "what is that"):
    asked = [("u", f"ask {i}", i) for i in range(64)]
    asked += [("v", text, document) for document in range(5)]
    root = tmp_path / text.replace(" ", "_")
    config = prepare_data.Config(
      source=small_data.write_user_log(root, asked, 64),
      vocabulary=str(shipped.VOCABULARY),
    )
    space = workspace.Workspace(root / "run", 7)
    tiny_runs.make(prepare_data.STAGE, config, space)
    lines = (root / "run/private/prepare_data/queries.jsonl").read_text()
    [name] = [
      one["_id"]
      for one in map(json.loads, lines.splitlines())
      if one["text"] == text
    ]
    with np.load(root / "run/private/prepare_data/train.npz") as train:
      kept.append(
        dict(zip(train["ids"], train["documents"], strict=True))[name]
      )
  assert len(set(kept)) == 1


def test_judged_documents_that_the_corpus_lacks_train_nothing_and_are_scored(
  tmp_path,
):
  write(tmp_path / "data", small_data.query)
  for split, query, own in (("train", "q0", "d0"), ("test", "q35", "d35")):
    path = tmp_path / "data/qrels" / f"{split}.tsv"
    text = path.read_text().replace(f"{query}\t{own}\t1\n", "")
    path.write_text(f"{text}{query}\tgone\t1\n{query}\t{own}\t1\n")
  made = prepare_source(tmp_path, f"beir:{tmp_path / 'data'}")
  assert made.num_queries == {"train": 30, "test": 10}
  assert made.num_pairs == {"train": 30, "test": 10}
  private = tmp_path / "run/private/prepare_data"
  for split, number in (("train", 30), ("test", 10)):
    arrays = np.load(private / f"{split}.npz")
    names = [f"q{d}" for d in arrays["documents"].tolist()]
    assert arrays["ids"].tolist() == names and len(names) == number
  assert "gone" not in (private / "qrels/train.tsv").read_text()
  assert prepared_files.read_qrels(private, "test")["q35"] == {
    "gone": 1,
    "d35": 1,
  }


def test_no_query_is_written_for_an_empty_document(tmp_path):
  write(tmp_path / "data", small_data.query)
  corpus = tmp_path / "data/corpus.jsonl"
  with open(corpus, "a") as stream:
    for name in ("e1", "e2"):
      stream.write(json.dumps({"_id": name, "title": "", "text": ""}) + "\n")
  for stride in (0, 5):
    root = tmp_path / str(stride)
    made = prepare_source(
      root, f"beir:{tmp_path / 'data'}", passage_stride=stride
    )
    assert made.num_documents == COUNT + 2
    space = workspace.Folders(root / "run")
    passages = prepared_files.document_tokens(space, made)
    rows = np.arange(len(passages.owners))
    kept = generate._drop_empty(passages, rows)
    assert set(passages.owners[kept]) == set(range(COUNT))
    assert set(passages.owners) == set(range(COUNT + 2))


def test_files_of_months_are_one_log_unless_they_stand_below_a_split(tmp_path):
  corpus, count = tmp_path / "corpus.jsonl", 60
  documents = [
    {"_id": f"d{i}", "title": "", "text": small_data.document(i)}
    for i in range(count)
  ]
  corpus.write_text("".join(f"{json.dumps(x)}\n" for x in documents))
  rows = [f"query {i},d{i % count}\n" for i in range(200)]
  for folder in (tmp_path / "logs", tmp_path / "below" / "train"):
    folder.mkdir(parents=True)
    for month, part in (("2024_01", rows[:90]), ("2024_02", rows[90:])):
      text = "".join(["query,document\n", *part])
      (folder / f"{month}.csv").write_text(text)
  made = prepare_source(tmp_path, f"log:{tmp_path / 'logs'}@{corpus}")
  assert sum(made.num_queries.values()) == 200
  assert min(made.num_queries.values()) > 0 and len(made.num_queries) == 3
  made = prepare_source(tmp_path, f"log:{tmp_path / 'below'}@{corpus}")
  assert made.num_queries["train"] > 100
