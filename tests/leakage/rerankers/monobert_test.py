"""monoBERT: its rows, its labels, and public folders against transformers."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.leakage.rerankers import monobert
from synthq_jax.models import bert

QUERIES = ["apple stone", "river"]
DOCUMENTS = ["the apple of a river , stone", "apple ! " * 20]
PIECES = "[PAD] [UNK] [CLS] [SEP] [MASK] apple stone river the of a , !".split()


@pytest.fixture
def public(tmp_path):
  """Writes a folder as Hugging Face does; returns it with its model."""
  os.environ.setdefault("HF_HUB_OFFLINE", "1")
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  transformers.utils.logging.disable_progress_bar()

  def write(kind="BertForSequenceClassification", **fields):
    config = transformers.BertConfig(
      vocab_size=len(PIECES),
      hidden_size=16,
      num_hidden_layers=2,
      num_attention_heads=2,
      intermediate_size=24,
      max_position_embeddings=24,
      **fields,
    )
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
      for weight in model.parameters():
        weight.add_(0.2 * torch.randn(weight.shape))
    model.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return model

  return tmp_path, write


def encoded(transformers, length):
  """Rows of transformers' own tokenizer, the document cut."""
  tokenizer = transformers.BertTokenizer(
    vocab={piece: place for place, piece in enumerate(PIECES)}
  )
  return tokenizer(
    QUERIES,
    DOCUMENTS,
    padding="max_length",
    truncation="only_second",
    max_length=length,
    return_tensors="pt",
  )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_labels", [1, 2])
def test_a_public_model_scores_as_transformers_does(public, num_labels):
  import torch
  import transformers

  folder, write = public
  model = write(num_labels=num_labels)
  reranker = monobert.from_folder(folder, query_length=8)
  params = reranker.init(jax.random.key(0))
  batch = reranker.featurize(QUERIES, DOCUMENTS)
  oracle = encoded(transformers, 24)
  np.testing.assert_array_equal(batch["tokens"], oracle["input_ids"])
  np.testing.assert_array_equal(batch["segments"], oracle["token_type_ids"])
  with torch.no_grad():
    logits = model(**oracle).logits
  expected = logits[:, 0]
  if num_labels == 2:
    expected = torch.log_softmax(logits, 1)[:, 1]
  np.testing.assert_allclose(
    jax.jit(reranker.logits)(params, batch), logits, atol=1e-4
  )
  np.testing.assert_allclose(
    jax.jit(reranker.score)(params, batch), expected, atol=1e-4
  )
  labels = torch.tensor([1, 0])
  loss = (
    torch.nn.functional.cross_entropy(logits, labels)
    if num_labels == 2
    else torch.nn.functional.binary_cross_entropy_with_logits(
      logits[:, 0], labels.float()
    )
  )
  np.testing.assert_allclose(
    jax.jit(reranker.loss)(params, batch), loss, atol=1e-4
  )


@pytest.mark.filterwarnings("ignore")
def test_a_public_model_without_labels_gets_new_ones(public):
  folder, write = public
  model = write("BertModel")
  reranker = monobert.from_folder(folder, query_length=8)
  params = reranker.init(jax.random.key(0))
  words = model.embeddings.word_embeddings.weight.detach().numpy()
  np.testing.assert_allclose(params["word_embedding"], words)
  assert params["classifier"]["kernel"].shape == (16, 2)
  other = reranker.init(jax.random.key(1))
  assert not np.array_equal(
    params["classifier"]["kernel"], other["classifier"]["kernel"]
  )
  score = jax.jit(reranker.score)
  assert np.isfinite(
    score(params, reranker.featurize(QUERIES, DOCUMENTS))
  ).all()


def test_rows_are_framed_and_the_document_is_cut(make_reranker, vocabulary):
  reranker = make_reranker("monoBERT", length=10, query_length=2)
  found = reranker.featurize(
    ["apple stone river", "music"], ["good bad fine poor right", "table"]
  )
  last = vocabulary.vocab_size - 1
  ids = vocabulary.encode
  long = [last, *ids("apple stone"), 1, *ids("good bad fine poor right"), 1]
  short = [last, *ids("music"), 1, *ids("table"), 1]
  assert found["tokens"].tolist() == [long, short + [0] * 5]
  assert found["segments"].tolist() == [
    [0] * 4 + [1] * 6,
    [0] * 3 + [1] * 2 + [0] * 5,
  ]


def test_words_start_from_given_vectors_at_the_size_of_bert(
  make_reranker, vocabulary
):
  rng = np.random.default_rng(0)
  vectors = rng.normal(size=(vocabulary.vocab_size, 32))
  reranker = make_reranker("monoBERT", embeddings=vectors)
  params = reranker.init(jax.random.key(0))
  words = np.asarray(params["word_embedding"])
  np.testing.assert_allclose(words.std(), 0.02, rtol=1e-4)
  np.testing.assert_allclose(
    words / words.std(), vectors / vectors.std(), rtol=1e-3
  )
  assert jnp.std(params["position_embedding"]) > 0


@pytest.mark.parametrize(
  "fields,message",
  [
    ({"length": 600}, "at most 512 positions, got length=600"),
    ({"length": 10, "query_length": 7}, "length=10, query_length=7"),
    ({"config": {"num_labels": 3}}, "got num_labels=3"),
    ({"config": {"num_labels": 0}}, "got num_labels=0"),
    ({"config": {"vocab_size": 5}}, "got 5 rows: give the vocabulary"),
  ],
)
def test_what_does_not_fit_is_refused(vocabulary, fields, message):
  shape = {
    "vocab_size": vocabulary.vocab_size,
    "emb_dim": 8,
    "num_heads": 2,
    "mlp_dim": 8,
    "num_layers": 1,
    "num_labels": 2,
  }
  config = bert.BertConfig(**(shape | fields.get("config", {})))
  with pytest.raises(ValueError, match=re.escape(message)):
    monobert.MonoBERT(
      vocabulary=vocabulary,
      cls_id=3,
      sep_id=1,
      **(fields | {"config": config}),
    )
