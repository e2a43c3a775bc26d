"""Compares rows with each other, and synthetic with real queries.

Rows are tested against each other query by query. Further test sets are put
side by side. Synthetic queries for documents of held-out pairs are compared
with the real ones: BLEU, MAUVE, words, copies. The report shows all of it.

Formal guarantee: none, the result lies under `private/`. Its `shareable_side_by_side`
alone is a function of scores that may be shared (`results.is_shareable_score`).
"""

import collections
import dataclasses
import itertools
import pathlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from synthq_jax import extras
from synthq_jax.data import beir_sets, files
from synthq_jax.generation import mauve, text_measures
from synthq_jax.retrieval import significance, tables, text_encoders
from synthq_jax.runtime import (
  comparison_results,
  config_types,
  prepared_files,
  results,
  runner,
  stage,
  workspace,
)
from synthq_jax.runtime import rows as rows_lib
from synthq_jax.storage import artifacts

__all__ = ["STAGE", "Config", "HeldOut", "Inputs", "compute_similarity", "run"]

_REFERENCE = "public only"
_ALPHA = 0.05
_ASKED = 5
"""Documents whose real and synthetic queries the private page shows."""
_CLUSTERINGS = 5
"""Clusterings of each MAUVE: with 500 queries, one alone is off by 0.05."""

