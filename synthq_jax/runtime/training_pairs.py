"""Reads (query, document) pairs with the tokens of the encoder that trains."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool

from synthq_jax.data import sentence_tokens
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import encoder_start, prepared_files, results, workspace
from synthq_jax.runtime import queries as queries_lib

__all__ = [
  "are_private",
  "draw_held_out",
  "inherit",
  "pair_with_documents",
  "read",
  "read_real",
]


def read_real(
  space: workspace.Folders,
  prepared: results.PreparedData,
  tokens: sentence_tokens.SentenceTokens | None = None,
) -> dict[str, np.ndarray]:
  """Reads the private train queries as pairs, in the form of
  `pair_with_documents`."""
  folder = space.root / prepared.private_directory
  arrays = prepared_files.arrays(space, prepared, folder / "train.npz")
  ids = arrays["ids"].tolist()
  texts = queries_lib.texts(folder, ids) if tokens else ()
  return pair_with_documents(space, prepared, arrays, texts, tokens)


def pair_with_documents(
  folders: workspace.Folders,
  prepared: prepared_files.Documents,
  stored: Mapping[str, np.ndarray],
  texts: Sequence[str],
  tokens: sentence_tokens.SentenceTokens | None,
) -> dict[str, np.ndarray]:
  """Turns stored queries into pairs.

  Args:
    folders: the working directory.
    prepared: the documents.
    stored: arrays of the queries: "tokens" in the run's vocabulary, "documents"
      and "passages".
    texts: the queries; only `tokens` reads them.
    tokens: the encoder's tokenizer; None: the run's vocabulary.

  Returns:
    "queries" and "documents", tokens of each pair (of a document those of its
    passage), and "rows", the positions of the documents.
  """
  documents = encoder_start.open_passages(folders, prepared, tokens)
  return {
    "queries": encoder_start.query_tokens(tokens, texts, stored["tokens"]),
    "documents": documents.tokens[stored["passages"]],
    "rows": stored["documents"].astype(np.int32),
  }


def draw_held_out(
  num_documents: int, share: float
) -> Bool[np.ndarray, " document"]:
  """Draws the documents whose queries train no retriever except direct DP's.

  Direct DP trains on the real queries of all documents, and so do generators.

  Formal guarantee: a function of the number of documents and of `share` alone,
  so that the draw reveals nothing about which documents were asked for.

  Args:
    num_documents: size of the public collection.
    share: share of documents to hold out, in [0, 1]; 0: none.

  Returns:
    Mask of held-out documents.
  """
  order = np.random.default_rng([num_documents, 5]).permutation(num_documents)
  return order < round(share * num_documents)


def read(
  folders: workspace.Folders,
  prepared: prepared_files.Documents,
  synthetic: results.SyntheticQueries | None,
  held_out_share: float,
  tokens: sentence_tokens.SentenceTokens | None = None,
) -> dict[str, np.ndarray]:
  """Reads training pairs, in the form of `pair_with_documents`.

  Args:
    folders: the working directory.
    prepared: the documents, with the private queries if `synthetic` is None.
    synthetic: the synthetic queries; None: the real train queries.
    held_out_share: share of the documents whose queries are left out.
    tokens: the encoder's tokenizer, see `pair_with_documents`.
  """
  if synthetic is None:
    assert isinstance(prepared, results.PreparedData)
    records = read_real(folders, prepared, tokens)
  else:
    folder = folders.root / synthetic.directory
    arrays = prepared_files.arrays(folders, synthetic, folder / "tokens.npz")
    texts = queries_lib.texts(folder) if tokens else ()
    records = pair_with_documents(folders, prepared, arrays, texts, tokens)
  if not held_out_share:
    return records
  left_out = draw_held_out(prepared.num_documents, held_out_share)
  rows = np.flatnonzero(~left_out[records["rows"]])
  return {name: values[rows] for name, values in records.items()}


def inherit(
  queries: results.SyntheticQueries | None, *, real: str, synthetic: str
) -> statement_lib.PrivacyStatement:
  """Returns the statement of a result made of queries and public documents.

  Formal guarantee: for synthetic queries their own statement, by
  post-processing, PROVIDED no private record is read besides them; for real
  queries none (epsilon inf).

  Args:
    queries: the synthetic queries; None: the private ones.
    real: use of the private queries, one sentence.
    synthetic: use of the synthetic queries, one sentence.
  """
  if queries is None:
    return statement_lib.non_private(real)
  return statement_lib.inherit(queries.statement, synthetic)


def are_private(queries: results.SyntheticQueries | None) -> bool:
  """Tests whether queries must not be shared, nor what is learned from them.

  Args:
    queries: synthetic queries; None: the private ones.
  """
  return queries is None or results.is_private_path(queries.directory)
