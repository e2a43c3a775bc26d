"""Reads the queries that choose weights.

For what is trained they are of documents that a draw holds out of its training.

Formal guarantee: with synthetic queries post-processing. Which documents are
held out is drawn with a public seed (`inputs.held_out`), and no private file is
opened unless the queries lie in one.
"""

from typing import Any

import numpy as np

from synthq_jax.data import files
from synthq_jax.pipeline import inputs, results
from synthq_jax.retrieval import fusion, trec
from synthq_jax.stages import _search, stage

__all__ = ["chosen", "of_public", "read", "source"]


def of_public(run: Any) -> Any:
  """Returns the queries of the public checkpoint that choose; None: none do."""
  written = run.queries
  return next(
    (written[k] for k in written if k.startswith("public_only")), None
  )


def source(run: Any, name: str) -> Any:
  """Returns whose queries choose for a row; None: real ones, or nobody's."""
  if name.startswith("original"):
    return None
  written = run.rows("generate")
  writer = name.removeprefix("synthetic_")
  return written.get(writer)


def read(
  task: stage.Task,
  chooser: Any,
  weight: float | None,
  *,
  everywhere: bool = False,
) -> tuple[_search.Judged | None, str]:
  """Returns the queries that choose, and says which these are."""
  folders, documents = task.folders, task.inputs["documents"]
  synthetic = task.inputs["synthetic"]
  if weight is not None:
    return None, "nothing, it was set"
  if isinstance(documents, results.PreparedData):
    folder = folders.root / documents.private_directory
    arrays = inputs.arrays(folders, documents, folder / "train.npz")
    names, whose = [str(name) for name in arrays["ids"]], "real queries"
  elif synthetic is not None:
    folder = folders.root / synthetic.directory
    arrays = inputs.arrays(folders, synthetic, folder / "tokens.npz")
    names, whose = None, f"synthetic queries of {synthetic.name}"
  else:
    return None, "nothing, it was set: there are no queries to choose it"
  passages = inputs.document_tokens(folders, documents)
  share = 1.0 if everywhere else chooser.held_out
  held_out = inputs.held_out(len(passages.ids), share)
  rows = np.flatnonzero(held_out[arrays["documents"]])
  order = np.random.default_rng([chooser.seed, 6]).permutation(len(rows))
  rows = np.sort(rows[order[: chooser.num_queries]])
  if len(rows) < chooser.min_queries:
    return None, "nothing, it was set for want of queries that could choose it"
  lines = [line for _, line in files.json_lines(folder / "queries.jsonl")]
  if names is None:
    names = [line["_id"] for line in lines]
  texts = {line["_id"]: line["text"] for line in lines}
  chosen = [names[row] for row in rows]
  judged = _search.Judged(
    split="held out",
    qrels={
      name: {str(passages.ids[arrays["documents"][row]]): 1}
      for name, row in zip(chosen, rows, strict=True)
    },
    queries=[texts[name] for name in chosen],
    query_tokens=arrays["tokens"][rows],
    passages=passages,
    corpus=inputs.corpus(folders, documents),
  )
  if everywhere:
    return judged, f"{whose}, for the untrained encoder; the same in all rows"
  return judged, f"{whose}, of documents held out of its training"


def chosen(
  weight: float | None,
  judged: _search.Judged | None,
  runs: tuple[trec.Run, trec.Run] | None,
  chooser: Any,
  *,
  method: fusion.Method,
  depth: int,
) -> dict[str, Any]:
  """Chooses a weight, and returns what `system_results.Weighed` says of it."""
  choice = fusion.Choice(
    chooser.default_weight if weight is None else weight, ()
  )
  if judged is not None:
    choice = fusion.choose(
      method,
      *runs,
      judged.qrels,
      standard_errors=chooser.standard_errors,
      depth=depth,
    )
  return {
    "weight": choice.weight,
    "num_queries": len(judged.qrels) if judged else 0,
    "scores": choice.scores,
  }
