"""Claims privacy for users: all that one of them holds is one record.

A step draws users, each by a coin of its own (`sampler`). What a user changes (the
mean gradient of its records, or an update of its own training) is clipped as
one vector, and the sum gets noise and a divisor that is public: with stacked
updates that is `optim.dp_aggregate`.

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
  """Returns the sampler in which each user throws a coin of its own.

  Formal guarantee: that of `privacy.sampling.Poisson`, whose records are users
  here: a step has rows for so many that hardly ever one is cut, which is
  accounted for all the same. With users_per_step = num_users everybody takes part
  in every step. Public: all arguments. Secret: seed and draws.

  >>> drawn = sampler(num_users=1000, users_per_step=50)
  >>> drawn.probability, drawn.max_batch_size
  (0.05, 105)

  Args:
    num_users: how many there are.
    users_per_step: the expected number of a step.
    multiple_of: rows of a step are a multiple of this, for example the devices
      of a mesh.
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
  """Returns the promise of DP-FedAvg, from its public settings.

  Formal guarantee:
    Unit: one client, with everything it holds. Relation: ADD_OR_REMOVE_ONE.
    That of `claim.Claim`, for everybody who sees all models of `rounds` rounds
    whose clients `sampler` drew, each a new draw, if in each the clients' updates
    were clipped, summed and noised by `optim.dp_aggregate` with this clip norm
    and noise and a denominator that is public. Public: these settings. Assumes
    what `terms.CLIENT` says.

    Dropping out. A client that is drawn and sends nothing, or nan, adds zero,
    whose norm is below the clip norm as that of any update is, and the divisor
    is no count of those who answered. So it may drop out for reasons that lie
    in its own data: that is one more way for its update to depend on them. It
    is another matter if it makes OTHERS drop out, by keeping the server busy or
    since a round with few answers is thrown away: then one client moves the sum
    by more than the clip norm, and nothing is claimed. A client that is drawn
    and stays away is still counted as drawn.

    Padding. Rows that no client fills add zero, too.

    Few clients. The claim is as true for nine of them, and says nothing: noise
    that hides one of nine moves a model farther than all nine could. With clip
    norm C, m clients in a round, noise multiplier s, T rounds and d parameters,
    clients that all agree move the model by at most T C, and noise by about
    sqrt(T d) s C / m.

  >>> draws = sampling.Poisson.with_margin(
  ...     num_examples=10_000, expected_batch_size=500)
  >>> privacy = claim(sampler=draws, rounds=100, l2_clip_norm=0.5,
  ...                 noise_multiplier=1.0, delta=1e-5)
  >>> round(privacy.epsilon, 2)
  3.5

  Args:
    sampler: draws the clients of a round, which are its records.
    rounds: of the whole training: the steps of the claim.
    l2_clip_norm: of a client's update, over all parameters.
    noise_multiplier: noise standard deviation over the clip norm.
    delta: below 1 / (the number of clients).

  Raises:
    ValueError: for draws that nothing is claimed for, and without clipping.
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
