"""The words of every promise: unit, what is public, assumed, not protected.

One value of `Terms` for each kind of private training of the project, so that
whoever asks what is promised reads them side by side. `claim` adds the numbers.
"""

import dataclasses
import re
from collections.abc import Sequence

__all__ = [
  "CLIENT",
  "DRAWN_PAIRS",
  "DRAWN_QUERIES",
  "DRAWN_JUDGED",
  "DRAWN_USERS",
  "EXAMPLES",
  "IDEAL_NUMBERS",
  "IMAGE_PAIRS",
  "QUERIES",
  "RANKED",
  "SCORES",
  "SECRET_SEEDS",
  "SPLIT",
  "SUMMED",
  "T5X",
  "Terms",
  "fixed_secret",
  "most_queries",
  "user",
  "users",
  "with_fixed_secret",
]

SECRET_SEEDS = (
  "The seeds of sampling and noise stay secret: whoever knows them can "
  "recompute the noise and take it away."
)
IDEAL_NUMBERS = (
  "Pseudo-random numbers stand for random ones and floating point numbers "
  "for real ones: attacks on the low bits of the noise are not covered."
)
_NOISE_SEED = "The seed of the noise stays secret: whoever knows it can take the noise away."
SPLIT = (
  "Which queries are for training and which for testing is treated as fixed."
)
_KEPT = "A query comes with the one of its relevant documents that was kept."
DRAWN_USERS = (
  "Users are drawn, and the mean gradient of one's queries is clipped as one."
  f" {_KEPT}"
)
DRAWN_PAIRS = (
  "Queries are drawn one by one; what is clipped, the mechanism says, and noise is"
  f" for all of a user's together. {_KEPT}"
)
DRAWN_QUERIES = (
  "Queries are drawn and clipped one by one, and noise is for all of a user's"
  f" together. {_KEPT}"
)
DRAWN_JUDGED = (
  "Queries are drawn and clipped one by one, each with all of its judgements, and"
  " noise is for all of a user's together."
)
SUMMED = "The scores of one user's queries are added up."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
  """What is promised to whom, in sentences that statements carry."""

  unit: str = "example"
  """What one record is."""
  mechanism: str = "per-record gradients, clipped, summed, Gaussian noise"
  """What is clipped and noised."""
  public: tuple[str, ...] = ()
  """What everybody is taken to know."""
  assumptions: tuple[str, ...] = ()
  """What must hold for the promise to hold."""
  not_protected: tuple[str, ...] = ()
  """What is not promised."""
  notes: tuple[str, ...] = ()
  """How the result is derived."""
  secret_is_fixed: bool = False
  """Whether anybody can recompute the noise; `with_fixed_secret` says it."""
  without_noise: str = ""
  """What is said instead where there is no noise; empty: epsilon is infinite."""

  def but(
    self,
    *,
    assumptions: Sequence[str] = (),
    not_protected: Sequence[str] = (),
    **fields: str,
  ) -> "Terms":
    """Returns these terms with more sentences, and other fields.

    Args:
      assumptions: sentences that come first.
      not_protected: sentences that come last.
      **fields: values in place of these.
    """
    return dataclasses.replace(
      self,
      assumptions=(*assumptions, *self.assumptions),
      not_protected=(*self.not_protected, *not_protected),
      **fields,
    )


def _shown_of(records: str) -> tuple[str, str]:
  """Returns what no promise of ours hides of records, such as "test queries"."""
  return (
    f"How many {records} there are.",
    f"What many {records.split()[-1]} have in common: learning that is the purpose.",
  )


QUERIES = Terms(
  unit="query",
  public=(
    "The documents.",
    "The number of private queries.",
    "The settings: model, vocabulary, learning rate, clip norm, batch sizes, "
    "number of steps and noise.",
  ),
  assumptions=(
    "A query is one record, drawn and clipped as one, with the one of its "
    "relevant documents that was kept.",
    SECRET_SEEDS,
    "Which queries were in which batch stays secret; every intermediate model "
    "may be published.",
    "Losses, gradient norms and scores on private queries are not published, but "
    "for scores with noise that have a claim of their own.",
    "The settings were chosen without looking at the private queries; trials "
    "that did look are listed as releases of their own.",
    IDEAL_NUMBERS,
  ),
  not_protected=(
    "Which documents exist and what they say.",
    *_shown_of("private queries"),
  ),
)
"""Of a generator or retriever that is trained on private queries."""


