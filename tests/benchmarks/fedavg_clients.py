"""Rounds per minute and peak memory of private federated averaging.

Clients train the shipped T5's dual encoder (float32, one encoder for both
sides) for one step of SGD on 8 pairs of the demo set, 32 and 64 tokens; pairs
are dealt out at random, and more than once where there are more clients than
pairs for them. Rounds of user-level DP-FedAvg with 100 clients expected, out of
100, 1,000 and 3,000, and one round of all 1,000, which join it 50 at a time.
Each case is a process of its own, which holds the tokens of all its clients;
epsilon is that of `--epsilon_rounds` such rounds. Prints one JSON document.

  python tests/benchmarks/fedavg_clients.py
"""

import argparse
import functools
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import measuring
import numpy as np

PAIRS, QUERY_LENGTH, DOCUMENT_LENGTH = 8, 32, 64
CLIP, NOISE = 0.1, 1.0


def write_tokens(path: pathlib.Path) -> None:
  """Writes the tokens of all pairs of the demo set."""
  from synthq_jax.data import environment_docs, shipped, vocabulary

  demo = environment_docs.build(environment_docs.EnvironmentDocs())
  documents = {document.id: document.text for document in demo.documents}
  queries = {query.id: query.text for query in demo.queries}
  pairs = [
    (queries[query], documents[next(iter(judged))])
    for split in demo.qrels.values()
    for query, judged in split.items()
  ]
  pieces = vocabulary.load(shipped.VOCABULARY)
  made = {
    name: vocabulary.tokenize(pieces, texts, length=length)
    for name, texts, length in (
      ("queries", [query for query, _ in pairs], QUERY_LENGTH),
      ("documents", [document for _, document in pairs], DOCUMENT_LENGTH),
    )
  }
  np.savez(path, **made)


def loss_fn(config: Any, params: Any, batch: Any, key: Any) -> Any:
  """Returns the in-batch softmax loss of each pair."""
  from synthq_jax.losses import contrastive
  from synthq_jax.models import dual_encoder

  del key
  encode = functools.partial(dual_encoder.encode, params, config)
  similarity = encode(batch["queries"]) @ encode(batch["documents"]).T
  return contrastive.softmax(
    similarity, temperature=0.05, is_padding_example=batch["is_padding"]
  )


