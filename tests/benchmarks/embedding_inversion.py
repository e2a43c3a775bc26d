"""What can be read out of sentence vectors, raw and with Gaussian noise.

One client is the victim; the others, with their own sentences, are the attacker.
The shipped T5's encoder makes the vectors, and its decoder learns to read them:
first the language alone, then from there one decoder for each amount of noise,
and one that goes on without vectors for as long. Planted secrets stand behind
the beginnings of the victim's sentences: digits, or words drawn at random; the
attacker knows the form and trains on secrets that it made up. Prints one JSON
document; --show also prints each level when it is done, and some sentences with
what was read of them, to stderr.

  python tests/benchmarks/embedding_inversion.py ../shared/data/medquad
  python tests/benchmarks/embedding_inversion.py   # the demo set
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
import repository

from synthq_jax import artifacts
from synthq_jax.audit import (
  canaries,
  inversion,
  inversion_measures,
  vector_bounds,
  vector_secrets,
)
from synthq_jax.data import (
  beir,
  environment_docs,
  public_text,
  shipped,
  vocabulary,
)
from synthq_jax.models import t5_checkpoints
from synthq_jax.retrieval import encode
from synthq_jax.training import loop

KINDS = {"digits": "own_query", "words": "rare_words"}
MADE_UP = 0.1
"""Sentences with made-up secrets of each kind, over the attacker's own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
  """Sentences of one side, and their tokens."""

  sentences: tuple[str, ...]
  tokens: np.ndarray


def sentences(folder: pathlib.Path | None) -> dict[str, str]:
  """Sentence -> the first client that has it."""
  if folder is None:
    collection = environment_docs.build(environment_docs.EnvironmentDocs())
  else:
    collection = beir.read_beir(folder)
  found: dict[str, str] = {}
  for document in collection.documents:
    for sentence in public_text.split_sentences(document.text):
      if len(sentence.split()) >= 4:
        found.setdefault(sentence, document.client)
  return found


def sides(
  by_client: dict[str, str], victim: str, vocab, options
) -> tuple[Text, Text]:
  """The attacker's text and the victim's; they share no sentence."""
  rng = np.random.default_rng(options.seed)
  folded = {s.casefold() for s, c in by_client.items() if c != victim}
  sizes = {False: options.sentences, True: options.victims}
  made = []
  for is_victim, size in sizes.items():
    chosen = [
      s
      for s, client in by_client.items()
      if (client == victim) == is_victim
      and not (is_victim and s.casefold() in folded)
    ]
    rng.shuffle(chosen)
    chosen = chosen[: 8 * size]  # most are too long, and tokenizing takes time
    tokens = vocabulary.tokenize(vocab, chosen, length=options.length + 1)
    fit = np.flatnonzero(tokens[:, -1] == 0)[:size]
    made.append(
      Text(
        sentences=tuple(chosen[i] for i in fit),
        tokens=tokens[fit, : options.length],
      )
    )
  return made[0], made[1]


def made(text: Text, kind: str, number: int, vocab, seed: int):
  return canaries.make(
    text.sentences,
    vocab,
    number=number,
    kinds=(KINDS[kind],),
    repetitions=(1,),
    digits=4,
    seed=[seed, *kind.encode()],
  )


