"""What the stages hand to each other: frozen, JSON, by directory.

Paths are relative to the working directory of the run, so that it can be moved
as a whole. A path under `private/` must not be shared; everything else may be.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterable

from synthq_jax import field_kinds, intervals
from synthq_jax.data import sources
from synthq_jax.models import token_ids as token_ids_lib
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.runtime import rows as rows_lib

__all__ = [
  "ASKED_NAME",
  "PRIVATE",
  "AuditBound",
  "AuditCell",
  "AuditReport",
  "Checkpoint",
  "Claimed",
  "Evaluation",
  "PreparedData",
  "PublicDocuments",
  "ReleasedMean",
  "ReleasedRow",
  "ReleasedScores",
  "Report",
  "RowResult",
  "Saved",
  "SyntheticQueries",
  "TestSet",
  "is_private_path",
  "inherited",
  "is_shareable",
  "is_shareable_score",
  "public_documents",
]

_CONTAMINATED = 1e-3

PRIVATE = "private"
"""The folder of the working directory that must not be shared."""

ASKED_NAME = "asked.npy"
"""Beside the documents: the positions of those that train queries ask about."""


def is_private_path(path: str) -> bool:
  """Says whether a path lies in the folder that must not be shared."""
  return PRIVATE in pathlib.PurePath(path).parts


def is_shareable(made: "Claimed") -> bool:
  """Says whether a model, or queries, may be given away: by claim and folder."""
  finite = not math.isinf(made.statement.epsilon)
  return finite and not is_private_path(made.directory)


def is_shareable_score(scored: "Evaluation") -> bool:
  """Says whether scores may be given away: by what they say, claim and folder."""
  finite = scored.epsilon is None or not math.isinf(scored.epsilon)
  return not scored.private and finite and not is_private_path(scored.directory)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
  """A result that lies in a folder."""

  directory: str
  """Where; under `private/` when it must not be shared."""
  seconds: float = 0.0
  """How long the stage took."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claimed(Saved):
  """A result with a privacy claim."""

  statement: statement_lib.PrivacyStatement
  """What is claimed; post-processing inherits it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowResult(Claimed):
  """A model, queries or vectors that belong to one row."""

  row: rows_lib.Row
  """The row; of a generator and of queries that of the retriever which learns from
  them."""

  @property
  def name(self) -> str:
    """Name of the row, such as "synthetic_eps8"."""
    return str(self.row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicDocuments:
  """What PreparedData says of public things, and nothing else.

  Formal guarantee:
    A function of the documents, of the vocabulary and of settings, and of which
    documents were asked about where settings call that public: it names no
    private file and counts no query. A stage that is given this instead of
    PreparedData cannot read a private query by way of it.
  """

  directory: str
  """corpus.jsonl, tokens and ids of it, and the vocabulary."""
  num_documents: int
  """Documents in the public collection."""
  vocabulary: str
  """The SentencePiece model."""
  vocab_size: int
  """Ids of the vocabulary, extra ids included."""
  extra_ids: int
  """Sentinels among them."""
  document_length: int
  """Tokens of a document, or of a passage, that generators read, EOS included."""
  query_length: int
  """Tokens of a query, EOS included."""
  passage_stride: int = 0
  """Tokens from one passage's beginning to the next's; 0: documents are cut."""
  num_passages: int = 0
  """What encoders and generators read of the collection; 0: not counted."""
  from_pairs: bool = False
  """Whether private queries chose the documents (`sources.Kind`)."""
  num_asked: int = 0
  """Documents that train queries ask about, where the settings say that they are
  public (`prepare_data.Config.written_for`): their positions stand in
  `ASKED_NAME`, and queries are written for them alone. 0: nothing says which."""
  retriever_length: int = 0
  """Tokens of a document that retrievers read, where these are more."""
  token_ids: token_ids_lib.TokenIds = field_kinds.later(
    token_ids_lib.TokenIds()
  )
  """The special ids of the vocabulary."""

  @property
  def read_length(self) -> int:
    """Tokens of a document that retrievers read, and that are kept."""
    return max(self.document_length, self.retriever_length)

  @property
  def not_protected(self) -> tuple[str, ...]:
    """What nothing made of these documents protects, by name."""
    told = {"from_pairs": self.from_pairs, "asked": self.num_asked}
    return tuple(name for name, holds in told.items() if holds)

  def statement(self) -> statement_lib.PrivacyStatement:
    """Returns the statement of what is made of these documents alone.

    Formal guarantee: no private record is read beside the documents. Where the
    documents were read from the queries' own, or queries are written for those
    that were asked about, they depend on each of them, and the statement says so
    instead of that it tells nothing.
    """
    return statement_lib.none(
      public=("documents",) if self.not_protected else (),
      not_protected=self.not_protected,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedData(PublicDocuments):
  """Documents (public), queries (private), splits and token arrays."""

  private_directory: str
  """Private part: queries.jsonl, qrels and the arrays of pairs."""
  source: str
  """Where the data came from, in one line."""
  digest: str
  """Digest of all data, keyed with the run's secret: it confirms nothing."""
  versions: str
  """Versions of the packages the demo set came from, or empty."""
  unit: unit_lib.Unit
  """The unit of privacy: queries, or users."""
  num_queries: dict[str, int]
  """Queries with a relevant document, for each split."""
  num_pairs: dict[str, int]
  """(query, document) pairs kept for each split."""
  test_split: str
  """The split that is scored."""
  num_public_test: int
  """Pseudo-queries of the public test set; 0 if no document gave one."""
  cut_documents: float
  """Share of documents longer than `read_length`, or with several passages."""
  seconds: float = 0.0
  """How long the stage took."""
  division: str = ""
  """The rule that made the splits (`collection.Collection`)."""
  num_users: dict[str, int] = dataclasses.field(default_factory=dict)
  """Who asked, for each split; empty where the unit is the query."""

  @property
  def queries_per_user(self) -> int:
    """The most queries of a user; 0 where the unit is the query."""
    return self.unit.max_records if self.unit.is_user else 0

  def units(self, split: str) -> int:
    """Returns how many users, or else queries, a split has; 0: it is not there.

    Args:
      split: several are joined by "+".
    """
    return self.num_users.get(split, self.num_queries.get(split, 0))

  def part(self, split: str) -> str:
    """Returns what a claim about one split says it reads; see `Release.part`.

    Args:
      split: several are joined by "+".
    """
    return f"{self.division}:{split}" if self.division else ""

  def __post_init__(self):
    """Follows the source, also where an earlier version wrote the result."""
    from_pairs = sources.kind_of(self.source).from_pairs
    object.__setattr__(self, "from_pairs", from_pairs)