SCORES = Terms(
  unit="query",
  mechanism="scores of test queries, each in [0, 1] and less a half, summed,"
  " Gaussian noise",
  public=(
    "The documents.",
    "The number of test queries.",
    "The settings: which systems are scored, by which measures, and the noise.",
  ),
  assumptions=(
    "A query is one record with its judgements.",
    "A query's score depends on that query, its judgements, the documents and "
    "the system alone, to the last bit, whatever is searched beside it.",
    "The systems were released under claims of their own, which come on top.",
    _NOISE_SEED,
    "Nothing else that was computed from test queries is published, but for"
    " what has a claim of its own.",
    "The settings were chosen without looking at the test queries; trials"
    " that did look are listed as releases of their own.",
    IDEAL_NUMBERS,
  ),
  not_protected=_shown_of("test queries"),
)
"""Of means over private test queries."""


EXAMPLES = Terms(
  unit="example",
  mechanism="per-example gradients, clipped, summed, Gaussian noise",
  public=(
    "The number of private examples.",
    "The settings: model, where training starts, learning rate, clip norm, "
    "batch sizes, number of steps and noise.",
  ),
  assumptions=(
    "An example is one record, drawn and clipped as one.",
    SECRET_SEEDS,
    "Which examples were in which batch stays secret; every intermediate model "
    "may be published.",
    "Losses, gradient norms and scores on private examples are not published.",
    "The settings were chosen without looking at the private examples; trials "
    "that did look are listed as releases of their own.",
    IDEAL_NUMBERS,
  ),
  not_protected=_shown_of("private examples"),
)
"""Of any model that is trained on private examples, as a classifier."""

RANKED = dataclasses.replace(
  QUERIES,
  assumptions=(
    "A query is one record, drawn and clipped as one, with all of its judgements.",
    "What is found for a query, and how it scores, depends on that query, the"
    " documents and the retriever alone, to the last bit, whatever is searched"
    " beside it.",
    *QUERIES.assumptions[1:],
  ),
)
"""Of what ranks the documents that BM25 and a retriever find."""

T5X = dataclasses.replace(
  EXAMPLES,
  mechanism="per-example gradients in T5X, clipped, summed, Gaussian noise",
  public=(
    "The number of private examples.",
    "The settings: model, vocabulary, initial checkpoint, learning rate, clip "
    "norm, batch sizes, number of steps and noise.",
  ),
  assumptions=(
    "An example of the task is one record, drawn and clipped as one, and a "
    "person's or query's data is in one example.",
    SECRET_SEEDS,
    "Which examples were in which batch stays secret; every checkpoint may be "
    "published.",
    "Losses, gradient norms and scores on private examples are not published: "
    "what T5X's evaluation of a private split writes is outside this claim.",
    "The settings were chosen without looking at the private examples; trials "
    "that did look are releases of their own, each in its own MODEL_DIR.",
    IDEAL_NUMBERS,
  ),
  without_noise="Trained in T5X on private examples without noise.",
)
"""Of a task that is trained inside T5X."""

IMAGE_PAIRS = Terms(
  unit="pair of images",
  public=(
    "The test images with their labels, and which images are for testing.",
    "The number of private pairs.",
    "The settings: encoder, loss, temperature, learning rate, clip norm, batch"
    " sizes, number of steps and noise.",
  ),
  assumptions=(
    "An image is in one pair at most, and a pair is drawn as one.",
    SECRET_SEEDS,
    "Which pairs were in which batch stays secret; every intermediate encoder"
    " may be published.",
    "The settings were chosen without looking at the private pairs. Those of"
    " the study's files were chosen on the public set itself: for private"
    " images such trials would be releases of their own.",
    IDEAL_NUMBERS,
  ),
  not_protected=(
    "How many private pairs there are.",
    "Somebody with images in several pairs is protected less.",
    "What many images have in common: learning that is the purpose.",
  ),
  notes=(
    "A head was trained on the frozen vectors of separate public images"
    " and labels, without privacy: post-processing of the encoder.",
  ),
  without_noise="Trained on the pairs without clipping and noise.",
)
"""Of an image encoder that is trained on pairs of images."""

