"""Reads pairs of a query and a document, as the encoder that is trained reads them."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool

from synthq_jax.data import sentence_tokens
from synthq_jax.runtime import encoder_start, inputs, results, workspace
from synthq_jax.runtime import queries as queries_lib

__all__ = ["Stored", "held_out", "read", "read_real", "with_documents"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
  """Queries with a document of each, as a stage wrote them."""

  queries: Sequence[str]
  """Their texts."""
  tokens: np.ndarray
  """Their tokens by the run's vocabulary, [query, length]."""
  documents: np.ndarray
  """Positions of their documents [query]."""
  passages: np.ndarray
  """Positions of the passages that are read of these [query]."""


def read_real(
  space: workspace.Folders,
  prepared: results.PreparedData,
  tokens: sentence_tokens.SentenceTokens | None = None,
) -> dict[str, np.ndarray]:
  """Reads the private train queries, as `with_documents` does."""
  folder = space.root / prepared.private_directory
  arrays = inputs.arrays(space, prepared, folder / "train.npz")
  ids = arrays["ids"].tolist()
  stored = _stored(arrays, queries_lib.texts(folder, ids) if tokens else ())
  return with_documents(space, prepared, stored, tokens)


def _stored(arrays: Mapping[str, np.ndarray], queries: Sequence[str]) -> Stored:
  """Returns the arrays that a stage wrote, beside texts where these are read."""
  names = ("tokens", "documents", "passages")
  return Stored(queries=queries, **{name: arrays[name] for name in names})


def with_documents(
  folders: workspace.Folders,
  prepared: inputs.Documents,
  stored: Stored,
  tokens: sentence_tokens.SentenceTokens | None = None,
) -> dict[str, np.ndarray]:
  """Turns stored queries into pairs.

  Args:
    folders: the working directory.
    prepared: the documents.
    stored: the queries.
    tokens: how the encoder reads texts; None: by the run's vocabulary.

  Returns:
    "queries" and "documents", tokens of each pair (of the document its
    passage), and "rows", the positions of the documents.
  """
  documents = encoder_start.passages(folders, prepared, tokens)
  return {
    "queries": encoder_start.query_tokens(
      tokens, stored.queries, stored.tokens
    ),
    "documents": documents.tokens[stored.passages],
    "rows": stored.documents.astype(np.int32),
  }


def held_out(num_documents: int, share: float) -> Bool[np.ndarray, " document"]:
  """Draws the documents whose queries train no retriever, but for direct DP's.

  Direct DP trains on the real queries of all documents, and so do generators.

  Formal guarantee: a function of the number of documents and of `share`, so that
  the draw says nothing about which documents were asked for.

  Args:
    num_documents: of the public collection.
    share: how many of them, in [0, 1]; 0: none.

  Returns:
    Whether each is held out.
  """
  order = np.random.default_rng([num_documents, 5]).permutation(num_documents)
  return order < round(share * num_documents)


def read(
  folders: workspace.Folders,
  prepared: inputs.Documents,
  synthetic: results.SyntheticQueries | None,
  held_out_share: float,
  tokens: sentence_tokens.SentenceTokens | None = None,
) -> dict[str, np.ndarray]:
  """Reads the pairs that something is trained on, see `with_documents`.

  Args:
    folders: the working directory.
    prepared: the documents; with the private queries where `synthetic` is None.
    synthetic: the queries; None: the real train queries.
    held_out_share: of the documents, whose queries are left out.
    tokens: as `with_documents` has it.
  """
  if synthetic is None:
    assert isinstance(prepared, results.PreparedData)
    records = read_real(folders, prepared, tokens)
  else:
    folder = folders.root / synthetic.directory
    arrays = inputs.arrays(folders, synthetic, folder / "tokens.npz")
    stored = _stored(arrays, queries_lib.texts(folder) if tokens else ())
    records = with_documents(folders, prepared, stored, tokens)
  if not held_out_share:
    return records
  left_out = held_out(prepared.num_documents, held_out_share)
  kept = np.flatnonzero(~left_out[records["rows"]])
  return {name: values[kept] for name, values in records.items()}
