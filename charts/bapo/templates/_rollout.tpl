{{/* Name of the LeaderWorkerSet, and of the headless Service that its controller creates. It is not that of the
StatefulSet of replicas of one pod, because Helm could not replace one by the other. */}}
{{- define "bapo.nodesName" -}}
{{ include "bapo.fullname" . }}-nodes
{{- end -}}

{{/* Hosts of the replicas: the names of their pods end like that. */}}
{{- define "bapo.replicaHosts" -}}
{{- if gt (int .Values.rollout.nodes) 1 -}}
.{{ include "bapo.nodesHost" . }}
{{- else -}}
.{{ include "bapo.host" (dict "root" . "component" "rollout") }}
{{- end -}}
{{- end -}}

{{- define "bapo.nodesHost" -}}
{{ include "bapo.nodesName" . }}.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* Addresses of a replica's worker pods, from the name of its leader pod. */}}
{{- define "bapo.workerNodes" -}}
{{- $addresses := list -}}
{{- range $rank := untilStep 1 (int .Values.rollout.nodes) 1 -}}
{{- $addresses = append $addresses (printf "http://$(BAPO_REPLICA)-%d.%s:8702" $rank (include "bapo.nodesHost" $)) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end -}}

{{/* Template of the pods of a rollout replica. `part`: the component. `node`: leader or worker of a replica of
several pods; empty for a replica of one pod. */}}
{{- define "bapo.rolloutPod" -}}
{{- $part := .part -}}
{{- $root := .part.root -}}
{{- $rollout := $root.Values.rollout -}}
{{- $host := ternary (include "bapo.nodesHost" $root) (include "bapo.host" $part) (not (empty .node)) -}}
{{- $vllm := $rollout.vllmArgs }}
{{- if gt (int $rollout.pipelineParallelSize) 1 }}
{{- $vllm = concat (list "--pipeline-parallel-size" (toString $rollout.pipelineParallelSize)) $vllm }}
{{- end }}
{{- if gt (int $rollout.tensorParallelSize) 1 }}
{{- $vllm = concat (list "--tensor-parallel-size" (toString $rollout.tensorParallelSize)) $vllm }}
{{- end -}}
metadata:
  labels:
    {{- include "bapo.podLabels" $part | nindent 4 }}
  annotations:
    {{- include "bapo.podAnnotations" $part | nindent 4 }}
spec:
  {{- include "bapo.podSecurity" $part | nindent 2 }}
  {{- include "bapo.scheduling" $part | nindent 2 }}
  serviceAccountName: {{ include "bapo.fullname" $root }}-services
  terminationGracePeriodSeconds: 60
  containers:
    {{- if eq .node "worker" }}
    # It starts a vLLM without an API server when its replica, the group's leader, says so.
    {{- else }}
    # The run watcher starts the replica's server, and that vLLM. vLLM's routes require no token, so
    # it listens on loopback only.
    {{- end }}
    - name: rollout
      image: {{ include "bapo.image" $part }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext:
        {{- include "bapo.containerContext" (dict "root" $root "own" $rollout.securityContext) | nindent 8 }}
      {{- if eq .node "worker" }}
      command: [python, -m, services.rollout.worker_node]
      {{- else }}
      command: [python, -m, services.rollout.run_watcher, services.rollout.server]
      {{- end }}
      env:
        {{- include "bapo.listenEnv" $part | nindent 8 }}
        - name: BAPO_SCRATCH
          value: /scratch
        {{- include "bapo.processToken" (dict "root" $root "key" "BAPO_REPLICA_TOKEN") | nindent 8 }}
        {{- if .node }}
        # The address by which vLLM's ranks reach each other.
        - name: VLLM_HOST_IP
          valueFrom:
            fieldRef: {fieldPath: status.podIP}
        {{- end }}
        {{- if ne .node "worker" }}
        - name: BAPO_REPLICA
          valueFrom:
            fieldRef: {fieldPath: metadata.name}
        - name: BAPO_ADVERTISE
          value: http://$(BAPO_REPLICA).{{ $host }}:8702
        {{- if .node }}
        - name: BAPO_VLLM_NODES
          value: {{ include "bapo.workerNodes" $root | quote }}
        {{- end }}
        {{- with $vllm }}
        - name: BAPO_VLLM_ARGS
          value: {{ include "bapo.shellWords" . | quote }}
        {{- end }}
        # A pod may run before its run begins, and so load the model long after its startup probe.
        - name: BAPO_VLLM_START_WITHIN_S
          value: {{ mul 60 $rollout.startupMinutes | quote }}
        {{- end }}
        # Compiled kernels survive a restart if the scratch space is persistent.
        - name: XDG_CACHE_HOME
          value: /scratch/cache
        # Weights come from the object store; the network policies allow no model hub.
        - name: HF_HUB_OFFLINE
          value: "1"
        - name: VLLM_NO_USAGE_STATS
          value: "1"
        {{- with $rollout.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      envFrom:
        {{- include "bapo.clientEnvFrom" $root | nindent 8 }}
      ports:
        - {name: http, containerPort: 8702}
      {{- if eq .node "worker" }}
      # The replica watches vLLM on this node, and restarts it here.
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        failureThreshold: 60
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 30
        timeoutSeconds: 30
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
      {{- else }}
      # Loading a large model takes long; the other probes begin after it.
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: {{ mul 6 $rollout.startupMinutes }}
      # /health generates a token, which queues behind those of a full batch. When a run begins, it
      # does not answer until the server has loaded its libraries. Three minutes cover both.
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 30
        timeoutSeconds: 30
        failureThreshold: 6
      # During a run, a pod is ready only with the target version of the weights.
      readinessProbe:
        httpGet: {path: /readyz, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
      {{- end }}
      lifecycle:
        preStop:
          sleep: {seconds: 5}
      resources:
        {{- $resources := deepCopy $rollout.resources }}
        {{- if gt (int $rollout.gpus) 0 }}
        {{- range $resources }}
        {{- $_ := set . $rollout.gpuResource $rollout.gpus }}
        {{- end }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: scratch, mountPath: /scratch}
        - {name: shm, mountPath: /dev/shm}
        {{- include "bapo.caMount" $root | nindent 8 }}
        {{- with $rollout.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "bapo.caVolume" $root | nindent 4 }}
    - name: tmp
      emptyDir: {sizeLimit: 8Gi}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $rollout.shmSize }}}
    {{- if not $rollout.scratch.persistent }}
    - name: scratch
      emptyDir: {sizeLimit: {{ $rollout.scratch.size }}}
    {{- end }}
    {{- with $rollout.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