def deal(tokens: Any, num_clients: int) -> list[dict[str, np.ndarray]]:
  """Gives each client one batch of pairs."""
  rng = np.random.default_rng(0)
  total = len(tokens["queries"])
  rows = np.concatenate(
    [
      rng.permutation(total)[: total // PAIRS * PAIRS]
      for _ in range(1 + num_clients * PAIRS // total)
    ]
  )
  return [
    {name: values[rows[i : i + PAIRS]][None] for name, values in tokens.items()}
    | {"is_padding": np.zeros((1, PAIRS), bool)}
    for i in range(0, num_clients * PAIRS, PAIRS)
  ]


def case(options: argparse.Namespace) -> dict[str, Any]:
  """Measures one number of clients in this process."""
  import jax
  import optax

  from synthq_jax.data import shipped
  from synthq_jax.federated import (
    cohorts,
    local_training,
    user_privacy,
  )
  from synthq_jax.models import dual_encoder, t5_checkpoints

  params, config = t5_checkpoints.load(shipped.DIRECTORY)
  clients = deal(dict(np.load(options.tokens)), options.case)
  sampler = cohorts.poisson(
    num_clients=options.case,
    clients_per_round=options.case if options.everybody else options.cohort,
  )
  privacy = user_privacy.claim(
    sampler=sampler,
    rounds=options.epsilon_rounds,
    l2_clip_norm=CLIP,
    noise_multiplier=NOISE,
    delta=1 / (2 * options.case),
  )
  made = user_privacy.fedavg(
    local_training.local_training(
      functools.partial(loss_fn, config), optax.sgd(0.05)
    ),
    privacy,
    noise_key=jax.random.key(1),
    clients_at_once=options.clients_at_once,
  )
  add, finish = jax.jit(made.add), jax.jit(made.finish)
  state = made.init(dual_encoder.encoder_params(params))
  parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
  part = 50 if options.everybody else options.rows

  def one_round(
    state: Any, number: int, at_most: int | None = None
  ) -> tuple[Any, dict[str, Any]]:
    drawn = sampler.batch((2, 3), number)
    ids = drawn.indices[~drawn.is_padding][:at_most]
    total = made.begin(state)
    for start in range(0, len(ids), part):
      some = ids[start : start + part]
      cohort = cohorts.stack([clients[i] for i in some], some, size=part)
      total = add(total, state, cohort, jax.random.key(4))
    state, metrics = finish(state, total)
    return state, jax.device_get(metrics)

  before = round(measuring.peak_mib())
  one_round(state, 0, at_most=part)  # compiles
  trained, started = 0, time.perf_counter()
  processor = time.process_time()
  for number in range(options.rounds):
    state, metrics = one_round(state, number)
    trained += int(metrics["clients"])
  wall = time.perf_counter() - started
  processor = time.process_time() - processor
  peak = round(measuring.peak_mib())
  try:
    user_privacy.check_meaningful(privacy, parameters)
    refusal = None
  except ValueError as error:
    refusal = str(error)
  return {
    "clients": options.case,
    "clients_per_round": sampler.expected_batch_size,
    "parameters": parameters,
    "rounds_measured": options.rounds,
    "rounds_per_minute": round(60 * options.rounds / wall, 2),
    "wall_ms_per_client": round(1e3 * wall / trained, 1),
    "processor_ms_per_client": round(1e3 * processor / trained, 1),
    "peak_memory_mib": {"before rounds": before, "with rounds": peak},
    "tokens_of_all_clients_mib": round(
      sum(rows.nbytes for one in clients for rows in one.values()) / 2**20, 1
    ),
    "user_level_epsilon": round(privacy.epsilon, 3),
    "delta": privacy.delta,
    "noise_multiplier": NOISE,
    "rounds_of_epsilon": options.epsilon_rounds,
    "refusal": refusal,
  }


def main() -> int:
  parser = measuring.parser(__doc__)
  flag = parser.add_argument
  flag("--clients", type=int, nargs="+", default=[100, 1000, 3000])
  flag("--cohort", type=int, default=100)
  flag("--rows", type=int, default=180, help="room for the clients of a round")
  flag("--rounds", type=int, default=3)
  flag("--epsilon_rounds", type=int, default=100)
  flag("--clients_at_once", type=int, default=1)
  flag("--case", type=int, help=argparse.SUPPRESS)
  flag("--everybody", action="store_true", help=argparse.SUPPRESS)
  flag("--only_tokens", action="store_true", help=argparse.SUPPRESS)
  flag("--tokens", help="of an earlier run, to be read; or where to keep them")
  options = parser.parse_args()
  if options.case is not None:
    print(json.dumps(case(options)))
    return 0
  if options.only_tokens:
    write_tokens(pathlib.Path(options.tokens))
    print("null")
    return 0
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(options.tokens or pathlib.Path(folder) / "tokens.npz")
    if not path.exists():
      # In a process of its own: what this one takes, its children begin with.
      measuring.fresh(__file__, f"--tokens={path}", "--only_tokens")
    pairs = len(np.load(path)["queries"])
    shared = [
      f"--{name}={getattr(options, name)}"
      for name in ("cohort", "rows", "epsilon_rounds", "clients_at_once")
    ]
    cases = [
      [f"--case={number}", f"--rounds={options.rounds}"]
      for number in options.clients
    ]
    cases.append(["--case=1000", "--rounds=1", "--everybody"])
    found = [
      measuring.fresh(__file__, f"--tokens={path}", *shared, *flags)
      for flags in cases
    ]
  result = {
    "model": "the shipped T5's encoder, float32",
    "data": f"the demo set, {pairs} pairs of queries and documents",
    "clients_at_once": options.clients_at_once,
    "cases": found,
  }
  return measuring.finish("fedavg_clients", result)


if __name__ == "__main__":
  sys.exit(main())
