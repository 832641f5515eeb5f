{{/* Peers and rules of the network policies. */}}

{{/* Takes {namespaceLabels, podLabels, cidrs}: pods by their labels, and addresses. */}}
{{- define "atelier.peer" -}}
{{- with .namespaceLabels }}
- namespaceSelector:
    matchLabels: {{- toYaml . | nindent 6 }}
  {{- with $.podLabels }}
  podSelector:
    matchLabels: {{- toYaml . | nindent 6 }}
  {{- end }}
{{- end }}
{{- range .cidrs }}
- ipBlock: {cidr: {{ . }}}
{{- end }}
{{- end -}}

{{- define "atelier.dnsEgress" -}}
- to:
    {{- include "atelier.peer" .Values.networkPolicy.dns | nindent 4 }}
  ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end -}}

{{/* A server of the user's own is outside: its address belongs into networkPolicy.egress. */}}
{{- define "atelier.redisJobsEgress" -}}
{{- if .Values.redis.jobs.enabled -}}
- to:
    - podSelector:
        matchLabels: {{- include "atelier.componentLabels" (list . "redis-jobs") | nindent 10 }}
  ports:
    - {port: 6379, protocol: TCP}
{{- end -}}
{{- end -}}

{{- define "atelier.apiServerEgress" -}}
- to:
    - ipBlock: {cidr: {{ .Values.networkPolicy.apiServer.cidr }}}
  ports:
    {{- range .Values.networkPolicy.apiServer.ports }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{- define "atelier.outsideEgress" -}}
{{- range .Values.networkPolicy.egress }}
- to:
    - ipBlock:
        cidr: {{ .cidr }}
        {{- with .except }}
        except: {{ toJson . }}
        {{- end }}
  ports:
    {{- range .ports }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end }}
{{- end -}}
