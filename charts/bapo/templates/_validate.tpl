{{/* Refuses combinations of values that cannot work, with the remedy. The schema checks single values. */}}
{{- define "bapo.validate" -}}
{{- $problems := list -}}
{{- range list "bapo.databaseProblems" "bapo.s3Problems" "bapo.secretProblems" "bapo.nameProblems" "bapo.imageProblems" "bapo.rolloutProblems" "bapo.scaleProblems" "bapo.outsideProblems" -}}
{{- $problems = concat $problems (include . $ | fromYamlArray) -}}
{{- end -}}
{{- if $problems -}}
{{- fail (printf "\n\nThese values do not work:\n  - %s\n" (join "\n  - " $problems)) -}}
{{- end -}}
{{- end -}}

{{- define "bapo.databaseProblems" -}}
{{- $database := .Values.database -}}
{{- $given := compact (list $database.existingSecret $database.url (ternary "bundled" "" $database.bundled.enabled)) -}}
{{- if not $given }}
- >-
  database: no Postgres is configured. Set database.existingSecret to a Secret with the key
  BAPO_DATABASE_URL, or database.url; for development database.bundled.enabled=true, as
  values-dev.yaml does
{{- else if gt (len $given) 1 }}
- >-
  database: {{ len $given }} of database.existingSecret, database.url and database.bundled.enabled are
  set; set only one of them
{{- end }}
{{- if and $database.url (not (regexMatch "^(postgres|postgresql|postgresql\\+psycopg)://" $database.url)) }}
- >-
  database.url: it must have the form postgresql://user:password@host:port/database
{{- end }}
{{- if regexMatch "@.*@" $database.url }}
- >-
  database.url: it has more than one @; in user and password, write @ as %40, / as %2F, : as %3A,
  ? as %3F, # as %23 and % as %25
{{- end }}
{{- end -}}

