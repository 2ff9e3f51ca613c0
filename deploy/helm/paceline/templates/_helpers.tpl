{{- define "paceline.labels" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
paceline/reward-model: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Name, labels and annotations of an object: of the component, or of `name`. */}}
{{- define "paceline.meta" -}}
{{- $release := .root.Release.Name -}}
{{- if gt (len $release) 40 }}{{ fail (printf "the release's name %s has %d characters: give it at most 40" $release (len $release)) }}{{ end -}}
name: {{ $release }}-{{ .name | default .component }}
labels:
  {{- include "paceline.labels" . | nindent 2 }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* `pods` of the values with the component's own `pod`, as JSON: maps are merged, lists are joined. */}}
{{- define "paceline.settings" -}}
{{- $all := deepCopy .root.Values.pods }}
{{- /* Redis gets variables and volumes only from its own `pod`. */}}
{{- if has .component (list "redis" "blobs") }}
{{- range list "envFrom" "volumes" "volumeMounts" }}{{ $_ := set $all . list }}{{ end }}
{{- $_ := set $all "env" dict }}
{{- end }}
{{- $values := .values | default (index .root.Values .component) }}
{{- range $key, $value := $values.pod }}
{{- if kindIs "slice" $value }}
{{- $_ := set $all $key (concat (index $all $key) $value) }}
{{- else if kindIs "map" $value }}
{{- $_ := set $all $key (mergeOverwrite (index $all $key) (deepCopy $value)) }}
{{- else }}
{{- $_ := set $all $key $value }}
{{- end }}
{{- end }}
{{- $all | toJson }}
{{- end }}

{{/* Metadata of objects that create pods. */}}
{{- define "paceline.workload" -}}
{{- $own := include "paceline.settings" . | fromJson }}
{{- $annotations := mergeOverwrite $own.annotations (.annotations | default dict) }}
{{- include "paceline.meta" (dict "root" .root "component" .component "model" .model "name" .name "labels" $own.labels "annotations" $annotations) }}
{{- end }}

{{/* A Job with the specification `spec`, in which @generation@ stands for its hash. Kubernetes forbids changes of a Job's
template, so another template makes a Job with another name; Helm removes the old one, whose pods save and end. */}}
{{- define "paceline.job" -}}
{{- $hash := .spec | sha256sum | trunc 8 -}}
apiVersion: batch/v1
kind: Job
metadata:
  {{- include "paceline.workload" (dict "root" .root "component" .component "name" (printf "%s-%s" .component $hash)) | nindent 2 }}
spec:
  {{- .spec | replace "@generation@" $hash | nindent 2 }}
{{- end }}

{{/* Metadata of a Deployment, with the number of pods from the values. */}}
{{- define "paceline.deployment" -}}
{{- include "paceline.workload" (merge (dict "annotations" (dict "paceline/replicas" (toString .replicas))) .) }}
{{- end }}

{{/* The number of a Deployment's pods. While its number in the values is unchanged, `kubectl scale` or an autoscaler
decides. */}}
{{- define "paceline.replicas" -}}
{{- $live := lookup "apps/v1" "Deployment" .root.Release.Namespace (printf "%s-%s" .root.Release.Name (.name | default .component)) | default dict }}
{{- $said := dig "metadata" "annotations" "paceline/replicas" "" $live }}
{{- eq $said (toString .replicas) | ternary (dig "spec" "replicas" .replicas $live) .replicas }}
{{- end }}

{{/* A pod's metadata and its `spec` without containers and volumes. */}}
{{- define "paceline.pod" -}}
{{- $own := include "paceline.settings" . | fromJson }}
{{- $user := ternary 999 10001 (has .component (list "redis" "blobs")) -}}
metadata:
  labels:
    {{- include "paceline.labels" . | nindent 4 }}
    {{- if .job }}
    paceline/generation: "@generation@"
    {{- end }}
    {{- with $own.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with mergeOverwrite $own.annotations (.podAnnotations | default dict) }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  terminationGracePeriodSeconds: {{ .root.Values.stopGraceSeconds }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    {{- $context := dict "runAsNonRoot" true "runAsUser" $user "runAsGroup" $user "fsGroup" $user }}
    {{- $_ := set $context "fsGroupChangePolicy" "OnRootMismatch" }}
    {{- $_ := set $context "seccompProfile" (dict "type" "RuntimeDefault") }}
    {{- toYaml (mergeOverwrite $context $own.podSecurityContext) | nindent 4 }}
  {{- with .root.Values.images.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- range $key := list "nodeSelector" "serviceAccountName" "priorityClassName" "runtimeClassName" "schedulerName" }}
  {{- with index $own $key }}
  {{ $key }}: {{ toJson . }}
  {{- end }}
  {{- end }}
  {{- with include "paceline.affinity" . | fromJson }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $own.topologySpreadConstraints | default (include "paceline.spread" . | fromYamlArray) }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  tolerations:
    {{- range list "not-ready" "unreachable" }}
    - {key: node.kubernetes.io/{{ . }}, operator: Exists, effect: NoExecute, tolerationSeconds: {{ $.root.Values.lostNodeSeconds }}}
    {{- end }}
    {{- with $own.tolerations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* The values' affinity. A Job's pods also wait until the pods of earlier Jobs are gone from all nodes. */}}
{{- define "paceline.affinity" -}}
{{- $affinity := (include "paceline.settings" . | fromJson).affinity }}
{{- if .job }}
{{- $others := dict "key" "paceline/generation" "operator" "NotIn" "values" (list "@generation@") }}
{{- $selector := dict "matchLabels" (include "paceline.labels" . | fromYaml) "matchExpressions" (list $others) }}
{{- $anti := $affinity.podAntiAffinity | default dict }}
{{- $required := $anti.requiredDuringSchedulingIgnoredDuringExecution | default list }}
{{- $required = prepend $required (dict "topologyKey" "kubernetes.io/os" "labelSelector" $selector) }}
{{- $_ := set $affinity "podAntiAffinity" (set $anti "requiredDuringSchedulingIgnoredDuringExecution" $required) }}
{{- end }}
{{- $affinity | toJson }}
{{- end }}

{{/* By default, the pods of the learner and of blob stores are spread over nodes. */}}
{{- define "paceline.spread" -}}
{{- $several := or (eq .component "blobs") (and (eq .component "learner") (gt (int .root.Values.learner.nodes) 1)) }}
{{- if $several }}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "paceline.labels" . | nindent 6 }}
{{- end }}
{{- end }}

{{/* A container's image, security context and resources; `gpus`: the number of GPUs. */}}
{{- define "paceline.container" -}}
{{- $own := include "paceline.settings" . | fromJson -}}
image: {{ index .root.Values.images (.image | default .component) | quote }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
securityContext:
  {{- $context := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true }}
  {{- $_ := set $context "capabilities" (dict "drop" (list "ALL")) }}
  {{- toYaml (mergeOverwrite $context $own.securityContext) | nindent 2 }}
resources:
  {{- $resources := deepCopy (.values | default (index .root.Values .component)).resources }}
  {{- if .gpus }}
  {{- $resources = mergeOverwrite $resources (dict "limits" (dict "nvidia.com/gpu" .gpus)) }}
  {{- end }}
  {{- toYaml $resources | nindent 2 }}
{{- with $own.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The environment variables of the values: each a text, or an object with `valueFrom`. */}}
{{- define "paceline.ownEnv" }}
{{- range $name, $value := (include "paceline.settings" . | fromJson).env }}
{{- $said := kindIs "map" $value | ternary $value (dict "value" $value) }}
- {{ set $said "name" $name | toJson }}
{{- end }}
{{- end }}

{{/* Environment of a service: identity, addresses and metrics. */}}
{{- define "paceline.env" -}}
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
{{- include "paceline.ownEnv" . }}
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
{{- if and .root.Values.redis.external.caSecret (ne .component "reward-model") }}
- {name: redis-ca, mountPath: /run/redis, readOnly: true}
{{- end }}
{{- with (include "paceline.settings" . | fromJson).volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Secrets are mounted as folders, so that the kubelet can update certificates, which the services read again. */}}
{{- define "paceline.volumes" -}}
{{- $redis := .root.Values.redis.external -}}
- name: tls
  secret: {secretName: {{ .root.Values.secrets }}-tls-{{ .certificate | default .component }}, defaultMode: 0440}
- name: token
  projected:
    defaultMode: 0440
    sources:
      - secret: {name: {{ .root.Values.secrets }}, items: [{key: token, path: token}]}
      {{- if eq .component "controller" }}
      - secret:
          name: {{ $redis.passwordSecret | default .root.Values.secrets }}
          items: [{key: redis_password, path: redis_password}]
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
{{- if and $redis.caSecret (ne .component "reward-model") }}
- name: redis-ca
  secret: {secretName: {{ $redis.caSecret }}, defaultMode: 0440, items: [{key: ca.pem, path: ca.pem}]}
{{- end }}
{{- with (include "paceline.settings" . | fromJson).volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* A port for gRPC, and a metrics port for each of `ranks` processes. */}}
{{- define "paceline.ports" -}}
- {name: grpc, containerPort: 7000}
{{- with .root.Values.metrics.port }}
{{- range $rank := until (int ($.ranks | default 1)) }}
- {name: {{ include "paceline.metricsPort" $rank }}, containerPort: {{ add $.root.Values.metrics.port $rank }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "paceline.metricsPort" -}}
{{- . | eq 0 | ternary "metrics" (printf "metrics-%d" .) }}
{{- end }}

{{/* A pod is ready when its service says so over gRPC; it is restarted if it has not answered for five minutes. */}}
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
exec: {command: [paceline, health, "127.0.0.1:7000", --role, {{ .role | default .component }}]}
periodSeconds: 30
timeoutSeconds: 30
{{- end }}

{{/* Errors that a new pod cannot fix end the job; a lost node does not count as a failure. */}}
{{- define "paceline.failures" }}
podFailurePolicy:
  rules:
    - action: Ignore
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
    - action: FailJob
      onExitCodes: {operator: In, values: {{ .final | toJson }}}
# Never two pods at a time: a new one starts when its predecessor is gone.
podReplacementPolicy: Failed
{{- end }}

{{/* The blob stores' addresses, without the password, separated by spaces. */}}
{{- define "paceline.blobStores" -}}
{{- range $number := until (int .Values.blobs.stores) }}
{{- if $number }} {{ end }}rediss://paceline@{{ $.Release.Name }}-blobs-{{ $number }}.{{ $.Release.Name }}-blobs:6379/0
{{- end }}
{{- end }}

{{/* Redis' address, without the password. */}}
{{- define "paceline.redisUrl" -}}
{{- with .Values.redis.external }}
{{- if .url }}
{{- .url }}{{ if .caSecret }}{{ contains "?" .url | ternary "&" "?" }}ssl_ca_certs=/run/redis/ca.pem{{ end }}
{{- else -}}
rediss://paceline@{{ $.Release.Name }}-redis:6379/0
{{- end }}
{{- end }}
{{- end }}

{{- define "paceline.claim" -}}
accessModes: [ReadWriteOncePod]
{{- with .className }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end }}

{{/* The entries of reward.models in the run's configuration, as JSON; fails if the chart cannot run one of them. */}}
{{- define "paceline.rewardModels" -}}
{{- $config := fromYaml .Values.config }}
{{- with $config.Error }}{{ fail (printf "config is not YAML: %s" .) }}{{ end }}
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

{{/* rollout.validation_servers of the run's configuration. */}}
{{- define "paceline.validationServers" -}}
{{- range .Values.overrides }}
{{- if hasPrefix "rollout.validation_servers" . }}{{ fail "set rollout.validation_servers in config, not in overrides: the chart starts those of config" }}{{ end }}
{{- end }}
{{- $config := fromYaml .Values.config }}
{{- with $config.Error }}{{ fail (printf "config is not YAML: %s" .) }}{{ end }}
{{- ($config.rollout | default dict).validation_servers | default 0 | int }}
{{- end }}
