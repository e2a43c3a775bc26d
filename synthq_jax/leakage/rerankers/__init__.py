"""Five rerankers behind one training interface.

A reranker says how texts become rows of numbers (`featurize`), how rows are
scored (`score`) and what its training minimises (`loss`). `train` and `rerank`
do the rest, the same for all of them.

| reranker | reads | trained with |
|---|---|---|
| `MonoT5` | query and document as one input of a T5 | cross-entropy of "true" and "false" |
| `MonoBERT` | query and document as two segments of a BERT | cross-entropy of two labels |
| `Duet` | exact matches, and convolutions of both texts | softmax over the pair |
| `KNRM` | the cosines of their terms, pooled by kernels | hinge on the pair |
| `PACRR` | n-grams of the cosines, the best k of each term | softmax over the pair |
"""

from synthq_jax.leakage.rerankers.duet import Duet
from synthq_jax.leakage.rerankers.interface import Instance, Reranker
from synthq_jax.leakage.rerankers.knrm import KNRM
from synthq_jax.leakage.rerankers.monobert import MonoBERT
from synthq_jax.leakage.rerankers.monot5 import MonoT5
from synthq_jax.leakage.rerankers.pacrr import PACRR
from synthq_jax.leakage.rerankers.reranking import rerank
from synthq_jax.leakage.rerankers.terms import Terms
from synthq_jax.leakage.rerankers.training import Recipe, train

__all__ = [
  "Duet",
  "Instance",
  "KNRM",
  "MonoBERT",
  "MonoT5",
  "PACRR",
  "Recipe",
  "Reranker",
  "Terms",
  "rerank",
  "train",
]
