{{/*
What changes a role's number of workers: a HorizontalPodAutoscaler, or a ScaledObject of KEDA that asks Prometheus.
Takes a dict of root, role and values.
*/}}
{{- define "baton.autoscaler" -}}
{{- $scaling := .values.autoscaling -}}
{{- $name := printf "%s-%s" (include "baton.fullname" .root) .role -}}
{{- $labels := include "baton.labels" (dict "root" .root "component" .role) -}}
{{- $group := eq .values.workload "LeaderWorkerSet" | ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" -}}
{{- $target := dict "apiVersion" $group "kind" .values.workload "name" $name -}}
{{- if eq $scaling.mode "hpa" }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ $name }}
  labels:
    {{- $labels | nindent 4 }}
spec:
  scaleTargetRef:
    {{- toYaml $target | nindent 4 }}
  minReplicas: {{ $scaling.minReplicas }}
  maxReplicas: {{ $scaling.maxReplicas }}
  metrics:
    {{- toYaml $scaling.metrics | nindent 4 }}
  behavior:
    scaleDown:
      stabilizationWindowSeconds: {{ int64 $scaling.scaleDownSeconds }}
{{- else if eq $scaling.mode "keda" }}
{{- /* Labels that the PodMonitor gives each series. */ -}}
{{- $series := printf "namespace=%q,app_kubernetes_io_instance=%q,app_kubernetes_io_component=%q" .root.Release.Namespace .root.Release.Name .role }}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ $name }}
  labels:
    {{- $labels | nindent 4 }}
spec:
  scaleTargetRef:
    {{- toYaml $target | nindent 4 }}
  minReplicaCount: {{ $scaling.minReplicas }}
  maxReplicaCount: {{ $scaling.maxReplicas }}
  cooldownPeriod: {{ int64 $scaling.scaleDownSeconds }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleDown:
          stabilizationWindowSeconds: {{ int64 $scaling.scaleDownSeconds }}
  # Without an answer of Prometheus the number of workers stays. KEDA wants a number, which this behaviour does not use.
  fallback: {failureThreshold: 3, behavior: currentReplicas, replicas: {{ $scaling.maxReplicas }}}
  triggers:
    # An answer without series is no answer (ignoreNullValues): it would count as no load.
    # Prompt tokens that wait, of all workers; the target is of one.
    - type: prometheus
      metadata:
        serverAddress: {{ .root.Values.monitoring.prometheusUrl }}
        query: sum(baton_engine_queued_tokens{ {{- $series -}} })
        threshold: {{ int64 $scaling.queuedTokens | quote }}
        ignoreNullValues: "false"
    # Workers' worth of KV blocks in use.
    - type: prometheus
      metadata:
        serverAddress: {{ .root.Values.monitoring.prometheusUrl }}
        query: sum(1 - baton_engine_free_blocks{ {{- $series -}} } / baton_engine_total_blocks{ {{- $series -}} })
        threshold: {{ $scaling.kvUse | quote }}
        ignoreNullValues: "false"
{{- end }}
{{- end -}}
