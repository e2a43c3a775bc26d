"""Defines the results that stages pass to each other: frozen, stored as JSON.

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
  "is_shareable",
  "is_shareable_score",
  "public_documents",
]

_CONTAMINATED = 1e-3

PRIVATE = "private"
"""The folder of the working directory that must not be shared."""

ASKED_NAME = "asked.npy"
"""File next to the documents: positions of those that train queries ask
about."""


def is_private_path(path: str) -> bool:
  """Checks whether a path lies in the folder that must not be shared."""
  return PRIVATE in pathlib.PurePath(path).parts


def is_shareable(result: "Claimed") -> bool:
  """Checks by claim and folder whether a model, or queries, may be shared."""
  finite = not math.isinf(result.statement.epsilon)
  return finite and not is_private_path(result.directory)


def is_shareable_score(scored: "Evaluation") -> bool:
  """Checks by flag, claim and folder whether scores may be shared."""
  finite = scored.epsilon is None or not math.isinf(scored.epsilon)
  return not scored.private and finite and not is_private_path(scored.directory)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
  """A result that is saved in a folder."""

  directory: str
  """Folder of the result; under `private/` if it must not be shared."""
  seconds: float = 0.0
  """Time that the stage took, in seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claimed(Saved):
  """A result with a privacy claim."""

  statement: statement_lib.PrivacyStatement
  """Privacy statement of the result; post-processing inherits it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowResult(Claimed):
  """A model, queries or vectors that belong to one row."""

  row: rows_lib.Row
  """Row of the result; of a generator and its queries, that of their retriever."""

  @property
  def name(self) -> str:
    """Name of the row, such as "synthetic_eps8"."""
    return str(self.row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicDocuments:
  """The public part of PreparedData, and nothing else.

  Formal guarantee:
    A function of the documents, the vocabulary and the settings; also of the
    list of documents that were asked about, if settings call that list public.
    It names no private file and counts no query. A stage that receives this
    instead of PreparedData cannot read a private query through it.
  """

  directory: str
  """Folder of corpus.jsonl, its tokens and ids, and the vocabulary."""
  num_documents: int
  """Documents in the public collection."""
  vocabulary: str
  """File of the SentencePiece model."""
  vocab_size: int
  """Ids of the vocabulary, extra ids included."""
  extra_ids: int
  """Sentinels among the ids."""
  document_length: int
  """Tokens of a document, or of a passage, that generators read, EOS included."""
  query_length: int
  """Tokens of a query, EOS included."""
  passage_stride: int = 0
  """Tokens from one passage's beginning to the next's; 0: documents are cut."""
  num_passages: int = 0
  """Passages that encoders and generators read; 0: not counted."""
  from_pairs: bool = False
  """Whether private queries chose the documents (`sources.Kind`)."""
  num_asked: int = 0
  """Documents that train queries ask about, if the settings call their list
  public (`prepare_data.Config.written_for`). Their positions are in
  `ASKED_NAME`, and queries are written for them alone. 0: the list is not
  public."""
  retriever_length: int = 0
  """Tokens of a document that retrievers read, if more than generators read."""
  token_ids: token_ids_lib.TokenIds = field_kinds.later(
    token_ids_lib.TokenIds()
  )
  """The special ids of the vocabulary."""

  @property
  def read_length(self) -> int:
    """Tokens of a document that retrievers read and the run stores."""
    return max(self.document_length, self.retriever_length)

  @property
  def not_protected(self) -> tuple[str, ...]:
    """Names of facts that no result made of these documents protects."""
    facts = {"from_pairs": self.from_pairs, "asked": self.num_asked}
    return tuple(name for name, holds in facts.items() if holds)

  def statement(self) -> statement_lib.PrivacyStatement:
    """Returns the statement of results made of these documents alone.

    Formal guarantee: such a result reads no private record besides the
    documents. If the documents come from the queries' own file, or queries are
    written for the documents that were asked about, the result depends on every
    such document. The statement then says so, instead of saying that it reveals
    nothing.
    """
    return statement_lib.none(
      public=("documents",) if self.not_protected else (),
      not_protected=self.not_protected,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedData(PublicDocuments):
  """Documents (public), queries (private), splits and token arrays."""

  private_directory: str
  """Folder of the private part: queries.jsonl, qrels and the arrays of
  pairs."""
  source: str
  """Source of the data, in one line."""
  digest: str
  """Digest of all data, keyed with the run's secret: nobody can confirm a guess
  with it."""
  versions: str
  """Versions of the packages that the demo set came from, or empty."""
  unit: unit_lib.Unit
  """The unit of privacy: queries, or users."""
  num_queries: dict[str, int]
  """Queries with a relevant document, by split."""
  num_pairs: dict[str, int]
  """(query, document) pairs kept, by split."""
  test_split: str
  """The split that is scored."""
  num_public_test: int
  """Pseudo-queries of the public test set; 0 if no document gives one."""
  cut_documents: float
  """Share of documents longer than `read_length`, or with several passages."""
  seconds: float = 0.0
  """Time that the stage took, in seconds."""
  division: str = ""
  """The rule that made the splits (`collection.Collection`)."""
  num_users: dict[str, int] = dataclasses.field(default_factory=dict)
  """Users with queries, by split; empty if the unit is the query."""

  @property
  def queries_per_user(self) -> int:
    """Maximum queries of a user; 0 if the unit is the query."""
    return self.unit.max_records if self.unit.is_user else 0

  def units(self, split: str) -> int:
    """Returns the number of users, or else queries, of a split; 0: no such
    split.

    Args:
      split: name of the split; several are joined by "+".
    """
    return self.num_users.get(split, self.num_queries.get(split, 0))

  def part(self, split: str) -> str:
    """Returns the part of the data that a claim names; see `Release.part`.

    Args:
      split: name of the split; several are joined by "+".
    """
    return f"{self.division}:{split}" if self.division else ""

  def __post_init__(self):
    """Sets `from_pairs` by the source; earlier versions did not store it."""
    from_pairs = sources.kind_of(self.source).from_pairs
    object.__setattr__(self, "from_pairs", from_pairs)


def list_releases(models: Iterable[Claimed]) -> tuple[str, ...]:
  """Returns sorted identifiers of the private releases that results depend on.

  Numbers that are computed from a model reveal it even after it is deleted.
  """
  identifiers = {
    entry.identifier.partition("#")[0]
    for model in models
    for entry in model.statement.ledger
  }
  return tuple(sorted(identifiers))


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
  """Name in tables; parts of a group of BEIR's are GROUP.PART."""
  split: str
  """Split of the source that is scored."""
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
  """Examples of a step; the expected number if batches are Poisson."""
  num_parameters: int
  """Trained parameters."""
  metrics: str
  """File of JSON lines of step, loss, ...; under `private/` if the data is
  private; empty if nothing was trained."""
  prefix: str = field_kinds.later("")
  """Text before each document that a generator was trained to read."""

  @property
  def name(self) -> str:
    """Name of the row; for a generator that of its queries, such as "eps8"."""
    return self.row.queries if self.kind == "generator" else str(self.row)

  @property
  def document_encoder(self) -> "Checkpoint":
    """The retriever whose document vectors this one searches: itself."""
    return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticQueries(RowResult):
  """Synthetic queries of a generator for public documents, after all filters.

  The folder belongs to the last of generate and filter_queries that ran. It
  holds queries.jsonl (_id, text, document) and tokens.npz; `seconds` includes
  both stages.
  """

  prefix: str
  """Text before each document."""
  sampler: str
  """Settings of decoding, in words; `decoding` holds them as numbers."""
  num_documents: int
  """Documents that queries are written for."""
  queries_per_document: int
  """Queries sampled for each document or passage."""
  num_queries: int
  """Queries that the filters kept."""
  removed: dict[str, int]
  """Queries that the filters of both stages removed, by reason."""
  gauge: float
  """Mean nDCG@10 of BM25 that searches for a query's own document."""
  copy_rate: float
  """Share of the queries' 4-grams that also occur in their document."""
  mean_words: float
  """Mean length of a query in words."""
  examples: tuple[tuple[str, str], ...]
  """A few (query, document) pairs, drawn at random."""
  filters: str = ""
  """The filters of filter_queries, in one sentence; empty: it did not run."""
  decoding: dict[str, float] | None = field_kinds.later(None)
  """`generate.Config`'s p, temperature and max_length; None: not recorded."""

  @property
  def name(self) -> str:
    """Name of the queries: "public_only", or such as "eps8"."""
    return self.row.queries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation(Saved):
  """Scores of one system on one set of test queries.

  The folder holds run.trec and per_query.json; it is private when the queries
  are.
  """

  row: rows_lib.Row
  """Row of the system."""
  label: str
  """Description of the row, in words."""
  test_set: str
  """"test" (private queries), "public" (pseudo-queries) or the name of a
  `TestSet`."""
  private: bool
  """Whether the scores come from private queries, or a private model."""
  measures: dict[str, intervals.Interval]
  """Scores by measure, e.g. "nDCG@10" and "R@10": means over all judged
  queries, with 95% bootstrap intervals over them."""
  num_queries: int
  """Judged queries in the averages."""
  traps: tuple[str, ...]
  """Choices of the evaluation that a reader should know."""
  split: str = ""
  """Split of the judgements."""
  drop_identical: bool = True
  """Whether results with the query's own id were dropped."""
  met: str = ""
  """Sentence on how often these choices mattered."""
  statement: statement_lib.PrivacyStatement | None = None
  """Statement of the system that was scored; None: it read no private
  record."""

  @property
  def epsilon(self) -> float | None:
    """Epsilon of the system; inf without privacy, None without private data."""
    return None if self.statement is None else self.statement.epsilon

  @property
  def name(self) -> str:
    """Name of the row, such as "fused_synthetic_eps8"."""
    return str(self.row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReleasedMean:
  """A noisy mean, or a difference of two; the exact value stays private."""

  here: intervals.Interval
  """Interval for the mean of the test queries themselves: uncertainty of the
  noise."""
  beyond: intervals.Interval
  """Interval for the population of the test queries: noise and sampling
  together, with the largest sampling variance for such a mean."""

  def turned(self) -> "ReleasedMean":
    """Returns the difference with the opposite sign."""
    return ReleasedMean(here=-self.here, beyond=-self.beyond)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReleasedRow:
  """A row that may be shared, scored on private queries."""

  row: rows_lib.Row
  """Row of the system."""
  label: str
  """Description of the row, in words."""
  epsilon: float | None
  """Epsilon of the system, as `Evaluation.epsilon`."""
  means: dict[str, ReleasedMean]
  """Released means by measure."""
  over_bm25: dict[str, ReleasedMean]
  """Released mean minus that of BM25, by measure; empty without BM25."""

  @property
  def name(self) -> str:
    """Name of the row."""
    return str(self.row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReleasedScores(Claimed):
  """Scores on private test queries with noise, which may be shared.

  The statement covers the noise of the scores; the statements of the systems
  add to it.
  """

  num_queries: int
  """Number of test queries, public with the release."""
  confidence: float
  """Confidence of each interval by itself."""
  noise: float
  """Standard deviation of the noise on each mean."""
  rows: tuple[ReleasedRow, ...]
  """Rows in the order of the private table."""
  systems: tuple[str, ...] = ()
  """Identifiers of the releases behind the scored systems,
  `list_releases`."""
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
  """Canaries of one kind that are repeated equally often in the data."""

  kind: str
  """One of `audit.canaries.KINDS`."""
  repetitions: int
  """Copies of each inserted canary in the data."""
  ranks: tuple[int, ...]
  """Ranks of the inserted canaries' secrets among `AuditReport.num_ranked`."""
  held_out_ranks: tuple[int, ...]
  """Ranks of the held-out canaries' secrets: the control group."""
  exposure: tuple[float, ...]
  """Exposure of the inserted canaries' secrets, in bits, among
  `AuditReport.num_candidates`; empty if the secret is in the document."""
  leaked: int | None
  """Inserted canaries whose secret occurs in a written query; None if it
  cannot."""
  leaked_held_out: int | None
  """Held-out canaries whose secret does: coincidence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditBound:
  """Result of one attack on canaries that are repeated equally often."""

  attack: str
  """"likelihood"; in earlier results also "synthetic" or "retriever"."""
  repetitions: int
  """Copies of each inserted canary in the data."""
  claimed_epsilon: float
  """Epsilon of the claim for a group of that many records; inf: nothing is
  claimed."""
  num_inserted: int
  """Canaries trained on."""
  num_held_out: int
  """Canaries left out."""
  epsilon_one_run: float
  """Lower bound on epsilon for any mechanism."""
  epsilon_one_run_fdp: float
  """Lower bound on epsilon for a Gaussian trade-off curve."""
  auroc: tuple[float, float, float]
  """Area under the ROC curve, and the two ends of its interval."""
  tpr_at_1_fpr: tuple[float, float, float]
  """True positive rate at 1% false positives, and the two ends of its
  interval."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditReport(Saved):
  """Result of an audit with canaries in the fine-tuning data of a generator.

  The folder, which holds the canaries and their ranks, is private.
  """

  row: rows_lib.Row
  """Row of the audited generator's queries."""
  cells: tuple[AuditCell, ...]
  """Results for each kind and number of repetitions."""
  bounds: tuple[AuditBound, ...]
  """Results for each attack and number of repetitions."""
  num_candidates: int
  """Candidates among which exposure is measured."""
  num_ranked: int
  """Candidates among which ranks are measured."""
  num_searched: int
  """Synthetic queries of the run that were searched for secrets, besides those
  that the audit had written; 0: none."""
  confidence: float
  """Confidence of `lower_bound`. In earlier results of three attacks each bound
  and interval has the higher confidence that they need together."""
  claimed_epsilon: float
  """Epsilon of the audited run's statement; inf: nothing is claimed."""
  claimed_delta: float
  """Delta of the bounds."""
  lower_bound: float | None
  """Lower bound on epsilon, from canaries with one copy. If it exceeds the claim,
  the claim is wrong. None: there are too few such canaries."""
  ceiling: float
  """Largest possible `lower_bound`, reached if every guess is right; so few
  canaries cannot refute a greater claim."""
  control: float
  """p-value of the control: ranks of held-out secrets, and of all secrets under
  the public checkpoint, are those of chance. A tiny value means that canaries
  were known before the private training, and that nothing else here means
  anything."""

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
    """Whether canaries were known before training; by chance once in 1,000
    audits."""
    return self.control < _CONTAMINATED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """Pages of a run's report, and its table."""

  html: str
  """Path of the shareable page."""
  markdown: str
  """Path of the shareable page as Markdown."""
  private_html: str
  """Path of the page with private content, under `private/`."""
  table: str
  """The main table as it is printed on the screen."""
  verdict: str = ""
  """Text of the verdict at the top of the private page."""
