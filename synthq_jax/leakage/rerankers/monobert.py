"""monoBERT: a BERT that labels a query and a document as a pair.

References:
  Nogueira, Cho: Passage Re-ranking with BERT. 2019, arXiv:1901.04085, section 3.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from synthq_jax import typing
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.data import wordpiece
from synthq_jax.leakage.rerankers import _losses, _tokens, interface
from synthq_jax.models import bert

__all__ = ["MonoBERT", "from_folder", "from_sentencepiece"]

_LABELS = 2


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MonoBERT:
  """Scores a document by a label of "[CLS] QUERY [SEP] DOCUMENT [SEP]".

  The query and what frames it is segment 0, the document segment 1; queries and
  documents are cut to their lengths. With two labels the score is the logarithm
  of the softmax at the label 1, "relevant"; public cross-encoders with one
  label are scored by its logit, and trained by its sigmoid. Training minimises
  the cross-entropy.

  `from_folder` builds one of a public BERT, `from_sentencepiece` a new one of
  any size on a vocabulary of this project.
  """

  vocabulary: Any = dataclasses.field(repr=False)
  """What texts are read with: has `encode` and `vocab_size`."""
  cls_id: int
  """The piece that begins a row."""
  sep_id: int
  """The piece that ends query and document."""
  config: bert.BertConfig
  """The shape of the BERT, with one or two labels."""
  start: typing.Params | None = dataclasses.field(default=None, repr=False)
  """The parameters that training starts from; parts that are missing, such as
  the classifier, start at random."""
  length: int = 512
  """Pieces of a row at most."""
  query_length: int = 64
  """Pieces of a query that are kept, as in the paper."""
  name: ClassVar[str] = "monoBERT"
  padded: ClassVar[tuple[str, ...]] = ("tokens", "segments")

  def __post_init__(self):
    _tokens.check_vocabulary(self.name, self.vocabulary, self.config.vocab_size)
    if self.config.num_labels not in (1, _LABELS):
      raise ValueError(
        "expected a BERT with one or two labels, got"
        f" num_labels={self.config.num_labels}"
      )
    if not self.query_length + 3 < self.length <= self.config.max_length:
      raise ValueError(
        "expected room for query and document in at most"
        f" {self.config.max_length} positions, got length={self.length},"
        f" query_length={self.query_length}"
      )

  def init(self, key: jax.Array) -> typing.Params:
    """Returns the given parameters, and random ones where there are none."""
    fresh = bert.init_params(self.config, key)
    return fresh | jax.tree.map(jnp.asarray, dict(self.start or {}))

  def featurize(
    self, queries: Sequence[str], documents: Sequence[str]
  ) -> interface.Features:
    """Returns "tokens" and "segments"."""
    rows, starts = _tokens.joined(
      self.vocabulary,
      queries,
      documents,
      length=self.length,
      query_length=self.query_length,
      before=[self.cls_id],
      between=[self.sep_id],
      after=[self.sep_id],
    )
    tokens = vocabulary_lib.pad(rows, self.length)
    places = np.arange(self.length)[None]
    in_document = (places >= np.array(starts)[:, None]) & (tokens != 0)
    return {"tokens": tokens, "segments": in_document.astype(np.int32)}

  def score(
    self,
    params: typing.Params,
    batch: Mapping[str, Array],
    *,
    key: jax.Array | None = None,
  ) -> Float[Array, " batch"]:
    """Returns log p(relevant) of each row, or the only label's logit."""
    found = self.logits(params, batch, key=key)
    if self.config.num_labels == 1:
      return found[:, 0]
    return jax.nn.log_softmax(found)[:, 1]

  def loss(
    self,
    params: typing.Params,
    batch: Mapping[str, Array],
    *,
    key: jax.Array | None = None,
  ) -> Float[Array, ""]:
    """Returns the mean cross-entropy of the labels."""
    found = self.logits(params, batch, key=key)
    if self.config.num_labels == 1:  # log sigmoid(x) is log softmax of 0 and x
      found = jnp.pad(found, ((0, 0), (1, 0)))
    return _losses.cross_entropy(jax.nn.log_softmax(found))

  def logits(
    self,
    params: typing.Params,
    batch: Mapping[str, Array],
    *,
    key: jax.Array | None = None,
  ) -> Float[Array, "batch label"]:
    """Returns the logits of the labels."""
    _, found = bert.Bert(self.config).apply(
      {"params": params},
      batch["tokens"],
      batch["segments"],
      deterministic=key is None,
      rngs=None if key is None else {"dropout": key},
    )
    return found


def from_folder(folder: str | os.PathLike, **options: Any) -> MonoBERT:
  """Builds a reranker of a public BERT; needs the extra `bert`.

  Args:
    folder: config.json, model.safetensors and the vocabulary, as Hugging Face
      writes them; without a classifier, a new one of two labels.
    **options: `length` and `query_length` of `MonoBERT`.

  Raises:
    ValueError: if something is missing in the folder, or does not fit.
  """
  params, config = bert.load(folder)
  pieces = wordpiece.load(folder)
  return MonoBERT(
    vocabulary=pieces,
    cls_id=pieces.cls_id,
    sep_id=pieces.sep_id,
    config=dataclasses.replace(
      config, has_pooler=True, num_labels=config.num_labels or _LABELS
    ),
    start=params,
    **({"length": min(512, config.max_length)} | options),
  )


def from_sentencepiece(
  vocabulary: Any,
  *,
  embeddings: Any = None,
  dim: int = 128,
  num_heads: int = 4,
  mlp_dim: int = 512,
  num_layers: int = 2,
  dropout_rate: float = 0.1,
  **options: Any,
) -> MonoBERT:
  """Builds a new BERT on a vocabulary of this project.

  The end of a sentence is its [SEP], the vocabulary's last piece its [CLS]: a
  sentinel, where there are some, which stands in no text.

  Args:
    vocabulary: from `data.vocabulary.load`.
    embeddings: vectors of the pieces to start from [vocab, dim], scaled to the
      size that BERT starts with; random ones if not given.
    dim: the width of the states, where no `embeddings` say it.
    num_heads: attention heads.
    mlp_dim: the width of the feed-forward layer.
    num_layers: encoder layers.
    dropout_rate: dropout in [0, 1).
    **options: `length` and `query_length` of `MonoBERT`.
  """
  rows, start = vocabulary.vocab_size, None
  if embeddings is not None:
    vectors = np.asarray(embeddings, np.float32)
    rows, dim = vectors.shape
    start = {"word_embedding": 0.02 * vectors / vectors.std()}
  return MonoBERT(
    vocabulary=vocabulary,
    cls_id=vocabulary.vocab_size - 1,
    sep_id=vocabulary_lib.EOS_ID,
    config=bert.BertConfig(
      vocab_size=rows,
      emb_dim=dim,
      num_heads=num_heads,
      mlp_dim=mlp_dim,
      num_layers=num_layers,
      dropout_rate=dropout_rate,
      num_labels=_LABELS,
      max_length=options.get("length", 512),
    ),
    start=start,
    **options,
  )
