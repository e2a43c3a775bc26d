"""A federated study as text, Markdown and one drawing."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from synthq_jax import artifacts
from synthq_jax.federated import ranking
from synthq_jax.pipeline import _federated_methods as methods
from synthq_jax.pipeline import _federated_results as results
from synthq_jax.pipeline import _plots, _report_tables
from synthq_jax.privacy import rounding
from synthq_jax.retrieval import significance, text_tables

__all__ = ["notes", "tables", "write"]

Table = tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]
"""Header, rows, and the titles of numeric columns."""
Section = tuple[str, str, Table]
"""Title, explanation, table."""

THESIS: Mapping[str, float] = {
  "BM25": 0.172,
  "Random negatives": 0.194,
  "BM25 negatives": 0.188,
  "STAR, each client alone": 0.232,
  methods.BASE: 0.261,
  "+ query encoder": 0.289,
  "+ Fed-Negative": 0.309,
  methods.CENTRAL: 0.338,
}
"""Sentence MRR@10 on Fed-NewsQA as the thesis reports it: other texts, another
model."""

_MAIN = "MRR@10"
_DRAWN = 40  # clients


def notes(config: Any) -> tuple[str, ...]:
  """Says what a reader must know of the settings.

  Args:
    config: a `federated_study.Config`.
  """
  recipe, personal = config.recipe, config.personal
  central = config.central_learning_rate
  rates = "" if central is None else f" ({methods.CENTRAL} at {central:g})"
  start = "a given T5" if config.checkpoint else "the package's small T5"
  limit = config.max_train_questions
  told = "all" if limit is None else f"at most {limit:,}"
  partners = config.exchange_partners or "all"
  return (
    f"Two towers that start from {start}; questions of {config.query_length}"
    f" tokens ({config.query_pooling}), sentences of {config.sentence_length}"
    f" (mean); {told} train questions of a client; seeds: {config.seeds}.",
    f"{recipe.warmup_rounds} rounds of warm-up and {recipe.rounds} more, each"
    f" of {recipe.epochs} local epochs in batches of {recipe.batch_size};"
    f" {recipe.num_negatives} negatives of a question, static hard ones from"
    f" the best {recipe.top}; Adam at {recipe.learning_rate:g}{rates},"
    f" temperature {recipe.temperature:g}. Every trained row sees every question equally"
    " often, but for those with a query encoder, which go on.",
    f"Query encoders: {personal.rounds} rounds of"
    f" {personal.settings.epochs} epochs, the hardest"
    f" {personal.settings.num_negatives} sentences of a client as negatives."
    f" Fed-Negative: the best {config.exchange_top} sentences of"
    f" {partners} partners for each question in each round.",
  )


def write(found: results.Study, root: pathlib.Path) -> str:
  """Writes study.md and study.svg; returns the tables for the screen.

  Args:
    found: the study.
    root: where they go.
  """
  sections = tables(found)
  artifacts.write_atomically(root / "study.svg", _drawing(found))
  artifacts.write_atomically(root / "study.md", _page(found, sections))
  parts = [_setting(found.facts), *found.notes]
  parts += [
    f"{title}\n\n{text_tables.aligned(*table)}" for title, _, table in sections
  ]
  return "\n\n".join([*parts, f"report: {root / 'study.md'}"])


def tables(found: results.Study) -> list[Section]:
  """Returns the tables with their titles and what explains them."""
  main = [one for one in found.outcomes if not one.variant]
  sections = [_effectiveness(main), _by_client(found.facts, main)]
  others = [
    one
    for one in found.outcomes
    if one.variant and one.method != methods.EXCHANGE
  ]
  if others:
    base = [one for one in main if (one.method, one.seed) == (methods.BASE, 0)]
    sections.append(_variants([*base, *others]))
  if any(one.exchanges for one in main):
    sections.append(_traffic(main))
  once = [one for one in found.outcomes if one.method == methods.EXCHANGE]
  if once:
    sections.append(_exchanges(once))
  return [*sections, _costs(found.outcomes)]


def values(
  group: Sequence[results.Outcome], measure: str, level: str = "sentence"
) -> list[np.ndarray]:
  """Returns a measure by client and question, the mean over repetitions.

  Args:
    group: outcomes of one method.
    measure: as in `ranking.Scores`.
    level: "sentence" or "passage".
  """
  by_seed = [
    [results.scores(one).values(measure, level) for one in outcome.ranks]
    for outcome in group
  ]
  return [np.mean(one, axis=0) for one in zip(*by_seed, strict=True)]


def _effectiveness(main: Sequence[results.Outcome]) -> Section:
  """The main table, as the thesis lays it out."""
  groups = _groups(main)
  reference = groups.get(methods.BASE)
  tested = len(groups) - 1
  rows = []
  for name, group in groups.items():
    found = values(group, _MAIN)
    row = [name, _with_interval(found), _spread(group)]
    for measure in ranking.MEASURES[1:]:
      row.append(f"{_mean(values(group, measure)):.3f}")
    row.append(f"{_mean(values(group, _MAIN, 'passage')):.3f}")
    row.append(f"{min(one.mean() for one in found):.3f}")
    row.append(_p_value(found, reference, name, tested))
    row.append(f"{THESIS[name]:.3f}" if name in THESIS else "-")
    rows.append(tuple(row))
  header = (
    "Method", "MRR@10 [95%]", "Seeds", "R@1", "R@20", "R@100",
    "Passage MRR@10", "Worst client", f"p against {methods.BASE}",
    "Thesis, Fed-NewsQA",
  )  # fmt: skip
  return (
    "Retrieval of answer sentences",
    "Means over clients of the means over their test questions, each among its"
    " own client's sentences; repetitions averaged. Intervals by bootstrap over"
    " questions; seeds: smallest and largest MRR@10 of a repetition; p of a t"
    " test over questions, clients as strata, times the number of tests.",
    (header, rows, header[1:]),
  )


def _by_client(
  facts: results.Facts, main: Sequence[results.Outcome]
) -> Section:
  """MRR@10 of every client, the largest first, and what methods gain."""
  groups = _groups(main)
  found = {name: values(group, _MAIN) for name, group in groups.items()}
  order = _largest_first(facts.clients)
  header = (
    "Client", "Passages", "Sentences", "Train questions", "Test questions",
    *groups,
  )  # fmt: skip
  rows = [
    (
      facts.clients[i].name,
      f"{facts.clients[i].num_passages:,}",
      f"{facts.clients[i].num_sentences:,}",
      f"{facts.clients[i].num_train:,}",
      f"{facts.clients[i].num_test:,}",
      *(f"{one[i].mean():.3f}" for one in found.values()),
    )
    for i in order
  ]
  explanation = "Sentence MRR@10."
  alone, base = found.get("STAR, each client alone"), found.get(methods.BASE)
  if alone and base:
    gains = [b.mean() - a.mean() for a, b in zip(alone, base, strict=True)]
    sizes = [one.num_train for one in facts.clients]
    if len(gains) > 2 and np.ptp(sizes) and np.ptp(gains):
      explanation += (
        " Rank correlation (Spearman) of a client's train questions with what"
        f" {methods.BASE} gains over training alone:"
        f" {_spearman(sizes, gains):+.2f}."
      )
  return "Clients", explanation, (header, rows, header[1:])


def _variants(group: Sequence[results.Outcome]) -> Section:
  """The base method with one setting changed."""
  base = [one for one in group if not one.variant]
  tested = len(group) - len(base)
  rows = []
  for one in group:
    found = values([one], _MAIN)
    rows.append(
      (
        one.variant or "as in the main table",
        _with_interval(found),
        _p_value(found, base or None, one.variant or methods.BASE, tested),
        f"{_mean(values([one], 'R@20')):.3f}",
        f"{one.hubness:.2f}",
      )
    )
  header = ("Setting", "MRR@10 [95%]", "p", "R@20", "Hubness")
  return (
    f"{methods.BASE} with other settings",
    "One seed. p of a t test against the first row, times the number of tests."
    " Hubness: skewness of how often a sentence is drawn as a hard"
    " negative by the final towers; 0 is even.",
    (header, rows, header[1:]),
  )


def _traffic(main: Sequence[results.Outcome]) -> Section:
  """Bytes and promises of the main table's exchanges."""
  rows = [
    (f"{one.method}, seed {one.seed}", *_sent(one))
    for one in main
    if one.exchanges
  ]
  header = ("Exchange", *_SENT)
  return (
    "Traffic",
    f"{_UNITS} Towers that travel in federated averaging are not counted.",
    (header, rows, header[1:]),
  )