CLIENT = Terms(
  unit="client",
  mechanism="per-client updates, clipped, summed, Gaussian noise",
  public=(
    "The number of clients.",
    "The settings: model, vocabulary, where training starts, learning rates, "
    "clip norm, clients per round, local steps, number of rounds and noise.",
  ),
  assumptions=(
    "A client is one record with everything it holds, and takes part in a round "
    "once at most.",
    "What a client sends depends on the published models, its own data and its "
    "own key, not on who else takes part.",
    "Whether a client drops out, is late or fails does not depend on another "
    "client's data, and no round is repeated, prolonged or given up because of "
    "it: a client that is missing adds zero to a sum whose denominator is "
    "fixed.",
    "The sums are made by somebody whom the clients trust, or by a protocol "
    "that shows no more than the noisy sum.",
    "Who took part in a round, who dropped out and the norms of updates stay "
    "secret; every intermediate model may be published.",
    SECRET_SEEDS,
    "The settings were chosen without looking at the clients' data; trials that "
    "did look are listed as releases of their own.",
    IDEAL_NUMBERS,
  ),
  not_protected=_shown_of("clients"),
)
"""Of federated averaging that hides whole clients."""


WHO = "client"
"""The column of user ids that a unit does not name."""
_USER = re.compile(
  r"user(?: \((.+)\))? with (?:one query|up to (\d+) queries)", re.S
)


def user(queries: int, who: str = WHO) -> str:
  """Returns the unit of a promise that reads so many queries of a user at most.

  >>> user(1), user(4), most_queries(user(4)), user(4, "device")
  ('user with one query', 'user with up to 4 queries', 4, 'user (device) with up to 4 queries')

  Args:
    queries: the most that are read.
    who: the column of user ids: users by another one are another unit.
  """
  named = "" if who == WHO else f" ({who})"
  number = "one query" if queries == 1 else f"up to {queries} queries"
  return f"user{named} with {number}"


def most_queries(unit: str) -> int | None:
  """Returns how many queries of a user a unit reads; None: it is no user."""
  found = _USER.fullmatch(unit)
  return found and int(found[2] or 1)


def who(unit: str) -> str:
  """Returns the column of user ids of a unit that `user` has named.

  >>> who(user(4)), who(user(1, "device"))
  ('client', 'device')
  """
  found = _USER.fullmatch(unit)
  assert found, "a unit that `user` has named"
  return found[1] or WHO


def users(unit: str, how: str, base: Terms) -> Terms:
  """Returns the words of a promise to users instead of single queries.

  Args:
    unit: of `user`.
    how: what is done with the queries of one user, such as `DRAWN_USERS`.
    base: the words for single queries, of which the first assumption says what
      is one record.
  """

  def said(sentences: Sequence[str]) -> tuple[str, ...]:
    changes = {
      "The number of": "The numbers of users and of",
      "How many": "How many users and",
      "What many queries": "What many users",
    }
    for old, new in changes.items():
      sentences = [one.replace(old, new) for one in sentences]
    return tuple(sentences)

  queries = most_queries(unit)
  return dataclasses.replace(
    base,
    unit=unit,
    public=said(base.public),
    assumptions=(
      "A user is all queries with one user id, the same id in all results that"
      f" one secret is used for, of which at most {queries:,}"
      f" {'is' if queries == 1 else 'are'} read, chosen by a keyed hash of each; that choice and the user's split depend on no other user.",
      how,
      *base.assumptions[1:],
    ),
    not_protected=said(base.not_protected),
  )


def fixed_secret(what: str) -> str:
  """Returns what is assumed where the secret is known to everybody.

  Args:
    what: "run" or "study".
  """
  return (
    f"The secret of this {what} was fixed by its settings, as only public data"
    " allows: anybody can recompute the noise, so this statement shows what"
    " would be claimed, and protects nobody."
  )


def with_fixed_secret(words: Terms, what: str) -> Terms:
  """Marks terms whose secret is known to everybody, and says so first.

  >>> with_fixed_secret(QUERIES, "run").secret_is_fixed
  True

  Args:
    words: of the promise.
    what: "run" or "study".
  """
  marked = words.but(assumptions=(fixed_secret(what),))
  return dataclasses.replace(marked, secret_is_fixed=True)
