"""A vocabulary of whole words, small rerankers, and a task that they can learn."""

import dataclasses

import jax
import numpy as np
import pytest

from synthq_jax.leakage import rerankers
from synthq_jax.leakage.rerankers import mono
from synthq_jax.models import t5, t5_config

WORDS = (
  "apple stone river cloud table paper music garden winter summer"
  " engine window silver market doctor school bridge flower mountain island"
).split()
GOOD, BAD = ("good", "fine", "right"), ("bad", "poor", "wrong")
FRAME = ("Query:", "Document:", "Relevant:", "true", "false")


class Vocabulary:
  """Every word is a piece; 0 is padding, 1 the end, 2 what is unknown."""

  eos_id = 1

  def __init__(self, words=(*FRAME, *GOOD, *BAD, *WORDS)):
    self._ids = {word: place for place, word in enumerate(words, 3)}
    self.vocab_size = len(words) + 4  # the last one stands in no text

  def encode(self, text):
    return [self._ids.get(word, 2) for word in text.split()]


@pytest.fixture(scope="module")
def vocabulary():
  return Vocabulary()


@dataclasses.dataclass
class Toy:
  """Relevant documents hold the query's two words and a word of praise."""

  rng: np.random.Generator

  def query(self):
    return list(self.rng.choice(WORDS, 2, replace=False))

  def document(self, query, relevant):
    others = [word for word in WORDS if word not in query]
    words = list(self.rng.choice(others, 5, replace=False))
    words += query if relevant else []
    words.append(self.rng.choice(GOOD if relevant else BAD))
    return " ".join(self.rng.permutation(words))

  def triples(self, count, *, shuffled=False):
    """Triples; where labels are shuffled, every second one is swapped."""
    found = []
    for number in range(count):
      query = self.query()
      pair = [self.document(query, relevant) for relevant in (True, False)]
      if shuffled and number % 2:
        pair.reverse()
      found.append((" ".join(query), *pair))
    return found

  def collection(self, queries=20, depth=20, relevant=2):
    """Candidates of new queries, texts and judgements."""
    candidates, texts, documents, qrels = {}, {}, {}, {}
    for number in range(queries):
      words, id_ = self.query(), f"q{number}"
      texts[id_] = " ".join(words)
      ids = [f"{id_}_d{place}" for place in self.rng.permutation(depth)]
      qrels[id_] = dict.fromkeys(ids[:relevant], 1)
      for document in ids:
        documents[document] = self.document(words, document in qrels[id_])
      order = self.rng.permutation(ids)
      candidates[id_] = {d: float(-rank) for rank, d in enumerate(order)}
    return candidates, texts, documents, qrels


@pytest.fixture
def make_toy():
  return lambda seed: Toy(np.random.default_rng(seed))


def terms(vocabulary):
  """Fields of a reranker of terms: random vectors, equal weights."""
  size = vocabulary.vocab_size
  return {
    "vocabulary": vocabulary,
    "embeddings": np.random.default_rng(0).normal(size=(size, 32)),
    "query_length": 4,
    "document_length": 12,
    "idf": np.ones(size),
  }


def monot5(vocabulary, **options):
  config = dataclasses.replace(
    t5_config.get("tiny"),
    num_encoder_layers=1,
    num_decoder_layers=1,
    logits_via_embedding=True,
  )
  options = {"config": config, "length": 20, "query_length": 4} | options
  if "start" not in options:
    init = jax.jit(t5.init_params, static_argnums=0)
    options["start"] = init(options["config"], jax.random.key(0))
  return rerankers.MonoT5(vocabulary=vocabulary, **options)


def small_monobert(vocabulary, **options):
  shape = {"num_heads": 2, "mlp_dim": 32, "num_layers": 1}
  shape["embeddings"] = terms(vocabulary)["embeddings"]
  return mono.bert_from_sentencepiece(
    vocabulary, **(shape | {"length": 20, "query_length": 4} | options)
  )


MAKERS = {
  "monoT5": monot5,
  "monoBERT": small_monobert,
  "Duet": lambda v: rerankers.Duet(**terms(v)),
  "KNRM": lambda v: rerankers.KNRM(**terms(v)),
  "PACRR": lambda v: rerankers.PACRR(**terms(v)),
}


@pytest.fixture(scope="module", params=MAKERS)
def reranker(request, vocabulary):
  """Each of the five; what was compiled for one serves all tests of a file."""
  return MAKERS[request.param](vocabulary)


@pytest.fixture
def make_reranker(vocabulary):
  """Builds one by its name."""
  return lambda name, **options: MAKERS[name](vocabulary, **options)
