{{/* The labels of all objects of a component; with a pool, of its own alone. In: root, component, and pool or not. */}}
{{- define "splitserve.labels" -}}
app.kubernetes.io/name: splitserve
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
splitserve-pool: {{ . }}
{{- end }}
{{- end }}

{{/* The head of an object. In: root, component, name, and pool or not. */}}
{{- define "splitserve.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels: {{- include "splitserve.labels" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{/* The component that clients reach. */}}
{{- define "splitserve.front" -}}
{{- if .Values.apiServers.replicas }}api-server{{ else }}coordinator{{ end }}
{{- end }}

{{- define "splitserve.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* The options of a process as variables of its environment. Numbers come as floats: 8e+09 is 8000000000. In: a map. */}}
{{- define "splitserve.settings" -}}
{{- range $name, $value := . }}
{{- if and (kindIs "float64" $value) (eq (floor $value) $value) }}{{ $value = int64 $value }}{{ end }}
- name: SPLITSERVE_{{ $name | upper | replace "-" "_" }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}

{{- define "splitserve.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* A pool's values, with the defaults of what it does not say. In: root, pool. */}}
{{- define "splitserve.pool" -}}
{{- mergeOverwrite (deepCopy .root.Values.poolDefaults) (deepCopy .pool) | toYaml }}
{{- end }}

{{/*
The template of a component's pods. In: root, component, container (name, args, env, ports, probes, preStop, resources), settings,
image, keys (of the Secret), certificate (that the process shows), drainSeconds; pool, mounts, volumes, scheduling,
serviceAccount or not.
*/}}
{{- define "splitserve.template" -}}
{{- $values := .root.Values }}
metadata:
  labels: {{- include "splitserve.labels" . | nindent 4 }}
spec:
  terminationGracePeriodSeconds: {{ add .drainSeconds 30 }} # SIGTERM drains for drainSeconds
  {{- with .serviceAccount }}
  serviceAccountName: {{ . }}
  {{- end }}
  automountServiceAccountToken: {{ not (empty .serviceAccount) }}
  enableServiceLinks: false # else variables such as SPLITSERVE_PORT are addresses of services
  shareProcessNamespace: true # else SIGTERM is lost on a process that has not come to its own handler yet
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    seccompProfile:
      type: RuntimeDefault
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with .scheduling }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  initContainers:
    - name: model
      image: {{ .image }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: [python3, -m, splitserve.launch.models] # an image with vLLM has no `python`
      args: [{{ $values.model | quote }}]
      env:
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ $values.secret }}
              key: hf-token
              optional: true
      # As the container's: with the kubelet's static CPU policy a pod of equal requests and limits has CPUs for itself.
      resources: {{- toYaml .container.resources | nindent 8 }}
      securityContext: {{- include "splitserve.securityContext" . | nindent 8 }}
      volumeMounts:
        - name: cache
          mountPath: /cache
        - name: tmp
          mountPath: /tmp
  containers:
    - name: {{ .component }}
      image: {{ .image }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args: {{- toYaml .container.args | nindent 8 }}
      env:
        - name: SPLITSERVE_MODEL
          value: {{ $values.model | quote }}
        - name: HF_HUB_OFFLINE
          value: "1" # the model is there
        {{- range .keys }}
        - name: SPLITSERVE_{{ . | upper | replace "-" "_" }}_FILE
          value: /run/secrets/splitserve/{{ . }}
        {{- end }}
        {{- if $values.tls.enabled }}
        - name: SPLITSERVE_TLS_CERT
          value: /run/secrets/splitserve-tls/tls.crt
        - name: SPLITSERVE_TLS_KEY
          value: /run/secrets/splitserve-tls/tls.key
        - name: SPLITSERVE_TLS_CA
          value: /run/secrets/splitserve-tls/ca.crt
        {{- end }}
        {{- with .container.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- include "splitserve.settings" .settings | nindent 8 }}
      ports:
        {{- range $name, $port := .container.ports }}
        - name: {{ $name }}
          containerPort: {{ $port }}
        {{- end }}
      {{- toYaml .container.probes | nindent 6 }}
      {{- if .container.preStop }}
      lifecycle: # the Service forgets the pod first, and SIGTERM drains it then
        preStop:
          exec:
            command: [sleep, "5"]
      {{- end }}
      resources: {{- toYaml .container.resources | nindent 8 }}
      securityContext: {{- include "splitserve.securityContext" . | nindent 8 }}
      volumeMounts:
        - name: cache
          mountPath: /cache
          readOnly: true
        - name: tmp
          mountPath: /tmp
        - name: secrets
          mountPath: /run/secrets/splitserve
          readOnly: true
        {{- if $values.tls.enabled }}
        - name: tls
          mountPath: /run/secrets/splitserve-tls
          readOnly: true
        {{- end }}
        {{- range $name, $path := .mounts }}
        - name: {{ $name }}
          mountPath: {{ $path }}
        {{- end }}
  volumes:
    - name: cache
      {{- toYaml $values.cache | nindent 6 }}
    - name: tmp
      emptyDir: {}
    - name: secrets
      secret:
        secretName: {{ $values.secret }}
        defaultMode: 0440
        items:
          {{- range .keys }}
          - key: {{ . }}
            path: {{ . }}
          {{- end }}
    {{- if $values.tls.enabled }}
    - name: tls
      secret:
        secretName: {{ .certificate }}
        defaultMode: 0440
    {{- end }}
    {{- with .volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
