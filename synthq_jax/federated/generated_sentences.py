"""Sentences that stand for a client's collection, from a private generator.

A client fine-tunes a public T5 on (prompt, sentence) records with DP, samples
sentences for public prompts, and shares them (`messages.sentences`). A record is
a whole unit of privacy: `one_per_unit` keeps one sentence of every passage.

Nothing here knows a folder but the one for states of unfinished training, and
nothing enters a ledger: whoever runs it does, BEFORE the first step, with the
statement of `claim`.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Key

from synthq_jax import artifacts, optim, typing
from synthq_jax.data import blocks
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.federated import clients, messages
from synthq_jax.generation import decoding
from synthq_jax.losses import seq2seq
from synthq_jax.models import t5, t5_checkpoints, t5_config
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import sampling, statement, terms
from synthq_jax.training import dp_step, loop

__all__ = [
  "Generated",
  "Settings",
  "claim",
  "fine_tune",
  "from_collection",
  "loss_fn",
  "one_per_unit",
  "write",
]

_PROMPT = "write_sentence: "
_LENGTH = 48  # tokens of a sentence, EOS included; longer ones are cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Private fine-tuning of one client's generator; every value is public."""

  epsilon: float
  """Target, finite."""
  delta: float | None = None
  """Target; None: 1 / (2n)."""
  batch_size: int = 64
  """Expected records of a Poisson batch, and the public divisor."""
  steps: int = 100
  """Optimizer steps."""
  clip_norm: float = 0.1
  """L2 clip norm of a record's gradient."""
  learning_rate: float = 1e-3
  """Peak of Adam's."""
  strategy: str = "bookkeeping"
  """How gradients are clipped; changes the speed only."""


class Generated(NamedTuple):
  """Sentences, and what is promised about the generator that wrote them."""

  texts: tuple[str, ...]
  promise: messages.Promise


def from_collection(
  params: typing.Params,
  config: t5_config.T5Config,
  vocabulary: Any,
  client: clients.Client,
  settings: Settings,
  *,
  run: str,
  count: int,
  key: Key[Array, ""],
  batch_seed: Sequence[int],
  directory: str | os.PathLike,
) -> Generated:
  """Fine-tunes on one sentence of every passage of a client, and writes.

  Every record has the same public prompt, so that what is written says what the
  generator has learned and nothing else.

  Formal guarantee: that of `claim`, for one passage of the client with all its
  sentences. No question is read, if none has brought a passage to the client
  (`clients.Federation.num_copies` is 0).

  Args:
    params: of a public T5.
    config: its shape.
    vocabulary: of the T5.
    client: whose collection.
    settings: target and length of the training.
    run: names the run: releases of two runs must differ.
    count: sentences to write; those that do not end or stand twice are dropped.
    key: secret of the client, for this call alone.
    batch_seed: secret seed of the sampling.
    directory: private; see `fine_tune`.

  Returns:
    What `messages.sentences` shares.
  """
  drawn = one_per_unit(client.passages, client.passage_ids, seed=0)
  records = {
    "inputs": vocabulary_lib.tokenize(
      vocabulary, [_PROMPT] * len(drawn), length=16
    ),
    "targets": vocabulary_lib.tokenize(
      vocabulary, [client.sentences[i] for i in drawn], length=_LENGTH
    ),
  }
  made = claim(settings, num_records=len(drawn), unit=messages.COLLECTION_UNIT)
  noise_key, writing_key = jax.random.split(key)
  trained = fine_tune(
    made, settings, params, config, records,
    key=noise_key, batch_seed=batch_seed, directory=directory,
  )  # fmt: skip
  first_extra = vocabulary.vocab_size - vocabulary.extra_ids
  rows = write(
    trained,
    config,
    np.repeat(records["inputs"][:1], count, axis=0),
    key=writing_key,
    max_length=_LENGTH,
    forbidden=(2, *range(first_extra, config.vocab_size)),
  )
  texts = (
    vocabulary.decode([int(t) for t in row if t > vocabulary_lib.EOS_ID])
    for row in rows
  )
  return Generated(
    tuple(dict.fromkeys(filter(None, texts))),
    messages.Promise(
      questions=statement.none(unit=messages.QUESTION_UNIT),
      collection=made.statement(f"{run}/{client.name}/generator"),
    ),
  )


def one_per_unit(
  units: Int[np.ndarray, " sentence"], ids: Sequence[str], *, seed: int
) -> Int[np.ndarray, " record"]:
  """Draws one sentence of every unit, e.g. of every passage.

  Formal guarantee: a unit's sentence depends on its id and its number of
  sentences alone, so that one record is one unit. (A draw by its number would
  change with every unit before it that is added or removed.) Public: the seed.

  Args:
    units: for each sentence the number of its unit; those of one unit stand
      together.
    ids: of the units, by number.
    seed: of the draws.

  Returns:
    Positions of sentences, by unit.
  """
  numbers, starts, counts = np.unique(
    units, return_index=True, return_counts=True
  )
  places = [
    np.random.default_rng([seed, *clients.seed_words(ids[number])]).integers(
      count
    )
    for number, count in zip(numbers, counts, strict=True)
  ]
  return starts + np.array(places, np.int64)


