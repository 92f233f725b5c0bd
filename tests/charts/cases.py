"""The values that the chart is tested with: the values files, and combinations of options."""

from __future__ import annotations

from tests.charts.helm import Case

DEV = Case(("dev",))
PRODUCTION = Case(("production",))
AIR_GAPPED = Case(("air-gapped",))
FILES = {"dev": DEV, "production": PRODUCTION, "air-gapped": AIR_GAPPED}

FROM_INGRESS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}]
DATABASE_URL = "postgresql+psycopg://reader:pass-word-1@db.example.com:5432/runs"
OWN_KEYS = {
    "database.existingSecret": "",
    "database.url": DATABASE_URL,
    "s3.existingSecret": "",
    "s3.accessKey": "access-key-1",
    "s3.secretKey": "secret-key-1",
}
EVERYTHING = {
    "image.registry": "registry.example.com/mirror",
    "image.mirror": "registry.example.com/mirror",
    "image.pullSecrets": ["mirror", "other"],
    "token.existingSecret": "our-token",
    "buffer.autoscaling.enabled": True,
    "buffer.podDisruptionBudget.maxUnavailable": "20%",
    "buffer.priorityClassName": "high",
    "buffer.nodeSelector": {"pool": "cpu"},
    "buffer.affinity": {"nodeAffinity": {}},
    "buffer.podAnnotations": {"example.com/a": "b"},
    "buffer.podLabels": {"team": "rl", "app.kubernetes.io/component": "mine"},
    "verifier.podDisruptionBudget.maxUnavailable": 0,
    "verifier.podAnnotations": {"example.com/a": "b"},
    "rollout.tolerations": [{"key": "gpu", "operator": "Exists"}],
    "rollout.vllmArgs": ["--gpu-memory-utilization=0.85", '--override={"a b": "it\'s"}'],
    "rollout.extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}],
    "rollout.topologySpread": ["kubernetes.io/hostname"],
    "rollout.scratch.storageClass": "fast",
    "collector.priorityClassName": "high",
    "trainer.priorityClassName": "low",
    "trainer.nodeSelector": {"pool": "gpu"},
    "trainer.runtimeClassName": "nvidia",
    "trainer.securityContext": {"readOnlyRootFilesystem": False},
    "rollout.queue": "gpus",
    "serviceAccounts.annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/bapo"},
    "proxy.http": "http://proxy:3128",
    "proxy.https": "http://proxy:3128",
    "caBundle.configMap": "authorities",
    "hub.endpoint": "https://hub.example.com",
    "s3.region": "eu-west-1",
    "s3.pathStyle": "always",
    "pipeline.serviceAccounts": [{"name": "runner"}],
    "kueue.queue": "gpus",
    "kueue.ownJobsQueue": "small",
    "networkPolicy.ingressFrom": FROM_INGRESS,
    "networkPolicy.directWeights": True,
    "ingress.enabled": True,
    "ingress.className": "nginx",
    "ingress.host": "bapo.example.com",
    "ingress.annotations": {"nginx.ingress.kubernetes.io/proxy-body-size": "512m"},
    "ingress.tls.secretName": "bapo-tls",
    "httpRoute.enabled": True,
    "httpRoute.parentRefs": [{"name": "public", "namespace": "gateways"}],
    "httpRoute.hostnames": ["bapo.example.com"],
    "monitoring.serviceMonitor.labels": {"release": "prometheus"},
    "monitoring.rules.labels": {"release": "prometheus"},
}
LEAST = {
    "networkPolicy.enabled": False,
    "migrations.enabled": False,
    "pipeline.serviceAccounts": [],
    "pipeline.reaper.enabled": False,
    "buffer.topologySpread": [],
    "rollout.gpus": 0,
    "rollout.scratch.persistent": True,
    "keepOnUninstall": False,
}
SEVERAL_NODES = {
    "rollout.nodes": 3,
    "rollout.pipelineParallelSize": 3,
    "rollout.scratch.persistent": False,
}
LONG = "a-release-with-a-name-as-long-as-helm-lets-it-be-5312"

CASES = {
    **FILES,
    "own keys": Case(("production",), OWN_KEYS),
    "everything": Case(("production",), EVERYTHING),
    "least": Case(("dev",), LEAST),
    "only the database bundled": Case(
        ("production",), {"database.existingSecret": "", "database.bundled.enabled": True}
    ),
    "only s3 bundled": Case(
        ("production",),
        {"s3.existingSecret": "", "s3.endpoint": "", "s3.bundled.enabled": True},
    ),
    "storage classes": Case(
        ("dev",),
        {
            "database.bundled.storage.storageClass": "slow",
            "s3.bundled.storage.storageClass": "slow",
            "database.bundled.podAnnotations": {"example.com/a": "b"},
            "s3.bundled.podAnnotations": {"example.com/a": "b"},
        },
    ),
    "own pods": Case(
        ("production",),
        {
            "image.service": f"bapo/service@sha256:{'a' * 64}",
            "database.existingSecretKey": "uri",
            **{
                f"{part}.{key}": value
                for part in ("buffer", "verifier", "rollout", "collector")
                for key, value in {
                    "runtimeClassName": "gvisor",
                    "schedulerName": "own",
                    "extraEnv": [{"name": "TZ", "value": "UTC"}],
                    "extraVolumes": [{"name": "cache", "emptyDir": {"sizeLimit": "1Gi"}}],
                    "extraVolumeMounts": [{"name": "cache", "mountPath": "/cache"}],
                }.items()
            },
            "extraObjects": [
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {
                        "name": "{{ .Release.Name }}-notes",
                        "namespace": "{{ .Release.Namespace }}",
                        "labels": {
                            "app.kubernetes.io/name": "bapo",
                            "app.kubernetes.io/part-of": "bapo",
                        },
                    },
                }
            ],
        },
    ),
    "several nodes": Case(("production",), SEVERAL_NODES),
    "several nodes, scaled to zero": Case(
        ("production",), {**SEVERAL_NODES, "rollout.scaleToZero.enabled": True}
    ),
    "scaled to zero": Case(("production",), {"rollout.scaleToZero.enabled": True}),
    "a long name": Case(("dev",), release=LONG),
    "a long name, several nodes": Case(
        ("dev",), {"rollout.nodes": 2, "rollout.pipelineParallelSize": 2}, release=LONG
    ),
}
