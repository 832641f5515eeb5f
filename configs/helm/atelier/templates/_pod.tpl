{{/* Parts of the pods. Each takes (dict "root" $ "places" {deployment: replicas} …); "alone" is a pod beside no other of Ray. */}}

{{/* Environment of a pod: what is the same everywhere, and secrets by reference where its deployments need them. */}}
{{- define "atelier.environment" -}}
{{- $root := .root -}}
{{- include "atelier.settings" $root }}
{{- $secret := include "atelier.secretName" $root -}}
{{- if $root.Values.redis.jobs.enabled }}
{{- $user := "" }}
{{- if include "atelier.redisUsers" $root }}
{{- $user = default (ternary "" "scaler" (or .places .pepper | empty | not)) .user }}
{{- end }}
- name: REDIS_JOBS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ $secret }}, key: {{ ternary (printf "redis-%s-password" $user) "redis-password" (ne $user "") }}}
- name: ATELIER_REDIS_URL
  value: redis://{{ $user }}:$(REDIS_JOBS_PASSWORD)@{{ include "atelier.fullname" $root }}-redis-jobs:6379/0
{{- else }}
- name: ATELIER_REDIS_URL
  valueFrom:
    {{- $ofHead := and (not (or .places .pepper)) $root.Values.redis.jobs.scalerUrlSecret }}
    secretKeyRef: {{ default $root.Values.redis.jobs.urlSecret $ofHead | toYaml | nindent 6 }}
{{- end }}
{{- if or .places .pepper }}
- name: ATELIER_PEPPER
  valueFrom:
    secretKeyRef: {name: {{ $secret }}, key: pepper}
- name: ATELIER_PEPPERS
  valueFrom:
    secretKeyRef: {name: {{ $secret }}, key: peppers, optional: true}
{{- end }}
{{- if .places }}
{{- include "atelier.storageCredentials" $root }}
- name: ATELIER_WATERMARK_SECRET
  valueFrom:
    secretKeyRef: {name: {{ $secret }}, key: watermark-secret, optional: true}
{{- end }}
{{- if hasKey .places "ingress" }}
- name: ATELIER_SIGNING_KEYS
  valueFrom:
    secretKeyRef: {name: {{ $secret }}, key: signing-keys}
- name: ATELIER_OPERATOR_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ $secret }}, key: operator-token, optional: true}
{{- end }}
{{- end -}}

{{/* The command of a job, tried again for two minutes in the same pod: a network plugin may let a new pod through a second
     after it has started. Takes the command's words. */}}
{{- define "atelier.patiently" -}}
{{- $again := "end=$(($(date +%s) + 120)); until \"$@\"; do [ $(date +%s) -lt $end ] || exit 1; sleep 2; done" -}}
{{- concat (list "sh" "-c" $again "sh") . | toJson -}}
{{- end -}}