_Pair = tuple[str, str]  # a query, and the id of its document


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Settings of the comparisons, and their numbers of draws."""

  GONE: ClassVar[Mapping[str, Any]] = {"num_comparisons": 5}

  measures: tuple[str, ...] = ("nDCG@10", "R@10")
  """Columns of the report's tables. Rows are compared by the first measure,
  which is drawn."""
  test_set: str = "test"
  """The test set of the main table: a split of private queries."""
  similar_to: str = "test"
  """Real queries behind BLEU and MAUVE. "test": those of the test split, all
  queries of a document together. "train": train queries, each compared with one
  query written for its document, as in the papers' tables: generators were
  trained on these queries."""
  num_similar: int = 5000
  """Maximum real and synthetic queries behind MAUVE; MAUVE's authors take 5,000
  of each."""
  mauve_gpt2: str | None = None
  """Local folder of GPT-2 (MAUVE's authors take gpt2-large) whose features
  MAUVE takes; None: features of the run's public checkpoint."""
  bootstrap_samples: int = 2000
  """Resamples of the queries behind differences."""
  seed: int = 0
  """Seed of all draws: resamples, documents, queries, clusterings."""

  def __post_init__(self):
    config_types.at_least(self, 1, "num_similar", "bootstrap_samples")
    config_types.one_of(self, "similar_to", ("test", "train"))
    if not self.measures:
      raise ValueError(
        "expected a measure in compare_queries.Config.measures, got none: name"
        ' one of the evaluate stage, e.g. "nDCG@10"'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scored:
  """A row with its values by measure and query."""

  row: comparison_results.ScoredRow
  per_query: Mapping[str, Mapping[str, float]]
  owners: Mapping[str, int] | None
  """User of each query, if users are the unit; a user's queries are alike."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Scores and queries to compare."""

  prepared: results.PreparedData
  t5: pathlib.Path | None
  """Folder of the public checkpoint whose vectors MAUVE compares; None: no
  MAUVE."""
  evaluations: Sequence[results.Evaluation]  # all scores, whose order rows keep
  synthetic: Sequence[results.SyntheticQueries]  # all synthetic queries


def make_job(run: runner.Run, _: None) -> stage.Job[Inputs]:
  """Returns one comparison of all queries and scores."""
  scores = run.get_results("evaluate")
  digests = [*run.queries.values(), *scores.values()]
  return stage.Job(
    depends=(
      run.config.compare_queries,
      *run.t5_data,
      *(result.digest for result in digests),
    ),
    settings=run.config.compare_queries,
    inputs=Inputs(
      prepared=run.prepared,
      t5=run.t5,
      evaluations=[result.value for result in scores.values()],
      synthetic=[result.value for result in run.queries.values()],
    ),
  )


def check(run: runner.Run) -> None:
  """Refuses measures without a row, models without files and a single test
  query, before any training."""
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
  split = run.prepared.test_split
  if (number := run.prepared.units(split)) < 2:
    raise ValueError(
      "expected at least 2 queries (with UNIT='user': users) in split"
      f" {split!r}, got {number}: name a larger TEST_SPLIT"
    )


def run(task: stage.Task[Config, Inputs]) -> comparison_results.QueryComparison:
  """Compares all rows, and the queries of every generator with the real ones.

  Returns:
    The comparisons, under `private/`.

  Raises:
    ValueError: if no evaluation has the main table's test set, or a file that a
      result names is missing or malformed.
  """
  config, space = task.settings, task.folders
  evaluations, prepared = task.inputs.evaluations, task.inputs.prepared
  if not any(item.test_set == config.test_set for item in evaluations):
    available = sorted({item.test_set for item in evaluations})
    raise ValueError(
      f"expected evaluations with test_set={config.test_set!r}, got "
      f"{available or 'none'}: evaluate on it or change "
      "compare_queries.Config.test_set"
    )
  scored = _find_ties(config, _rows(space, prepared, evaluations))
  scored = _headlined(config, scored)
  own_sets = {*rows_lib.OWN_TEST_SETS, config.test_set}
  others = [
    item for item in scored if item.row.evaluation.test_set not in own_sets
  ]
  shareable = [
    item for item in others if results.is_shareable_score(item.row.evaluation)
  ]
  held_out = _compare_with_real(
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
    rows=tuple(item.row for item in scored),
    differences=tuple(_differences(config, scored)),
    side_by_side=tuple(_side_by_side(config, others)),
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
  for evaluation in evaluations:
    sets.setdefault(evaluation.test_set, []).append(evaluation)
  return [
    _Scored(
      row=comparison_results.ScoredRow(evaluation=evaluation),
      per_query=artifacts.read_json(
        folders.root / evaluation.directory / "per_query.json"
      ),
      owners=owners,
    )
    for test_set, group in sets.items()
    for owners in [prepared_files.read_owners(folders, data, test_set)]
    for evaluation in group
  ]


def _headlined(config: Config, scored: Sequence[_Scored]) -> list[_Scored]:
  """Adds the headline columns to the rows of every test set."""
  measure = config.measures[0]
  values = {
    (item.row.evaluation.test_set, item.row.evaluation.row): item.per_query.get(
      measure
    )
    for item in scored
  }
  number = collections.Counter(test_set for test_set, _ in values)
  return [_add_headline(config, item, values, number) for item in scored]


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
      p_value = significance.stratified_t_test(first, second, owners=owners)
      if p_value * len(pairs) >= _ALPHA:
        ties[id(pair[0])].append(pair[1].row.evaluation.name)
  return [
    dataclasses.replace(
      item, row=dataclasses.replace(item.row, level=tuple(ties[id(item)]))
    )
    for item in scored
  ]


def _add_headline(config: Config, item: _Scored, values, number) -> _Scored:
  evaluation = item.row.evaluation
  system = evaluation.row.system

  def get(row: rows_lib.Row):
    return values.get((evaluation.test_set, row))

  original = rows_lib.ORIGINAL.of_system(system)
  bare = rows_lib.UNTRAINED.of_system(system)
  if system == rows_lib.RANKED:  # its weights need private queries
    bare = rows_lib.UNTRAINED.of_system(rows_lib.FUSED)
  own, lexical, full = map(get, (evaluation.row, rows_lib.BM25, original))
  baseline = get(bare) or (None if system == rows_lib.DENSE else lexical)
  over, at_once, gain = None, None, None
  if own and lexical and evaluation.row != rows_lib.BM25:
    over, at_once = (
      significance.paired_bootstrap(
        own,
        lexical,
        item.owners,
        level=1 - 0.05 / rows,
        samples=config.bootstrap_samples * max(1, rows // 2),
        seed=config.seed,
      )
      for rows in (1, number[evaluation.test_set] - 1)
    )
  ends = {rows_lib.BM25, bare, original}
  if own and baseline and full and evaluation.row not in ends and len(own) > 1:
    gain = significance.share_of_gain(own, baseline, full, item.owners)
  row = dataclasses.replace(
    item.row, over_bm25=over, over_bm25_at_once=at_once, gain_kept=gain
  )
  return dataclasses.replace(item, row=row)


def _differences(
  config: Config, scored: Sequence[_Scored]
) -> Iterator[comparison_results.Difference]:
  """Tests the pairs of rows that a reader of the table asks about.

  Every row that trained on private queries is tested against the two public
  ones. In each family every epsilon is tested against the next smaller one.
  Synthetic queries are tested against every direct DP row at the same epsilon,
  and the real queries against every synthetic row. All of this happens for each
  system, and systems other than dense retrievers are tested against BM25. P
  values are corrected for all these tests.
  """
  rows = {
    item.row.evaluation.row: item
    for item in scored
    if item.row.evaluation.test_set == config.test_set
  }
  values = {
    row: item.per_query[config.measures[0]] for row, item in rows.items()
  }
  pairs = comparison_results.list_pairs(
    [item.row.evaluation for item in rows.values()]
  )
  pairs = [(a, b) for a, b in pairs if a in values and b in values]
  compared = significance.compare(
    {f"{a} - {b}": (values[a], values[b]) for a, b in pairs},
    next((item.owners for item in rows.values()), None),
    samples=config.bootstrap_samples,
    seed=config.seed,
  )
  for (a, b), item in zip(pairs, compared, strict=True):
    yield comparison_results.Difference(
      first=str(a),
      second=str(b),
      interval=item.difference,
      p_value=item.corrected,
    )


def _side_by_side(
  config: Config, scored: Sequence[_Scored]
) -> Iterator[comparison_results.SideBySide]:
  """Yields a table for each measure, over sets that are not the run's own.

  The parts of a group of BEIR's count as one set. Rows are tested against the
  row of the public checkpoint, if there is one.
  """
  sets = dict.fromkeys(item.row.evaluation.test_set for item in scored)
  groups = {
    group: [name for name in sets if name.startswith(f"{group}.")]
    for group in beir_sets.GROUPS
  }
  for measure in config.measures:
    scores: dict = collections.defaultdict(dict)
    for item in scored:
      if measure in item.per_query:
        row = item.row.evaluation
        scores[_words(row.name)][row.test_set] = item.per_query[measure]
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


def _compare_with_real(
  config: Config,
  root: pathlib.Path,
  prepared: results.PreparedData,
  synthetic: Sequence[results.SyntheticQueries],
  encoder: pathlib.Path | None,
) -> dict[str, Any]:
  """Compares the queries of generators with those of the test split."""
  featurizer = _featurizer(config, root, prepared, encoder)
  texts = similar = HeldOut(root, prepared, synthetic)
  if is_train := config.similar_to == "train":
    similar = HeldOut(root, prepared, synthetic, "train")
  names = tuple(queries.name for queries in synthetic)
  asked = texts.asked_and_written(names, _ASKED, config.seed)
  similarities = compute_similarity(
    similar,
    featurizer,
    limit=config.num_similar,
    seed=config.seed,
    one_to_one=is_train,
  )
  return {
    "generators": names, "asked": tuple(asked), "similarity": tuple(similarities)
  }  # fmt: skip


def _featurizer(
  config: Config,
  root: pathlib.Path,
  prepared: results.PreparedData,
  encoder: pathlib.Path | None,
) -> text_encoders.FlaxEncoder | text_encoders.Gpt2 | None:
  """Returns the model behind MAUVE's vectors, which saw none of the queries."""
  if not mauve.is_installed():
    return None
  if config.mauve_gpt2 is not None:
    return text_encoders.Gpt2(folder=config.mauve_gpt2)
  if encoder is None:
    return None
  return text_encoders.load_own(
    encoder, root / prepared.vocabulary, length=prepared.query_length
  )


class HeldOut:
  """Real and synthetic queries for the documents of a split.

  Attributes:
    documents: id -> title and text, of documents that private queries ask for.
    real: document -> the real queries to which it is relevant.
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
    for query, grades in prepared_files.read_qrels(private, split).items():
      for document, grade in grades.items():
        if grade > 0:
          asked.setdefault(document, []).append(query)
    ids = {query for queries in asked.values() for query in queries}
    texts = prepared_files.read_texts(files.find(private, "queries.jsonl"), ids)
    corpus = files.find(root / prepared.directory, "corpus.jsonl")
    self.documents = prepared_files.read_texts(corpus, set(asked))
    self.real = {
      document: [texts[query] for query in queries]
      for document, queries in asked.items()
      if document in self.documents  # the corpus may lack a judged one
    }
    self.written = {
      generator.name: self._written(root / generator.directory)
      for generator in synthetic
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
    """Draws documents; those that most generators wrote for come first."""
    written = [self.written[name] for name in names]
    counts = {d: sum(d in own for own in written) for d in sorted(self.real)}
    drawn = [document for document, count in counts.items() if count]
    random.Random(seed).shuffle(drawn)
    drawn.sort(key=lambda document: -counts[document])
    return [
      comparison_results.Asked(
        document=self.documents[document],
        real=tuple(self.real[document]),
        synthetic=tuple(tuple(own.get(document, ())) for own in written),
      )
      for document in drawn[:number]
    ]


def compute_similarity(
  texts: HeldOut,
  featurizer: text_encoders.FlaxEncoder | text_encoders.Gpt2 | None,
  *,
  limit: int,
  seed: int,
  one_to_one: bool = False,
) -> list[comparison_results.Similarity]:
  """Compares synthetic queries for the documents of a split with its real ones.

  Distinct n-grams and MAUVE depend on the number of texts, so as many synthetic
  as real queries are drawn.

  Args:
    texts: queries of a split that no generator trained on, or of training
      pairs.
    featurizer: model that makes MAUVE's vectors; None: no MAUVE.
    limit: maximum queries of each side for all numbers but BLEU.
    seed: seed of the draw, and of MAUVE's clustering.
    one_to_one: whether a document's first synthetic query is paired with its
      first real one, the second with the second, and the rest is left out.

  Returns:
    One comparison for each generator.
  """
  pairs, drawn = [], []
  for written in texts.written.values():
    own, real, references = _pair_up(written, texts.real, one_to_one)
    number = min(len(real), len(own), limit)
    sample = random.Random(seed).sample
    pairs.append((own, references))
    drawn.append((sample(real, number), sample(own, number)))
  scores = _compute_mauve(drawn, featurizer, seed)
  similarities = []
  for name, (own, references), (real, ours), score in zip(
    texts.written, pairs, drawn, scores, strict=True
  ):
    bleu = text_measures.bleu([query for query, _ in own], references)
    similarities.append(
      comparison_results.Similarity(
        name=name,
        num_queries=len(own),
        one_to_one=one_to_one,
        bleu=bleu.score,
        bleu_signature=bleu.signature,
        num_compared=len(real),
        mauve=score,
        real=_measure_side(real, texts.documents),
        synthetic=_measure_side(ours, texts.documents),
      )
    )
  return similarities


def _pair_up(
  written: Mapping[str, Sequence[str]],
  real: Mapping[str, Sequence[str]],
  one_to_one: bool,
) -> tuple[list[_Pair], list[_Pair], list[list[str]]]:
  """Returns written and real pairs, and each written query's references."""
  own, asked, references = [], [], []
  for document in sorted(written):
    queries, others = list(written[document]), list(real[document])
    if one_to_one:
      paired = list(zip(queries, others, strict=False))
      queries, others = [q for q, _ in paired], [q for _, q in paired]
    own += [(q, document) for q in queries]
    asked += [(q, document) for q in others]
    references += (
      [[q] for q in others] if one_to_one else [others] * len(queries)
    )
  return own, asked, references


def _compute_mauve(
  drawn: Sequence[tuple[list[_Pair], list[_Pair]]],
  featurizer: text_encoders.FlaxEncoder | text_encoders.Gpt2 | None,
  seed: int,
) -> list[tuple[mauve.Mauve, ...]]:
  """Compares both sides of each draw; every text is featurized once."""
  if featurizer is None or not any(real for real, _ in drawn):
    return [()] * len(drawn)
  texts = sorted({q for sides in drawn for side in sides for q, _ in side})
  vectors = featurizer.encode(texts)
  positions = {text: number for number, text in enumerate(texts)}
  scores = []
  for sides in drawn:
    first, second = (vectors[[positions[q] for q, _ in side]] for side in sides)
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


def _measure_side(
  pairs: Sequence[_Pair], documents: Mapping[str, str]
) -> comparison_results.Side:
  queries = [query for query, _ in pairs]
  owners = [documents[document] for _, document in pairs]
  return comparison_results.Side(
    words=text_measures.mean_length(queries),
    distinct=text_measures.distinct_pairs(queries),
    copied=text_measures.copy_rate(queries, owners),
  )


STAGE = stage.Stage(
  name="compare_queries",
  result=comparison_results.QueryComparison,
  config=Config,
  check=check,
  plan=stage.plan_one_result,
  job=make_job,
  run=run,
  needs=("filter_queries", "evaluate"),
  starts_from="encoder",
)