def claim(
  settings: Settings, *, num_records: int, unit: str
) -> claim_lib.Claim:
  """Returns what the training will promise, with the least noise for it.

  Args:
    settings: target and length.
    num_records: n, which is treated as public.
    unit: what one record is, e.g. "passage" or "query".

  Returns:
    How batches are drawn, the noise, and the words of the promise.

  Raises:
    ValueError: if the target cannot be met with these settings.
  """
  return claim_lib.calibrated(
    epsilon=settings.epsilon,
    sampler=sampling.Poisson.with_margin(
      num_examples=num_records,
      expected_batch_size=settings.batch_size,
      multiple_of=8,
    ),
    steps=settings.steps,
    l2_clip_norm=settings.clip_norm,
    delta=settings.delta,
    words=terms.records(unit),
  )


def fine_tune(
  made: claim_lib.Claim,
  settings: Settings,
  params: typing.Params,
  config: t5_config.T5Config,
  records: Mapping[str, Int[np.ndarray, "record length"]],
  *,
  key: Key[Array, ""],
  batch_seed: Sequence[int],
  directory: str | os.PathLike,
) -> typing.Params:
  """Fine-tunes a public T5 on a client's records.

  Formal guarantee: that of `made`, for one record, if `params` are
  public, and `key` and `batch_seed` secret and given to no other training. One
  with another strategy is another, and so is one that is made again on other
  devices or by other code after `directory` was removed: their noises would
  cancel where the gradients do not. Each takes a statement with an identifier of its
  own. States and metrics in `directory` are private, and a state is gone on
  from by the same training alone: same claim, settings, parameters, records and
  secrets.

  Args:
    made: from `claim`, for as many records.
    settings: those of the claim.
    params: of the public T5.
    config: its shape.
    records: "inputs" and "targets", 0 = padding at the end of a row.
    key: secret, of the noise and nothing else.
    batch_seed: secret, of the sampling.
    directory: for states of unfinished training and for metrics, each training
      in a folder of its own.

  Returns:
    The parameters of the generator, which may be published.

  Raises:
    ValueError: if the claim is for another number of records.
  """
  count = len(records["targets"])
  if count != made.sampler.num_examples:
    raise ValueError(
      f"expected as many records as the claim has, {made.sampler.num_examples},"
      f" got {count}: make it again"
    )
  arrays = (params, dict(records), jax.random.key_data(key))
  own = os.path.join(
    directory,
    artifacts.fingerprint(
      made.sampler,
      made.noise_multiplier,
      settings,
      config,
      [blocks.digest(np.asarray(x)) for x in jax.tree.leaves(arrays)],
      list(batch_seed),
    ),
  )
  clipped = optim.clipped_grad(
    functools.partial(loss_fn, config=config),
    l2_clip_norm=settings.clip_norm,
    strategy=settings.strategy,
  )
  trained = dp_step.train(
    clipped,
    t5_checkpoints.flatten(params),
    dict(records),
    sampler=made.sampler,
    noise_multiplier=made.noise_multiplier,
    optimizer=dp_step.Optimizer(
      name="dp_adam", learning_rate=settings.learning_rate, steps=settings.steps
    ),
    batch_seed=batch_seed,
    noise_key=key,
    directory=os.path.join(own, "state"),
    metrics_path=os.path.join(own, "metrics.jsonl"),
    description="generator of sentences",
    settings=loop.Settings(progress=False),
  )
  return t5_checkpoints.unflatten(trained)


def loss_fn(
  params: Mapping[str, Any],
  batch: Mapping[str, Array],
  *,
  config: t5_config.T5Config,
) -> Float[Array, " record"]:
  """Returns each record's mean cross-entropy per target token, in nats."""
  logits = t5.Transformer(config).apply(
    {"params": t5_checkpoints.unflatten(params)},
    batch["inputs"],
    t5.shift_right(batch["targets"]),
  )
  return seq2seq.cross_entropy(logits, batch["targets"])


def write(
  params: typing.Params,
  config: t5_config.T5Config,
  prompts: Int[np.ndarray, "prompt length"],
  *,
  key: Key[Array, ""],
  max_length: int,
  forbidden: Sequence[int],
) -> Int[np.ndarray, "sentence length"]:
  """Samples a sentence for each public prompt.

  Formal guarantee: post-processing, if prompts and their number were chosen
  without a look at the client's texts.

  Args:
    params: of the generator.
    config: its shape.
    prompts: public, 0 = padding at the end of a row; equal ones get different
      sentences.
    key: for this and nothing else.
    max_length: tokens of a sentence, EOS included.
    forbidden: tokens that no sentence may hold, such as sentinels.

  Returns:
    Tokens, those that end before `max_length` and are not empty, each once.
  """
  written = decoding.generate(
    params,
    config,
    prompts,
    ids=[str(number) for number in range(len(prompts))],
    key=key,
    sampler=decoding.Nucleus(p=0.9),
    max_length=max_length,
    forbidden=forbidden,
  ).reshape(-1, max_length)
  ended = np.any(written == decoding.EOS, axis=1)
  is_kept = ended & (written[:, 0] != decoding.EOS)
  return np.unique(written[is_kept], axis=0)
