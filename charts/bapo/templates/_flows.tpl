{{/* Peers and rules of the network policies. */}}

{{- define "bapo.pods" -}}
matchLabels:
  {{- include "bapo.selector" . | nindent 2 }}
{{- end -}}

{{/* Steps of a pipeline have only this label for certain. Our own pods have it too; those that have no
business with the services are left out. */}}
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
