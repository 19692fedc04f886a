{{/*
The autoscaler of a pool: as many nodes as the load needs, up at once, down by one a minute and never below what the last five
minutes needed. In: root, at, pool, isGroup.
*/}}
{{- define "splitserve.autoscaler" -}}
{{- $metric := ternary "splitserve_nodes_needed" (printf "splitserve_%s_nodes_needed" .pool.role) (eq .pool.role "mixed") }}
{{- $target := dict "apiVersion" (ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" .isGroup)
  "kind" (ternary "LeaderWorkerSet" "Deployment" .isGroup) "name" .at.name }}
{{- $behavior := dict "scaleUp" (dict "stabilizationWindowSeconds" 0)
  "scaleDown" (dict "stabilizationWindowSeconds" 300 "policies" (list (dict "type" "Pods" "value" 1 "periodSeconds" 60))) }}
{{- if eq .root.Values.autoscaler "keda" -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata: {{- include "splitserve.metadata" .at | nindent 2 }}
spec:
  scaleTargetRef: {{- toYaml $target | nindent 4 }}
  pollingInterval: 15
  minReplicaCount: {{ .pool.autoscaling.minReplicas }}
  maxReplicaCount: {{ .pool.autoscaling.maxReplicas }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: {{- toYaml $behavior | nindent 8 }}
  triggers:
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ .root.Values.prometheusAddress }}
        query: max({{ $metric }}{namespace="{{ .root.Release.Namespace }}",service="{{ .root.Release.Name }}-fleet"})
        threshold: "1" # so the figure is the number of replicas
        ignoreNullValues: "false" # without figures it stays as it is
{{- else -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {{- include "splitserve.metadata" .at | nindent 2 }}
spec:
  scaleTargetRef: {{- toYaml $target | nindent 4 }}
  minReplicas: {{ .pool.autoscaling.minReplicas }}
  maxReplicas: {{ .pool.autoscaling.maxReplicas }}
  metrics:
    - type: External
      external:
        metric:
          name: {{ $metric }}
          selector:
            matchLabels:
              service: {{ .root.Release.Name }}-fleet
        target:
          type: AverageValue
          averageValue: "1" # so the figure is the number of replicas
  behavior: {{- toYaml $behavior | nindent 4 }}
{{- end }}
{{- end }}
