{{/*
One kind of worker: a Deployment or a LeaderWorkerSet, since a worker is who its pod is and keeps nothing; a headless
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
{{- if eq $values.workload "LeaderWorkerSet" }}
# Groups of one pod: the ranks of a worker are on one host.
apiVersion: leaderworkerset.x-k8s.io/v1
{{- else }}
apiVersion: apps/v1
{{- end }}
kind: {{ $values.workload }}
metadata:
  name: {{ $name }}
  labels:
    {{- include "baton.labels" $component | nindent 4 }}
    {{- with $values.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if eq $values.autoscaling.mode "none" }}
  replicas: {{ $values.replicas }}
  {{- else }}
  {{- /* The autoscaler's number. Left out after it was set, it would be 1: helm removes it, and Kubernetes sets the default. */}}
  {{- $group := eq $values.workload "LeaderWorkerSet" | ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" }}
  {{- $live := lookup $group $values.workload $root.Release.Namespace $name }}
  {{- with ($live.spec).replicas }}
  replicas: {{ int64 . }}
  {{- end }}
  {{- end }}
  {{- /* Without a spare GPU, one leaves before its successor comes. */}}
  {{- $rolling := dict "maxSurge" $values.surge "maxUnavailable" (ternary 0 1 (gt (int $values.surge) 0)) }}
  {{- if eq $values.workload "LeaderWorkerSet" }}
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration:
      {{- toYaml $rolling | nindent 6 }}
  leaderWorkerTemplate:
    size: 1
    workerTemplate:
      {{- include "baton.workerPod" . | nindent 6 }}
  {{- else }}
  progressDeadlineSeconds: {{ include "baton.progressDeadline" $root }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      {{- toYaml $rolling | nindent 6 }}
  selector:
    matchLabels:
      {{- include "baton.selectorLabels" $component | nindent 6 }}
  template:
    {{- include "baton.workerPod" . | nindent 4 }}
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

{{/* The pod of a worker; takes what baton.worker takes. */}}
{{- define "baton.workerPod" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $sharesHost := and $values.prefixCache ($root.Values.kv.host).size -}}
{{- /* A worker refuses a key without a tier that it seals, and a flag that is given twice. */ -}}
{{- $extraArgs := join " " $values.extraArgs -}}
{{- $stores := or ($root.Values.kv.object).url (contains "--disk-kv" $extraArgs) -}}
{{- $sealsKv := and $root.Values.kv.keySecret $values.prefixCache $stores (not (contains "--kv-key-file" $extraArgs)) -}}
{{- /* In the network of a node a worker listens on that node's address alone. Its ports are declared, so that the scheduler keeps them apart. */ -}}
{{- $port := $values.hostNetwork | ternary $values.hostPort 8090 | int64 -}}
{{- $host := include ($values.hostNetwork | ternary "baton.podHost" "baton.anyAddress") $root -}}
{{- $ports := $root.Values.rdma.enabled | ternary (list "grpc" "data" "rdma") (list "grpc" "data") -}}
{{- $component := dict "root" $root "component" .role -}}
metadata:
  labels:
    {{- include "baton.selectorLabels" $component | nindent 4 }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "baton.serviceAccountName" $root }}
  automountServiceAccountToken: false
  # Kubernetes would describe services in variables such as BATON_PORT, which mean something else here.
  enableServiceLinks: false
  {{- if $values.hostNetwork }}
  hostNetwork: true
  # Without it such a pod does not resolve names of Services.
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    {{- include "baton.podSecurityContext" $root | nindent 4 }}
  # SIGTERM: leave discovery, finish what runs for drainSeconds, hand over what is held, exit.
  terminationGracePeriodSeconds: {{ add $values.drainSeconds 15 }}
  {{- if $values.gpus }}
  {{- with $root.Values.gpu.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- end }}
  {{- with $values.resourceClaims }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- include "baton.modelWaits" $root | trim | nindent 2 }}
  containers:
    - name: {{ .role }}-worker
      image: {{ include "baton.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        - {{ .role }}-worker
        - --id=$(POD_NAME)
        - --listen={{ $host }}:{{ $port }}
        - --advertise={{ include "baton.scheme" $root }}://{{ include "baton.podHost" $root }}:{{ $port }}
        - --data-listen={{ $host }}:{{ add $port 1 }}
        - --data-host={{ include "baton.podHost" $root }}
        # Pods share no memory.
        {{- if $root.Values.rdma.enabled }}
        - --transports=rdma,tcp
        - --nixl={{ $root.Values.rdma.nixl.path }}
        - --rdma-listen={{ $host }}:{{ add $port 2 }}
        {{- else }}
        - --transports=tcp
        {{- end }}
        {{- include "baton.commonArgs" $root | trim | nindent 8 }}
        {{- if eq $root.Values.discovery.mode "embedded" }}
        - --router={{ include "baton.scheme" $root }}://{{ include "baton.fullname" $root }}-registry:8080
        {{- end }}
        - --block-size={{ int64 $root.Values.kv.blockSize }}
        {{- with $root.Values.kv.dtype }}
        - --kv-dtype={{ . }}
        {{- end }}
        {{- with $root.Values.kv.wire }}
        - --kv-wire={{ . }}
        {{- end }}
        {{- if $values.gpus }}
        - --device=cuda:0
        {{- if gt (int $values.gpus) 1 }}
        - --tensor-parallel={{ int64 $values.gpus }}
        {{- end }}
        - --gpu-memory-utilization={{ $values.gpuMemoryUtilization }}
        # For kernels: a container that is started again in its pod has them.
        - --weight-cache=/tmp/baton
        {{- else }}
        - --kv-memory={{ $values.kvMemory }}
        {{- end }}
        {{- with $values.maxRunning }}
        - --max-running={{ int64 . }}
        {{- end }}
        - --max-waiting={{ int64 $values.maxWaiting }}
        {{- with $values.tokenBudget }}
        - --token-budget={{ int64 . }}
        {{- end }}
        {{- if $sharesHost }}
        - --host-kv={{ $root.Values.kv.host.size }}
        # Releases in two namespaces may have one name; neither name has a "_". A directory of another user is refused, and it outlives pods.
        - --host-kv-dir=/dev/shm/{{ $root.Release.Namespace }}_{{ include "baton.fullname" $root }}_{{ include "baton.workerUser" $root }}
        {{- end }}
        {{- if not $values.prefixCache }}
        - --no-prefix-cache
        {{- else if ($root.Values.kv.object).url }}
        - --object-kv={{ $root.Values.kv.object.url }}
        - --object-kv-size={{ $root.Values.kv.object.size }}
        {{- end }}
        {{- if $sealsKv }}
        - --kv-key-file=/etc/baton/kv-key/key
        {{- end }}
        {{- if $values.threads }}
        - --threads={{ int64 $values.threads }}
        {{- end }}
        - --handoff-deadline={{ int64 $values.handoffDeadlineSeconds }}
        - --drain-timeout={{ int64 $values.drainSeconds }}
        {{- with $values.extraArgs }}
        {{- toYaml . | nindent 8 }}
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
        {{- if and $root.Values.apiKeys.secretName (eq $root.Values.discovery.mode "embedded") }}
        # The router's registry asks for it.
        - name: BATON_API_KEY
          valueFrom:
            secretKeyRef: {name: {{ $root.Values.apiKeys.secretName }}, key: {{ $root.Values.apiKeys.workerKey }}}
        {{- end }}
        {{- with $values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $values.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- range $idx, $name := $ports }}
        - name: {{ $name }}
          containerPort: {{ add $port $idx }}
          {{- if $values.hostNetwork }}
          hostPort: {{ add $port $idx }}
          {{- end }}
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
        {{- include "baton.workerResources" . | nindent 8 }}
      securityContext:
        {{- include "baton.containerSecurityContext" $root | nindent 8 }}
        {{- if and $root.Values.rdma.enabled $root.Values.rdma.lockMemory }}
          add: [IPC_LOCK]
        # The capability of a user that is not root would not take effect.
        runAsNonRoot: false
        runAsUser: 0
        {{- end }}
      volumeMounts:
        {{- include "baton.volumeMounts" $root | trim | nindent 8 }}
        {{- if $root.Values.kv.keySecret }}
        - name: kv-key
          mountPath: /etc/baton/kv-key
          readOnly: true
        {{- end }}
        {{- if or $sharesHost (gt (int $values.gpus) 1) }}
        - name: shm
          mountPath: /dev/shm
        {{- end }}
        {{- if and $root.Values.rdma.enabled $root.Values.rdma.nixl.volume }}
        - name: nixl
          mountPath: {{ $root.Values.rdma.nixl.mountPath }}
          readOnly: true
        {{- end }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "baton.volumes" $root | trim | nindent 4 }}
    {{- with $root.Values.kv.keySecret }}
    - name: kv-key
      secret: {secretName: {{ . }}}
    {{- end }}
    {{- if $sharesHost }}
    # The workers of a node share a tier of KV.
    - name: shm
      hostPath: {path: /dev/shm, type: Directory}
    {{- else if gt (int $values.gpus) 1 }}
    # NCCL goes through it between GPUs that do not reach each other; a runtime gives 64 MiB.
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: 1Gi}
    {{- end }}
    {{- if $root.Values.rdma.enabled }}
    {{- with $root.Values.rdma.nixl.volume }}
    - name: nixl
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with include "baton.placement" $values | trim }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* The user of workers, for a name: root where they lock memory. Without a number the cluster assigns one to the namespace. */}}
{{- define "baton.workerUser" -}}
{{- if and .Values.rdma.enabled .Values.rdma.lockMemory -}}0
{{- else if kindIs "invalid" .Values.podSecurityContext.runAsUser -}}assigned
{{- else -}}{{ int64 .Values.podSecurityContext.runAsUser }}
{{- end -}}
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
{{- /* Without a name they come by claims. */ -}}
{{- if and .values.gpus .root.Values.gpu.resource -}}
{{- $_ := set $devices .root.Values.gpu.resource .values.gpus -}}
{{- end -}}
{{- if $devices -}}
{{- $_ := set $resources "limits" (merge $devices (default dict $resources.limits)) -}}
{{- end -}}
{{- with .values.resourceClaims -}}
{{- $claims := list -}}
{{- range . -}}{{- $claims = append $claims (pick . "name") -}}{{- end -}}
{{- $_ := set $resources "claims" $claims -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
