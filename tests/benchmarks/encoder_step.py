"""A training step of a whole encoder: ours against sentence-transformers', in turns.

Processor seconds and time of a step on a CPU: in-batch softmax over pairs of a BEIR
folder, forward, backward and Adam. Both see the same pairs, cut at one length, and
their first losses are equal. Prints one JSON document.

  bash launch/minilm.sh minilm
  python tests/benchmarks/encoder_step.py --encoder=minilm --folder=medquad
"""

import pathlib
import random
import sys

import measuring
import numpy as np

_RATE, _TEMPERATURE = 2e-5, 0.05


def read_pairs(
  folder: pathlib.Path, number: int
) -> tuple[list[str], list[str]]:
  """Reads queries and their documents, no document twice."""
  from synthq_jax.data import beir, files

  queries, documents = (
    {
      line["_id"]: f"{line.get('title') or ''} {line['text']}".strip()
      for _, line in files.json_lines(files.find(folder, name))
    }
    for name in ("queries.jsonl", "corpus.jsonl")
  )
  judged = beir.read_judgements(files.find(folder / "qrels", "train.tsv"))
  of_document = {next(iter(own)): query for query, own in judged.items()}
  chosen = list(of_document.items())
  random.Random(0).shuffle(chosen)
  names = chosen[:number]
  return [queries[q] for _, q in names], [documents[d] for d, _ in names]


def cut(tokens: np.ndarray) -> np.ndarray:
  """Cuts padding that no row needs, by whole steps of 32, as `pairs.train` does."""
  longest = np.flatnonzero((tokens != 0).any(axis=0))[-1] + 1
  return tokens[:, : -(-longest // 32) * 32]


def main() -> int:
  parser = measuring.parser(__doc__)
  parser.add_argument("--encoder", required=True)
  parser.add_argument("--folder", required=True, type=pathlib.Path)
  parser.add_argument("--pairs", type=int, default=64)
  parser.add_argument("--length", type=int, default=128)
  parser.add_argument("--repeats", type=int, default=6)
  options = parser.parse_args()

  import jax
  import jax.numpy as jnp
  import optax
  import sentence_transformers
  import torch
  from sentence_transformers.sentence_transformer import losses

  from synthq_jax.data import sentence_tokens
  from synthq_jax.models import sentence_encoder
  from synthq_jax.training import pairs

  queries, documents = read_pairs(options.folder, options.pairs)
  tokens = sentence_tokens.load(options.encoder, length=options.length)
  params, shape = sentence_encoder.load(options.encoder)
  batch = {
    "queries": cut(tokens.rows(queries)),
    "documents": cut(tokens.rows(documents)),
    "rows": np.arange(options.pairs),
  }
  optimizer = optax.adam(_RATE)

  @jax.jit
  def step(state):
    params, moments = state

    def mean_loss(params):
      found = pairs.loss_fn(
        params, batch, model_config=shape, temperature=_TEMPERATURE
      )
      return jnp.mean(found)

    loss, grads = jax.value_and_grad(mean_loss)(params)
    updates, moments = optimizer.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss

  theirs = sentence_transformers.SentenceTransformer(
    options.encoder, device="cpu"
  )
  theirs.max_seq_length = options.length
  theirs.eval()  # without dropout, as ours
  loss_fn = losses.MultipleNegativesRankingLoss(theirs, scale=1 / _TEMPERATURE)
  adam = torch.optim.Adam(theirs.parameters(), lr=_RATE)
  read = [theirs.preprocess(some) for some in (queries, documents)]

  def their_step() -> float:
    loss = loss_fn([dict(some) for some in read], None)
    adam.zero_grad()
    loss.backward()
    adam.step()
    return loss.item()

  state = (params, optimizer.init(params))
  first = {  # compiles
    "synthq_jax": float(step(state)[1]),
    "sentence_transformers": their_step(),
  }
  found = measuring.in_turns(
    {
      "synthq_jax": lambda: step(state),
      "sentence_transformers": their_step,
    },
    options.repeats,
  )
  apart = abs(first["synthq_jax"] - first["sentence_transformers"])
  return measuring.finish(
    "encoder_step",
    {
      "pairs": options.pairs,
      "length": options.length,
      "first_losses": first,
      **found,
    },
    passed=found["processor_ratio"] <= 0.8 and apart <= 1e-4,
  )


if __name__ == "__main__":
  sys.exit(main())