{{- define "bapo.s3Problems" -}}
{{- $s3 := .Values.s3 -}}
{{- $keys := or $s3.accessKey $s3.secretKey -}}
{{- if $s3.bundled.enabled }}
{{- if or $s3.endpoint $s3.existingSecret $keys }}
- >-
  s3: s3.bundled.enabled is true, and the bundled server has its own address and keys; leave
  s3.endpoint, s3.existingSecret, s3.accessKey and s3.secretKey empty
{{- end }}
{{- else if not $s3.endpoint }}
- >-
  s3: no object store is configured. Set s3.endpoint (https://host) and s3.existingSecret; for
  development s3.bundled.enabled=true, as values-dev.yaml does
{{- else if eq $s3.credentials "identity" }}
{{- if or $s3.existingSecret $keys }}
- >-
  s3: s3.credentials is identity, so pods use the cloud identity of their service account; leave
  s3.existingSecret, s3.accessKey and s3.secretKey empty
{{- end }}
{{- else if and $s3.existingSecret $keys }}
- >-
  s3: both s3.existingSecret and s3.accessKey or s3.secretKey are set; set either the Secret or the keys
{{- else if not (or $s3.existingSecret (and $s3.accessKey $s3.secretKey)) }}
- >-
  s3: the keys of {{ $s3.endpoint }} are missing. Set s3.existingSecret to a Secret with the keys
  BAPO_S3_ACCESS_KEY and BAPO_S3_SECRET_KEY, or both s3.accessKey and s3.secretKey, or
  s3.credentials=identity
{{- end }}
{{- end -}}

{{/* Checks that named Secrets exist, have their keys and values that the services take, if a cluster with the
namespace can be queried. A pod would wait for a missing Secret without an error of the release. The services
remove white space around a value, which `kubectl create secret --from-file` leaves there. */}}
{{- define "bapo.secretProblems" -}}
{{- $namespace := .Release.Namespace -}}
{{- if lookup "v1" "Namespace" "" $namespace -}}
{{- $named := dict
  "token.existingSecret" (list .Values.token.existingSecret "BAPO_TOKEN" "BAPO_VERIFIER_TOKEN")
  "database.existingSecret" (list .Values.database.existingSecret .Values.database.existingSecretKey)
  "s3.existingSecret" (list .Values.s3.existingSecret "BAPO_S3_ACCESS_KEY" "BAPO_S3_SECRET_KEY")
-}}
{{- range $value, $secretAndKeys := $named }}
{{- $name := first $secretAndKeys }}
{{- if $name }}
{{- $secret := lookup "v1" "Secret" $namespace $name }}
{{- if not $secret }}
- >-
  {{ $value }}: the namespace {{ $namespace }} has no Secret {{ $name }}; create it with
  {{ join " and " (rest $secretAndKeys) }}
{{- else }}
{{- $data := $secret.data | default dict }}
{{- range $key := rest $secretAndKeys }}
{{- if not (hasKey $data $key) }}
- >-
  {{ $value }}: the Secret {{ $name }} has no key {{ $key }}
{{- end }}
{{- end }}
{{- $read := rest $secretAndKeys }}
{{- if eq $value "token.existingSecret" }}{{ $read = concat $read (include "bapo.processTokens" $ | fromYamlArray) }}{{ end }}
{{- range $key := $read }}
{{- if hasKey $data $key }}
{{- $text := get $data $key | b64dec | trim }}
{{- if not $text }}
- >-
  {{ $value }}: {{ $key }} of the Secret {{ $name }} is empty
{{- else if not (regexMatch "^[ -~]+$" $text) }}
- >-
  {{ $value }}: {{ $key }} of the Secret {{ $name }} holds a line break or another character that is not printable
  ASCII; store it again, for example with kubectl create secret generic {{ $name }} --from-literal={{ $key }}=VALUE
{{- else if eq $value "database.existingSecret" }}
{{- if regexMatch "@.*@" $text }}
- >-
  {{ $value }}: {{ $key }} of the Secret {{ $name }} has more than one @; in user and password, write @ as %40,
  / as %2F, : as %3A, ? as %3F, # as %23 and % as %25
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- range .Values.image.pullSecrets }}
{{- if not (lookup "v1" "Secret" $namespace .) }}
- >-
  image.pullSecrets: the namespace {{ $namespace }} has no Secret {{ . }}, so nodes could not pull
  images; create it, or remove it from the list
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "bapo.nameProblems" -}}
{{- $name := include "bapo.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
- >-
  fullnameOverride: names would begin with {{ $name }}, which Kubernetes refuses for Services; set it
  to lower-case letters, digits and hyphens, beginning with a letter
{{- end }}
{{- end -}}

{{- define "bapo.imageProblems" -}}
{{- if not .Values.image.registry }}
- >-
  image.registry: it is empty, and images of these names on Docker Hub are not this project's. Set it
  to the registry that you pushed the images to
{{- end }}
{{- if eq .Values.image.tag "latest" }}
- >-
  image.tag: latest is not a fixed version, so nodes could run different images; set a version
{{- end }}
{{- range $section, $image := dict "database" .Values.database.bundled.image "s3" .Values.s3.bundled.image }}
{{- if or (hasSuffix ":latest" $image) (not (regexMatch "[:@][^/]+$" $image)) }}
- >-
  {{ $section }}.bundled.image: {{ $image }} has no fixed version; write it as name:version
{{- end }}
{{- end }}
{{- end -}}

{{- define "bapo.rolloutProblems" -}}
{{- $rollout := .Values.rollout -}}
{{- $nodes := int $rollout.nodes }}
{{- $sizes := printf "rollout.tensorParallelSize x rollout.pipelineParallelSize is %d" (mul $rollout.tensorParallelSize $rollout.pipelineParallelSize) }}
{{- $size := mul $rollout.tensorParallelSize $rollout.pipelineParallelSize }}
{{- $gpus := mul $rollout.gpus $nodes }}
{{- if and (gt $gpus 0) (gt $size $gpus) }}
- >-
  {{ $sizes }}, but a replica has {{ $gpus }} GPU(s) (rollout.gpus x rollout.nodes); raise rollout.gpus
  or rollout.nodes, or lower one of the sizes
{{- end }}
{{- $parallel := false }}
{{- range $rollout.vllmArgs }}
{{- if or (hasPrefix "--data-parallel-size" .) (hasPrefix "-dp" .) }}{{ $parallel = true }}{{ end }}
{{- end }}
{{- if and (lt $size $gpus) (not $parallel) }}
- >-
  {{ $sizes }}, but a replica has {{ $gpus }} GPUs (rollout.gpus x rollout.nodes), so that some would be
  idle; set the sizes to make the same number{{ if eq $nodes 1 }}, or --data-parallel-size among
  rollout.vllmArgs{{ end }}
{{- end }}
{{- if gt $nodes 1 }}
{{- if and (eq $gpus 0) (mod $size $nodes) }}
- >-
  {{ $sizes }}, which {{ $nodes }} pods cannot share equally (rollout.nodes); set
  rollout.pipelineParallelSize to {{ $nodes }}
{{- end }}
{{- if $parallel }}
- >-
  rollout.vllmArgs: --data-parallel-size copies the model, and with rollout.nodes {{ $nodes }} one copy has
  all GPUs of a replica; raise rollout.replicas instead
{{- end }}
{{- if $rollout.scratch.persistent }}
- >-
  rollout.scratch.persistent: the pods of a LeaderWorkerSet have no volumes of their own; with rollout.nodes
  {{ $nodes }} set it to false, and the scratch space is on the nodes' disks
{{- end }}
{{- /* Helm knows the kinds of a cluster only if it has asked one; otherwise it assumes API versions. */}}
{{- $asked := .Capabilities.APIVersions.Has "apps/v1/StatefulSet" }}
{{- if and $asked (not (.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet")) }}
- >-
  rollout.nodes: it is {{ $nodes }}, but this cluster has no LeaderWorkerSet (leaderworkerset.x-k8s.io/v1);
  install its controller (https://lws.sigs.k8s.io), or set rollout.nodes to 1
{{- end }}
{{- end }}
{{- $own := dict
  "--tensor-parallel-size" "rollout.tensorParallelSize" "-tp" "rollout.tensorParallelSize"
  "--pipeline-parallel-size" "rollout.pipelineParallelSize" "-pp" "rollout.pipelineParallelSize"
  "--nnodes" "rollout.nodes" "--node-rank" "rollout.nodes" "--master-addr" "rollout.nodes"
  "--master-port" "rollout.nodes" "--headless" "rollout.nodes" -}}
{{- range $argument := $rollout.vllmArgs }}
{{- range $flag, $value := $own }}
{{- if hasPrefix $flag $argument }}
- >-
  rollout.vllmArgs: the chart sets {{ $argument }} itself; use {{ $value }}
{{- end }}
{{- end }}
{{- end }}
{{- if $rollout.scaleToZero.enabled }}
{{- if $rollout.queue }}
- >-
  rollout.scaleToZero: Kueue refuses changes of the number of pods of rollout.queue; clear the queue, or
  turn scaleToZero off
{{- end }}
{{- if lt (int $rollout.replicas) 1 }}
- >-
  rollout.replicas: it is {{ $rollout.replicas }}, so scaleToZero would never start a pod; set at least 1
{{- end }}
{{- end }}
{{- range $part := list "buffer" "verifier" "rollout" "collector" "trainer" }}
{{- range (get $.Values $part).extraEnv }}
{{- if hasPrefix "BAPO_" .name }}
- >-
  {{ $part }}.extraEnv: the chart sets variables that begin with BAPO_ itself; remove {{ .name }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "bapo.scaleProblems" -}}
{{- range $name := list "buffer" "verifier" }}
{{- $scaling := (get $.Values $name).autoscaling }}
{{- if and $scaling.enabled (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) }}
- >-
  {{ $name }}.autoscaling: minReplicas is {{ $scaling.minReplicas }}, and maxReplicas only
  {{ $scaling.maxReplicas }}; raise maxReplicas
{{- end }}
{{- end }}
{{- end -}}

{{- define "bapo.outsideProblems" -}}
{{- $values := .Values -}}
{{- $closed := and $values.networkPolicy.enabled (not $values.networkPolicy.ingressFrom) -}}
{{- if and $values.ingress.enabled (not $values.ingress.host) }}
- >-
  ingress.host: it is empty, so the Ingress would match every host of the controller; set a host name
{{- end }}
{{- range $value, $hosts := dict "ingress.host" (list $values.ingress.host) "httpRoute.hostnames" $values.httpRoute.hostnames }}
{{- range $hosts }}
{{- if regexMatch "[/:]" . }}
- >-
  {{ $value }}: {{ . }} is more than a host name; set the path below it as buffer.rootPath, and no scheme and
  no port
{{- end }}
{{- end }}
{{- end }}
{{- if regexMatch "^/(v1|dashboard|docs|openapi[.]json|health|readyz|metrics)(/|$)|/[.][.]?(/|$)" $values.buffer.rootPath }}
- >-
  buffer.rootPath: {{ $values.buffer.rootPath }} cannot be told apart from a path of the service itself; choose
  another one
{{- end }}
{{- if and $values.httpRoute.enabled (not (and $values.httpRoute.parentRefs $values.httpRoute.hostnames)) }}
- >-
  httpRoute: set both httpRoute.parentRefs (your gateway) and httpRoute.hostnames
{{- end }}
{{- if and (or $values.ingress.enabled $values.httpRoute.enabled) $closed }}
- >-
  networkPolicy.ingressFrom: it is empty, so no request from outside would reach the buffer service;
  name the pods of your ingress controller or gateway, such as
  [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: ingress-nginx}}}]
{{- end }}
{{- if and $values.monitoring.serviceMonitor.enabled $values.networkPolicy.enabled (not $values.networkPolicy.metricsFrom) }}
- >-
  networkPolicy.metricsFrom: it is empty, so Prometheus could not scrape; name its pods, such as
  [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]
{{- end }}
{{- end -}}
