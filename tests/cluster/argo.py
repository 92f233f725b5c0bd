"""Runs the compiled pipeline as pods, as Kubeflow Pipelines 2.17 and Argo do.

The command line, the security context, the labels, the volumes and the variables of a step's pod
are those of a recorded one; so are the order of the graph, the automatic retries, what happens
after a failure, "Retry" and "Terminate", importers, and Kubeflow's name of the run. Not here: the
drivers, the launcher (but its download of imported artifacts), caching, and the upload of
artifacts.

Kubeflow 2.17 sets the retry policy `OnError`: a step whose pod is deleted is repeated, and one that
fails is not. "Terminate" runs the exit handler, too. An exit handler that has succeeded is not
repeated by "Retry".
"""

from __future__ import annotations

import json
import shlex
import threading
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from pipelines.naming import name_run
from tests.cluster.kubectl import Namespace, Object, wait_until

SERVICE_ACCOUNT = "pipeline-runner"
STEP_TIMEOUT_S = 900.0
OUTPUT_FILE = "/minio/mlpipeline/output_metadata.json"
OUTPUT = "@@output "
"""Marks the line of a step's log that holds what it writes to `OUTPUT_FILE`."""
PRINT_OUTPUT = f'\n[ ! -f {OUTPUT_FILE} ] || printf "\\n{OUTPUT}%s\\n" "$(cat {OUTPUT_FILE})"\n'
FORWARD_SIGNALS = """
import os, signal, subprocess, sys, time
process = subprocess.Popen(sys.argv[1:], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: os.killpg(process.pid, signal.SIGTERM))
code = process.wait()
deadline = time.monotonic() + 10
try:
    while time.monotonic() < deadline:
        os.waitpid(-1, os.WNOHANG)
        os.killpg(process.pid, 0)
        time.sleep(0.1)
except (ChildProcessError, ProcessLookupError):
    pass
sys.exit(code % 256)
"""
"""Stands in for Argo's emissary: it passes signals on to the processes of the step, and waits for
those that the shell leaves behind."""
JOB_NAME = "{{$.pipeline_job_name}}"
"""Stands for Kubeflow's name of the run; the driver resolves it where it is a whole value."""
DOWNLOAD = """
import pathlib, sys
from services.common.objectstore import ObjectStore
from services.common.settings import ObjectStoreClientSettings
bucket, _, prefix = sys.argv[1].removeprefix("minio://").partition("/")
client = ObjectStore(ObjectStoreClientSettings.load().s3)._client
for item in client.list_objects(bucket, prefix, recursive=True):
    path = pathlib.Path("/minio", bucket, item.object_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    client.fget_object(bucket, item.object_name, str(path))
"""
"""Stands in for the launcher: it downloads an artifact to where the component looks for it."""
_NUMBERS = count()


class StepFailed(Exception):
    """A step failed for good; the message is the end of its log."""


