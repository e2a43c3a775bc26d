"""Private training inside of a client, which hides its single questions.

Every step of a client's local training clips the gradient of each record, sums,
and adds noise (`clipped_grad`, `private_training`), so that whatever the client
sends, its records are hidden, also from the server. The loss of a record is
that of its question with its answer and negatives of its own: other questions'
answers are no negatives, since they would couple the records.

`silo_privacy` has the claim, and what it says of which negatives.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int

from synthq_jax import optim, typing
from synthq_jax.federated import (
  _seeds,
  clients,
  local_training,
  silo_privacy,
)
from synthq_jax.federated import encoders as encoders_lib
from synthq_jax.federated import negatives as negatives_lib
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import sampling
from synthq_jax.training import dp_step

__all__ = [
  "batches",
  "clipped_grad",
  "mine_public",
  "private_training",
  "records",
]


def mine_public(
  encoders: encoders_lib.Encoders,
  params: typing.Params,
  tokens: clients.Tokens,
  corpus: Int[np.ndarray, "sentence length"],
  *,
  n: int,
  k: int,
  seed: int,
  round_number: int = 0,
  split: str = "train",
  corpus_vectors: Float[np.ndarray, "sentence dim"] | None = None,
) -> Int[np.ndarray, "question n"]:
  """Draws n of the k sentences of a public corpus nearest to each question.

  Formal guarantee: what is drawn for a question depends on that question, its
  answers, the public corpus, `params` and the other arguments, and not on the
  client's other questions or sentences. So a record's gradient at published
  `params` depends on no other record. The search is exact in float64, question
  by question. Assumed: a vector does not depend, to the bit, on the rows that
  are encoded beside it, for which `retrieval.encode` has batches of fixed
  shapes; that holds on CPUs, where it is tested.

  Args:
    encoders: how texts become vectors.
    params: the two towers as the round begins, which may be published.
    tokens: of the client.
    corpus: tokens of public sentences, of the length of the client's.
    n: negatives of a question.
    k: how many of the nearest they are drawn from, >= n.
    seed: with the client's name and the round, of the draws; not secret.
    round_number: of the federated training, from 0.
    split: whose questions.
    corpus_vectors: where the caller has encoded the corpus already.

  Returns:
    Positions in the corpus, none equal to an answer of the question.

  Raises:
    ValueError: if n or k is out of range, or sentences have another length.
  """
  if not 0 <= n <= k:
    raise ValueError(f"expected n from 0 to k={k}, got {n=}; change them")
  length = tokens.sentences.shape[1]
  if corpus.shape[1] != length:
    raise ValueError(
      f"expected public sentences of {length} tokens as the client's are, got"
      f" {corpus.shape[1]}: equal ones could not be told"
    )
  if corpus_vectors is None:
    corpus_vectors = encoders.encode_sentences(params, corpus)
  same = negatives_lib.first_equal(corpus)
  known = {corpus[at].tobytes(): int(at) for at in np.unique(same)}
  equal = [
    [known[text] for text in texts if text in known]
    for texts in (
      [tokens.sentences[at].tobytes() for at in answers]
      for answers in tokens.answers[split]
    )
  ]
  pool = negatives_lib.hardest(
    encoders.encode_queries(params, tokens.questions[split]),
    corpus_vectors,
    k=k,
    answers=equal,
    same=same,
  )
  streams = negatives_lib.generators(tokens, seed, round_number, split)
  return negatives_lib.draw(pool, streams, n=n)[0]


def records(
  tokens: clients.Tokens,
  table: Int[np.ndarray, "question n"],
  collection: Int[np.ndarray, "sentence length"],
  *,
  split: str = "train",
) -> dict[str, np.ndarray]:
  """Returns a row for each of a client's questions.

  Args:
    tokens: of the client.
    table: of negatives; -1 for none.
    collection: tokens of the sentences that `table` counts: the public corpus,
      or the client's own.
    split: whose questions.

  Returns:
    "questions" [question, length], "answers" [question, longer], "negatives"
    [question, n, longer].
  """
  answers = [of_question[0] for of_question in tokens.answers[split]]
  negatives = collection[table]
  negatives[table < 0] = 0
  return {
    "questions": tokens.questions[split],
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
    sentences = encoders.sentences(params, shown.reshape(-1, length))
    sentences = sentences.reshape(size, columns, -1)
    questions = encoders.queries(params, batch["questions"])
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
  words = [*seed, *_seeds.words(client)]
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
