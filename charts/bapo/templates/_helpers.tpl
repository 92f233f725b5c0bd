{{/* Prefix of all names, at most 40 characters. The longest name is that of the StatefulSet "-postgres"; its
controller appends a hash of 11 characters in a label of at most 63. A truncated name ends in a hash, so
that two releases with long names differ. */}}
{{- define "bapo.fullname" -}}
{{- $name := .Release.Name -}}
{{- if .Values.fullnameOverride -}}
{{- $name = .Values.fullnameOverride -}}
{{- else if not (contains .Chart.Name .Release.Name) -}}
{{- $name = printf "%s-%s" .Release.Name .Chart.Name -}}
{{- end -}}
{{- if gt (len $name) 40 -}}
{{- $name = printf "%s-%s" (trunc 33 $name | trimSuffix "-") (sha256sum $name | trunc 6) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Selector of the pods of a component. */}}
{{- define "bapo.selector" -}}
app.kubernetes.io/name: bapo
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "bapo.labels" -}}
{{ include "bapo.selector" . }}
app.kubernetes.io/part-of: bapo
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name (.root.Chart.Version | replace "+" "_") }}
{{- end -}}

{{/* Labels of a pod. They contain no version, so that a new version of the chart alone restarts nothing. In
Kubeflow's namespaces Istio adds a sidecar to every pod, which violates the restricted standard, keeps Jobs
from finishing, and is cut off by the network policies. `podLabels` can override the label. */}}
{{- define "bapo.podLabels" -}}
{{- $own := include "bapo.selector" . | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/part-of" "bapo" -}}
{{- toYaml (merge $own .settings.podLabels (dict "sidecar.istio.io/inject" "false")) -}}
{{- end -}}

{{/* Label of the release's own Jobs, which Kueue reads; none without a queue. It may follow `bapo.metadata`,
which ends with the labels. */}}
{{- define "bapo.queueLabel" -}}
{{- with .Values.kueue.ownJobsQueue -}}
kueue.x-k8s.io/queue-name: {{ . }}
{{- end -}}
{{- end -}}

{{/* Name, namespace and labels of an object. `suffix`: end of its name, where that is not the component. */}}
{{- define "bapo.metadata" -}}
name: {{ include "bapo.fullname" .root }}-{{ .suffix | default .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "bapo.labels" . | nindent 2 }}
{{- end -}}

{{/* ---- images ---- */}}

{{/* Image of the bundled Postgres or S3. */}}
{{- define "bapo.mirrored" -}}
{{- with .root.Values.image.mirror }}{{ trimSuffix "/" . }}/{{ end }}{{ .image -}}
{{- end -}}

{{/* Image of the project; `which` is service, trainer or rollout. */}}
{{- define "bapo.image" -}}
{{- $image := .root.Values.image -}}
{{- with $image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $name := get $image .which -}}
{{- $name }}{{ if not (contains "@" $name) }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end -}}
{{- end -}}

{{/* ---- names of Secrets, and addresses ---- */}}

{{- define "bapo.tokenSecret" -}}
{{ .Values.token.existingSecret | default (printf "%s-token" (include "bapo.fullname" .)) }}
{{- end -}}

{{- define "bapo.databaseSecret" -}}
{{ .Values.database.existingSecret | default (printf "%s-database" (include "bapo.fullname" .)) }}
{{- end -}}

{{/* Keys of the tokens of processes in that Secret. The buffer service accepts each with the scope of its
process; `BAPO_TOKEN` is the administrator's, which no other pod gets. */}}
{{- define "bapo.processTokens" -}}
[BAPO_REPLICA_TOKEN, BAPO_COLLECTOR_TOKEN, BAPO_TRAINER_TOKEN, BAPO_PIPELINE_TOKEN]
{{- end -}}

{{/* Those of them that a Secret of yours lacks, as one for an earlier version of the chart does. Without a
cluster to ask, it is taken to have all. */}}
{{- define "bapo.missingTokens" -}}
{{- $missing := list -}}
{{- with .Values.token.existingSecret -}}
{{- with lookup "v1" "Secret" $.Release.Namespace . -}}
{{- $data := .data | default dict -}}
{{- range include "bapo.processTokens" $ | fromYamlArray -}}
{{- if not (hasKey $data .) -}}
{{- $missing = append $missing . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $missing -}}
{{- end -}}

{{/* Key of the token of a process. If a Secret of yours lacks it, it is the administrator's, so that an upgrade
from an earlier version works; NOTES.txt warns of that. */}}
{{- define "bapo.tokenKey" -}}
{{- ternary "BAPO_TOKEN" .key (has .key (include "bapo.missingTokens" .root | fromJsonArray)) -}}
{{- end -}}

{{/* Variable with a token. `key`: key in the Secret of tokens. `name`: name of the variable. */}}
{{- define "bapo.tokenVariable" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ include "bapo.tokenSecret" .root }}
      key: {{ .key }}
{{- end -}}

{{/* Variable with the token of a process of this release. */}}
{{- define "bapo.processToken" -}}
{{- include "bapo.tokenVariable" (dict "root" .root "name" "BAPO_TOKEN" "key" (include "bapo.tokenKey" .)) -}}
{{- end -}}

{{/* Only a Secret of yours may have another key. */}}
{{- define "bapo.databaseKey" -}}
{{ ternary .Values.database.existingSecretKey "BAPO_DATABASE_URL" (not (empty .Values.database.existingSecret)) }}
{{- end -}}

{{/* Empty where pods have a cloud identity instead of keys. */}}
{{- define "bapo.s3Secret" -}}
{{- if ne .Values.s3.credentials "identity" -}}
{{ .Values.s3.existingSecret | default (printf "%s-s3" (include "bapo.fullname" .)) }}
{{- end -}}
{{- end -}}

{{- define "bapo.host" -}}
{{ include "bapo.fullname" .root }}-{{ .component }}.{{ .root.Release.Namespace }}.svc
{{- end -}}

{{/* Addresses of the services. */}}
{{- define "bapo.endpoints" -}}
BAPO_BUFFER_URL: http://{{ include "bapo.host" (dict "root" . "component" "buffer") }}:8700
BAPO_VERIFIER_URL: http://{{ include "bapo.host" (dict "root" . "component" "verifier") }}:8701
{{- if .Values.s3.bundled.enabled }}
BAPO_S3_ENDPOINT: http://{{ include "bapo.host" (dict "root" . "component" "s3") }}:8333
{{- else }}
BAPO_S3_ENDPOINT: {{ .Values.s3.endpoint | quote }}
{{- end }}
BAPO_S3_BUCKET: {{ .Values.s3.bucket | quote }}
BAPO_S3_REGION: {{ .Values.s3.region | quote }}
BAPO_S3_PATH_STYLE: {{ .Values.s3.pathStyle }}
BAPO_S3_CREDENTIALS: {{ .Values.s3.credentials }}
{{- with .Values.proxy }}
{{- if or .http .https }}
HTTP_PROXY: {{ .http | quote }}
HTTPS_PROXY: {{ .https | quote }}
NO_PROXY: {{ .exceptions | quote }}
{{- end }}
{{- end }}
{{- if .Values.caBundle.configMap }}
SSL_CERT_FILE: /etc/bapo/ca/{{ .Values.caBundle.key }}
{{- end }}
{{- with .Values.hub.endpoint }}
HF_ENDPOINT: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Address at which people reach the dashboard; empty unless the chart exposes it. */}}
{{- define "bapo.dashboardUrl" -}}
{{- if .Values.ingress.enabled -}}
{{ ternary "https" "http" (not (empty .Values.ingress.tls.secretName)) }}://{{ .Values.ingress.host }}{{ .Values.buffer.rootPath }}
{{- else if .Values.httpRoute.enabled -}}
https://{{ first .Values.httpRoute.hostnames }}{{ .Values.buffer.rootPath }}
{{- end -}}
{{- end -}}

