{{- define "quire.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 48 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough that "-worker-63" still fits into a label. */}}
{{- define "quire.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 48 | trimSuffix "-" -}}
{{- else if contains (include "quire.name" .) .Release.Name -}}
{{- .Release.Name | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "quire.name" .) | trunc 48 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels by which pods are selected: never changed, they are immutable. Call with (dict "root" $ "component" "router"). */}}
{{- define "quire.selector" -}}
app.kubernetes.io/name: {{ include "quire.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "quire.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "quire.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "quire.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{- define "quire.apiKeySecret" -}}
{{- .Values.apiKey.existingSecret | default (printf "%s-api-key" (include "quire.fullname" .)) -}}
{{- end -}}

{{/* The static list of workers: the stable names of the StatefulSet's pods. */}}
{{- define "quire.workers" -}}
{{- $service := printf "%s-worker" (include "quire.fullname" .) -}}
{{- $list := list -}}
{{- range $i := until (int .Values.worker.replicas) -}}
{{- $list = append $list (printf "%s-%d.%s.%s.svc.%s:%d" $service $i $service $.Release.Namespace $.Values.clusterDomain (int $.Values.worker.port)) -}}
{{- end -}}
{{- join "," $list -}}
{{- end -}}

{{/* Values that contradict each other, named. */}}
{{- define "quire.check" -}}
{{- range $name := list "router" "worker" -}}
{{- $part := index $.Values $name -}}
{{- $needs := add $part.preStopSleepSeconds $part.settleSeconds $part.drainTimeoutSeconds 5 | int -}}
{{- if lt (int $part.terminationGracePeriodSeconds) $needs -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d, but preStopSleepSeconds + settleSeconds + drainTimeoutSeconds + 5 is %d: streams would be killed before they are drained" $name (int $part.terminationGracePeriodSeconds) $needs) -}}
{{- end -}}
{{- if eq (int $part.port) (int $part.adminPort) -}}
{{- fail (printf "%s.port and %s.adminPort are both %d" $name $name (int $part.port)) -}}
{{- end -}}
{{- end -}}
{{- if lt (int .Values.router.terminationGracePeriodSeconds) (int .Values.worker.drainTimeoutSeconds) -}}
{{- fail "router.terminationGracePeriodSeconds must not be below worker.drainTimeoutSeconds: the router carries the longest stream of any worker" -}}
{{- end -}}
{{- if and .Values.apiKey.existingSecret .Values.apiKey.value -}}
{{- fail "apiKey.existingSecret and apiKey.value are both set: which one is it?" -}}
{{- end -}}
{{- if and (eq .Values.worker.cache.type "existingClaim") (not .Values.worker.cache.existingClaim) -}}
{{- fail "worker.cache.type is existingClaim, but worker.cache.existingClaim names none" -}}
{{- end -}}
{{- if and .Values.worker.cache.readOnly (ne .Values.worker.cache.type "existingClaim") -}}
{{- fail "worker.cache.readOnly needs worker.cache.type existingClaim: nothing could ever be put on the volume" -}}
{{- end -}}
{{- if and .Values.router.autoscaling.enabled (gt (int .Values.router.autoscaling.minReplicas) (int .Values.router.autoscaling.maxReplicas)) -}}
{{- fail "router.autoscaling.minReplicas is above maxReplicas" -}}
{{- end -}}
{{- end -}}

{{- define "quire.podAnnotations" -}}
{{- if .root.Values.metrics.annotations }}
prometheus.io/scrape: "true"
prometheus.io/port: {{ .part.adminPort | quote }}
prometheus.io/path: /metrics
{{- end }}
{{- with .part.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What every pod has in common, but its containers and volumes. */}}
{{- define "quire.pod" -}}
serviceAccountName: {{ include "quire.serviceAccount" .root }}
automountServiceAccountToken: false
{{- /* A Service called quire would set QUIRE_PORT=tcp://..., which the program reads. */}}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .part.terminationGracePeriodSeconds }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- if .part.topologySpreadConstraints }}
{{- toYaml .part.topologySpreadConstraints | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "quire.selector" (dict "root" .root "component" .component) | nindent 8 }}
{{- end }}
{{- end -}}

{{/* What every container has in common. */}}
{{- define "quire.container" -}}
image: {{ include "quire.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
readinessProbe:
  httpGet:
    path: /readyz
    port: admin
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe:
  httpGet:
    path: /livez
    port: admin
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 6
{{- if .part.preStopSleepSeconds }}
lifecycle:
  preStop:
    sleep:
      seconds: {{ .part.preStopSleepSeconds }}
{{- end }}
resources: {{- toYaml .part.resources | nindent 2 }}
{{- end -}}