def _exchanges(once: Sequence[results.Outcome]) -> Section:
  """What each exchange gives, costs and promises."""
  base = next((one for one in once if not one.exchanges), None)
  rows = []
  for one in once:
    found = values([one], _MAIN)
    p_value = "-"
    if base is not None and one is not base:
      p_value = _p_value(found, [base], one.variant, len(once) - 1)
    rows.append(
      (
        one.variant,
        _with_interval(found),
        p_value,
        *(_sent(one) if one.exchanges else ["-"] * len(_SENT)),
      )
    )
  header = ("Exchange", "MRR@10 [95%]", "p against none", *_SENT)
  return (
    "Exchanges",
    "Query encoders of clients on the public encoder's sentences, with negatives"
    f" asked for once; one seed. {_UNITS}",
    (header, rows, header[1:]),
  )


_SENT = (
  "Sent", "Received", "Most sent", "Most received", "Epsilon per question",
  "Epsilon per passage",
)  # fmt: skip
_UNITS = (
  "MiB of a client in a round, as serialised: the mean over clients, and the"
  " most. Epsilon over all rounds, the largest of a client; 0 where nothing"
  " leaves, or where the noise's delta alone covers it."
)


def _sent(one: results.Outcome) -> list[str]:
  per_round = np.array([one.sent, one.received]) / one.exchanges
  return [
    *(_mebibytes(x) for x in per_round.mean(axis=1)),
    *(_mebibytes(x) for x in per_round.max(axis=1)),
    _promised(one.epsilon_questions),
    _promised(one.epsilon_collection),
  ]


