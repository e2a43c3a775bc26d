"""Which generator is audited, and what attackers are given of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.pipeline import _audit_scores, audit, results, runner, workspace

__all__ = ["audits", "needed"]

Made = Mapping[str, tuple[Any, str]]
"""Results with their fingerprints, by name."""

_MATERIAL = {
  "likelihood": (),
  "synthetic": ("generate", "filter_queries"),
  "retriever": ("generate", "filter_queries", "train_retriever"),
}
"""The stages whose results each attack reads, beside finetune_dp."""


def needed(config: audit.Config) -> set[str]:
  """Returns the stages that the attacks of an audit read.

  Args:
    config: of the audit.
  """
  stages = {"prepare_data", "pretrain", "finetune_dp", "audit"}
  return stages.union(*(_MATERIAL[attack] for attack in config.attacks))


def audits(
  config: Any,
  make: runner.Runner,
  space: workspace.Workspace,
  *,
  prepared: results.PreparedData,
  start_from: Any,
  canaries: Mapping[str, Sequence[canaries_lib.Canary]],
  generators: Made,
  written: Made,
  queries: Made,
  retrievers: Made,
  progress: bool,
) -> dict[str, tuple[results.AuditReport, str]]:
  """Audits every generator with the canaries that it was trained on.

  Args:
    config: the `plan.RunConfig`.
    make: makes results, or finds them finished.
    space: the working directory.
    prepared: vocabulary and lengths.
    start_from: the public checkpoint.
    canaries: of each repetition, by the end of its names.
    generators: with their fingerprints.
    written: their queries, and those of the public checkpoint.
    queries: what filters kept of these.
    retrievers: trained on them, and the untrained one.
    progress: whether bars are shown.

  Returns:
    The reports; none where no canaries were planted.
  """
  if not config.canaries.number:
    return {}
  made = {}
  for name, (generator, source) in generators.items():
    seed = name.removeprefix(results.row_of(name))
    given = {"written": written.get(name)}  # searched for secrets
    if "synthetic" in config.audit.attacks:
      given["public_synthetic"] = queries.get(f"public_only{seed}")
    if {"synthetic", "retriever"} & {*config.audit.attacks}:
      given["synthetic"] = queries.get(name)
    if "retriever" in config.audit.attacks:
      given["retriever"] = retrievers.get(f"synthetic_{name}")
      given["public_retriever"] = retrievers.get("untrained")
    given = {key: found for key, found in given.items() if found}
    released = _audit_scores.Released(
      generator=generator, **{key: found for key, (found, _) in given.items()}
    )
    made[name] = make(
      f"audit/{name}",
      results.AuditReport,
      (
        config.audit,
        config.canaries,
        source,
        {key: digest for key, (_, digest) in given.items()},
      ),
      lambda digest, r=released, s=seed: audit.run(
        config.audit,
        space,
        digest,
        prepared=prepared,
        start_from=start_from,
        prefix=config.finetune_dp.prefix,
        released=r,
        canaries=canaries[s],
        progress=progress,
      ),
    )
  return made
