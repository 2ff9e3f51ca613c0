{{- define "paceline.labels" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "paceline.meta" -}}
name: {{ .root.Release.Name }}-{{ .component }}
labels:
  {{- include "paceline.labels" . | nindent 2 }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* What every pod has: an ordinary user, no token of the cluster's, no capabilities. */}}
{{- define "paceline.pod" -}}
{{- $user := ternary 999 10001 (eq .component "redis") -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ $user }}
  runAsGroup: {{ $user }}
  fsGroup: {{ $user }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- $values := .values | default (index .root.Values .component) }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "paceline.container" -}}
image: {{ index .root.Values.images (.image | default .component) | quote }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "paceline.envFrom" -}}
{{- if .root.Values.envFromSecrets }}
envFrom:
  {{- range .root.Values.envFromSecrets }}
  - secretRef: {name: {{ . }}}
  {{- end }}
{{- end }}
{{- end }}

{{/* Environment of a service: who it is, where it is, what it serves. */}}
{{- define "paceline.env" -}}
{{- with include "paceline.envFrom" . }}
{{- . }}
{{ end -}}
env:
  - {name: PACELINE_TOKEN_FILE, value: /run/paceline/token}
  - {name: PACELINE_TLS_DIR, value: /run/tls}
  - name: PACELINE_NODE_ID
    valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
  - {name: PACELINE_PROMETHEUS_PORT, value: {{ .root.Values.metrics.port | quote }}}
  - {name: PACELINE_PROMETHEUS_HOST, value: 0.0.0.0}
  - {name: PACELINE_STOP_GRACE_S, value: {{ .root.Values.stopGraceSeconds | quote }}}
  {{- if ne .component "controller" }}
  - {name: PACELINE_CONTROLLER, value: "{{ .root.Release.Name }}-controller:7000"}
  {{- end }}
  {{- range $name, $value := .root.Values.env }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
  {{- end }}
{{- end }}

{{- define "paceline.mounts" -}}
- {name: tls, mountPath: /run/tls, readOnly: true}
- {name: token, mountPath: /run/paceline, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
{{- if .root.Values.volumes.models }}
- {name: models, mountPath: /paceline/models, readOnly: true}
{{- end }}
{{- if and .root.Values.volumes.checkpoints (has .component (list "controller" "learner")) }}
- {name: checkpoints, mountPath: /paceline/checkpoints}
{{- end }}
{{- end }}

{{/* Secrets are whole folders: the kubelet writes a new certificate into them, and the services read it. */}}
{{- define "paceline.volumes" -}}
- name: tls
  secret: {secretName: {{ .root.Values.secrets }}-tls-{{ .certificate | default .component }}, defaultMode: 0440}
- name: token
  secret:
    secretName: {{ .root.Values.secrets }}
    defaultMode: 0440
    items:
      - {key: token, path: token}
      {{- if eq .component "controller" }}
      - {key: redis_password, path: redis_password}
      {{- end }}
- {name: tmp, emptyDir: {}}
- {name: cache, emptyDir: {}}
{{- with .root.Values.volumes.models }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and .root.Values.volumes.checkpoints (has .component (list "controller" "learner")) }}
- name: checkpoints
  {{- toYaml .root.Values.volumes.checkpoints | nindent 2 }}
{{- end }}
{{- end }}

{{- define "paceline.ports" -}}
- {name: grpc, containerPort: 7000}
{{- if .root.Values.metrics.port }}
- {name: metrics, containerPort: {{ .root.Values.metrics.port }}}
{{- end }}
{{- end }}

{{/* A pod is ready when its service says so over gRPC; one that has not answered for five minutes is started anew. */}}
{{- define "paceline.probes" -}}
startupProbe:
  {{- include "paceline.health" . | nindent 2 }}
  failureThreshold: 120
readinessProbe:
  {{- include "paceline.health" . | nindent 2 }}
  failureThreshold: 3
livenessProbe:
  {{- include "paceline.health" . | nindent 2 }}
  failureThreshold: 10
{{- end }}

{{- define "paceline.health" -}}
exec: {command: [paceline, health, "127.0.0.1:7000", --role, {{ .component }}]}
periodSeconds: 30
timeoutSeconds: 30
{{- end }}

{{/* What a new pod would not mend ends the job; a lost node is nobody's fault. */}}
{{- define "paceline.failures" -}}
podFailurePolicy:
  rules:
    - action: Ignore
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
    - action: FailJob
      onExitCodes: {operator: In, values: {{ .final | toJson }}}
# Never two at a time: the next one starts when its predecessor is gone.
podReplacementPolicy: Failed
{{- end }}

{{- define "paceline.claim" -}}
accessModes: [ReadWriteOncePod]
{{- with .className }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end }}

{{/* The entries of reward.models of the run's configuration, as JSON; fails where the chart cannot run one. */}}
{{- define "paceline.rewardModels" -}}
{{- $config := fromYaml .Values.config }}
{{- with $config.Error }}{{ fail (printf "config is no YAML: %s" .) }}{{ end }}
{{- $models := (($config.reward | default dict).models) | default list }}
{{- $names := list }}
{{- range $models }}
{{- if not (regexMatch "^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$" (.name | toString)) }}
{{- fail (printf "reward.models of config names %q: in Kubernetes a model's name has at most 32 lower-case letters, digits and hyphens, with a letter or digit at both ends" (.name | toString)) }}
{{- end }}
{{- $names = append $names .name }}
{{- end }}
{{- range .Values.overrides }}
{{- if hasPrefix "reward.models" . }}{{ fail "name reward models in config, not in overrides: the chart starts those of config" }}{{ end }}
{{- end }}
{{- range $name, $_ := .Values.rewardModels.named }}
{{- if not (has $name $names) }}{{ fail (printf "rewardModels.named has %s, which reward.models of config does not name" $name) }}{{ end }}
{{- end }}
{{- $models | toJson }}
{{- end }}
