{{/* The volume source of the model, as YAML. Empty: the model is in the image. */}}
{{- define "baton.modelVolume" -}}
{{- if .Values.model.claim.create -}}
persistentVolumeClaim:
  claimName: {{ include "baton.fullname" . }}-model
{{- else if .Values.model.volume -}}
{{- toYaml .Values.model.volume -}}
{{- end -}}
{{- end -}}

{{/* The file that the Job leaves beside a model that is complete; a new source has a new name. A directory has one at most. Takes a dict of source and path. */}}
{{- define "baton.modelMarker" -}}
{{- printf "%s/.fetched-%s" .path (sha256sum .source | trunc 8) -}}
{{- end -}}

{{/* For pods that read the model: wait until the Job has fetched it. */}}
{{- define "baton.modelWaits" -}}
{{- if .Values.model.fetch.source -}}
initContainers:
  - name: model
    image: {{ include "baton.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command:
      - sh
      - -c
      - |
        seconds=0
        until [ -e "$0" ]; do
          [ $((seconds % 30)) -ne 0 ] || echo "waiting for $0, which the Job (app.kubernetes.io/component=model) leaves when it has fetched the model"
          seconds=$((seconds + 2))
          sleep 2
        done
      - {{ include "baton.modelMarker" (dict "source" .Values.model.fetch.source "path" .Values.model.path) | quote }}
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 32Mi}
    securityContext:
      {{- include "baton.containerSecurityContext" . | nindent 6 }}
    volumeMounts:
      - name: model
        mountPath: {{ .Values.model.mountPath }}
        readOnly: true
{{- end -}}
{{- end -}}

{{/* Deployments whose pods wait for the model make no progress until it is there. */}}
{{- define "baton.progressDeadline" -}}
{{- ternary .Values.model.fetch.progressDeadlineSeconds .Values.progressDeadlineSeconds (ne .Values.model.fetch.source "") | int64 -}}
{{- end -}}

{{/* A Job cannot be changed: another pod gets another name, and helm removes the old Job. Takes what baton.fetchPod takes. */}}
{{- define "baton.fetchJob" -}}
{{- printf "%s-model-%s" (include "baton.fullname" .root) (include "baton.fetchPod" . | sha256sum | trunc 8) -}}
{{- end -}}

{{/*
The pod that fetches a model. It says nothing of the chart's version, nor whether the model is served now or next: another pod is another Job.
Takes a dict of root, source and path.
*/}}
{{- define "baton.fetchPod" -}}
{{- $source := .source -}}
{{- $path := .path -}}
{{- with .root -}}
{{- $fetch := .Values.model.fetch -}}
{{- $kind := $source | splitList "://" | first -}}
{{- $claim := fromYaml (include "baton.modelVolume" .) -}}
metadata:
  labels:
    {{- include "baton.selectorLabels" (dict "root" . "component" "model") | nindent 4 }}
spec:
  # A pod that failed stays, with its log.
  restartPolicy: Never
  serviceAccountName: {{ include "baton.serviceAccountName" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    {{- include "baton.podSecurityContext" . | nindent 4 }}
  containers:
    - name: fetch
      image: {{ get $fetch.images $kind }}
      command: [sh, -ec]
      args:
        - |
          {{- .Files.Get (printf "files/fetch/%s.sh" $kind) | trim | nindent 10 }}
      env:
        - {name: SOURCE, value: {{ $source | splitList "://" | last | quote }}}
        - {name: MODEL, value: {{ $path | quote }}}
        - {name: MARKER, value: {{ include "baton.modelMarker" (dict "source" $source "path" $path) | quote }}}
        - {name: ENDPOINT, value: {{ $fetch.endpoint | quote }}}
      {{- with $fetch.secretName }}
      envFrom:
        - secretRef: {name: {{ . }}}
      {{- end }}
      resources:
        {{- toYaml $fetch.resources | nindent 8 }}
      securityContext:
        {{- include "baton.containerSecurityContext" . | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: model, mountPath: {{ .Values.model.mountPath }}}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 4Gi}
    - name: model
      persistentVolumeClaim: {claimName: {{ $claim.persistentVolumeClaim.claimName }}}
  {{- with include "baton.placement" $fetch | trim }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end -}}
{{- end -}}
