"""monoT5: its inputs, its two words, and public folders against transformers."""

import os
import re

import jax
import numpy as np
import pytest

from synthq_jax.data import shipped
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.leakage import rerankers
from synthq_jax.models import t5_checkpoints, t5_config

QUERIES = ["apple stone", "river"]
DOCUMENTS = ["good apple stone river", "bad " * 30]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("gated", [False, True], ids=["T5 1.0", "gated"])
def test_a_public_checkpoint_scores_as_transformers_does(
  make_reranker, vocabulary, tmp_path, gated
):
  os.environ.setdefault("HF_HUB_OFFLINE", "1")
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  transformers.utils.logging.disable_progress_bar()
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
      feed_forward_proj="gated-gelu" if gated else "relu",
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
  np.testing.assert_allclose(
    jax.jit(reranker.logits)(params, batch["tokens"]), logits, atol=1e-4
  )
  false, true = (vocabulary.encode(word)[0] for word in ("false", "true"))
  two = torch.log_softmax(logits[:, [false, true]], dim=1)
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
    vocabulary=pieces, config=t5_config.get("demo"), length=96
  )
  query, document = "What is JAX, exactly?", "A library for arrays (on TPUs)."
  tokens = reranker.featurize([query], [document])["tokens"][0]
  whole = f"Query: {query} Document: {document} Relevant:"
  assert tokens[tokens > 0].tolist() == [*pieces.encode(whole), 1]
  names = [pieces.tokenizer.id_to_piece(id_) for id_ in reranker.labels()]
  assert names == ["▁false", "▁true"]


class Split:
  """A vocabulary that reads letters."""

  vocab_size = 128

  def encode(self, text):
    return [ord(letter) for letter in "_" + text if ord(letter) < 128]


def test_words_that_are_split_differ_in_their_first_different_pieces():
  reranker = rerankers.MonoT5(vocabulary=Split(), config=t5_config.get("tiny"))
  assert reranker.labels() == (ord("f"), ord("t"))
  other = rerankers.MonoT5(
    vocabulary=Split(), config=t5_config.get("tiny"), words=("no", "yes")
  )
  assert other.labels() == (ord("n"), ord("y"))


def test_words_that_are_read_alike_are_refused():
  reranker = rerankers.MonoT5(
    vocabulary=Split(), config=t5_config.get("tiny"), words=("né", "nè")
  )
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


def test_a_model_of_another_vocabulary_is_refused():
  class Large(Split):
    vocab_size = 129

  with pytest.raises(ValueError, match="129 pieces, got 128 rows"):
    rerankers.MonoT5(vocabulary=Large(), config=t5_config.get("tiny"))