@dataclass
class PipelineRun:
    """A run of the pipeline, which its Workflow object owns."""

    namespace: Namespace
    package: Path
    parameters: dict[str, Any]
    display_name: str = "Run of bapo"
    """Kubeflow's name of the run."""
    succeeded: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Output parameters of the steps that have succeeded."""
    logs: dict[str, str] = field(default_factory=dict)
    """Log of the last attempt at each step."""
    running: str | None = None
    """Name of the pod that is at work."""

    terminated: bool = False

    def __post_init__(self) -> None:
        self._pipeline, platform = yaml.safe_load_all(self.package.read_text())
        self._platform = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        inputs = self._pipeline["root"]["inputDefinitions"]["parameters"]
        unknown = self.parameters.keys() - inputs.keys()
        assert not unknown, f"the form has no field {unknown}"
        defaults = {name: value["defaultValue"] for name, value in inputs.items()}
        self._values = defaults | self.parameters
        self.workflow = f"bapo-{time.monotonic_ns():x}-{next(_NUMBERS)}"
        created = self.namespace.create(
            {
                "apiVersion": "argoproj.io/v1alpha1",
                "kind": "Workflow",
                "metadata": {"name": self.workflow},
                "spec": {},
                "status": {"phase": "Running"},
            }
        )
        self._owner = {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "name": self.workflow,
            "uid": created["metadata"]["uid"],
        }

    @property
    def name(self) -> str:
        """Name of the run that is trained."""
        return name_run(str(self._values["bapo_run"]), self.display_name, self.workflow)

    def execute(self) -> None:
        """Runs every step that has not succeeded. Raises `StepFailed`, after clean-up."""
        self._patch({"status": {"phase": "Running"}})
        graph = self._tasks("comp-exit-handler-1")
        try:
            for name in _in_order(graph):
                if self.terminated:
                    raise StepFailed(f"{name}: terminated before it started")
                if name not in self.succeeded:
                    self._run_step(name, graph[name])
        except StepFailed:
            self._clean_up()
            self._patch({"status": {"phase": "Failed"}})
            raise
        self._clean_up()
        self._patch({"status": {"phase": "Succeeded"}})

    def start(self) -> threading.Thread:
        """Runs the steps in the background, and leaves failures in the logs."""

        def execute() -> None:
            try:
                self.execute()
            except StepFailed:
                return

        thread = threading.Thread(target=execute, daemon=True)
        thread.start()
        return thread

    def log(self) -> str:
        """Returns the log of the step that is at work."""
        return self.namespace.log(self.running) if self.running else ""

    def terminate(self) -> None:
        """Ends the run as "Terminate" does: Argo sets the deadline, and ends the pods."""
        self.terminated = True
        self._patch({"spec": {"activeDeadlineSeconds": 0}})
        if self.running is not None:
            self.namespace.kubectl("delete", "pod", self.running, "--wait=false")

    def delete_workflow(self) -> None:
        """Deletes the Workflow, and with it all that it owns."""
        self.namespace.kubectl("delete", "workflow", self.workflow, "--wait=false")

    def _clean_up(self) -> None:
        """Runs the exit handler, which Kubeflow does not repeat once it has succeeded."""
        if "clean-up" not in self.succeeded:
            self._run_step("clean-up", self._tasks(None)["clean-up"])

    def _patch(self, change: Object) -> None:
        self.namespace.kubectl(
            *("patch", "workflow", self.workflow, "--type=merge", "-p", json.dumps(change))
        )

    def _tasks(self, component: str | None) -> dict[str, Object]:
        dag = self._pipeline["root" if component is None else "components"]
        tasks: dict[str, Object] = (dag if component is None else dag[component])["dag"]["tasks"]
        return tasks

    def _run_step(self, name: str, task: Object) -> None:
        if self._importer(task) is not None:
            self.succeeded[name] = {}
            return
        for attempt in range(int(task["retryPolicy"]["maxRetryCount"]) + 1):
            pod = f"{self.workflow}-{name}-{len(self.logs)}-{attempt}-{next(_NUMBERS)}"[:63]
            self.namespace.create(self._pod(pod, task, attempt))
            self.running = pod
            phase = wait_until(
                lambda pod=pod: self._ended(pod),  # type: ignore[misc]
                f"step {name}",
                STEP_TIMEOUT_S,
                lambda pod=pod: self.namespace.log(pod)[-3000:],  # type: ignore[misc]
            )
            self.running = None
            self.logs[name] = log = self.namespace.log(pod)
            if phase == "Succeeded":
                self.succeeded[name] = _outputs(log)
                return
            if phase == "Failed" or (self.terminated and name != "clean-up"):
                break
        raise StepFailed(f"{name}: {log[-3000:]}")

    def _importer(self, task: Object) -> Object | None:
        """Returns the importer that a task stands for; None for a task with a pod."""
        label = self._pipeline["components"][task["componentRef"]["name"]]["executorLabel"]
        importer: Object | None = self._pipeline["deploymentSpec"]["executors"][label].get(
            "importer"
        )
        return importer

    def _ended(self, pod: str) -> str | None:
        found = self.namespace.get("pod", pod)
        if found is None:
            return "Deleted"
        phase: str = found["status"].get("phase", "")
        return phase if phase in ("Succeeded", "Failed") else None

    # -- the pod of a step

    def _pod(self, name: str, task: Object, attempt: int) -> Object:
        component = self._pipeline["components"][task["componentRef"]["name"]]
        label = component["executorLabel"]
        container = self._pipeline["deploymentSpec"]["executors"][label]["container"]
        platform = self._platform.get(label, {})
        shell, option, script, source = container["command"]
        imported = self._imported(task)
        for artifact in imported.values():
            download = f"python3 -c {shlex.quote(DOWNLOAD)} {shlex.quote(artifact['uri'])}\n"
            script = download + script
        script += PRINT_OUTPUT
        executor_input = json.dumps(_as_go_writes(self._executor_input(component, task)))
        arguments = [executor_input if text == "{{$}}" else text for text in container["args"]]
        mounts, volumes = _kfp_volumes()
        for entry in platform.get("configMapAsVolume", []):
            config_map = {
                "name": self._argument(entry["configMapNameParameter"]),
                "optional": entry.get("optional", False),
            }
            volumes.append({"name": config_map["name"], "configMap": config_map})
            mounts.append({"name": config_map["name"], "mountPath": entry["mountPath"]})
        resources = container["resources"]
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "ownerReferences": [self._owner],
                "labels": {
                    **platform["podMetadata"]["labels"],
                    "pipelines.kubeflow.org/v2_component": "true",
                    "workflows.argoproj.io/workflow": self.workflow,
                },
                "annotations": {"sidecar.istio.io/inject": "false"},
            },
            "spec": {
                "serviceAccountName": SERVICE_ACCOUNT,
                "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
                "restartPolicy": "Never",
                "containers": [
                    {
                        "name": "main",
                        "image": container["image"],
                        "imagePullPolicy": "IfNotPresent",
                        "command": ["python3", "-c", FORWARD_SIGNALS, shell, option, script],
                        "args": [source, *arguments],
                        "env": self._variables(container, platform, attempt),
                        "resources": {
                            "requests": {
                                "cpu": resources["resourceCpuRequest"],
                                "memory": resources["resourceMemoryRequest"],
                            },
                            "limits": {
                                "cpu": resources["resourceCpuLimit"],
                                "memory": resources["resourceMemoryLimit"],
                            },
                        },
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "capabilities": {"drop": ["ALL"]},
                            "seccompProfile": {"type": "RuntimeDefault"},
                        },
                        "volumeMounts": mounts,
                    }
                ],
                "volumes": volumes,
            },
        }

    def _executor_input(self, component: Object, task: Object) -> Object:
        arguments = {
            name: self._argument(source)
            for name, source in task.get("inputs", {}).get("parameters", {}).items()
        }
        outputs = component.get("outputDefinitions", {})
        return {
            "inputs": {
                "parameterValues": arguments,
                "artifacts": {
                    name: {"artifacts": [artifact]}
                    for name, artifact in self._imported(task).items()
                },
            },
            "outputs": {
                "parameters": {
                    name: {"outputFile": f"/tmp/kfp/outputs/{name}"}
                    for name in outputs.get("parameters", {})
                },
                "artifacts": {
                    name: {
                        "artifacts": [
                            {
                                "name": name,
                                "type": artifact["artifactType"],
                                "uri": f"minio://mlpipeline/{self.workflow}/{name}",
                                "metadata": {},
                            }
                        ]
                    }
                    for name, artifact in outputs.get("artifacts", {}).items()
                },
                "outputFile": OUTPUT_FILE,
            },
        }

    def _imported(self, task: Object) -> dict[str, Object]:
        """Returns the artifacts among a task's inputs. Raises `AssertionError`, as Kubeflow's
        driver fails, for an importer that has another name than its key."""
        artifacts = {}
        graph = self._tasks("comp-exit-handler-1")
        for name, source in task.get("inputs", {}).get("artifacts", {}).items():
            producer = source["taskOutputArtifact"]["producerTask"]
            recorded = graph[producer]["taskInfo"]["name"]
            assert recorded == producer, f"cannot find producer task {producer!r}"
            importer = self._importer(graph[producer])
            assert importer is not None, "only importers make artifacts that others use"
            artifacts[name] = {
                "name": name,
                "type": importer["typeSchema"],
                "uri": self._argument(graph[producer]["inputs"]["parameters"]["uri"]),
                "metadata": {},
            }
        return artifacts

    def _argument(self, source: Object) -> Any:
        if "runtimeValue" in source:
            value = source["runtimeValue"]["constant"]
            return self.display_name if value == JOB_NAME else value
        if "taskOutputParameter" in source:
            output = source["taskOutputParameter"]
            return self.succeeded[output["producerTask"]][output["outputParameterKey"]]
        return self._resolve(source)

    def _resolve(self, source: Object) -> Any:
        """Returns the value of a parameter of the pipeline."""
        return self._values[source["componentInputParameter"].removeprefix("pipelinechannel--")]

    def _variables(self, container: Object, platform: Object, attempt: int) -> list[Object]:
        variables: list[Object] = [
            {"name": entry["name"], "value": entry["value"]} for entry in container.get("env", [])
        ]
        variables.append({"name": "KFP_RETRY_INDEX", "value": str(attempt)})
        for kind, parameter, key, reference in (
            ("configMapAsEnv", "configMapNameParameter", "configMapKey", "configMapKeyRef"),
            ("secretAsEnv", "secretNameParameter", "secretKey", "secretKeyRef"),
        ):
            for entry in platform.get(kind, []):
                source = {
                    "name": self._argument(entry[parameter]),
                    "optional": entry.get("optional", False),
                }
                variables += [
                    {
                        "name": pair["envVar"],
                        "valueFrom": {reference: {"key": pair[key], **source}},
                    }
                    for pair in entry["keyToEnv"]
                ]
        for entry in platform.get("fieldPathAsEnv", []):
            field_path = {"fieldPath": entry["fieldPath"]}
            variables.append({"name": entry["name"], "valueFrom": {"fieldRef": field_path}})
        return variables


def _kfp_volumes() -> tuple[list[Object], list[Object]]:
    """Returns the mounts and volumes that KFP gives a step: none of them is at /tmp."""
    paths = ("/kfp-launcher", "/gcs", "/s3", "/minio", "/.local", "/.cache", "/.config")
    names = [path.strip("/.") for path in paths]
    mounts = [{"name": name, "mountPath": path} for name, path in zip(names, paths, strict=True)]
    return mounts, [{"name": name, "emptyDir": {}} for name in names]


def _in_order(graph: dict[str, Object]) -> list[str]:
    """Returns the names of the tasks, each after those that it depends on."""
    order: list[str] = []
    while len(order) < len(graph):
        order += [
            name
            for name in graph
            if name not in order and set(graph[name].get("dependentTasks", [])) <= set(order)
        ]
    return order


def _outputs(log: str) -> dict[str, Any]:
    for line in log.splitlines():
        if line.startswith(OUTPUT):
            values: dict[str, Any] = json.loads(line.removeprefix(OUTPUT)).get(
                "parameterValues", {}
            )
            return values
    return {}


def _as_go_writes(value: Any) -> Any:
    """Returns `value` as KFP's launcher writes it: whole numbers have no decimal point."""
    if isinstance(value, dict):
        return {key: _as_go_writes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_go_writes(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