{{- define "atelier.storageCredentials" -}}
{{- $secret := .Values.storage.credentialsSecret -}}
{{- range $key := list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
{{- if $secret }}
- name: {{ $key }}
  valueFrom:
    secretKeyRef: {name: {{ $secret }}, key: {{ $key }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* The certificate authorities of a company, for every pod that has the environment. */}}
{{- define "atelier.trustMount" -}}
{{- if .Values.trust.configMap }}
- {name: trust, mountPath: /etc/atelier-trust, readOnly: true}
{{- end }}
{{- end -}}

{{- define "atelier.trustVolume" -}}
{{- with .Values.trust.configMap }}
- name: trust
  configMap: {name: {{ . }}}
{{- end }}
{{- end -}}

{{- define "atelier.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- include "atelier.trustMount" .root }}
- {name: data, mountPath: /var/lib/atelier}
{{- if and (include "atelier.tls" .root) (not .alone) }}
- {name: ray-tls, mountPath: /etc/atelier-ray-tls, readOnly: true}
{{- end }}
{{- if or .root.Values.catalog .root.Values.plans }}
- {name: catalog, mountPath: /etc/atelier, readOnly: true}
{{- end }}
{{- if .models }}
- {name: models, mountPath: {{ .root.Values.models.mountPath }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "atelier.volumes" -}}
- name: tmp
  emptyDir: {}
{{- include "atelier.trustVolume" .root }}
{{- if and (include "atelier.tls" .root) (not .alone) }}
- name: ray-tls
  emptyDir: {medium: Memory}
- name: ray-ca
  secret: {secretName: {{ .root.Values.ray.tls.caSecret }}, defaultMode: 0440}
{{- end }}
- name: data
{{- if and .root.Values.storage.persistence.enabled (hasKey .places "ingress") }}
  persistentVolumeClaim: {claimName: {{ include "atelier.fullname" .root }}-images}
{{- else }}
  emptyDir: {}
{{- end }}
{{- if or .root.Values.catalog .root.Values.plans }}
- name: catalog
  projected:
    sources:
      {{- if .root.Values.catalog }}
      - configMap: {name: {{ include "atelier.fullname" .root }}-catalog}
      {{- end }}
      {{- if .root.Values.plans }}
      - downwardAPI:
          items: [{path: plans.yaml, fieldRef: {fieldPath: "metadata.annotations['atelier/plans']"}}]
      {{- end }}
{{- end }}
{{- if .models }}
- name: models
  persistentVolumeClaim: {claimName: {{ include "atelier.modelsClaim" .root }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* Whether Ray's processes are on several pods and speak by TLS; empty when not. */}}
{{- define "atelier.tls" -}}
{{- if and .Values.workerGroups .Values.ray.tls.enabled -}}
{{- if not .Values.ray.tls.caSecret -}}
{{- fail "ray.tls.caSecret: name a Secret with a CA (tls.crt, tls.key), or set ray.tls.enabled: false where the network between pods is encrypted by itself" -}}
{{- end -}}
{{- .Values.ray.tls.caSecret -}}
{{- end -}}
{{- end -}}

{{- define "atelier.tlsEnvironment" -}}
{{- if include "atelier.tls" . -}}
- {name: RAY_USE_TLS, value: "1"}
- {name: RAY_TLS_SERVER_CERT, value: /etc/atelier-ray-tls/tls.crt}
- {name: RAY_TLS_SERVER_KEY, value: /etc/atelier-ray-tls/tls.key}
- {name: RAY_TLS_CA_CERT, value: /etc/atelier-ray-tls/ca.crt}
{{- end -}}
{{- end -}}

{{/* The pod's certificate is for its address, and for the names of this namespace's services: workers call the head by one.
     The CA's key is in no container that runs on. */}}
{{- define "atelier.nodeCertificate" -}}
- name: node-certificate
  image: {{ include "atelier.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [python, -m, deployments.node_certificate, /etc/atelier-ray-ca/tls.crt, /etc/atelier-ray-ca/tls.key, /etc/atelier-ray-tls, $(POD_IP), "*.{{ .Release.Namespace }}.svc.{{ .Values.ray.tls.clusterDomain }}"]
  env:
    - name: POD_IP
      valueFrom:
        fieldRef: {fieldPath: status.podIP}
  securityContext: {{- toYaml .Values.containerSecurityContext | nindent 4 }}
  resources:
    requests: {cpu: 50m, memory: 128Mi}
    limits: {cpu: 200m, memory: 256Mi}
  volumeMounts:
    - {name: ray-tls, mountPath: /etc/atelier-ray-tls}
    - {name: ray-ca, mountPath: /etc/atelier-ray-ca, readOnly: true}
{{- end -}}

{{/* Custom resources of the Ray node. */}}
{{- define "atelier.places" -}}
{{- range $deployment, $replicas := . }}
{{ $deployment }}: {{ $replicas | quote }}
{{- end }}
{{- end -}}

{{/* GPU pods start when every model of `models.downloads` is in the volume. */}}
{{- define "atelier.waitForModels" -}}
- name: wait-for-models
  image: {{ include "atelier.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [timeout, "{{ .root.Values.models.waitSeconds }}", python, /etc/atelier-models/fetch_models.py, --wait, /etc/atelier-models/models.json, {{ .root.Values.models.mountPath }}]
  securityContext: {{- toYaml .root.Values.containerSecurityContext | nindent 4 }}
  resources:
    requests: {cpu: 50m, memory: 128Mi}
    limits: {cpu: 200m, memory: 256Mi}
  volumeMounts:
    - {name: models, mountPath: {{ .root.Values.models.mountPath }}, readOnly: true}
    - {name: fetch-models, mountPath: /etc/atelier-models, readOnly: true}
{{- end -}}

{{/* The plans, an annotation that a pod reads as a file: they belong to the cluster that was made with them. */}}
{{- define "atelier.plans" -}}
{{- with .Values.plans }}
atelier/plans: {{ toYaml . | quote }}
{{- end }}
{{- end -}}

{{/* The ray container's readiness: KubeRay's own would ask every worker for an HTTP proxy, and wants wget for it. */}}
{{- define "atelier.readinessProbe" -}}
readinessProbe:
  httpGet: {{ if hasKey .places "ingress" }}{path: /-/healthz, port: serve}{{ else }}{path: /api/healthz, port: 52365}{{ end }}
  initialDelaySeconds: 10
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end -}}

{{/* Annotations of a Ray pod. Takes (list $ group), the group with what KubeRay's hash of a cluster leaves out, so that a change
     of that makes a new cluster too. So does a changed revision of the Secret, plan or base model, which processes read when
     they start; adapters of the catalog are read again while they run. */}}
{{- define "atelier.podAnnotations" -}}
{{- $root := index . 0 -}}
{{- $group := index . 1 -}}
{{- include "atelier.plans" $root }}
{{- with $root.Values.catalog }}
checksum/models: {{ toJson .base_models | sha256sum }}
{{- end }}
checksum/not-in-kuberays-hash: {{ pick $group "minReplicas" "maxReplicas" "tolerations" | toJson | sha256sum }}
{{- with $root.Values.secrets.revision }}
revision/secrets: {{ . | quote }}
{{- end }}
{{- with $group.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes a worker group: whether generators of any group of base models have places on its pods; empty when not. */}}
{{- define "atelier.draws" -}}
{{- if omit .places "ingress" "upscaler" "housekeeper" -}}
true
{{- end -}}
{{- end -}}

{{/* Items of a list behind those that the chart has. */}}
{{- define "atelier.more" -}}
{{- with . }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes (list $ group). */}}
{{- define "atelier.scheduling" -}}
{{- $root := index . 0 -}}
{{- $group := index . 1 -}}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" "schedulerName" "topologySpreadConstraints" }}
{{- with get $group $key }}
{{ $key }}: {{- if kindIs "string" . }} {{ . }}{{ else }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
{{- end -}}
