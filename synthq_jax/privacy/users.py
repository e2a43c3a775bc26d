"""Claims privacy for users: all data of one user is one record.

A step draws each user independently (`sampler`). The contribution of a user is
the mean gradient of its records, or an update of its own training. It is clipped
as one vector. The sum gets noise and a public divisor: for stacked updates,
`optim.dp_aggregate` does all of this.

References:
  McMahan et al. (2018), arXiv:1710.06963, algorithm 1 with the estimator that
  divides by a fixed number.
"""

import dp_accounting

from synthq_jax import checks
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import sampling, terms

__all__ = ["claim", "sampler"]


def sampler(
  *, num_users: int, users_per_step: int, multiple_of: int = 1
) -> sampling.Poisson:
  """Makes the sampler that draws each user independently.

  Formal guarantee: that of `privacy.sampling.Poisson`, whose records are users
  here. A step has so many rows that a user is hardly ever cut, and truncation is
  accounted for all the same. With users_per_step = num_users every user takes
  part in every step. Public: all arguments. Secret: seed and draws.

  >>> drawn = sampler(num_users=1000, users_per_step=50)
  >>> drawn.probability, drawn.max_batch_size
  (0.05, 105)

  Args:
    num_users: the number of users.
    users_per_step: the expected number of users in a step.
    multiple_of: rows of a step are a multiple of this, for example the number of
      devices of a mesh.
  """
  return sampling.Poisson.with_margin(
    num_examples=num_users,
    expected_batch_size=users_per_step,
    multiple_of=multiple_of,
  )


def claim(
  *,
  sampler: sampling.Poisson,
  rounds: int,
  l2_clip_norm: float,
  noise_multiplier: float,
  delta: float,
) -> claim_lib.Claim:
  """Returns the claim of DP-FedAvg for its public settings.

  Formal guarantee:
    Unit: one client, with all its data. Relation: ADD_OR_REMOVE_ONE. The
    guarantee is that of `claim.Claim`, for an observer of all models of `rounds`
    rounds. It requires that `sampler` makes a new draw of clients for each round.
    In each round `optim.dp_aggregate` must clip, sum and noise the updates with
    this clip norm, this noise and a public denominator. Public: these settings.
    Assumed: the assumptions of `terms.CLIENT`.

    Dropping out. A drawn client that sends nothing, or nan, adds zero. Zero is
    below the clip norm, as is every clipped update, and the divisor does not count
    the answers. So a client may drop out for reasons in its own data: this is one
    more way for its update to depend on them. But a client must not make OTHERS
    drop out, by keeping the server busy or because a round with few answers is
    thrown away. Then one client moves the sum by more than the clip norm, and
    nothing is claimed. A drawn client that stays away still counts as drawn.

    Padding. Rows without a client add zero, too.

    Few clients. The claim also holds for nine clients, but then the model learns
    nothing: noise that hides one of nine moves the model farther than all nine
    could. Take clip norm C, m clients in a round, noise multiplier s, T rounds
    and d parameters. Clients that all agree move the model by at most T C, and
    noise moves it by about sqrt(T d) s C / m.

  >>> draws = sampling.Poisson.with_margin(
  ...     num_examples=10_000, expected_batch_size=500)
  >>> privacy = claim(sampler=draws, rounds=100, l2_clip_norm=0.5,
  ...                 noise_multiplier=1.0, delta=1e-5)
  >>> round(privacy.epsilon, 2)
  3.5

  Args:
    sampler: draws the clients of a round; its records are clients.
    rounds: the number of rounds of the training, the steps of the claim.
    l2_clip_norm: the norm that a client's update is clipped to, over all
      parameters.
    noise_multiplier: noise standard deviation over the clip norm.
    delta: delta of the claim, below 1 / (the number of clients).

  Raises:
    ValueError: if the sampler is not `sampling.Poisson`, or the clip norm is not
      positive and finite.
  """
  if not isinstance(sampler, sampling.Poisson):
    raise ValueError(
      "expected a privacy.sampling.Poisson as the sampler of users, got"
      f" {type(sampler).__name__}: draw them with privacy.users.sampler"
    )
  checks.within("(0, inf)", l2_clip_norm=l2_clip_norm)
  return claim_lib.Claim(
    sampler=sampler,
    steps=rounds,
    noise_multiplier=noise_multiplier,
    l2_clip_norm=l2_clip_norm,
    delta=delta,
    relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    words=terms.CLIENT,
  )
