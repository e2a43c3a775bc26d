"""A job on a TPU slice as a manifest for Kubernetes, for GKE to carry out.

An Indexed Job has one pod for each host of the slice, and a Service without an
address lets them find each other. The node pool, or Autopilot, makes the slice
and deletes it; here nothing is called.
"""

import json
import shlex
from typing import Any

import tpu_steps

__all__ = ["manifest"]

_FINAL = [2, 3]  # synthq: a mistake of the user, an audit that refutes a claim
_PORTS = (8471, 8476)  # of the TPU's runtime, and of JAX's coordinator
_VOLUME = "shared"


def manifest(job: tpu_steps.Job) -> str:
  """Returns the manifest for `kubectl apply -f -`.

  Args:
    job: with an image, `gke_image`, in which `synthq` is installed and the
      checkout is the working directory.

  Returns:
    A document of YAML: a List of a Service and a Job, as JSON.
  """
  items = [_service(job), _job(job)]
  content = {"apiVersion": "v1", "kind": "List", "items": items}
  return "---\n" + json.dumps(content, indent=2) + "\n"


def _service(job: tpu_steps.Job) -> dict[str, Any]:
  return {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": job.name},
    "spec": {"clusterIP": "None", "selector": {"job-name": job.name}},
  }


def _job(job: tpu_steps.Job) -> dict[str, Any]:
  hosts = job.slice.hosts
  metadata: dict[str, Any] = {"name": job.name}
  if job.labels:
    pairs = (label.partition("=") for label in job.labels.split(","))
    metadata["labels"] = {name: value for name, _, value in pairs}
  final = {"containerName": "synthq", "operator": "In", "values": _FINAL}
  return {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": metadata,
    "spec": {
      "completionMode": "Indexed",
      "completions": hosts,
      "parallelism": hosts,
      # One host that is lost ends the others, and each of them counts.
      "backoffLimit": job.max_restarts * hosts,
      "podFailurePolicy": {
        "rules": [{"action": "FailJob", "onExitCodes": final}]
      },
      "template": _pod(job),
    },
  }


def _pod(job: tpu_steps.Job) -> dict[str, Any]:
  chips = {"google.com/tpu": str(job.slice.chips // job.slice.hosts)}
  where = {
    "cloud.google.com/gke-tpu-accelerator": job.slice.gke,
    "cloud.google.com/gke-tpu-topology": job.slice.topology,
  }
  if job.spot:
    where["cloud.google.com/gke-spot"] = "true"
  spec: dict[str, Any] = {
    "subdomain": job.name,
    "restartPolicy": "Never",
    # A run that is told to stop saves its state first.
    "terminationGracePeriodSeconds": 120,
    "nodeSelector": where,
    "containers": [
      {
        "name": "synthq",
        "image": job.gke_image,
        "command": ["sh", "-c", _command(job)],
        "ports": [{"containerPort": port} for port in _PORTS],
        "resources": {"requests": chips, "limits": chips},
        "volumeMounts": [{"name": _VOLUME, "mountPath": tpu_steps.MOUNT}],
      }
    ],
    "volumes": [{"name": _VOLUME, **_storage(job)}],
  }
  if job.service_account:
    spec["serviceAccountName"] = job.service_account
  metadata = {"annotations": {"gke-gcsfuse/volumes": "true"}}
  return {"metadata": metadata if job.bucket else {}, "spec": spec}


def _command(job: tpu_steps.Job) -> str:
  """Runs synthq with its output below private/.

  A pod's own output goes to Cloud Logging, and synthq prints scores and counts of
  private queries.
  """
  private = f"{job.workdir}/private"
  run = shlex.join(["synthq", job.stage, *tpu_steps.synthq_flags(job)])
  return "\n".join(
    [
      "set -e",
      f"mkdir -p {job.workdir}",
      f"output={private}/output_$JOB_COMPLETION_INDEX.txt",
      f'(umask 077; mkdir -p {private}; : >>"$output")',
      'echo "the output is private: $output"',
      'exec >>"$output" 2>&1',
      f"exec {run}",
    ]
  )


def _storage(job: tpu_steps.Job) -> dict[str, Any]:
  """The file system that all hosts share."""
  if job.nfs:
    server, _, path = job.nfs.partition(":")
    return {"nfs": {"server": server, "path": path}}
  options = ",".join(tpu_steps.GCSFUSE)
  for flag, entry in (
    ("metadata-cache-", "metadata-cache:"),
    ("secs=", "secs:"),
  ):
    options = options.replace(flag, entry)  # as the driver writes them
  attributes = {"bucketName": job.bucket, "mountOptions": options}
  return {
    "csi": {
      "driver": "gcsfuse.csi.storage.gke.io",
      "volumeAttributes": attributes,
    }
  }
