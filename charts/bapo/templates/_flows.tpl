{{/* Peers and rules of the network policies. */}}

{{- define "bapo.pods" -}}
matchLabels:
  {{- include "bapo.selector" . | nindent 2 }}
{{- end -}}

{{/* Selects the steps of a pipeline, which are sure to have only this label. The release's own pods have
it too, so those that do not connect to the services are excluded. */}}
{{- define "bapo.pipelinePods" -}}
matchLabels:
  app.kubernetes.io/part-of: bapo
matchExpressions:
  - key: app.kubernetes.io/component
    operator: NotIn
    values: [verifier, postgres, s3, migrate]
{{- end -}}

{{- define "bapo.toPods" -}}
- to:
    - podSelector:
        {{- include "bapo.pods" . | nindent 8 }}
  ports:
    - {protocol: TCP, port: {{ .port }}}
{{- end -}}

{{- define "bapo.toDatabase" -}}
{{- if .Values.database.bundled.enabled -}}
{{- include "bapo.toPods" (dict "root" . "component" "postgres" "port" 5432) -}}
{{- else -}}
{{- include "bapo.toOutside" (dict "peers" .Values.networkPolicy.externalDatabase "url" .Values.database.url "port" 5432) -}}
{{- end -}}
{{- end -}}

{{- define "bapo.toS3" -}}
{{- if .Values.s3.bundled.enabled -}}
{{- include "bapo.toPods" (dict "root" . "component" "s3" "port" 8333) -}}
{{- else -}}
{{- $port := ternary 80 443 (hasPrefix "http://" .Values.s3.endpoint) -}}
{{- include "bapo.toOutside" (dict "peers" .Values.networkPolicy.externalS3 "url" .Values.s3.endpoint "port" $port) -}}
{{- if eq .Values.s3.credentials "identity" }}
{{- /* EKS Pod Identity, by IPv4 and by IPv6, and the metadata of the machine. */}}
- to:
    - ipBlock: {cidr: 169.254.170.23/32}
    - ipBlock: {cidr: "fd00:ec2::23/128"}
    - ipBlock: {cidr: 169.254.169.254/32}
  ports:
    - {protocol: TCP, port: 80}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A rule for `peers`, at their own port, or else the one in `url`, or else `port`. */}}
{{- define "bapo.toOutside" -}}
- to:
    {{- toYaml .peers.to | nindent 4 }}
  ports:
    - {protocol: TCP, port: {{ int .peers.port | default (include "bapo.portOf" .) }}}
{{- end -}}

{{- define "bapo.portOf" -}}
{{/* Parts the user from the host as the service does: a password may hold a slash, and no user a colon. */}}
{{- $host := regexReplaceAll "^[^:]*://([^:/@]*(:[^@]*)?@)?" (trim .url) "" | regexFind "^[^/?]*" -}}
{{- regexFind ":[0-9]+$" $host | trimPrefix ":" | default .port -}}
{{- end -}}