def attackers_tokens(text: Text, vocab, options) -> np.ndarray:
  """The attacker's sentences, and some with secrets that it made up."""
  rows = [text.tokens]
  for kind in KINDS:
    one = made(
      text, kind, int(MADE_UP * len(text.tokens)), vocab, options.seed + 1
    )
    sides = canaries.tokenize(
      one, vocab, prefix="", document_length=1, query_length=options.length
    )
    rows.append(sides["targets"])
  return np.concatenate(rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attack:
  """Everything that one decoder is trained from."""

  inverter: inversion.Inverter
  vectors: np.ndarray
  tokens: np.ndarray
  folder: pathlib.Path
  options: argparse.Namespace

  def fit(self, name: str, start, treatment, steps: int):
    """Trains a decoder that starts from another's language."""
    sent = inversion.send(treatment, self.vectors, jax.random.key(1))
    recipe = inversion.Recipe(
      steps=steps,
      batch_size=self.options.batch_size,
      learning_rate=self.options.learning_rate,
      warmup_steps=min(50, steps // 4),
      seed=self.options.seed,
      settings=loop.Settings(log_every=50),
    )
    return inversion.train(
      self.inverter,
      self.inverter.init(start, sent, jax.random.key(2)),
      self.vectors,
      self.tokens,
      treatment=treatment,
      recipe=recipe,
      directory=self.folder / name / "state",
      metrics_path=self.folder / name / "metrics.jsonl",
      description=name,
    )


def bounds(vectors: np.ndarray, deviation: float, num_candidates: int) -> float:
  """Mean over secrets of what no attacker exceeds."""
  radii = vector_bounds.enclosing_radius(vectors)
  return float(
    np.mean(
      [
        vector_bounds.success(
          num_candidates=num_candidates,
          radius=float(radius),
          standard_deviation=deviation,
        )
        for radius in radii
      ]
    )
  )


def show(decoders, vectors, text: Text, vocab, number: int) -> None:
  """Prints sentences and what is read of them."""
  sent = inversion.send(decoders.treatment, vectors[:number], jax.random.key(3))
  written = inversion.write(
    decoders.inverter, decoders.params, sent, max_length=text.tokens.shape[1]
  )
  for sentence, row in zip(text.sentences, written, strict=False):
    read = vocab.decode([int(token) for token in row if token > 1])
    print(f"  true: {sentence}\n  read: {read}", file=sys.stderr)


def plain(value) -> object:
  """Rounds the numbers of a result."""
  if isinstance(value, dict):
    return {k: plain(v) for k, v in value.items() if k != "_type"}
  if isinstance(value, list):
    return [plain(item) for item in value]
  return round(value, 4) if isinstance(value, float) else value


def measured(
  decoders,
  deviation: float,
  client: tuple[np.ndarray, Text],
  planted: dict[str, tuple[vector_secrets.Planted, np.ndarray]],
  vocab,
) -> dict[str, object]:
  """All figures of one amount of noise."""
  vectors, text = client
  read = inversion_measures.reading(
    decoders,
    vectors,
    text.tokens,
    to_text=vocab.decode,
    key=jax.random.key(4),
  )
  found: dict[str, object] = {
    "standard deviation": deviation,
    "text": artifacts.to_json(read),
    "bits, no attacker exceeds": vector_bounds.information_bits(
      dim=vectors.shape[1], radius=1, standard_deviation=deviation
    ),
  }
  for kind, (secrets, candidates) in planted.items():
    read = inversion_measures.read_secrets(
      decoders, secrets, candidates, key=jax.random.key(5)
    )
    found[f"secret {kind}"] = artifacts.to_json(read)
    found[f"secret {kind}, no attacker exceeds"] = bounds(
      candidates, deviation, candidates.shape[1]
    )
  return plain(found)


def plant(text: Text, encoded, vocab, options) -> dict[str, tuple]:
  """Secrets of each kind in the victim's text, and all candidates' vectors."""
  planted = {}
  for number, kind in enumerate(KINDS):
    secrets = vector_secrets.plant(
      made(text, kind, options.secrets, vocab, options.seed),
      vocab,
      length=options.length,
      num_candidates=options.candidates,
      seed=[options.seed, number],
    )
    flat = encoded(secrets.rows.reshape(-1, options.length))
    planted[kind] = secrets, flat.reshape(*secrets.rows.shape[:2], -1)
  return planted


def nearest(planted, options) -> list[dict[str, object]]:
  """The attack that needs no training, at every amount of noise."""
  found = []
  for kind, (_, vectors) in planted.items():
    for deviation in options.noise:
      treatment = inversion.Gaussian(standard_deviation=deviation)
      sent = inversion.send(treatment, vectors[:, 0], jax.random.key(5))
      other = sent[vector_secrets.others(len(sent), 1)]
      row = {"secret": kind, "standard deviation": deviation}
      for name, one in {"own": sent, "other": other}.items():
        scores = vector_secrets.nearest(one, vectors)
        row[name] = artifacts.to_json(vector_secrets.recovery(scores))
      row["no attacker exceeds"] = bounds(vectors, deviation, vectors.shape[1])
      found.append(plain(row))
  return found


def run(options, folder: pathlib.Path) -> dict[str, object]:
  vocab = vocabulary.load(shipped.VOCABULARY, extra_ids=shipped.EXTRA_IDS)
  params, config = t5_checkpoints.load(shipped.DIRECTORY)
  by_client = sentences(options.data)
  names, counts = np.unique(list(by_client.values()), return_counts=True)
  # One of the middle: neither the rarest text nor most of what there is.
  victim = options.victim or str(names[np.argsort(counts)[len(names) // 2]])
  own, text = sides(by_client, victim, vocab, options)
  encoded: Callable[[np.ndarray], np.ndarray] = functools.partial(
    encode.encode, params, config
  )
  planted = plant(text, encoded, vocab, options)
  found = {"victim": victim, "nearest": nearest(planted, options)}
  if options.nearest:
    return found
  tokens = attackers_tokens(own, vocab, options)
  attack = Attack(
    inverter=inversion.Inverter(
      model=config, vector_dim=config.emb_dim, memories=options.memories
    ),
    vectors=encoded(tokens),
    tokens=tokens,
    folder=folder,
    options=options,
  )
  client = encoded(text.tokens), text
  language = attack.fit(
    "language", params, inversion.hidden, options.language_steps
  )
  hidden = attack.fit("hidden", language, inversion.hidden, options.steps)
  levels = []
  for deviation in options.noise:
    treatment = inversion.Gaussian(standard_deviation=deviation)
    decoders = inversion_measures.Decoders(
      inverter=attack.inverter,
      params=attack.fit(
        f"noise_{deviation}", language, treatment, options.steps
      ),
      hidden=hidden,
      treatment=treatment,
    )
    levels.append(measured(decoders, deviation, client, planted, vocab))
    if options.show:
      print(json.dumps(levels[-1]), file=sys.stderr)
      show(decoders, client[0], text, vocab, options.show)
  return found | {
    "attacker's sentences": len(own.tokens),
    "levels": levels,
  }


def main(arguments: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "data",
    nargs="?",
    type=pathlib.Path,
    help="a BEIR folder with clients; the demo set if none",
  )
  parser.add_argument("--victim", help="a client; one of middle size if none")
  parser.add_argument(
    "--noise", type=float, nargs="+", default=[0.0, 0.05, 0.1, 0.3, 1.0]
  )
  parser.add_argument("--steps", type=int, default=400)
  parser.add_argument("--language_steps", type=int, default=400)
  parser.add_argument("--batch_size", type=int, default=64)
  parser.add_argument("--learning_rate", type=float, default=3e-3)
  parser.add_argument("--memories", type=int, default=8)
  parser.add_argument(
    "--length",
    type=int,
    default=32,
    help="tokens of a sentence; longer ones are left out",
  )
  parser.add_argument(
    "--sentences", type=int, default=20_000, help="of the attacker, at most"
  )
  parser.add_argument(
    "--victims",
    type=int,
    default=300,
    help="sentences of the victim that are read",
  )
  parser.add_argument(
    "--secrets", type=int, default=100, help="planted, of each kind"
  )
  parser.add_argument("--candidates", type=int, default=50)
  parser.add_argument(
    "--nearest",
    action="store_true",
    help="stop before the training, after some seconds",
  )
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--show", type=int, default=0)
  parser.add_argument("--workdir", type=pathlib.Path,
                      help="a new folder; run again, it goes on from there")  # fmt: skip
  options = parser.parse_args(arguments)
  wall, cpu = time.perf_counter(), time.process_time()
  with tempfile.TemporaryDirectory() as temporary:
    found = run(options, options.workdir or pathlib.Path(temporary))
  result = {
    "benchmark": "embedding_inversion",
    "commit": repository.commit(),
    "options": {
      name: str(value) if isinstance(value, pathlib.Path) else value
      for name, value in vars(options).items()
      if name not in ("data", "workdir", "show")
    },
    "data": options.data.name if options.data else "demo set",
    "wall_s": round(time.perf_counter() - wall, 1),
    "cpu_s": round(time.process_time() - cpu, 1),
    **found,
  }
  print(json.dumps(result, indent=1))
  return 0


if __name__ == "__main__":
  sys.exit(main())
