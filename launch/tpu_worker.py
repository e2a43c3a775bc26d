"""Finds out whether this machine is a worker of a TPU slice, and of which one.

A host of Cloud TPU asks its metadata server, as libtpu does; a pod of Kubernetes
has it in its environment. Neither JAX nor gcloud is needed, and a machine without
the devices of a TPU asks nobody.
"""

import dataclasses
import math
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping

__all__ = ["Worker", "find"]

_DEVICES = ("/dev/accel0", "/dev/vfio/0")
_PATH = "/computeMetadata/v1/instance/attributes/tpu-env"
_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
  """One host of a slice."""

  slice: str  # its name; "" in Kubernetes
  accelerator: str  # e.g. "v4-32"; "" where it is not known
  hosts: int


def find(environment: Mapping[str, str] | None = None) -> Worker | None:
  """Returns the facts about this worker; None on other machines.

  Args:
    environment: variables; None: the process's own.
  """
  variables = os.environ if environment is None else environment
  if names := variables.get("TPU_WORKER_HOSTNAMES"):
    kind = variables.get("TPU_ACCELERATOR_TYPE", "")
    return Worker(slice="", accelerator=kind, hosts=len(names.split(",")))
  if not any(map(os.path.exists, _DEVICES)):
    return None
  host = variables.get("GCE_METADATA_HOST", "metadata.google.internal")
  request = urllib.request.Request(
    f"http://{host}{_PATH}", headers={"Metadata-Flavor": "Google"}
  )
  try:
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
      return read(answer.read().decode())
  except (OSError, urllib.error.URLError):
    return None


def read(text: str) -> Worker:
  """Reads the attribute `tpu-env`.

  >>> read("NODE_ID: 'ours'\\nACCELERATOR_TYPE: 'v4-16'\\nHOST_BOUNDS: '1,1,2'")
  Worker(slice='ours', accelerator='v4-16', hosts=2)

  Args:
    text: lines of NAME: 'VALUE'.
  """
  values = dict(re.findall(r"(?m)^(\w+):\s*'?([^'\n]*)'?\s*$", text))
  sides = [int(n) for n in re.findall(r"\d+", values.get("HOST_BOUNDS", "1"))]
  return Worker(
    slice=values.get("NODE_ID", ""),
    accelerator=values.get("ACCELERATOR_TYPE", ""),
    hosts=math.prod(sides),
  )
