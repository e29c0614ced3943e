{{/*
One kind of worker: a Deployment, since a worker is who its pod is and keeps nothing; a headless
Service, so that scrapers find every pod; and a PodDisruptionBudget if wanted.
Takes a dict of root, role ("prefill" or "decode") and values.
*/}}
{{- define "baton.worker" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $name := printf "%s-%s" (include "baton.fullname" $root) .role -}}
{{- $component := dict "root" $root "component" .role -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels:
    {{- include "baton.labels" $component | nindent 4 }}
spec:
  clusterIP: None
  selector:
    {{- include "baton.selectorLabels" $component | nindent 4 }}
  ports:
    - name: grpc
      port: 8090
      targetPort: grpc
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels:
    {{- include "baton.labels" $component | nindent 4 }}
spec:
  {{- if eq $values.autoscaling.mode "none" }}
  replicas: {{ $values.replicas }}
  {{- end }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      {{- if $values.surge }}
      maxSurge: {{ $values.surge }}
      maxUnavailable: 0
      {{- else }}
      # No node has room for one more: one leaves before its successor comes.
      maxSurge: 0
      maxUnavailable: 1
      {{- end }}
  selector:
    matchLabels:
      {{- include "baton.selectorLabels" $component | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "baton.labels" $component | nindent 8 }}
        {{- with $values.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $values.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      serviceAccountName: {{ include "baton.serviceAccountName" $root }}
      automountServiceAccountToken: false
      # Kubernetes would describe services in variables such as BATON_PORT, which mean something else here.
      enableServiceLinks: false
      {{- with $root.Values.image.pullSecrets }}
      imagePullSecrets:
        {{- range . }}
        - name: {{ . }}
        {{- end }}
      {{- end }}
      securityContext:
        {{- include "baton.podSecurityContext" $root | nindent 8 }}
      # SIGTERM: leave discovery, finish what runs for drainSeconds, hand over what is held, exit.
      terminationGracePeriodSeconds: {{ add $values.drainSeconds 15 }}
      {{- if $values.gpus }}
      {{- with $root.Values.gpu.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      {{- end }}
      containers:
        - name: {{ .role }}-worker
          image: {{ include "baton.image" $root }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args:
            - {{ .role }}-worker
            - --id=$(POD_NAME)
            - --listen=0.0.0.0:8090
            - --advertise={{ include "baton.scheme" $root }}://$(POD_IP):8090
            - --data-listen=0.0.0.0:8091
            - --data-host=$(POD_IP)
            # Pods share no memory.
            {{- if $root.Values.rdma.enabled }}
            - --transports=rdma,tcp
            - --nixl={{ $root.Values.rdma.nixl.path }}
            - --rdma-listen=0.0.0.0:8092
            {{- else }}
            - --transports=tcp
            {{- end }}
            {{- include "baton.commonArgs" $root | trim | nindent 12 }}
            {{- if eq $root.Values.discovery.mode "embedded" }}
            - --router={{ include "baton.scheme" $root }}://{{ include "baton.fullname" $root }}-registry:8080
            {{- end }}
            - --block-size={{ $root.Values.kv.blockSize }}
            {{- with $root.Values.kv.dtype }}
            - --kv-dtype={{ . }}
            {{- end }}
            {{- with $root.Values.kv.wire }}
            - --kv-wire={{ . }}
            {{- end }}
            {{- if $values.gpus }}
            - --device=cuda:0
            {{- if gt (int $values.gpus) 1 }}
            - --tensor-parallel={{ $values.gpus }}
            {{- end }}
            - --gpu-memory-utilization={{ $values.gpuMemoryUtilization }}
            # For kernels: a container that is started again in its pod has them.
            - --weight-cache=/tmp/baton
            {{- else }}
            - --kv-memory={{ $values.kvMemory }}
            {{- end }}
            - --max-running={{ $values.maxRunning }}
            - --max-waiting={{ $values.maxWaiting }}
            - --token-budget={{ $values.tokenBudget }}
            {{- if not $values.prefixCache }}
            - --no-prefix-cache
            {{- end }}
            {{- if $values.threads }}
            - --threads={{ $values.threads }}
            {{- end }}
            - --handoff-deadline={{ $values.handoffDeadlineSeconds }}
            - --drain-timeout={{ $values.drainSeconds }}
            {{- with $values.extraArgs }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          env:
            - name: POD_NAME
              valueFrom:
                fieldRef:
                  fieldPath: metadata.name
            - name: POD_IP
              valueFrom:
                fieldRef:
                  fieldPath: status.podIP
            {{- with $values.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            - name: grpc
              containerPort: 8090
            - name: data
              containerPort: 8091
            {{- if $root.Values.rdma.enabled }}
            - name: rdma
              containerPort: 8092
            {{- end }}
          # It listens before it loads the model, so a short start-up time does; loading shows in readiness.
          startupProbe:
            httpGet: {path: /livez, port: grpc{{ if $root.Values.tls.secretName }}, scheme: HTTPS{{ end }}}
            periodSeconds: 2
            failureThreshold: 30
          livenessProbe:
            httpGet: {path: /livez, port: grpc{{ if $root.Values.tls.secretName }}, scheme: HTTPS{{ end }}}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          readinessProbe:
            httpGet: {path: /readyz, port: grpc{{ if $root.Values.tls.secretName }}, scheme: HTTPS{{ end }}}
            periodSeconds: 2
            timeoutSeconds: 2
          resources:
            {{- include "baton.workerResources" . | nindent 12 }}
          securityContext:
            {{- include "baton.containerSecurityContext" $root | nindent 12 }}
            {{- if and $root.Values.rdma.enabled $root.Values.rdma.lockMemory }}
              add: [IPC_LOCK]
            # The capability of a user that is not root would not take effect.
            runAsNonRoot: false
            runAsUser: 0
            {{- end }}
          volumeMounts:
            {{- include "baton.volumeMounts" $root | trim | nindent 12 }}
            {{- if gt (int $values.gpus) 1 }}
            - name: shm
              mountPath: /dev/shm
            {{- end }}
            {{- if and $root.Values.rdma.enabled $root.Values.rdma.nixl.volume }}
            - name: nixl
              mountPath: {{ $root.Values.rdma.nixl.mountPath }}
              readOnly: true
            {{- end }}
      volumes:
        {{- include "baton.volumes" $root | trim | nindent 8 }}
        {{- if gt (int $values.gpus) 1 }}
        # NCCL goes through it between GPUs that do not reach each other; a runtime gives 64 MiB.
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: 1Gi}
        {{- end }}
        {{- if $root.Values.rdma.enabled }}
        {{- with $root.Values.rdma.nixl.volume }}
        - name: nixl
          {{- toYaml . | nindent 10 }}
        {{- end }}
        {{- end }}
      {{- with include "baton.placement" $values | trim }}
      {{- . | nindent 6 }}
      {{- end }}
{{- if $values.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  labels:
    {{- include "baton.labels" $component | nindent 4 }}
spec:
  maxUnavailable: {{ $values.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels:
      {{- include "baton.selectorLabels" $component | nindent 6 }}
{{- end }}
{{- include "baton.autoscaler" . }}
{{- end -}}

{{/* What a worker is given, its devices among it. */}}
{{- define "baton.workerResources" -}}
{{- $resources := deepCopy .values.resources -}}
{{- $rdma := .root.Values.rdma -}}
{{- /* Such resources are requested by their limits. */ -}}
{{- $devices := dict -}}
{{- if and $rdma.enabled $rdma.resource.name -}}
{{- $_ := set $devices $rdma.resource.name $rdma.resource.count -}}
{{- end -}}
{{- if .values.gpus -}}
{{- $_ := set $devices .root.Values.gpu.resource .values.gpus -}}
{{- end -}}
{{- if $devices -}}
{{- $_ := set $resources "limits" (merge $devices (default dict $resources.limits)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
