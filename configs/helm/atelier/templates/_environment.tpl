{{/* The settings that are the same in every pod, as items of a container's `env`: an old cluster's pod that is made anew while
     another version is installed has the old ones. */}}
{{- define "atelier.settings" -}}
{{- range $name, $value := include "atelier.settingsByName" . | fromYaml }}
- {name: {{ $name }}, value: {{ $value | toString | replace "$(" "$$(" | quote }}}
{{- end }}
{{- end -}}

{{- define "atelier.settingsByName" -}}
{{- $url := .Values.storage.url -}}
{{- if not $url -}}
{{- fail "storage.url: name the bucket for images, as s3://bucket/prefix" -}}
{{- end -}}
ATELIER_PUBLIC_URL: {{ include "atelier.publicUrl" . | quote }}
ATELIER_STORAGE_URL: {{ $url | quote }}
{{- with .Values.storage.options }}
ATELIER_STORAGE_OPTIONS: {{ toJson . | quote }}
{{- end }}
ATELIER_DATA_DIR: /var/lib/atelier
ATELIER_WEIGHT_CACHE: {{ include "atelier.mebibytes" .Values.models.adapterCache }}MiB
ATELIER_MAX_LORA_SIZE: {{ .Values.limits.loraMegabytes }}MiB
ATELIER_CONNECTIONS_PER_ADDRESS: {{ .Values.limits.connectionsPerProxy | quote }}
{{- with .Values.limits.trustedProxies }}
ATELIER_TRUSTED_PROXIES: {{ join "," . | quote }}
{{- end }}
{{- if and .Values.workerGroups (not (include "atelier.tls" .)) }}
ATELIER_NETWORK_ENCRYPTED: "true"
{{- end }}
{{- if .Values.catalog }}
ATELIER_CATALOG: /etc/atelier/catalog.yaml
{{- end }}
{{- if .Values.plans }}
ATELIER_PLANS: /etc/atelier/plans.yaml
{{- end }}
{{- if .Values.trust.configMap }}
{{- range list "SSL_CERT_FILE" "REQUESTS_CA_BUNDLE" "AWS_CA_BUNDLE" }}
{{ . }}: /etc/atelier-trust/{{ $.Values.trust.key }}
{{- end }}
{{- end }}
{{- $own := dict "ATELIER_LOG_FORMAT" "json" }}
{{- with .Values.environment }}
{{- if or .HTTPS_PROXY .HTTP_PROXY }}
{{- $inside := printf "localhost,127.0.0.1,.svc,.%s" $.Values.ray.tls.clusterDomain }}
{{- $own = merge (dict "NO_PROXY" (list .NO_PROXY $inside | compact | join ",")) $own }}
{{- end }}
{{- end }}
{{- range $name, $value := merge (pick $own "NO_PROXY") .Values.environment .Values.ray.environment $own }}
{{ $name }}: {{ $value | quote }}
{{- end }}
{{- end -}}
