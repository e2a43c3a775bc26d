"""The federated study: on a tiny collection, from end to end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_t5

from synthq_jax.data import beir, collection, shipped, sources
from synthq_jax.federated import personalisation, ranking
from synthq_jax.storage import artifacts
from synthq_jax.studies import federated, frame
from synthq_jax.studies.federated import data as study_data
from synthq_jax.studies.federated import methods, page, training


def tiny(clients=("north", "south", "west"), train=6, test=3):
  """Passages of two sentences; a question repeats two words of its passage."""
  rng = np.random.default_rng(0)
  words = [f"{a}{b}{c}" for a in "bdgk" for b in "aeiou" for c in "lmnr"]
  documents, queries = [], []
  qrels = {"train": {}, "test": {}}
  for client in clients:
    for number in range(train + test):
      drawn = rng.choice(words, 14).tolist()
      name = f"{client}{number}"
      text = f"{' '.join(drawn[:7])} is one. {' '.join(drawn[7:])} is two."
      documents.append(
        collection.Document(id=f"d{name}", text=text, client=client)
      )
      asked = " ".join(drawn[:2])
      queries.append(collection.Query(id=f"q{name}", text=asked, client=client))
      split = "train" if number < train else "test"
      qrels[split][f"q{name}"] = {f"d{name}": 1}
  return collection.Collection(tuple(documents), tuple(queries), qrels)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  folder = tmp_path_factory.mktemp("source") / "tiny"
  beir.write_beir(folder, tiny())
  return f"beir:{folder}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  return random_t5.save(tmp_path_factory.mktemp("t5") / "checkpoint")


@pytest.fixture(scope="module")
def config(source, checkpoint):
  return federated.Config(
    source=source,
    checkpoint=checkpoint,
    vocabulary=str(shipped.VOCABULARY),
    min_test_questions=2,
    query_length=8,
    sentence_length=16,
    seeds=1,
    recipe=federated.Recipe(
      warmup_rounds=1, rounds=1, batch_size=4, num_negatives=2, top=4
    ),
    personal=federated.Personal(
      rounds=1,
      settings=personalisation.Settings(
        epochs=1, batch_size=4, num_negatives=4
      ),
    ),
    exchange_top=2,
    public_data=True,
  )


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("study")
  return config, workdir, run(config, workdir)


def run(config, workdir):
  return frame.run(federated.STUDY, config, workdir)


def load(workdir):
  return artifacts.load(workdir, methods.Study)


def test_every_method_scores_every_test_question_of_every_client(finished):
  _, workdir, _ = finished
  study = load(workdir)
  main = study.outcomes
  assert tuple(one.method for one in main) == methods.METHODS
  for one in study.outcomes:
    assert [r.client for r in one.ranks] == ["north", "south", "west"]
    assert all(len(r.sentence) == len(r.passage) == 3 for r in one.ranks)
  # BM25 finds passages by the two words that questions share with them.
  assert page.average_values([main[0]])[0].mean() > 0.5


def test_the_report_has_a_row_for_each_method(finished):
  _, workdir, said = finished
  written = (workdir / "study.md").read_text().replace("\\_", "_")
  for name in (*methods.METHODS, ".309", ".338"):
    assert name in said and name in written, name
  drawing = (workdir / "study.svg").read_text()
  assert drawing.startswith("<svg")
  # A row for every client, though all have the same size.
  for client in load(workdir).facts.clients:
    assert f">{client.name} ({client.num_train})</text>" in drawing
  assert not (workdir / "private").exists()


def test_what_is_finished_is_read_again(finished, monkeypatch):
  config, workdir, said = finished

  def fail(*args, **kwargs):
    raise AssertionError("trained again")

  monkeypatch.setattr(methods._Maker, "__call__", fail)
  assert run(config, workdir) == said


def test_only_fed_negative_moves_bytes_and_promises_nothing(finished):
  _, workdir, _ = finished
  said = " ".join((workdir / "study.md").read_text().split())
  assert "nothing is promised" in said
  for one in load(workdir).outcomes:
    if one.method == "+ Fed-Negative":
      # 6 vectors of 16 floats to two partners.
      assert min(one.sent) > 2 * 6 * 16 * 4
      assert sum(one.sent) == sum(one.received)
    else:
      assert one.sent == one.received == [0, 0, 0]


def test_dev_questions_choose_the_rate_and_the_round(
  config, tmp_path, monkeypatch
):
  """Dev scores are made up: the second rate and the first round are best."""
  data = tiny()
  data = dataclasses.replace(
    data,
    qrels={
      **data.qrels,
      "dev": data.qrels["test"],
      "other": dict([*data.qrels["test"].items()][1:]),
    },
  )
  beir.write_beir(tmp_path / "dev", data)
  tuned = dataclasses.replace(
    config,
    source=f"beir:{tmp_path / 'dev'}",
    rates=(1e-3, 2e-3),
    methods=(methods.BASE, methods.CENTRAL, methods.EQUAL, "+ query encoder"),
  )
  trained = []
  real = methods._Maker._train_towers

  def towers(self, rate, shared):
    made = real(self, rate, shared)
    trained.append((made, rate))
    return made

  monkeypatch.setattr(methods._Maker, "_train_towers", towers)
  monkeypatch.setattr(
    methods._Maker,
    "_score_on_dev",
    lambda self, found: next(rate for one, rate in trained if one is found),
  )
  asked = []

  def score_of(self, context):
    def score(params, at=None):
      asked.append((self.row.method, at))
      return -len(asked)

    return score

  monkeypatch.setattr(methods._Maker, "_make_score", score_of)
  run(tuned, tmp_path / "run")
  # Towers that other dev questions chose are not those of these.
  other = dataclasses.replace(tuned, dev_split="other")
  states = {
    context(one, tmp_path / "run").get_path("everyone", 0, ("bm25",))
    for one in (tuned, other)
  }
  assert len(states) == 2
  outcomes = load(tmp_path / "run").outcomes
  assert {one.learning_rate for one in outcomes} == {2e-3}
  assert len(outcomes) == 4 and len(asked) >= 4 * 2
  made = context(tuned, tmp_path / "run", learning_rate=2e-3)
  first = training.train_best_round(
    made, 0, ("bm25", "static"), lambda params: 1
  )
  last = training.train_federated(made, 0, ("bm25", "static"))
  assert equal(first, last)  # of equals the last
  scores = iter((2, 1))
  first = training.train_best_round(
    made, 0, ("bm25", "static"), lambda params: next(scores)
  )
  assert equal(first, training.train_federated(made, 0, ("bm25",)))


def test_central_takes_no_more_steps_than_the_largest_client(config, tmp_path):
  made = context(config, tmp_path)
  few = training.train_central(made, 0, ("bm25",), equal_updates=True)
  assert not equal(few, training.train_central(made, 0, ("bm25",)))
  # Six questions in batches of four.
  assert made.get_path("everyone, 2 steps", 0, ("bm25",)).is_dir()


def context(config, tmp_path, **recipe):
  data = study_data.build(config)
  made = training.make_contexts(config, data, tmp_path / "states")
  return made(dataclasses.replace(config.recipe, **recipe))


def equal(one, other):
  leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  return all(np.array_equal(a, b) for a, b in leaves)


def test_a_training_that_was_killed_ends_the_same_to_the_bit(
  config, tmp_path, monkeypatch
):
  """Its shapes, too: other ones are other sums, and other last bits."""
  real, asked = training.training.compute_slots, []

  def slots(plans, longest, *, at_least):
    asked.append(at_least)
    return real(plans, longest, at_least=at_least)

  monkeypatch.setattr(training.training, "compute_slots", slots)
  history = ("bm25", "static")
  whole = training.train_federated(context(config, tmp_path / "a"), 0, history)
  training.train_federated(context(config, tmp_path / "b"), 0, history[:1])
  again = training.train_federated(context(config, tmp_path / "b"), 0, history)
  assert equal(whole, again)
  # Of the four rounds, none was made twice.
  assert len(asked) == 4 and asked[0] == asked[2] == ()
  assert asked[1] == asked[3] != ()


def test_a_split_that_is_not_there_is_named(config, tmp_path):
  wrong = dataclasses.replace(config, test_split="validation")
  with pytest.raises(ValueError, match="'validation' in .*got test, train"):
    run(wrong, tmp_path)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"sentences_of": ""}, "must be a key of corpus.jsonl's lines, got ''"),
    ({"sentences_of": "no"}, "got 'no', which none has"),
    (
      {"sentences_of": "doc", "source": "environment_docs"},
      "without corpus.jsonl, got 'doc' beside environment_docs",
    ),
  ],
)
def test_a_key_of_passages_that_is_not_there_is_named(
  config, monkeypatch, change, words
):
  monkeypatch.setattr(sources.Source, "read", lambda self: tiny())
  with pytest.raises(ValueError, match=words):
    study_data.build(dataclasses.replace(config, **change))


def test_a_learning_rate_of_its_own_is_that_of_central_alone(config):
  other = dataclasses.replace(config, central_learning_rate=1e-2)
  rates = {
    one: methods._get_recipe(other, one).learning_rate
    for one in methods.METHODS
  }
  own = {one for one, rate in rates.items() if rate == 1e-2}
  central = {methods.CENTRAL, methods.EQUAL, "Central + query encoder"}
  assert own == central
  assert f"({methods.CENTRAL} at 0.01)" in " ".join(page.make_notes(other))


def test_vectors_are_those_of_the_tower_that_is_asked_for(config, tmp_path):
  made = context(config, tmp_path)
  other = {
    **made.start,
    "sentence": jax.tree.map(jnp.tanh, made.start["query"]),
  }
  for params in (made.start, made.start, other, made.start):
    for client, tokens in enumerate(made.data.tokens):
      expected = made.encoders.encode_sentences(params, tokens.sentences)
      assert np.array_equal(made.sentences(params, client), expected)
  assert made.sentences(other, 0) is made.sentences(other, 0)
  found = [made.sentences(params, 0) for params in (other, made.start)]
  assert not np.array_equal(*found)


def test_private_texts_leave_nothing_outside_of_private(config, tmp_path):
  secret = dataclasses.replace(
    config, public_data=False, methods=("BM25",), seeds=1
  )
  said = run(secret, tmp_path)
  outside = [
    path
    for path in tmp_path.rglob("*")
    if path.is_file() and "private" not in path.relative_to(tmp_path).parts
  ]
  assert not [path for path in outside if path.suffix in (".md", ".json")]
  page = (tmp_path / "private" / "study.md").read_text()
  assert "PRIVATE: computed from data that is not public" in page
  assert said.startswith("PRIVATE: ")
  assert (tmp_path / "private").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"partition": "site"}, "partition"),
    ({"partition": "genre"}, "urls must be given"),
    ({"methods": ("BM25", "magic")}, "methods"),
    ({"central_learning_rate": 0.0}, "central_learning_rate must be above 0"),
    ({"test_split": "dev", "rates": (1e-3,)}, "dev_split must be another"),
    (
      {
        "dev_split": "test",
        "personal": federated.Personal(
          settings=personalisation.Settings(patience=1)
        ),
      },
      "dev_split must be another",
    ),
    ({"num_clients": 1}, "num_clients must be at least 2"),
    ({"test_split": "train"}, "test_split must be another split than train"),
  ],
)
def test_settings_out_of_range_are_refused(change, message):
  with pytest.raises(ValueError, match="federated.Config") as error:
    federated.Config(**change)
  assert message in str(error.value) and "\n" not in str(error.value)


def test_another_list_of_urls_is_other_data(config, tmp_path, monkeypatch):
  """Results of the old division were read as those of the new one."""
  urls = {
    f"d{name}{number}": f"http://www.cnn.com/2007/{name}/a/{number}.story"
    for name in ("north", "south", "west")
    for number in range(9)
  }
  monkeypatch.setattr(study_data.newsqa, "read_urls", lambda paths: urls)
  path, digests = tmp_path / "urls.txt", set()
  dealt = dataclasses.replace(config, partition="genre", urls=(str(path),))
  for text in ("one list", "another list"):
    path.write_text(text)
    digests.add(study_data.build(dealt).digest)
  assert len(digests) == 2


def test_the_clients_with_the_most_test_questions_are_kept(config, monkeypatch):
  """The thesis keeps ten genres of NewsQA, whose rest has too few questions."""
  assert "max_clients" in study_data._SETTINGS  # of the digest, too
  few = tiny(clients=("north",), test=2)
  many = tiny(clients=("south", "west", "other"), test=4)
  joined = collection.Collection(
    few.documents + many.documents,
    few.queries + many.queries,
    {split: few.qrels[split] | many.qrels[split] for split in few.qrels},
  )
  monkeypatch.setattr(sources.Source, "read", lambda self: joined)

  def names(**change):
    data = study_data.build(dataclasses.replace(config, **change))
    return [one.name for one in data.clients], data.facts.num_left_out

  assert names() == (["north", "other", "south", "west"], 0)
  assert names(max_clients=2) == (["other", "south"], 2)
  urls = {
    document.id: f"http://www.cnn.com/2007/{document.client}/a/1.story"
    for document in joined.documents
    if document.client != "other"
  }
  monkeypatch.setattr(study_data.newsqa, "read_urls", lambda paths: urls)
  monkeypatch.setattr(
    study_data.fingerprints, "of_file", lambda path: str(path)
  )
  genres = {"partition": "genre", "urls": ("u.txt",)}
  kept, _ = names(**genres, max_clients=2)  # "other" is no genre
  assert [name.lower() for name in kept] == ["south", "west"]
  # One genre and the rest are one client.
  for id_ in [d.id for d in joined.documents if d.client != "south"]:
    urls.pop(id_, None)
  with pytest.raises(ValueError, match="two clients or more .* got 1 of 2"):
    names(**genres, max_clients=2)


def test_clients_named_otherwise_by_their_questions_are_told(config, tmp_path):
  """The line said "change the partition"; 27 questions had been left out."""
  made = tiny()
  queries = [
    dataclasses.replace(query, client=query.client.title())
    for query in made.queries
  ]
  made = dataclasses.replace(made, queries=tuple(queries))
  beir.write_beir(tmp_path / "torn", made)
  torn = dataclasses.replace(config, source=f"beir:{tmp_path / 'torn'}")
  with pytest.raises(ValueError, match="0 of 3: .*; 27 questions .* names"):
    study_data.build(torn)


def study(by_method):
  """A study of two clients: ranks by method, one list for each seed."""
  outcomes = [
    methods.Outcome(
      method=name, seed=seed,
      ranks=tuple(
        ranking.Scores(client=client, sentence=ranks, passage=ranks)
        for client, ranks in zip("ab", found, strict=True)
      ),
      sent=[0, 0], received=[0, 0], exchanges=0, hubness=0.0, seconds=1.0,
      train=(0.75, 0.5), learning_rate=1e-3,
    )
    for name, seeds in by_method.items()
    for seed, found in enumerate(seeds)
  ]  # fmt: skip
  facts = study_data.Facts(
    source="s", partition="client", num_left_out=0, num_foreign_judgements=0,
    num_lost_questions=0,
    clients=tuple(
      study_data.ClientFacts(
        name=name, num_passages=1, num_sentences=2, num_train=3, num_test=2
      )
      for name in "ab"
    ),
  )  # fmt: skip
  return methods.Study(facts=facts, notes=(), outcomes=tuple(outcomes))


def table_of(found, number):
  return page.make_page(found).parts[number].blocks[1]


def test_what_no_client_scores_stands_on_the_page():
  """Lost questions and shared passages stood in no text for readers."""
  found = study({methods.BASE: [[[1, 1], [2, 0]]]})
  counts = {
    "num_foreign_judgements": 12,
    "num_lost_questions": 7,
    "num_shared_passages": 31,
    "num_unheld_passages": 45,
  }

  def introduce(**changes):
    facts = dataclasses.replace(found.facts, **changes)
    built = page.make_page(dataclasses.replace(found, facts=facts))
    return built.introduction[0].text

  told = introduce(**counts)
  for words in (
    "12 judgements",
    "7 questions",
    "31 passages",
    "45 that answer",
  ):
    assert words in told
  assert "Left out" not in introduce() and "no client" not in introduce()


def test_tables_show_the_mean_over_clients_and_that_over_questions():
  found = study(
    {
      methods.BASE: [[[1, 1], [2, 0, 0, 0]], [[1, 1], [4, 1, 0, 0]]],
      "Central": [[[2, 2], [1, 1, 1, 1]], [[2, 2], [1, 1, 1, 1]]],
    }
  )
  table = table_of(found, 0)
  base, central = (dict(zip(table.header, x, strict=True)) for x in table.rows)
  # Client a: 1. Client b: (1/2 + 0)/4 and (1/4 + 1)/4, mean .21875.
  assert base["MRR@10 over clients [95%]"].startswith("0.609 ")
  assert base["MRR@10 over questions [95%]"].startswith("0.479 ")
  assert base["Seeds"] == "0.562 to 0.656"
  assert base["Worst client"] == "0.219"
  assert base["Hubness"] == "0.00, 0.00"
  assert base["R@1"] == "0.562, 0.417"
  assert base["Thesis, Fed-NewsQA"] == "0.261"
  assert base["p over clients"] == base["p over questions"] == "-"
  assert central["R@1"] == "0.500, 0.667"
  # Over clients 0.75 against 0.61, over questions 0.83 against 0.48: another t.
  assert float(central["p over questions"]) < float(central["p over clients"])
  rows = {row[0]: row for row in table_of(found, 1).rows}
  assert rows["mean over clients"][-2:] == ("0.609", "0.750")
  assert rows["mean over questions"][-2:] == ("0.479", "0.833")


def test_rows_keep_the_digest_of_a_table_with_other_settings(config):
  """As commit 7f7874b4 made it: finished rows stay finished."""
  row = methods._Job(method="BM25", seed=1, recipe=federated.Recipe())
  assert artifacts.fingerprint(row) == "a5c9d05b7d3acb83"
