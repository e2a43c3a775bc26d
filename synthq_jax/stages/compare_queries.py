"""Compares rows with each other, and synthetic with real queries.

Rows are tested against each other query by query, further test sets stand side by
side, and the synthetic queries for documents of held-out pairs are held against the
real ones: BLEU, MAUVE, words, copies. The report draws what this stage found.

Formal guarantee: none, the result lies under `private/`. Its `shareable_side_by_side`
alone is a function of scores that may be shared (`results.is_shareable_score`).
"""

import collections
import dataclasses
import itertools
import pathlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from synthq_jax import extras
from synthq_jax.data import beir_sets, files
from synthq_jax.generation import mauve, text_measures
from synthq_jax.retrieval import significance, tables, text_encoders
from synthq_jax.runtime import (
  comparison_results,
  config_types,
  inputs,
  results,
  runner,
  stage,
  workspace,
)
from synthq_jax.runtime import rows as rows_lib
from synthq_jax.storage import artifacts

__all__ = ["STAGE", "Config", "HeldOut", "Inputs", "run", "similarity"]

_REFERENCE = "public only"
_ALPHA = 0.05
_CLUSTERINGS = 5
"""Behind each MAUVE: with 500 queries, one alone is off by 0.05."""

_Pair = tuple[str, str]  # a query, and the id of its document


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What is compared, and with how many draws."""

  measures: tuple[str, ...] = ("nDCG@10", "R@10")
  """Columns of the report's tables; rows are compared by the first, which is
  drawn against epsilon."""
  test_set: str = "test"
  """The test set of the main table: a split of private queries."""
  num_comparisons: int = 5
  """Documents with real beside synthetic queries, on the private page."""
  similar_to: str = "test"
  """Real queries behind BLEU and MAUVE: those of the "test" split, all of a
  document's together; or of "train", as in the papers' tables, whose generators
  were trained on them: each against one query written for its document."""
  num_similar: int = 5000
  """Real and synthetic queries behind MAUVE, at most; MAUVE's authors take
  5,000 of each."""
  mauve_gpt2: str | None = None
  """A local folder of GPT-2 (gpt2-large, to compare with papers) whose features
  MAUVE takes; None: those of the run's public checkpoint."""
  bootstrap_samples: int = 2000
  """Resamples of the queries behind differences."""
  seed: int = 0
  """Of all draws: resamples, documents, queries, clusterings."""

  def __post_init__(self):
    config_types.at_least(
      self, 1, "num_comparisons", "num_similar", "bootstrap_samples"
    )
    config_types.one_of(self, "similar_to", ("test", "train"))
    if not self.measures:
      raise ValueError(
        "expected a measure in compare_queries.Config.measures, got none: name"
        ' one of the evaluate stage, e.g. "nDCG@10"'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scored:
  """A row, and its values by measure and query."""

  row: comparison_results.ScoredRow
  per_query: Mapping[str, Mapping[str, float]]
  owners: Mapping[str, int] | None
  """Who asked, where users are protected; of one user, queries are alike."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """What is compared."""

  prepared: results.PreparedData
  t5: pathlib.Path | None
  """The folder of the public checkpoint whose vectors MAUVE compares; None: no
  MAUVE."""
  evaluations: Sequence[results.Evaluation]  # all scores, whose order rows keep
  synthetic: Sequence[results.SyntheticQueries]  # all synthetic queries


def make_job(run: runner.Run, _: None) -> stage.Job[Inputs]:
  """Returns one comparison of everything that was written and scored."""
  scores = run.get_results("evaluate")
  digests = [*run.queries.values(), *scores.values()]
  return stage.Job(
    depends=(
      run.config.compare_queries,
      *run.t5_data,
      *(made.digest for made in digests),
    ),
    settings=run.config.compare_queries,
    inputs=Inputs(
      prepared=run.prepared,
      t5=run.t5,
      evaluations=[made.value for made in scores.values()],
      synthetic=[made.value for made in run.queries.values()],
    ),
  )


def check(run: runner.Run) -> None:
  """Refuses what no row would have or no model gives, before any training."""
  config, computed = run.config.compare_queries, run.config.evaluate.measures
  if config.measures[0] not in computed:
    raise ValueError(
      "compare_queries.Config.measures must begin with one of"
      f" evaluate.Config.measures, {', '.join(computed)}, by which rows are"
      f" compared, got {config.measures[0]!r}: set both"
    )
  if config.mauve_gpt2 is not None:
    extras.check("mauve", "mauve")
    text_encoders.Gpt2(folder=config.mauve_gpt2).check()


def run(task: stage.Task[Config, Inputs]) -> comparison_results.QueryComparison:
  """Compares all rows, and the queries of every generator with the real ones.

  Returns:
    The comparisons, under `private/`.

  Raises:
    ValueError: if no evaluation is of the main table's test set, or a file that
      a result names is missing or malformed.
  """
  config, space = task.settings, task.folders
  evaluations, prepared = task.inputs.evaluations, task.inputs.prepared
  if not any(one.test_set == config.test_set for one in evaluations):
    found = sorted({one.test_set for one in evaluations})
    raise ValueError(
      f"expected evaluations with test_set={config.test_set!r}, got "
      f"{found or 'none'}: evaluate on it or change "
      "compare_queries.Config.test_set"
    )
  scored = _find_ties(config, _rows(space, prepared, evaluations))
  scored = _headlined(config, scored)
  own_sets = {*rows_lib.OWN_TEST_SETS, config.test_set}
  further = [
    one for one in scored if one.row.evaluation.test_set not in own_sets
  ]
  shareable = [
    one for one in further if results.is_shareable_score(one.row.evaluation)
  ]
  held_out = _held_out(
    config,
    space.root,
    prepared,
    task.inputs.synthetic,
    task.inputs.t5,
  )
  return comparison_results.QueryComparison(
    directory=space.relative(task.folder(private=True)),
    measures=tuple(config.measures),
    test_set=config.test_set,
    rows=tuple(one.row for one in scored),
    differences=tuple(_differences(config, scored)),
    side_by_side=tuple(_side_by_side(config, further)),
    shareable_side_by_side=tuple(_side_by_side(config, shareable)),
    **held_out,
  )


def _rows(
  folders: workspace.Folders,
  data: results.PreparedData,
  evaluations: Sequence[results.Evaluation],
) -> list[_Scored]:
  """Reads the values of each row, test set by test set."""
  sets: dict[str, list[results.Evaluation]] = {}
  for one in evaluations:
    sets.setdefault(one.test_set, []).append(one)
  return [
    _Scored(
      row=comparison_results.ScoredRow(evaluation=one),
      per_query=artifacts.read_json(
        folders.root / one.directory / "per_query.json"
      ),
      owners=owners,
    )
    for test_set, group in sets.items()
    for owners in [inputs.read_owners(folders, data, test_set)]
    for one in group
  ]


def _headlined(config: Config, scored: Sequence[_Scored]) -> list[_Scored]:
  """Adds the two headline columns to the rows of every test set."""
  measure = config.measures[0]
  values = {
    (one.row.evaluation.test_set, one.row.evaluation.row): one.per_query.get(
      measure
    )
    for one in scored
  }
  number = collections.Counter(test_set for test_set, _ in values)
  return [_with_headline(config, one, values, number) for one in scored]


def _find_ties(config: Config, scored: Sequence[_Scored]) -> list[_Scored]:
  """Adds to each row of the run's own sets the rows that it may tie with.

  Formal guarantee: rows that may be shared are compared with each other alone.
  """
  measure, groups = config.measures[0], collections.defaultdict(list)
  for item in scored:
    score = item.row.evaluation
    if score.test_set in (*rows_lib.OWN_TEST_SETS, config.test_set):
      groups[score.test_set, results.is_shareable_score(score)].append(item)
  ties = collections.defaultdict(list)
  for group in groups.values():
    group.sort(key=lambda item: -item.row.evaluation.measures[measure].mean)
    pairs = list(itertools.combinations(group, 2))
    for pair in pairs if group[0].row.evaluation.num_queries > 1 else ():
      first, second = ([item.per_query[measure]] for item in pair)
      owners = [pair[0].owners]
      test = significance.stratified_t_test(first, second, owners=owners)
      if test.p_value * len(pairs) >= _ALPHA:
        ties[id(pair[0])].append(pair[1].row.evaluation.name)
  return [
    dataclasses.replace(
      item, row=dataclasses.replace(item.row, level=tuple(ties[id(item)]))
    )
    for item in scored
  ]


def _with_headline(config: Config, one: _Scored, values, number) -> _Scored:
  made = one.row.evaluation
  system = made.row.system

  def get(row: rows_lib.Row):
    return values.get((made.test_set, row))

  original = rows_lib.ORIGINAL.of_system(system)
  bare = rows_lib.UNTRAINED.of_system(system)
  if system == rows_lib.RANKED:  # private queries weigh
    bare = rows_lib.UNTRAINED.of_system(rows_lib.FUSED)
  own, lexical, whole = map(get, (made.row, rows_lib.BM25, original))
  nothing = get(bare) or (None if system == rows_lib.DENSE else lexical)
  over, at_once, kept = None, None, None
  if own and lexical and made.row != rows_lib.BM25:
    over, at_once = (
      significance.paired_bootstrap(
        own,
        lexical,
        one.owners,
        level=1 - 0.05 / rows,
        samples=config.bootstrap_samples * max(1, rows // 2),
        seed=config.seed,
      )
      for rows in (1, number[made.test_set] - 1)
    )
  ends = {rows_lib.BM25, bare, original}
  if own and nothing and whole and made.row not in ends and len(own) > 1:
    kept = significance.share_of_gain(own, nothing, whole, one.owners)
  row = dataclasses.replace(
    one.row, over_bm25=over, over_bm25_at_once=at_once, gain_kept=kept
  )
  return dataclasses.replace(one, row=row)


def _differences(
  config: Config, scored: Sequence[_Scored]
) -> Iterator[comparison_results.Difference]:
  """Tests the pairs of rows that a reader of the table asks about.

  Every row that trained on private queries against the two public ones; in each
  family every epsilon against the next smaller one; synthetic queries against
  every direct DP row at the same epsilon; the real queries against every
  synthetic row; all of that for each system, and systems other than dense
  retrievers against BM25. P values count all of them.
  """
  rows = {
    one.row.evaluation.row: one
    for one in scored
    if one.row.evaluation.test_set == config.test_set
  }
  values = {row: one.per_query[config.measures[0]] for row, one in rows.items()}
  pairs = comparison_results.pairs(
    [one.row.evaluation for one in rows.values()]
  )
  pairs = [(a, b) for a, b in pairs if a in values and b in values]
  compared = significance.compare(
    {f"{a} - {b}": (values[a], values[b]) for a, b in pairs},
    next((one.owners for one in rows.values()), None),
    samples=config.bootstrap_samples,
    seed=config.seed,
  )
  for (a, b), one in zip(pairs, compared, strict=True):
    yield comparison_results.Difference(
      first=str(a),
      second=str(b),
      interval=one.difference,
      p_value=one.corrected,
    )


def _side_by_side(
  config: Config, scored: Sequence[_Scored]
) -> Iterator[comparison_results.SideBySide]:
  """Yields a table for each measure, over sets that are not the run's own.

  The parts of a group of BEIR's count as one. Rows are tested against the one of
  the public checkpoint, where there is one.
  """
  sets = dict.fromkeys(one.row.evaluation.test_set for one in scored)
  groups = {
    group: [name for name in sets if name.startswith(f"{group}.")]
    for group in beir_sets.GROUPS
  }
  for measure in config.measures:
    scores: dict = collections.defaultdict(dict)
    for one in scored:
      if measure in one.per_query:
        row = one.row.evaluation
        scores[_words(row.name)][row.test_set] = one.per_query[measure]
    if scores:
      table = tables.compare(
        scores,
        measure,
        reference=_REFERENCE if _REFERENCE in scores else None,
        groups=groups,
      )
      yield comparison_results.SideBySide(
        measure=measure, table=table.cells(), caption=table.caption
      )


def _words(name: str) -> str:
  return name.replace("_", " ")


def _held_out(
  config: Config,
  root: pathlib.Path,
  prepared: results.PreparedData,
  synthetic: Sequence[results.SyntheticQueries],
  encoder: pathlib.Path | None,
) -> dict[str, Any]:
  """Holds the queries of generators against those of the test split."""
  featurizer = _featurizer(config, root, prepared, encoder)
  texts = similar = HeldOut(root, prepared, synthetic)
  if is_train := config.similar_to == "train":
    similar = HeldOut(root, prepared, synthetic, "train")
  names = tuple(one.name for one in synthetic)
  asked = texts.asked_and_written(names, config.num_comparisons, config.seed)
  found = similarity(
    similar,
    featurizer,
    limit=config.num_similar,
    seed=config.seed,
    one_to_one=is_train,
  )
  return {
    "generators": names, "asked": tuple(asked), "similarity": tuple(found)
  }  # fmt: skip


def _featurizer(
  config: Config,
  root: pathlib.Path,
  prepared: results.PreparedData,
  encoder: pathlib.Path | None,
) -> text_encoders.TextEncoder | None:
  """Returns whose vectors MAUVE compares: a model that saw none of the queries."""
  if not mauve.is_installed():
    return None
  if config.mauve_gpt2 is not None:
    return text_encoders.Gpt2(folder=config.mauve_gpt2)
  if encoder is None:
    return None
  return text_encoders.OwnEncoder(
    checkpoint=encoder,
    vocabulary=root / prepared.vocabulary,
    length=prepared.query_length,
  )


class HeldOut:
  """Real and synthetic queries for the documents of a split, else of the test's.

  Attributes:
    documents: id -> title and text, of documents that private queries ask for.
    real: document -> the queries that it answers.
    written: generator -> document -> its queries.
  """

  def __init__(
    self,
    root: pathlib.Path,
    prepared: results.PreparedData,
    synthetic: Sequence[results.SyntheticQueries],
    split: str = "",
  ):
    private = root / prepared.private_directory
    asked: dict[str, list[str]] = {}
    split = split or prepared.test_split
    for query, grades in inputs.qrels(private, split).items():
      for document, grade in grades.items():
        if grade > 0:
          asked.setdefault(document, []).append(query)
    ids = {query for queries in asked.values() for query in queries}
    texts = inputs.texts_of(files.find(private, "queries.jsonl"), ids)
    corpus = files.find(root / prepared.directory, "corpus.jsonl")
    self.documents = inputs.texts_of(corpus, set(asked))
    self.real = {
      document: [texts[query] for query in queries]
      for document, queries in asked.items()
      if document in self.documents  # the corpus may lack a judged one
    }
    self.written = {
      one.name: self._written(root / one.directory) for one in synthetic
    }

  def _written(self, directory: pathlib.Path) -> dict[str, list[str]]:
    written: dict[str, list[str]] = {}
    for _, line in files.json_lines(files.find(directory, "queries.jsonl")):
      if line["document"] in self.real:
        written.setdefault(line["document"], []).append(line["text"])
    return written

  def asked_and_written(
    self, names: Sequence[str], number: int, seed: int
  ) -> list[comparison_results.Asked]:
    """Draws documents, those that most generators wrote for first."""
    written = [self.written[name] for name in names]
    counts = {d: sum(d in one for one in written) for d in sorted(self.real)}
    drawn = [document for document, count in counts.items() if count]
    random.Random(seed).shuffle(drawn)
    drawn.sort(key=lambda document: -counts[document])
    return [
      comparison_results.Asked(
        document=self.documents[document],
        real=tuple(self.real[document]),
        synthetic=tuple(tuple(one.get(document, ())) for one in written),
      )
      for document in drawn[:number]
    ]


def similarity(
  texts: HeldOut,
  featurizer: text_encoders.TextEncoder | None,
  *,
  limit: int,
  seed: int,
  one_to_one: bool = False,
) -> list[comparison_results.Similarity]:
  """Compares synthetic queries for the documents of a split with its own.

  Distinct n-grams and MAUVE depend on how many texts there are: as many of one
  side are drawn as of the other.

  Args:
    texts: of a split that no generator was trained on, or of training pairs.
    featurizer: makes MAUVE's vectors; None: no MAUVE.
    limit: queries of each side, at most, behind all but BLEU.
    seed: of the draw, and of MAUVE's clustering.
    one_to_one: whether a document's first written query stands beside its first
      real one, the second beside the second, and what is left over is left out.

  Returns:
    One for each generator.
  """
  pairs, drawn = [], []
  for written in texts.written.values():
    own, real, references = _beside(written, texts.real, one_to_one)
    number = min(len(real), len(own), limit)
    sample = random.Random(seed).sample
    pairs.append((own, references))
    drawn.append((sample(real, number), sample(own, number)))
  scores = _mauve(drawn, featurizer, seed)
  found = []
  for name, (own, references), (real, ours), score in zip(
    texts.written, pairs, drawn, scores, strict=True
  ):
    bleu = text_measures.signed_bleu([query for query, _ in own], references)
    found.append(
      comparison_results.Similarity(
        name=name,
        num_queries=len(own),
        one_to_one=one_to_one,
        bleu=bleu.score,
        bleu_signature=bleu.signature,
        num_compared=len(real),
        mauve=score,
        real=_side(real, texts.documents),
        synthetic=_side(ours, texts.documents),
      )
    )
  return found


def _beside(
  written: Mapping[str, Sequence[str]],
  real: Mapping[str, Sequence[str]],
  one_to_one: bool,
) -> tuple[list[_Pair], list[_Pair], list[list[str]]]:
  """Returns written and real pairs, and each written query's references."""
  own, asked, references = [], [], []
  for document in sorted(written):
    queries, others = list(written[document]), list(real[document])
    if one_to_one:
      beside = list(zip(queries, others, strict=False))
      queries, others = [q for q, _ in beside], [q for _, q in beside]
    own += [(q, document) for q in queries]
    asked += [(q, document) for q in others]
    references += (
      [[q] for q in others] if one_to_one else [others] * len(queries)
    )
  return own, asked, references


def _mauve(
  drawn: Sequence[tuple[list[_Pair], list[_Pair]]],
  featurizer: text_encoders.TextEncoder | None,
  seed: int,
) -> list[tuple[mauve.Mauve, ...]]:
  """Compares both sides of each draw; every text is featurized once."""
  if featurizer is None or not any(real for real, _ in drawn):
    return [()] * len(drawn)
  texts = sorted({q for sides in drawn for side in sides for q, _ in side})
  vectors = featurizer.encode(texts)
  place = {text: number for number, text in enumerate(texts)}
  scores = []
  for sides in drawn:
    first, second = (vectors[[place[q] for q, _ in side]] for side in sides)
    scores.append(
      tuple(
        mauve.from_vectors(
          first,
          second,
          seed=seed + number,
          featurizer=featurizer.description,
        )
        for number in range(_CLUSTERINGS if len(first) else 0)
      )
    )
  return scores


def _side(
  pairs: Sequence[_Pair], documents: Mapping[str, str]
) -> comparison_results.Side:
  queries = [query for query, _ in pairs]
  owners = [documents[document] for _, document in pairs]
  return comparison_results.Side(
    words=text_measures.mean_length(queries),
    distinct=text_measures.distinct_n(queries, 2),
    copied=text_measures.copy_rate(queries, owners, 4),
  )


STAGE = stage.Stage(
  name="compare_queries",
  result=comparison_results.QueryComparison,
  config=Config,
  check=check,
  plan=stage.only,
  job=make_job,
  run=run,
  needs=("filter_queries", "evaluate"),
  starts_from="encoder",
)
