"""What stages that train a T5 have in common: what is trained, what is saved."""

import pathlib
import re
import time
from collections.abc import Mapping
from typing import Any

from synthq_jax import artifacts
from synthq_jax.models import t5_checkpoints, t5_config
from synthq_jax.pipeline import private_training, results, workspace
from synthq_jax.training import distributed

__all__ = ["save", "split"]


def split(
  params: Mapping[str, Any], pattern: str, name: str, hint: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Parts parameters by path into what is trained and what stays.

  Args:
    params: by path.
    pattern: regular expression that the paths of the first match in full.
    name: of the setting, for the message.
    hint: ends the message.

  Raises:
    ValueError: if nothing matches.
  """
  trained = {k: v for k, v in params.items() if re.fullmatch(pattern, k)}
  if not trained:
    raise ValueError(
      f"{name} must match a parameter, got trained={pattern!r}; there are"
      f" {', '.join(sorted(params)[:3])}, ...{hint}"
    )
  return trained, {k: v for k, v in params.items() if k not in trained}


def save(
  space: workspace.Workspace,
  stage: str,
  digest: str,
  directory: pathlib.Path,
  params: Any,
  model_config: t5_config.T5Config,
  *,
  began: float,
  **fields: Any,
) -> results.Checkpoint:
  """Saves a trained model and its result, then drops the unfinished states.

  Of several processes that trained it together process 0 does so.

  Args:
    space: the working directory.
    stage: name of the stage and row, e.g. "finetune_dp/eps8".
    digest: fingerprint to save the result under.
    directory: where it goes, private or not.
    params: nested dicts of arrays.
    model_config: the shape they belong to.
    began: `time.monotonic()` when the stage began.
    **fields: the other fields of the result.
  """
  if distributed.is_main():
    t5_checkpoints.save(directory, params, model_config)
  result = results.Checkpoint(
    directory=space.relative(directory),
    seconds=time.monotonic() - began,
    **fields,
  )
  if distributed.is_main():
    artifacts.save(directory, result, digest)
    private_training.remove_state(space, stage, digest)
  return result
