"""Trains privately inside of a client, which hides its single questions.

Every step of a client's local training clips the gradient of each record, sums,
and adds noise (`clipped_grad`, `private_training`), so that whatever the client
sends, its records are hidden, also from the server. The loss of a record is
that of its question with its answer and negatives of its own: other questions'
answers are no negatives, since they would couple the records.

`silo_privacy` has the claim, and what it says of which negatives; those of a
public corpus come from `negatives.mine`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int

from synthq_jax import optim, typing
from synthq_jax.federated import clients, local_training, silo_privacy
from synthq_jax.federated import encoders as encoders_lib
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import sampling, terms
from synthq_jax.training import dp_step

__all__ = ["batches", "clipped_grad", "private_training", "records"]


def records(
  tokens: clients.Tokens,
  table: Int[np.ndarray, "question n"],
  collection: Int[np.ndarray, "sentence length"],
) -> dict[str, np.ndarray]:
  """Returns a row for each of a client's train questions.

  Args:
    tokens: of the client.
    table: of negatives; -1 for none.
    collection: tokens of the sentences that `table` counts: the public corpus,
      or the client's own.

  Returns:
    "questions" [question, length], "answers" [question, longer], "negatives"
    [question, n, longer].
  """
  answers = [of_question[0] for of_question in tokens.answers["train"]]
  negatives = collection[table]
  negatives[table < 0] = 0
  return {
    "questions": tokens.questions["train"],
    "answers": tokens.sentences[np.array(answers, np.int32)],
    "negatives": negatives,
  }


def clipped_grad(
  encoders: encoders_lib.Encoders,
  *,
  temperature: float,
  l2_clip_norm: float,
  strategy: str = "bookkeeping",
  microbatch_size: int | None = None,
) -> optim.ClippedGrad:
  """Returns the sum of the records' clipped gradients.

  The loss of a record is the softmax of its question's answer against its own
  negatives, of which those that are all padding are none.

  Formal guarantee: that of `optim.clipped_grad`; a record is a row of
  `records`, and its loss reads that row alone. What the unit is depends on
  where the negatives are from: see `silo_privacy`.

  Args:
    encoders: the towers.
    temperature: divides the cosines, above 0.
    l2_clip_norm: of a record's gradient.
    strategy: as in `optim.clipped_grad`.
    microbatch_size: as in `optim.clipped_grad`.

  Returns:
    From (params, batch) to (sum, `Aux`).
  """

  def losses(
    params: typing.Params, batch: Mapping[str, jax.Array]
  ) -> Float[jax.Array, " batch"]:
    shown = jnp.concatenate(
      [batch["answers"][:, None], batch["negatives"]], axis=1
    )
    size, columns, length = shown.shape
    sentences = encoders.encode(
      params, encoders_lib.SENTENCE, shown.reshape(-1, length)
    )
    sentences = sentences.reshape(size, columns, -1)
    questions = encoders.encode(params, encoders_lib.QUERY, batch["questions"])
    logits = jnp.einsum("qd,qcd->qc", questions, sentences) / temperature
    is_none = jnp.all(shown == 0, axis=2).at[:, 0].set(False)
    total = jax.nn.logsumexp(jnp.where(is_none, -jnp.inf, logits), axis=1)
    return total - logits[:, 0]

  return optim.clipped_grad(
    losses,
    l2_clip_norm=l2_clip_norm,
    strategy=strategy,
    microbatch_size=microbatch_size,
  )


def batches(
  rows: Mapping[str, np.ndarray],
  sampler: sampling.Poisson,
  *,
  client: str,
  seed: Sequence[int],
  first_step: int,
  steps: int,
) -> dict[str, np.ndarray]:
  """Draws the Poisson batches of a round.

  Args:
    rows: from `records`, a row for each record of the sampler.
    sampler: that of the client's `silo_privacy.claim`.
    client: its name, so that clients of one seed draw different batches.
    seed: the client's secret.
    first_step: how many steps of the client were drawn before.
    steps: of this round.

  Returns:
    Arrays [step, batch, ...] with "is_padding", for `private_training`.

  Raises:
    ValueError: if there are not as many rows as the sampler draws from.
  """
  if len(rows["questions"]) != sampler.num_examples:
    raise ValueError(
      f"expected {sampler.num_examples} records for the sampler, got"
      f" {len(rows['questions'])}; make it for this client"
    )
  words = [*seed, *clients.seed_words(client)]
  drawn = [
    dp_step.draw(rows, sampler, words, first_step + step)
    for step in range(steps)
  ]
  return {
    **{name: np.stack([one[name] for one, _ in drawn]) for name in rows},
    "is_padding": np.stack([is_padding for _, is_padding in drawn]),
  }


def private_training(
  grad_fn: optim.ClippedGrad,
  privacy: claim_lib.Claim,
  optimizer: optax.GradientTransformation,
) -> local_training.ClientUpdate:
  """Builds a client's round of noisy steps, for `fedavg.fedavg`.

  Unlike in `local_training.local_training` a step that is all padding is a
  step, of noise alone: that nobody was drawn must not show. So the clients of a
  cohort have the same number of steps.

  Formal guarantee: that of `silo_privacy.claim`, if the client's key is
  secret, another one in each round, also in one that is made again, and used
  for nothing else. `fedavg.apply` derives all clients' keys from one, and
  whoever has that one can take the noise away: it is a simulation by one trusted
  process. Where the server and other clients are not trusted, each client keeps
  a key of its own and calls what this returns with
  `jax.random.fold_in(own_key, round)`. Clients that are trained side by side
  share noise multiplier, clip norm and divisor, their samplers have one
  `max_batch_size`, and each client has the epsilon of its own number of records.

  Args:
    grad_fn: from `clipped_grad`, with the clip norm of `privacy`.
    privacy: from `silo_privacy.claim`.
    optimizer: takes the noisy mean; its state does not survive the round.

  Returns:
    From (params, batches, key) to parameters.

  Raises:
    ValueError: if the clip norms differ.
  """
  privacy.check_plain(*map(terms.silo, silo_privacy.NEGATIVES))
  if grad_fn.l2_clip_norm != privacy.l2_clip_norm:
    raise ValueError(
      f"expected a gradient of l2_clip_norm={privacy.l2_clip_norm}, got"
      f" {grad_fn.l2_clip_norm}; the claim counts on the former"
    )

  def update(
    params: typing.Params, batches: local_training.Batches, key: jax.Array
  ) -> typing.Params:
    private = optax.chain(
      optim.privatize(
        l2_sensitivity=grad_fn.sensitivity(silo_privacy.RELATION),
        noise_multiplier=privacy.noise_multiplier,
        denominator=privacy.sampler.expected_batch_size,
        key=key,
      ),
      optimizer,
    )

    def step(carry: Any, batch: Any) -> tuple[Any, None]:
      params, state = carry
      rows = {name: x for name, x in batch.items() if name != "is_padding"}
      total, _ = grad_fn(params, rows, is_padding_example=batch["is_padding"])
      updates, state = private.update(total, state, params)
      return (optax.apply_updates(params, updates), state), None

    start = (params, private.init(params))
    return jax.lax.scan(step, start, dict(batches))[0][0]

  return update
