"""Searches the synthetic queries for private ones.

Every query that `generate` saved, also those that `filter_queries` drops, is
compared with the private queries that were trained on and with a control group:
private queries of the other splits, which no generator saw. Near-duplicates
that both groups have in common with the written queries are coincidence; the
difference is the effect of being trained on.

A private query is the unit. It counts as reproduced if some written query is a
near-duplicate of it. Only queries count that have no near-duplicate among the
other private ones, whichever group those are in. This rule does not look at
which queries were trained on. Suppose that chance had made the groups and the
generator kept nothing of single queries. Then, given the written queries, every
choice of the trained ones among those that count would be equally likely.
Fisher's test is then exact, whatever the sizes of the groups. Another rule
could remove near-duplicates of train queries from the control group alone. It
would leave rare queries in one group and common ones in the other, and find
leaks where there are none. A rule that removed nothing would count a train
query that came out as a coincidence for its near-duplicate. If queries are
written for the documents of train queries alone
(`prepare_data.Config.written_for`), train queries come out without any memory
of them: shares are shown then, but no difference and no test.

Formal guarantee: none. The numbers of this empirical check are functions of
private queries, without noise: they are private.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Int
from scipy import stats

from synthq_jax import intervals
from synthq_jax.data import files
from synthq_jax.leakage import calibration, near_duplicates, shares, words
from synthq_jax.report import leakage as leakage_report
from synthq_jax.runtime import (
  comparison_results,
  config_types,
  prepared_files,
  results,
  rows,
  runner,
  stage,
  workspace,
)
from synthq_jax.runtime import queries as queries_lib
from synthq_jax.training import progress

__all__ = [
  "DETECTORS",
  "STAGE",
  "Config",
  "Inputs",
  "read_real",
  "read_written",
  "run",
]

DETECTORS = {
  "exact": "the same words in the same order, without case and punctuation",
  "token_set": "at least {:g} of all words of both are in both, stemmed",
  "containment": "at least {:g} of the real query's character 4-grams stand in a"
  " query that has no fewer of them",
}
"""Definition of a near-duplicate for each detector."""
_TRAIN = "train"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Settings of the search: detectors, and numbers of queries."""

  enabled: bool = True
  """Whether the stage runs."""
  detectors: tuple[str, ...] = ("exact", "token_set", "containment")
  """Names of `DETECTORS`; each is a test of its own."""
  token_set: float = 0.8
  """Threshold of the detector of that name, in (0, 1]."""
  containment: float = 0.9
  """Threshold of the detector of that name, in (0, 1]."""
  confidence: float = 0.95
  """Confidence of each interval by itself, in (0.5, 1)."""
  max_real: int = 100_000
  """Approximate maximum of private queries that are compared. Of more, whole
  users, documents or single queries are drawn, whether or not generators
  trained on them."""
  max_written: int = 100_000
  """Approximate maximum of queries of each generator that are compared; of
  more, documents are drawn."""
  seed: int = 0
  """Seed of these draws; public."""

  def __post_init__(self):
    config_types.some_of(self, "detectors", tuple(DETECTORS))
    config_types.at_least(self, 2, "max_real")
    config_types.at_least(self, 1, "max_written")
    config_types.at_least(self, 0, "seed")
    config_types.within(self, "(0, 1]", "token_set", "containment")
    config_types.within(self, "(0.5, 1)", "confidence")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Queries to compare."""

  prepared: results.PreparedData  # the private queries
  synthetic: Sequence[results.SyntheticQueries]  # of each generator


def plan_rows(plan: rows.Plan) -> dict[str, None]:
  """Plans one search, if it is enabled and queries are written."""
  is_wanted = plan.written and plan.config.query_leakage.enabled
  return {"": None} if is_wanted else {}


def make_job(run: runner.Run, _: None) -> stage.Job[Inputs]:
  """Returns the search of all synthetic queries."""
  config, written = run.config.query_leakage, run.get_results("generate")
  return stage.Job(
    depends=(
      config,
      tuple(DETECTORS.values()),
      *run.data,
      {row.queries: result.digest for row, result in written.items()},
    ),
    settings=config,
    inputs=Inputs(
      prepared=run.prepared,
      synthetic=[result.value for result in written.values()],
    ),
  )


def run(task: stage.Task[Config, Inputs]) -> comparison_results.QueryLeakage:
  """Compares each generator's queries with private ones.

  Returns:
    The comparisons, under `private/`.
  """
  config, space = task.settings, task.folders
  prepared, synthetic = task.inputs.prepared, task.inputs.synthetic
  real = read_real(space, prepared)
  real = real.sample(config.max_real, config.seed)
  options = {"limit": config.max_written, "seed": config.seed}
  written = {x.name: read_written(space, x, **options) for x in synthetic}
  memberships = []
  total = len(config.detectors)
  with progress.bar("query_leakage", total, unit="search") as bar:
    for name in config.detectors:
      memberships += _compare(
        _index(name, config, real.texts),
        real,
        written,
        name=name,
        confidence=config.confidence,
        is_fair=not prepared.num_asked,
      )
      bar.update()
  return comparison_results.QueryLeakage(
    directory=space.relative(task.folder(private=True)),
    detectors={
      item: DETECTORS[item].format(getattr(config, item, None))
      for item in config.detectors
    },
    num_train=int(real.trained.sum()),
    num_control=int((~real.trained).sum()),
    num_written={name: len(texts) for name, texts in written.items()},
    confidence=config.confidence,
    memberships=tuple(memberships),
    only_for_train=bool(prepared.num_asked),
  )


def _index(
  name: str, config: Config, targets: Sequence[str]
) -> near_duplicates.Index:
  """Indexes targets for a detector.

  By containment, targets match only queries with at least as many n-grams. Without
  this rule it takes a written query of two words for a near-duplicate of every
  private query with these words, which reveals nothing. Distinct n-grams count: a
  long query may repeat two words.
  """
  if name == "exact":
    return near_duplicates.Exact().index(targets)
  if name == "token_set":
    return near_duplicates.TokenSet(threshold=config.token_set).index(targets)
  detector = near_duplicates.Containment(threshold=config.containment)
  contained, sizes = detector.index(targets), _count_ngrams(targets)

  def match(queries: Sequence[str]) -> near_duplicates.Matches:
    rows, matched, scores = contained(queries)
    holds = _count_ngrams(queries)[rows] >= sizes[matched]
    return rows[holds], matched[holds], scores[holds]

  return match


def _count_ngrams(texts: Sequence[str]) -> np.ndarray:
  """Counts the distinct n-grams of each text."""
  bags = words.extract_character_ngrams(texts, n=near_duplicates.Containment.n)
  return np.array([len(each) for each in bags.sets()], np.int64)


def _screen(searches: Sequence[comparison_results.QueryLeakage]) -> str:
  if not searches:
    return (
      "nothing was looked for: no generator wrote queries, or"
      " query_leakage.Config.enabled is False\n"
    )
  text = "\n\n".join(map(leakage_report.text, searches))
  return (
    "\nPRIVATE: computed from real queries. Do not share this table.\n\n"
    f"{text}\n\n"
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Real:
  """Private queries: those that were trained on, and all others."""

  texts: list[str]
  trained: Bool[np.ndarray, " query"]
  units: Int[np.ndarray, " query"]
  """Units that the split drew: users or documents, if all queries of each are
  on one side; else the queries themselves."""
  drawn: Bool[np.ndarray, " query"]
  """Whether a draw chose the query's side. Queries that a rule of the splits
  put on one side are in no comparison."""

  def sample(self, limit: int, seed: int) -> "_Real":
    """Returns about `limit` queries, or all if there are fewer.

    Whole units are drawn without looking at their side. Otherwise one side
    would lose near-duplicates that the other side keeps.
    """
    if len(self.texts) <= limit:
      return self
    is_drawn = _whole(self.units, limit, np.random.default_rng([seed, 4]))
    rows = np.flatnonzero(is_drawn)
    arrays = {
      name: getattr(self, name)[rows] for name in ("trained", "units", "drawn")
    }
    return _Real(texts=[self.texts[row] for row in rows], **arrays)


def read_real(
  space: workspace.Folders, prepared: results.PreparedData
) -> _Real:
  """Reads the private queries with a relevant document; trained ones come
  first.

  A query of several splits, train among them, counts as trained on.
  """
  folder = space.root / prepared.private_directory
  arrays = {
    split: prepared_files.arrays(space, prepared, folder / f"{split}.npz")
    for split in prepared.num_queries
  }
  ids = {split: split_arrays["ids"] for split, split_arrays in arrays.items()}
  trained = dict.fromkeys(ids[_TRAIN].tolist())
  others = dict.fromkeys(
    query
    for split, queries in ids.items()
    for query in queries.tolist()
    if query not in trained
  )
  names = [*trained, *others]
  gathered = {
    query
    for split_arrays in arrays.values()
    if "gathered" in split_arrays
    for query in split_arrays["ids"][split_arrays["gathered"]].tolist()
  }
  units = _units(arrays, trained)
  return _Real(
    texts=queries_lib.texts(folder, names),
    trained=np.arange(len(names)) < len(trained),
    units=np.array([units[name] for name in names], np.int64),
    drawn=np.array([name not in gathered for name in names], bool),
  )


def _units(
  arrays: dict[str, dict[str, np.ndarray]], trained: dict[str, None]
) -> dict[str, int]:
  """Returns query id -> number of the unit that the split drew."""
  ids = [
    name
    for split_arrays in arrays.values()
    for name in split_arrays["ids"].tolist()
  ]
  for kind in ("users", "documents"):
    if not all(kind in split_arrays for split_arrays in arrays.values()):
      continue
    owners = [
      (split if kind == "users" else "", owner)  # numbered within their split
      for split, split_arrays in arrays.items()
      for owner in split_arrays[kind].tolist()
    ]
    numbers = {owner: i for i, owner in enumerate(dict.fromkeys(owners))}
    units, sides = {}, {}
    for name, owner in zip(ids, owners, strict=True):
      units[name] = numbers[owner]
    for name, unit in units.items():
      sides.setdefault(unit, []).append(name in trained)
    several = [
      unit_sides for unit_sides in sides.values() if len(unit_sides) > 1
    ]
    if several and all(len({*unit_sides}) == 1 for unit_sides in several):
      return units
  return {name: i for i, name in enumerate(dict.fromkeys(ids))}


def _whole(
  units: np.ndarray, limit: int, rng: np.random.Generator
) -> Bool[np.ndarray, " row"]:
  """Draws units until they have about `limit` rows; returns a mask of rows."""
  _, inverse, counts = np.unique(units, return_inverse=True, return_counts=True)
  order = rng.permutation(len(counts))
  before = np.cumsum(counts[order]) - counts[order]
  is_drawn = np.zeros(len(counts), bool)
  is_drawn[order[before < limit]] = True
  return is_drawn[inverse]


def read_written(
  folders: workspace.Folders,
  synthetic: results.SyntheticQueries,
  *,
  limit: int,
  seed: int,
) -> list[str]:
  """Reads about `limit` queries of a generator, all of a document or none."""
  path = files.find(folders.root / synthetic.directory, "queries.jsonl")
  lines = [line for _, line in files.json_lines(path)]
  _, owners = np.unique(
    np.array([line["document"] for line in lines]), return_inverse=True
  )
  rng = np.random.default_rng([seed, 5])
  rows = np.flatnonzero(_whole(owners, limit, rng))
  return [lines[i]["text"] for i in rows]


def _compare(
  index: near_duplicates.Index,
  queries: _Real,
  written: Mapping[str, Sequence[str]],
  *,
  name: str,
  confidence: float,
  is_fair: bool = True,
) -> Iterator[comparison_results.Membership]:
  """Yields, for each generator, a comparison of trained and other queries.

  Args:
    index: the private queries, by a detector of `near_duplicates`.
    queries: the private queries, which are the targets.
    written: the synthetic queries of each generator.
    name: name of the detector, in results.
    confidence: confidence of each interval by itself, in (0, 1).
    is_fair: whether documents were chosen without looking at which queries were
      trained on. If not, shares are counted, and neither compared nor tested.
  """
  number = len(queries.texts)
  pairs = near_duplicates.pairs(queries.texts, index)
  pairs = zip(*map(np.ndarray.tolist, pairs), strict=True)
  trained, is_unique = (
    queries.trained,
    shares.alone(pairs, number) & queries.drawn,
  )
  for generator, texts in written.items():
    hit = np.zeros(number, bool)
    hit[near_duplicates.pairs(texts, index)[1]] = True
    train, control = (
      _count(hit[is_unique & trained]),
      _count(hit[is_unique & ~trained]),
    )
    difference = p_value = None
    if is_fair and train.total and control.total:
      difference, p_value = _test(
        hit[is_unique], trained[is_unique], queries.units[is_unique], confidence
      )
    yield comparison_results.Membership(
      name=generator,
      detector=name,
      train=train,
      control=control,
      difference=difference,
      p_value=p_value,
      train_all=_count(hit[trained]),
      control_all=_count(hit[~trained]),
    )


def _test(hit, trained, units, confidence) -> tuple[intervals.Interval, float]:
  """Compares the share of train queries that were hit with that of the
  others."""
  difference = shares.difference(
    *(
      calibration.grouped_interval(
        hit[side],
        [1.0] * int(side.sum()),
        units[side].tolist(),
        confidence=confidence,
      )
      for side in (trained, ~trained)
    )
  )
  if len(np.unique(units)) < len(units):
    return difference, shares.permutation_p_value(hit, trained, units)
  # Fisher's test counts the hits that each group would get if chance had put
  # every text into its group: exact if the groups were drawn so.
  table = [
    [hit[side].sum(), (~hit[side]).sum()] for side in (trained, ~trained)
  ]
  return difference, float(stats.fisher_exact(table).pvalue)


def _count(hit: Bool[np.ndarray, " text"]) -> comparison_results.Found:
  return comparison_results.Found(number=int(hit.sum()), total=len(hit))


STAGE = stage.Stage(
  name="query_leakage",
  result=comparison_results.QueryLeakage,
  config=Config,
  plan=plan_rows,
  job=make_job,
  run=run,
  needs=("generate",),
  screen=_screen,
)