def releases_behind(made: Iterable[Claimed]) -> tuple[str, ...]:
  """Returns identifiers of the private releases that results stand on, sorted.

  Numbers that are computed from a model tell of it also when it is gone.
  """
  found = {
    entry.identifier.partition("#")[0]
    for one in made
    for entry in one.statement.ledger
  }
  return tuple(sorted(found))


def public_documents(prepared: PreparedData) -> PublicDocuments:
  """Returns the public part of prepared data."""
  names = [field.name for field in dataclasses.fields(PublicDocuments)]
  return PublicDocuments(**{name: getattr(prepared, name) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TestSet(Saved):
  """A public collection with judged queries, tokenized; nothing is private.

  The folder holds corpus.jsonl and its tokens, queries.jsonl, qrels/test.tsv and
  queries.npz.
  """

  __test__ = False  # for pytest
  QUERIES = "queries.npz"

  name: str
  """In tables; parts of a group of BEIR's are GROUP.PART."""
  split: str
  """Of the source, that was taken."""
  drop_identical: bool
  """Whether results with the query's own id are dropped."""
  num_documents: int
  """Documents in the collection."""
  num_queries: int
  """Queries with a relevant document."""
  cut_documents: float
  """Share of documents longer than the document length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint(RowResult):
  """A trained model: params.safetensors and config.json in a directory."""

  kind: str
  """"generator" or "retriever"."""
  steps: int
  """Optimizer steps."""
  batch_size: int
  """Examples of a step (expected, where batches are Poisson)."""
  num_parameters: int
  """Trained parameters."""
  metrics: str
  """JSON lines of step, loss, ...; under `private/` when data was private;
  empty where nothing was trained."""
  prompt_tokens: int = 0
  """Last ids of the vocabulary that stand before each input: a trained prompt."""

  @property
  def name(self) -> str:
    """Name of the row; of a generator that of its queries, such as "eps8"."""
    return self.row.queries if self.kind == "generator" else str(self.row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticQueries(RowResult):
  """Queries written by a generator for public documents, or what was kept.

  The folder, of the last of generate and filter_queries that ran,
  holds queries.jsonl (_id, text, document) and tokens.npz; `seconds` are of all.
  """

  prefix: str
  """What stood before each document."""
  sampler: str
  """Decoding settings in words."""
  num_documents: int
  """Documents written for, drawn from the whole public collection."""
  queries_per_document: int
  """Of each document or passage."""
  num_queries: int
  """Queries that the filters kept."""
  removed: dict[str, int]
  """What each filter of each stage took out, by reason."""
  gauge: float
  """nDCG@10 of BM25 finding a query's own document."""
  copy_rate: float
  """Share of the queries' 4-grams that stand in their document."""
  mean_words: float
  """Mean length of a query in words."""
  examples: tuple[tuple[str, str], ...]
  """A few (query, document) pairs, drawn at random."""
  filters: str = ""
  """What filter_queries did, in one sentence; empty: it did not run."""

  @property
  def name(self) -> str:
    """Name of the queries: "public_only", or such as "eps8"."""
    return self.row.queries


def inherited(
  queries: SyntheticQueries | None, *, real: str, synthetic: str
) -> statement_lib.PrivacyStatement:
  """Returns the statement of what was made of queries and public documents.

  Formal guarantee: of synthetic queries their own, by post-processing, PROVIDED
  no private record is read beside them; of real ones none (epsilon inf).

  Args:
    queries: synthetic ones; None: the private ones.
    real: what was done with private queries, one sentence.
    synthetic: what was done with synthetic queries, one sentence.
  """
  if queries is None:
    return statement_lib.non_private(real)
  return statement_lib.inherit(queries.statement, synthetic)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation(Saved):
  """Scores of one retriever on one set of test queries.

  The folder holds run.trec and per_query.json; it is private when the queries
  are.
  """

  row: rows_lib.Row
  """The row."""
  label: str
  """The row in words."""
  test_set: str
  """"test" (private queries), "public" (pseudo-queries) or the name of a
  `TestSet`."""
  private: bool
  """Whether the scores come from private queries, or a private model."""
  measures: dict[str, intervals.Interval]
  """By name, e.g. "nDCG@10" and "R@10": means over all judged queries, with 95%
  bootstrap intervals over them."""
  num_queries: int
  """Judged queries averaged over."""
  traps: tuple[str, ...]
  """Choices of the evaluation a reader should know."""
  split: str = ""
  """Whose judgements they are."""
  drop_identical: bool = True
  """Whether results with the query's own id were dropped."""
  met: str = ""
  """How often these choices mattered, in one sentence."""
  statement: statement_lib.PrivacyStatement | None = None
  """Of the system that was scored; None where no private record went into it."""

  @property
  def epsilon(self) -> float | None:
    """Of the system; inf without privacy, None where no private data was."""
    return None if self.statement is None else self.statement.epsilon

  @property
  def name(self) -> str:
    """Name of the row, such as "fused_synthetic_eps8"."""
    return str(self.row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReleasedMean:
  """A noisy mean, or a difference of two; the truth is not told."""

  here: intervals.Interval
  """Of the test queries themselves: what the noise leaves open."""
  beyond: intervals.Interval
  """Of the queries that they were drawn from: noise and sampling together, the
  latter at its largest for such a mean."""

  def turned(self) -> "ReleasedMean":
    """Returns the difference the other way round."""
    return ReleasedMean(here=-self.here, beyond=-self.beyond)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReleasedRow:
  """A row that may be shared, scored on private queries."""

  row: rows_lib.Row
  """The row."""
  label: str
  """The row in words."""
  epsilon: float | None
  """Of the system, as `Evaluation.epsilon`."""
  means: dict[str, ReleasedMean]
  """By measure."""
  over_bm25: dict[str, ReleasedMean]
  """By measure: less the released mean of BM25; empty where there is none."""

  @property
  def name(self) -> str:
    """Name of the row."""
    return str(self.row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReleasedScores(Claimed):
  """Scores on private test queries with noise, which may be shared.

  The statement is what the noise promises; the systems' own come on top.
  """

  num_queries: int
  """Test queries, public with the release."""
  confidence: float
  """Of each interval by itself."""
  noise: float
  """Standard deviation of the noise on each mean."""
  rows: tuple[ReleasedRow, ...]
  """In the order of the private table."""
  systems: tuple[str, ...] = ()
  """Identifiers of the releases behind what was scored, `releases_behind`."""
  kind: str = "scores"
  name: str = "test"

  def __post_init__(self):
    """Refuses scores without a release in a ledger behind them."""
    if self.statement.is_public or math.isinf(self.statement.epsilon):
      raise ValueError(
        "expected released scores with a finite epsilon and a ledger, got"
        f" epsilon={self.statement.epsilon} and"
        f" {len(self.statement.ledger)} releases: make them with the"
        " release_scores stage"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditCell:
  """Canaries of one kind that stand in the data equally often."""

  kind: str
  """Of `audit.canaries.KINDS`."""
  repetitions: int
  """How often each inserted one stands there."""
  ranks: tuple[int, ...]
  """Of the inserted ones' secrets among `AuditReport.num_ranked`."""
  held_out_ranks: tuple[int, ...]
  """Of the others: the control group."""
  exposure: tuple[float, ...]
  """Bits of the inserted ones' secrets, among `AuditReport.num_candidates`;
  empty where the secret stands in the document."""
  leaked: int | None
  """Inserted ones whose secret stands in a written query; None where it
  cannot."""
  leaked_held_out: int | None
  """The same of the others: coincidence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditBound:
  """What one attack shows about canaries that stand there equally often."""

  attack: str
  """"likelihood", "synthetic" or "retriever"."""
  repetitions: int
  """How often each inserted canary stands in the data."""
  claimed_epsilon: float
  """For a group of that many records; inf: nothing is claimed."""
  num_inserted: int
  """Canaries trained on."""
  num_held_out: int
  """Canaries left out."""
  epsilon_one_run: float
  """Lower bound, for any mechanism."""
  epsilon_one_run_fdp: float
  """Lower bound, for a Gaussian trade-off curve."""
  auroc: tuple[float, float, float]
  """Area under the ROC curve, and its interval."""
  tpr_at_1_fpr: tuple[float, float, float]
  """True positives at 1% false ones, and its interval."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditReport(Saved):
  """Canaries in the fine-tuning data: did the generator learn them?

  The folder, which holds the canaries and their ranks, is private.
  """

  row: rows_lib.Row
  """The row of the audited generator's queries."""
  cells: tuple[AuditCell, ...]
  """Each kind and number of repetitions."""
  bounds: tuple[AuditBound, ...]
  """Each attack and number of repetitions."""
  num_candidates: int
  """Candidates among which exposure is measured."""
  num_ranked: int
  """Candidates among which the ranks are."""
  num_searched: int
  """Synthetic queries of the run that were searched for secrets, beside those
  that the audit had written; 0: none."""
  confidence: float
  """Of `lower_bound`; each bound and interval by itself has the higher one that
  all attacks together need for it."""
  claimed_epsilon: float
  """Epsilon of the audited run's statement; inf: nothing is claimed."""
  claimed_delta: float
  """Delta that the bounds are computed for."""
  lower_bound: float | None
  """On epsilon, of all attacks together, from canaries that stand there once:
  above the claim, the claim is wrong. None: there were too few of them."""
  ceiling: float
  """What `lower_bound` would be if every guess were right: a greater claim
  cannot be refuted by so few canaries."""
  control: float
  """p-value of the control: held-out secrets rank as by chance, and all do under
  the public checkpoint. Tiny: canaries were known before the private training,
  and nothing else here means anything."""

  @property
  def name(self) -> str:
    """Name of the generator, such as "eps8"."""
    return self.row.queries

  @property
  def exceeds_claim(self) -> bool:
    """Whether the audit refutes the statement."""
    return (self.lower_bound or 0.0) > self.claimed_epsilon

  @property
  def is_contaminated(self) -> bool:
    """Whether canaries were known before; by chance once in 1,000 audits."""
    return self.control < _CONTAMINATED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """The reports of a run."""

  html: str
  """Shareable page."""
  markdown: str
  """The same as text."""
  private_html: str
  """Page with private content, under `private/`."""
  table: str
  """The main table as it is printed on the screen."""
  verdict: str = ""
  """What stands at the top of the private page, as it is printed."""