{{/* ---- Secrets ---- */}}

{{/* A generated password in base64: that of the cluster's Secret `name` under `key`, or else a new one. So
an upgrade changes no password. */}}
{{- define "bapo.generated" -}}
{{- $secret := lookup "v1" "Secret" .root.Release.Namespace .name | default dict -}}
{{- get ($secret.data | default dict) .key | default (randAlphaNum .length | b64enc) -}}
{{- end -}}

{{- define "bapo.keepAnnotations" -}}
{{- if .Values.keepOnUninstall }}
annotations:
  helm.sh/resource-policy: keep
{{- end }}
{{- end -}}

{{/* ---- pods ---- */}}

{{/* Annotations of a pod. The checksums restart it at an upgrade when a setting or a Secret of yours has
changed that it reads at its start. Generated Secrets are left out: on an installation they do not exist
yet, so that the first upgrade would restart every pod. */}}
{{- define "bapo.podAnnotations" -}}
{{- $values := .root.Values -}}
{{- $read := list (include "bapo.endpoints" .root) $values.database.url $values.s3.accessKey $values.s3.secretKey -}}
{{- $own := dict "checksum/config" (join "\n" $read | sha256sum) -}}
{{/* The collector alone reads the hosts of the replicas, and the API must not restart with them. */}}
{{- if eq .component "collector" -}}
{{- $_ := set $own "checksum/replica-hosts" (include "bapo.replicaHosts" .root | sha256sum) -}}
{{- end -}}
{{- $found := list -}}
{{- range compact (list $values.token.existingSecret $values.database.existingSecret $values.s3.existingSecret) -}}
{{- with lookup "v1" "Secret" $.root.Release.Namespace . -}}
{{- $found = append $found (toJson .data) -}}
{{- end -}}
{{- end -}}
{{- with $found -}}
{{- $_ := set $own "checksum/secrets" (join "\n" . | sha256sum) -}}
{{- end -}}
{{- toYaml (merge $own .settings.podAnnotations) -}}
{{- end -}}

