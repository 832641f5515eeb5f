{{/* Names and labels of objects. */}}

{{- define "atelier.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough for KubeRay to add its own endings (RayService names may have 41 letters). */}}
{{- define "atelier.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 35 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "atelier.name" . -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 35 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "atelier.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "atelier.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* KubeRay sets app.kubernetes.io/name of its pods; these two it leaves alone. */}}
{{- define "atelier.selectorLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: {{ include "atelier.name" . }}
{{- end -}}

{{/* Takes (list $ component). */}}
{{- define "atelier.componentLabels" -}}
{{ include "atelier.selectorLabels" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Takes (list $ component settings): the component's labels with those of `podLabels`, which cannot change them. */}}
{{- define "atelier.podLabels" -}}
{{- merge (include "atelier.componentLabels" . | fromYaml) (default (dict) (index . 2).podLabels) | toYaml -}}
{{- end -}}

{{/* Selects every Ray pod of this release, of an old and a new cluster during an upgrade alike. */}}
{{- define "atelier.rayLabels" -}}
{{ include "atelier.selectorLabels" . }}
ray.io/is-ray-node: "yes"
{{- end -}}

{{- define "atelier.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "atelier.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "atelier.headServiceAccountName" -}}
{{- include "atelier.serviceAccountName" . }}{{ ternary "-head" "" .Values.serviceAccount.create }}
{{- end -}}

{{- define "atelier.image" -}}
{{- $tag := default .Chart.AppVersion .Values.image.tag | toString -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository $tag -}}
{{- end -}}
{{- end -}}

{{- define "atelier.secretName" -}}
{{- if .Values.secrets.existingSecret -}}
{{- .Values.secrets.existingSecret -}}
{{- else if .Values.secrets.generate -}}
{{- include "atelier.fullname" . }}-secrets
{{- else -}}
{{- fail "secrets.existingSecret: name a Secret with the keys pepper, signing-keys, redis-password, redis-scaler-password, redis-operator-password and gcs-redis-password" -}}
{{- end -}}
{{- end -}}

{{/* Whether Redis has users of its own for the head and for operators; empty when not. An existing Secret of an earlier
     version has no passwords for them. Where no cluster can be asked (`helm template`), it has to have them. */}}
{{- define "atelier.redisUsers" -}}
{{- if and .Values.redis.jobs.enabled .Values.redis.jobs.users -}}
{{- $keys := dict -}}
{{- if .Values.secrets.existingSecret -}}
{{- $keys = default (dict) (lookup "v1" "Secret" .Release.Namespace .Values.secrets.existingSecret).data -}}
{{- end -}}
{{- if or (empty $keys) (and (hasKey $keys "redis-scaler-password") (hasKey $keys "redis-operator-password")) -}}
true
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The address of your own Redis for Ray; empty when the chart makes one or there is none. */}}
{{- define "atelier.ownGcsRedis" -}}
{{- if not .Values.redis.gcs.enabled -}}
{{- .Values.redis.gcs.address -}}
{{- end -}}
{{- end -}}

{{- define "atelier.modelsClaim" -}}
{{- default (printf "%s-models" (include "atelier.fullname" .)) .Values.models.persistence.existingClaim -}}
{{- end -}}

{{- define "atelier.publicUrl" -}}
{{- if .Values.publicUrl -}}
{{- .Values.publicUrl | trimSuffix "/" -}}
{{- else if and .Values.ingress.enabled .Values.ingress.host -}}
https://{{ .Values.ingress.host }}
{{- else if and .Values.gateway.enabled .Values.gateway.host -}}
https://{{ .Values.gateway.host }}
{{- else -}}
{{- fail "publicUrl: image addresses need the address that customers use" -}}
{{- end -}}
{{- end -}}

{{- define "atelier.serveService" -}}
{{ include "atelier.fullname" . }}-serve-svc
{{- end -}}

{{/* Where a POST may take long: uploads, and OpenAI's API, which answers when images are drawn. */}}
{{- define "atelier.longPaths" -}}
- {path: /v1/loras, pathType: Exact}
- {path: /v1/images, pathType: Exact}
- {path: /openai/, pathType: Prefix}
- {path: /console/loras/new, pathType: Exact}
- {path: /console/pictures, pathType: Prefix}
{{- end -}}
