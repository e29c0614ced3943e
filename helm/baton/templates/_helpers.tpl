{{/* Names. Kept short: a suffix follows, and 63 characters is the end. */}}
{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "baton.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "baton.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "baton.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "baton.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/*
Takes a dict of root and component. These are the labels of pods of workloads, too: with the chart's version among them another chart would
restart every pod.
*/}}
{{- define "baton.selectorLabels" -}}
app.kubernetes.io/name: {{ include "baton.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "baton.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "baton.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end -}}

{{- define "baton.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{/* Whether the chart brings its own etcd: "true" or empty. */}}
{{- define "baton.ownEtcd" -}}
{{- if and (eq .Values.discovery.mode "etcd") .Values.etcd.enabled (empty .Values.discovery.etcd.endpoints) -}}true{{- end -}}
{{- end -}}

{{/* Flags rather than environment variables: a flag that does not exist is refused at start. */}}
{{- define "baton.commonArgs" -}}
{{- with .Values.model.path }}
- --model={{ . }}
{{- end }}
{{- with .Values.model.name }}
- --model-name={{ . }}
{{- end }}
- --discovery={{ .Values.discovery.mode }}
{{- if eq .Values.discovery.mode "etcd" }}
{{- with .Values.discovery.etcd }}
- --etcd-endpoints={{ if .endpoints }}{{ join "," .endpoints }}{{ else }}http://{{ include "baton.fullname" $ }}-etcd:2379{{ end }}
- --etcd-prefix={{ default (printf "/baton/%s/%s" $.Release.Namespace $.Release.Name) .prefix }}
- --etcd-lease-ttl={{ int64 .leaseTtlSeconds }}
{{- if .auth.secretName }}
- --etcd-user={{ .auth.username }}
- --etcd-password-file=/etc/baton/etcd-auth/{{ .auth.passwordKey }}
{{- end }}
{{- if .tls.secretName }}
- --etcd-ca=/etc/baton/etcd-tls/{{ .tls.caKey }}
{{- if .tls.certKey }}
- --etcd-cert=/etc/baton/etcd-tls/{{ .tls.certKey }}
- --etcd-key=/etc/baton/etcd-tls/{{ .tls.keyKey }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.tls }}
{{- if .secretName }}
- --tls-cert=/etc/baton/tls/{{ .certKey }}
- --tls-key=/etc/baton/tls/{{ .keyKey }}
- --tls-ca=/etc/baton/tls/{{ .caKey }}
- --tls-name={{ .name }}
{{- end }}
{{- end }}
- --log={{ .Values.log.filter }}
- --log-format={{ .Values.log.format }}
{{- with .Values.otlpEndpoint }}
- --otlp-endpoint={{ . }}
{{- end }}
{{- end -}}

{{/* The root file system is read-only; what is written goes to /tmp: the embedded model, unpacked. */}}
{{- define "baton.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
{{- if include "baton.modelVolume" . }}
- name: model
  mountPath: {{ .Values.model.mountPath }}
  readOnly: true
{{- end }}
{{- if and (eq .Values.discovery.mode "etcd") .Values.discovery.etcd.auth.secretName }}
- name: etcd-auth
  mountPath: /etc/baton/etcd-auth
  readOnly: true
{{- end }}
{{- if and (eq .Values.discovery.mode "etcd") .Values.discovery.etcd.tls.secretName }}
- name: etcd-tls
  mountPath: /etc/baton/etcd-tls
  readOnly: true
{{- end }}
{{- if .Values.tls.secretName }}
- name: tls
  mountPath: /etc/baton/tls
  readOnly: true
{{- end }}
{{- end -}}

{{- define "baton.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 256Mi
{{- with include "baton.modelVolume" . }}
- name: model
  {{- . | nindent 2 }}
{{- end }}
{{- if eq .Values.discovery.mode "etcd" }}
{{- with .Values.discovery.etcd.auth.secretName }}
- name: etcd-auth
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with .Values.discovery.etcd.tls.secretName }}
- name: etcd-tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- with .Values.tls.secretName }}
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{/* How the router and the workers are called. */}}
{{- define "baton.scheme" -}}
{{- if .Values.tls.secretName }}https{{ else }}http{{ end -}}
{{- end -}}

{{/* What a socket listens on to be reached by other pods, and the pod's address as a host: IPv6 takes brackets. */}}
{{- define "baton.anyAddress" -}}
{{- if eq .Values.network.ipFamily "IPv6" }}[::]{{ else }}0.0.0.0{{ end -}}
{{- end -}}

{{- define "baton.loopback" -}}
{{- if eq .Values.network.ipFamily "IPv6" }}[::1]{{ else }}127.0.0.1{{ end -}}
{{- end -}}

{{- define "baton.podHost" -}}
{{- if eq .Values.network.ipFamily "IPv6" }}[$(POD_IP)]{{ else }}$(POD_IP){{ end -}}
{{- end -}}

{{/* Whether a role has pods, or autoscaling may give it some: "true" or empty; takes its values. */}}
{{- define "baton.hasPods" -}}
{{- if or .replicas (ne .autoscaling.mode "none") -}}true{{- end -}}
{{- end -}}

{{/* Roles that have workers in the network of their nodes, separated by spaces. */}}
{{- define "baton.hostNetworks" -}}
{{- $roles := list -}}
{{- range $role := list "prefill" "decode" -}}
{{- with index $.Values $role -}}
{{- if and .hostNetwork (include "baton.hasPods" .) -}}{{- $roles = append $roles $role -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- join " " $roles -}}
{{- end -}}

{{/* Of every pod. Helm removes a default that a values file sets to null; some versions leave the null to a chart within another. */}}
{{- define "baton.podSecurityContext" -}}
{{- $context := dict -}}
{{- range $key, $value := .Values.podSecurityContext -}}
{{- if not (kindIs "invalid" $value) -}}{{- $_ := set $context $key $value -}}{{- end -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{- define "baton.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Where pods of one component go; takes its values. */}}
{{- define "baton.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- end -}}
