"""monoT5 and monoBERT: inputs, labels, and public folders against transformers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.data import shipped
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.leakage import rerankers
from synthq_jax.leakage.rerankers import mono
from synthq_jax.models import bert, t5_checkpoints, t5_config

QUERIES = ["apple stone", "river"]
DOCUMENTS = ["good apple stone river", "bad " * 30]


@pytest.mark.filterwarnings("ignore")
def test_a_public_checkpoint_scores_as_transformers_does(
  make_reranker, vocabulary, tmp_path
):
  from hugging_face import torch, transformers

  torch.manual_seed(0)
  theirs = transformers.T5ForConditionalGeneration(
    transformers.T5Config(
      vocab_size=40,
      d_model=24,
      d_kv=4,
      d_ff=40,
      num_layers=2,
      num_heads=5,
      decoder_start_token_id=0,
      feed_forward_proj="relu",
    )
  ).eval()
  theirs.save_pretrained(tmp_path)
  start, config = t5_checkpoints.load(tmp_path)
  reranker = make_reranker("monoT5", start=start, config=config)
  params = reranker.init(jax.random.key(0))
  batch = reranker.featurize(QUERIES, DOCUMENTS)
  tokens = torch.tensor(batch["tokens"], dtype=torch.long)
  with torch.no_grad():
    logits = theirs(
      input_ids=tokens,
      attention_mask=(tokens > 0).long(),
      decoder_input_ids=torch.zeros((2, 1), dtype=torch.long),
    ).logits[:, 0]
  false, true = (vocabulary.encode(word)[0] for word in ("false", "true"))
  logits = logits[:, [false, true]]
  np.testing.assert_allclose(
    jax.jit(reranker.logits)(params, batch), logits, atol=1e-4
  )
  two = torch.log_softmax(logits, dim=1)
  np.testing.assert_allclose(
    jax.jit(reranker.score)(params, batch), two[:, 1], atol=1e-4
  )
  expected = -(two[0, 1] + two[1, 0]) / 2
  np.testing.assert_allclose(
    jax.jit(reranker.loss)(params, batch), expected, atol=1e-4
  )


def test_the_document_is_cut_and_everything_else_stays(
  make_reranker, vocabulary
):
  reranker = make_reranker("monoT5", length=9, query_length=2)
  found = reranker.featurize(
    ["apple stone river", "music"], ["good bad fine poor right", "table"]
  )
  ids = vocabulary.encode
  long = "Query: apple stone Document: good bad fine Relevant:"
  short = "Query: music Document: table Relevant:"
  assert found["tokens"].tolist() == [
    [*ids(long), 1],
    [*ids(short), 1, 0, 0, 0],
  ]


def test_the_shipped_vocabulary_reads_parts_as_it_reads_the_whole():
  pieces = vocabulary_lib.load(shipped.VOCABULARY, extra_ids=shipped.EXTRA_IDS)
  reranker = rerankers.MonoT5(
    vocabulary=pieces, config=t5_config.get("demo"), length=96, start={}
  )
  query, document = "What is JAX, exactly?", "A library for arrays (on TPUs)."
  tokens = reranker.featurize([query], [document])["tokens"][0]
  whole = f"Query: {query} Document: {document} Relevant:"
  assert tokens[tokens > 0].tolist() == [*pieces.encode(whole), 1]
  names = [pieces.tokenizer.id_to_piece(id_) for id_ in reranker.labels()]
  assert names == ["▁false", "▁true"]


class Split:
  """A vocabulary that reads letters."""

  vocab_size, eos_id = 128, 1

  def encode(self, text):
    return [ord(letter) for letter in "_" + text if ord(letter) < 128]


def read_by(vocabulary):
  config = t5_config.get("tiny")
  return rerankers.MonoT5(vocabulary=vocabulary, config=config, start={})


def test_words_that_are_split_differ_in_their_first_different_pieces():
  reranker = read_by(Split())
  assert reranker.labels() == (ord("f"), ord("t"))


class Alike(Split):
  """A vocabulary that reads all words alike."""

  def encode(self, text):
    return [3 for _ in text.split()]


def test_words_that_are_read_alike_are_refused():
  reranker = read_by(Alike())
  with pytest.raises(ValueError, match="got the same pieces for both"):
    reranker.labels()


@pytest.mark.parametrize(
  "fields,message",
  [
    ({"length": 8}, "length=8: the words around them take 4 pieces"),
    ({"query_length": 0}, "got query_length=0"),
  ],
)
def test_lengths_without_room_are_refused(make_reranker, fields, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    make_reranker("monoT5", **fields)


BERT_DOCUMENTS = ["the apple of a river , stone", "apple ! " * 20]
PIECES = "[PAD] [UNK] [CLS] [SEP] [MASK] apple stone river the of a , !".split()


@pytest.fixture
def public(tmp_path):
  """Writes a folder as Hugging Face does; returns it with its model."""
  from hugging_face import torch, transformers

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
    BERT_DOCUMENTS,
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
  reranker = mono.bert_from_folder(folder, query_length=8)
  params = reranker.init(jax.random.key(0))
  batch = reranker.featurize(QUERIES, BERT_DOCUMENTS)
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
  reranker = mono.bert_from_folder(folder, query_length=8)
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
    score(params, reranker.featurize(QUERIES, BERT_DOCUMENTS))
  ).all()


def test_a_bert_reads_framed_rows_and_the_document_is_cut(
  make_reranker, vocabulary
):
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
    ({"config": {"num_labels": 0}}, "got num_labels=0"),
    ({"config": {"vocab_size": 5}}, "got 5 rows: give the vocabulary"),
  ],
)
def test_a_bert_that_does_not_fit_is_refused(vocabulary, fields, message):
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
    mono.MonoBERT(
      vocabulary=vocabulary,
      cls_id=3,
      sep_id=1,
      start={},
      **(fields | {"config": config}),
    )