def _costs(outcomes: Sequence[results.Outcome]) -> Section:
  groups = _groups(outcomes)
  rows = [
    (
      name,
      str(len(group)),
      _report_tables.duration(sum(one.seconds for one in group)),
    )
    for name, group in groups.items()
  ]
  header = ("Method", "Trainings", "Together")
  return (
    "Times",
    "Rows that begin like one before go on from it: the later one is cheaper.",
    (header, rows, header[1:]),
  )


def _groups(
  outcomes: Sequence[results.Outcome],
) -> dict[str, list[results.Outcome]]:
  groups: dict[str, list[results.Outcome]] = {}
  for one in outcomes:
    groups.setdefault(one.method, []).append(one)
  return groups


def _with_interval(found: Sequence[np.ndarray]) -> str:
  """Returns the mean over clients with its interval."""
  one = significance.stratified_interval(found, seed=0)
  return f"{one.mean:.3f} [{one.low:.3f}, {one.high:.3f}]"


def _mean(found: Sequence[np.ndarray]) -> float:
  return float(np.mean([one.mean() for one in found]))


def _spread(group: Sequence[results.Outcome]) -> str:
  if len(group) < 2:
    return "-"
  means = [_mean(values([one], _MAIN)) for one in group]
  return f"{min(means):.3f} to {max(means):.3f}"


def _p_value(
  found: Sequence[np.ndarray],
  reference: Sequence[results.Outcome] | None,
  name: str,
  tested: int,
) -> str:
  if reference is None or name == methods.BASE:
    return "-"
  test = significance.stratified_t_test(found, values(reference, _MAIN))
  return _report_tables.p_value(min(1.0, test.p_value * tested))


def _largest_first(clients: Sequence[results.ClientFacts]) -> list[int]:
  """Returns the clients' order by train questions, then by sentences."""
  sizes = [(one.num_train, one.num_sentences) for one in clients]
  return sorted(range(len(clients)), key=sizes.__getitem__, reverse=True)


def _spearman(left: Sequence[float], right: Sequence[float]) -> float:
  from scipy import stats

  return float(stats.spearmanr(left, right).statistic)


def _mebibytes(number: float) -> str:
  return f"{number / 2**20:.2f}"


def _promised(epsilon: float) -> str:
  return "none promised" if np.isinf(epsilon) else rounding.epsilon(epsilon)


def _setting(facts: results.Facts) -> str:
  train = sum(one.num_train for one in facts.clients)
  test = sum(one.num_test for one in facts.clients)
  sentences = sum(one.num_sentences for one in facts.clients)
  said = (
    f"{facts.source}: {len(facts.clients)} clients ({facts.partition}),"
    f" {sentences:,} sentences, {train:,} train and {test:,} test questions."
  )
  if facts.num_left_out:
    said += f" {facts.num_left_out} clients with too few questions left out."
  return said


def _drawing(found: results.Study) -> str:
  """Draws MRR@10 of each client, or of the largest ones."""
  main = _groups([one for one in found.outcomes if not one.variant])
  clients = found.facts.clients
  order = _largest_first(clients)[:_DRAWN]
  wanted = ("STAR, each client alone", methods.BASE, methods.CENTRAL)
  points = {}
  for name in [one for one in wanted if one in main] or main:
    means = [float(one.mean()) for one in values(main[name], _MAIN)]
    points[name] = [means[i] for i in order]
  return _plots.in_rows(
    [f"{clients[i].name} ({clients[i].num_train:,})" for i in order],
    points,
    label="sentence MRR@10 (client: its train questions)",
  )


def _page(found: results.Study, sections: Sequence[Section]) -> str:
  """Returns the Markdown page."""
  parts = ["# Answer sentences over clients", _setting(found.facts)]
  parts += [f"- {text_tables.escaped(note)}" for note in found.notes]
  for title, explanation, table in sections:
    parts += [f"## {title}", explanation, text_tables.markdown(*table)]
  parts += [
    f"## MRR@10 of clients, the largest first ({_DRAWN} at most)",
    "![MRR@10 of clients, with their train questions](study.svg)",
  ]
  return "\n\n".join(parts) + "\n"