{{/* Security settings of a pod. `user`: user id of an image that is not the project's. `apiToken`: whether the
pod calls the Kubernetes API. Service links are off, because Kubernetes' variables for Services would collide
with settings such as BAPO_PORT. */}}
{{- define "bapo.podSecurity" -}}
automountServiceAccountToken: {{ .apiToken | default false }}
enableServiceLinks: false
{{- $context := deepCopy .root.Values.podSecurityContext }}
{{- if and .user (hasKey $context "runAsUser") }}
{{- $context = merge (dict "runAsUser" .user "runAsGroup" .user "fsGroup" .user) $context }}
{{- end }}
securityContext:
  {{- toYaml $context | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "bapo.containerSecurity" -}}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  {{- toYaml .Values.securityContext | nindent 2 }}
{{- end -}}

{{/* The security context of a container with settings of its own over the common one. Sprig's merge would take
a `false` for a value that is not set. */}}
{{- define "bapo.containerContext" -}}
{{- $context := deepCopy .root.Values.securityContext -}}
{{- range $key, $value := .own -}}
{{- $_ := set $context $key $value -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{- define "bapo.scheduling" -}}
{{- with .settings.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .settings.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .settings.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "bapo.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Names with a full stop under which a server is reached. Probes and Prometheus use the pod's address. */}}
{{- define "bapo.hostNames" -}}
{{- $values := .root.Values -}}
{{- $names := list (printf "%s-%s.%s" (include "bapo.fullname" .root) .component .root.Release.Namespace) ".svc" ".cluster.local" -}}
{{- if eq .component "buffer" -}}
{{- if $values.ingress.enabled -}}
{{- $names = append $names $values.ingress.host -}}
{{- end -}}
{{- if $values.httpRoute.enabled -}}
{{- $names = concat $names $values.httpRoute.hostnames -}}
{{- end -}}
{{- $names = concat $names $values.buffer.hostNames -}}
{{- end -}}
{{- $plain := list -}}
{{- range $names -}}
{{- $plain = append $plain (trimPrefix "*" .) -}}
{{- end -}}
{{- join "," $plain -}}
{{- end -}}

{{/* Environment of a server process. */}}
{{- define "bapo.listenEnv" -}}
# All addresses, of IPv4 and of IPv6.
- name: BAPO_HOST
  value: "::"
- name: BAPO_PORT
  value: {{ .port | quote }}
- name: BAPO_HOST_NAMES
  value: {{ include "bapo.hostNames" . | quote }}
- name: HOME
  value: /tmp
{{- end -}}

{{/* ConfigMap and Secret with the environment of a client of the services, but for its token. */}}
{{- define "bapo.clientEnvFrom" -}}
- configMapRef:
    name: {{ include "bapo.fullname" . }}-connection
{{- with include "bapo.s3Secret" . }}
- secretRef:
    name: {{ . }}
{{- end }}
{{- end -}}

{{/* Volume and mount of the certificates of authorities, for the pods that connect to others. */}}
{{- define "bapo.caVolume" -}}
{{- with .Values.caBundle.configMap }}
- name: ca
  configMap:
    name: {{ . }}
{{- end }}
{{- end -}}

{{- define "bapo.caMount" -}}
{{- if .Values.caBundle.configMap }}
- {name: ca, mountPath: /etc/bapo/ca, readOnly: true}
{{- end }}
{{- end -}}

{{/* Quotes a list as one line, which a shell splits into the same list. */}}
{{- define "bapo.shellWords" -}}
{{- $words := list -}}
{{- range . -}}
{{- if regexMatch "^[A-Za-z0-9_./:=,@%+-]+$" . -}}
{{- $words = append $words . -}}
{{- else -}}
{{- $words = append $words (printf "'%s'" (replace "'" "'\"'\"'" .)) -}}
{{- end -}}
{{- end -}}
{{- join " " $words -}}
{{- end -}}

{{- define "bapo.autoscaler" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "bapo.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ include "bapo.fullname" .root }}-{{ .component }}
  minReplicas: {{ .settings.autoscaling.minReplicas }}
  maxReplicas: {{ .settings.autoscaling.maxReplicas }}
  metrics:
    - type: Resource
      resource:
        name: cpu
        target:
          type: Utilization
          averageUtilization: {{ .settings.autoscaling.targetCPU }}
{{- end -}}

{{- define "bapo.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "bapo.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .settings.podDisruptionBudget.maxUnavailable }}
  # A pod that is not ready must not block the draining of its node.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "bapo.selector" . | nindent 6 }}
{{- end -}}

{{- define "bapo.service" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "bapo.metadata" . | nindent 2 }}
spec:
  selector:
    {{- include "bapo.selector" . | nindent 4 }}
  ports:
    - name: {{ .portName | default "http" }}
      port: {{ .port }}
      targetPort: {{ .portName | default "http" }}
      protocol: TCP
{{- end -}}

{{/* Whether volumes are kept when their StatefulSet is deleted or scaled down. */}}
{{- define "bapo.claimRetention" -}}
persistentVolumeClaimRetentionPolicy:
  whenDeleted: {{ ternary "Retain" "Delete" .Values.keepOnUninstall }}
  whenScaled: Retain
{{- end -}}

{{- define "bapo.claimTemplate" -}}
- metadata:
    name: {{ .name }}
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .storage.storageClass }}
    storageClassName: {{ . }}
    {{- end }}
    resources:
      requests:
        storage: {{ .storage.size }}
{{- end -}}

{{/* ---- pods that call the Kubernetes API, as the command line with an account of their own ---- */}}

{{/* Variables of their containers. `key`: key of their token. */}}
{{- define "bapo.commandEnv" -}}
- name: HOME
  value: /tmp
- name: BAPO_BUFFER_URL
  valueFrom:
    configMapKeyRef:
      name: {{ include "bapo.fullname" .root }}-connection
      key: BAPO_BUFFER_URL
{{ include "bapo.processToken" . }}
{{- end -}}

{{/* The account of such a pod, and the binding of the Role of the same name. */}}
{{- define "bapo.boundAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "bapo.metadata" . | nindent 2 }}
automountServiceAccountToken: false
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  {{- include "bapo.metadata" . | nindent 2 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ include "bapo.fullname" .root }}-{{ .component }}
subjects:
  - kind: ServiceAccount
    name: {{ include "bapo.fullname" .root }}-{{ .component }}
    namespace: {{ .root.Release.Namespace }}
{{- end -}}
