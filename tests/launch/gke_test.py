"""The Job for Kubernetes that a dry run prints."""

import json
import os
import shlex
import subprocess

import pytest

from synthq_jax.cli import flags as flags_lib


def _printed(cloud, *flags: str) -> tuple[dict, dict]:
  done = cloud.run("--dry_run", "--gke_image=image:1", *flags)
  assert done.returncode == 0, done.stderr
  assert cloud.kinds == []
  first, _, text = done.stdout.partition("\n")
  assert first == "---"  # several are one stream of YAML
  service, job = json.loads(text)["items"]
  return service, job


@pytest.mark.parametrize(
  ("accelerator", "hosts", "chips", "kind", "topology"),
  [
    ("v4-16", 2, "4", "tpu-v4-podslice", "2x2x2"),
    ("v5litepod-8", 1, "8", "tpu-v5-lite-podslice", "2x4"),
    ("v6e-16", 4, "4", "tpu-v6e-slice", "4x4"),
    ("v5p-4x4x12", 48, "4", "tpu-v5p-slice", "4x4x12"),
  ],
)
def test_a_pod_for_each_host_gets_all_of_its_chips(
  cloud, accelerator, hosts, chips, kind, topology
):
  flags = [f"--accelerator={accelerator}", "--gin.BATCH_SIZE=256"]
  service, job = _printed(cloud, *flags)
  spec, pod = job["spec"], job["spec"]["template"]["spec"]
  assert spec["completionMode"] == "Indexed"
  assert spec["completions"] == spec["parallelism"] == hosts
  (container,) = pod["containers"]
  assert container["resources"]["limits"] == {"google.com/tpu": chips}
  assert pod["nodeSelector"] == {
    "cloud.google.com/gke-tpu-accelerator": kind,
    "cloud.google.com/gke-tpu-topology": topology,
  }
  # By which the hosts find each other.
  assert pod["subdomain"] == service["metadata"]["name"]
  assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


def test_synthq_understands_what_a_pod_runs(cloud):
  _, job = _printed(cloud)
  (container,) = job["spec"]["template"]["spec"]["containers"]
  assert container["command"][:2] == ["sh", "-c"]
  command, name, *flags = shlex.split(container["command"][2].splitlines()[-1])
  assert (command, name) == ("exec", "synthq")
  flags = [flag for flag in flags if not flag.startswith("--gin.")]
  options = flags_lib.parser().parse_args(flags)
  assert options.distributed == "tpu"
  mounted = container["volumeMounts"][0]["mountPath"]
  assert options.workdir.startswith(f"{mounted}/")


def test_what_synthq_prints_is_in_no_log_of_the_cluster(cloud, tmp_path):
  """Scores and exact counts of private queries stood in Cloud Logging."""
  _, job = _printed(cloud, "--gin.SOURCE=beir:/mnt/synthq/it's mine")
  (container,) = job["spec"]["template"]["spec"]["containers"]
  mount = container["volumeMounts"][0]["mountPath"]
  shell, flag, script = container["command"]
  program = tmp_path / "synthq"
  program.write_text(
    '#!/bin/sh\necho "score .7 of $*"\necho 3 users >&2\nexit 2\n'
  )
  program.chmod(0o755)
  done = subprocess.run(
    [shell, flag, script.replace(mount, str(tmp_path / "mnt"))],
    env={
      "PATH": f"{tmp_path}:{os.environ['PATH']}",
      "JOB_COMPLETION_INDEX": "1",
    },
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2 and not done.stderr
  assert "score" not in done.stdout and "users" not in done.stdout
  (output,) = (tmp_path / "mnt").glob("*/private/output_1.txt")
  assert str(output) in done.stdout
  assert (
    output.stat().st_mode & 0o077 == output.parent.stat().st_mode & 0o077 == 0
  )
  text = output.read_text()
  assert text.startswith("score .7 of run ") and "it's mine" in text
  assert text.endswith("3 users\n")


def test_the_shared_file_system_is_mounted(cloud):
  template = _printed(cloud)[1]["spec"]["template"]
  assert template["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
  attributes = template["spec"]["volumes"][0]["csi"]["volumeAttributes"]
  assert attributes["bucketName"] == "my-bucket"
  # What one host writes, the others see at once.
  options = attributes["mountOptions"].split(",")
  assert {"metadata-cache:ttl-secs:0", "file-mode=600"} <= set(options)
  template = _printed(cloud, "--bucket=", "--nfs=h:/e")[1]["spec"]["template"]
  (volume,) = template["spec"]["volumes"]
  assert volume["nfs"] == {"server": "h", "path": "/e"}
  assert "annotations" not in template["metadata"]


def test_final_codes_end_a_job_and_others_are_tried_again(cloud):
  _, job = _printed(cloud, "--max_restarts=3")
  (rule,) = job["spec"]["podFailurePolicy"]["rules"]
  assert rule["action"] == "FailJob"
  assert rule["onExitCodes"]["values"] == [2, 3]
  assert job["spec"]["backoffLimit"] == 3 * 2
  assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_wishes_reach_the_pod(cloud):
  flags = ["--spot", "--service_account=k", "--labels=a=b,c=d"]
  _, job = _printed(cloud, *flags)
  pod = job["spec"]["template"]["spec"]
  assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
  assert pod["serviceAccountName"] == "k"
  assert job["metadata"]["labels"] == {"a": "b", "c": "d"}
