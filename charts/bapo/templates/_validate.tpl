{{/* Combinations that cannot work, in words. Single values are the schema's business. */}}
{{- define "bapo.validate" -}}
{{- $problems := list -}}
{{- range list "bapo.databaseProblems" "bapo.s3Problems" "bapo.secretProblems" "bapo.imageProblems" "bapo.rolloutProblems" "bapo.scaleProblems" "bapo.outsideProblems" -}}
{{- $problems = concat $problems (include . $ | fromYamlArray) -}}
{{- end -}}
{{- if $problems -}}
{{- fail (printf "\n\nThe values do not fit together:\n  - %s\n" (join "\n  - " $problems)) -}}
{{- end -}}
{{- end -}}

{{- define "bapo.databaseProblems" -}}
{{- $database := .Values.database -}}
{{- $given := compact (list $database.existingSecret $database.url (ternary "bundled" "" $database.bundled.enabled)) -}}
{{- if not $given }}
- >-
  database: where is Postgres? Set database.existingSecret to a Secret with the key BAPO_DATABASE_URL,
  or database.url; for development database.bundled.enabled=true (values-dev.yaml does it)
{{- else if gt (len $given) 1 }}
- >-
  database: give only one of database.existingSecret, database.url and database.bundled.enabled;
  {{ len $given }} are set
{{- end }}
{{- if and $database.url (not (hasPrefix "postgresql+psycopg://" $database.url)) }}
- >-
  database.url: write it as postgresql+psycopg://user:password@host:port/database
{{- end }}
{{- end -}}

{{- define "bapo.s3Problems" -}}
{{- $s3 := .Values.s3 -}}
{{- $keys := or $s3.accessKey $s3.secretKey -}}
{{- if $s3.bundled.enabled }}
{{- if or $s3.endpoint $s3.existingSecret $keys }}
- >-
  s3: with s3.bundled.enabled=true leave s3.endpoint, s3.existingSecret, s3.accessKey and s3.secretKey
  empty: the bundled server has an address and generated keys of its own
{{- end }}
{{- else if not $s3.endpoint }}
- >-
  s3: where is the object store? Set s3.endpoint (https://host) and s3.existingSecret; for development
  s3.bundled.enabled=true (values-dev.yaml does it)
{{- else if and $s3.existingSecret $keys }}
- >-
  s3: give either s3.existingSecret, or s3.accessKey and s3.secretKey, not both
{{- else if not (or $s3.existingSecret (and $s3.accessKey $s3.secretKey)) }}
- >-
  s3: which keys open {{ $s3.endpoint }}? Set s3.existingSecret to a Secret with the keys
  BAPO_S3_ACCESS_KEY and BAPO_S3_SECRET_KEY, or s3.accessKey and s3.secretKey
{{- end }}
{{- end -}}

{{/* Secrets that are said to exist: looked for only where there is a cluster to look in, which has the
namespace. A pod would wait for one that is missing, and say so to nobody. */}}
{{- define "bapo.secretProblems" -}}
{{- $namespace := .Release.Namespace -}}
{{- if lookup "v1" "Namespace" "" $namespace -}}
{{- $named := dict
  "token.existingSecret" (list .Values.token.existingSecret "BAPO_TOKEN")
  "database.existingSecret" (list .Values.database.existingSecret "BAPO_DATABASE_URL")
  "s3.existingSecret" (list .Values.s3.existingSecret "BAPO_S3_ACCESS_KEY" "BAPO_S3_SECRET_KEY")
-}}
{{- range $where, $said := $named }}
{{- $name := first $said }}
{{- if $name }}
{{- $secret := lookup "v1" "Secret" $namespace $name }}
{{- if not $secret }}
- >-
  {{ $where }}: there is no Secret {{ $name }} in the namespace {{ $namespace }}; create it with
  {{ join " and " (rest $said) }}
{{- else }}
{{- range $key := rest $said }}
{{- if not (hasKey ($secret.data | default dict) $key) }}
- >-
  {{ $where }}: the Secret {{ $name }} has no key {{ $key }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- range .Values.image.pullSecrets }}
{{- if not (lookup "v1" "Secret" $namespace .) }}
- >-
  image.pullSecrets: there is no Secret {{ . }} in the namespace {{ $namespace }}; nodes could not pull
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "bapo.imageProblems" -}}
{{- if eq .Values.image.tag "latest" }}
- >-
  image.tag: latest names another image every day, on every node; give a version
{{- end }}
{{- range $where, $image := dict "database" .Values.database.bundled.image "s3" .Values.s3.bundled.image }}
{{- if or (hasSuffix ":latest" $image) (not (regexMatch "[:@][^/]+$" $image)) }}
- >-
  {{ $where }}.bundled.image: {{ $image }} has no fixed version; write name:version
{{- end }}
{{- end }}
{{- end -}}

{{- define "bapo.rolloutProblems" -}}
{{- $rollout := .Values.rollout -}}
{{- if and (gt (int $rollout.gpus) 0) (gt (int $rollout.tensorParallelSize) (int $rollout.gpus)) }}
- >-
  rollout.tensorParallelSize is {{ $rollout.tensorParallelSize }}, and a pod has only
  {{ $rollout.gpus }} GPU(s): raise rollout.gpus, or lower rollout.tensorParallelSize
{{- end }}
{{- range $rollout.vllmArgs }}
{{- if or (hasPrefix "--tensor-parallel-size" .) (hasPrefix "-tp" .) }}
- >-
  rollout.vllmArgs: {{ . }} is the chart's to set; use rollout.tensorParallelSize
{{- end }}
{{- end }}
{{- range $rollout.extraEnv }}
{{- if hasPrefix "BAPO_" .name }}
- >-
  rollout.extraEnv: {{ .name }} is the chart's to set; names that start with BAPO_ are refused
{{- end }}
{{- end }}
{{- end -}}

{{- define "bapo.scaleProblems" -}}
{{- range $name := list "buffer" "verifier" }}
{{- $scaling := (get $.Values $name).autoscaling }}
{{- if and $scaling.enabled (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) }}
- >-
  {{ $name }}.autoscaling: minReplicas ({{ $scaling.minReplicas }}) is more than maxReplicas
  ({{ $scaling.maxReplicas }})
{{- end }}
{{- end }}
{{- end -}}

{{- define "bapo.outsideProblems" -}}
{{- $values := .Values -}}
{{- $closed := and $values.networkPolicy.enabled (not $values.networkPolicy.ingressFrom) -}}
{{- if and $values.ingress.enabled (not $values.ingress.host) }}
- >-
  ingress.host: under which name? Without one it would answer for every host of the controller
{{- end }}
{{- if and $values.httpRoute.enabled (not (and $values.httpRoute.parentRefs $values.httpRoute.hostnames)) }}
- >-
  httpRoute: set httpRoute.parentRefs to your gateway, and httpRoute.hostnames
{{- end }}
{{- if and (or $values.ingress.enabled $values.httpRoute.enabled) $closed }}
- >-
  networkPolicy.ingressFrom is empty, so nothing from outside would reach the buffer service: name the
  pods of your ingress controller or gateway, such as
  [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: ingress-nginx}}}]
{{- end }}
{{- if and $values.monitoring.serviceMonitor.enabled $values.networkPolicy.enabled (not $values.networkPolicy.metricsFrom) }}
- >-
  networkPolicy.metricsFrom is empty, so Prometheus could not scrape: name its pods, such as
  [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]
{{- end }}
{{- end -}}
