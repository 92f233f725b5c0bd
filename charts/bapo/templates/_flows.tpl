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
{{- include "bapo.toOutside" .Values.networkPolicy.externalDatabase -}}
{{- end -}}
{{- end -}}

{{- define "bapo.toS3" -}}
{{- if .Values.s3.bundled.enabled -}}
{{- include "bapo.toPods" (dict "root" . "component" "s3" "port" 8333) -}}
{{- else -}}
{{- include "bapo.toOutside" .Values.networkPolicy.externalS3 -}}
{{- end -}}
{{- end -}}

{{- define "bapo.toOutside" -}}
- to:
    {{- toYaml .to | nindent 4 }}
  ports:
    - {protocol: TCP, port: {{ .port }}}
{{- end -}}
