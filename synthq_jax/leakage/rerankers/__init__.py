"""Five rerankers behind one training interface.

A reranker defines the features of texts (`featurize`), the scores of rows
(`logits`) and the training loss (`objective`). `train` and `rerank` work for all
rerankers alike.

::

  | reranker | reads | trained with |
  |---|---|---|
  | `MonoT5` | query and document as one input of a T5 | cross-entropy of "true" and "false" |
  | `MonoBERT` | query and document as two segments of a BERT | cross-entropy of two labels |
  | `Duet` | exact matches, and convolutions of both texts | softmax over the pair |
  | `KNRM` | the cosines of their terms, pooled by kernels | hinge on the pair |
  | `PACRR` | n-grams of the cosines, the best k of each term | softmax over the pair |
"""

from synthq_jax.leakage.rerankers.duet import Duet
from synthq_jax.leakage.rerankers.mono import MonoBERT, MonoT5
from synthq_jax.leakage.rerankers.reranker import Reranker
from synthq_jax.leakage.rerankers.terms import KNRM, PACRR
from synthq_jax.leakage.rerankers.training import Recipe, rerank, train

__all__ = [
  "Duet",
  "KNRM",
  "MonoBERT",
  "MonoT5",
  "PACRR",
  "Recipe",
  "Reranker",
  "rerank",
  "train",
]
