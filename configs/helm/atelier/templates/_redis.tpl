{{/* A Valkey server with its Service, volume and password. Takes (dict "root" $ "name" "redis-jobs" "settings" … "passwordKey" …
     "fsync" … "users" …), the latter whether it has users of its own for the head and for operators. */}}
{{- define "atelier.redis" -}}
{{- $root := .root -}}
{{- $fullname := printf "%s-%s" (include "atelier.fullname" $root) .name -}}
{{- $labels := include "atelier.componentLabels" (list $root .name) -}}
{{- $limit := include "atelier.mebibytes" .settings.resources.limits.memory | int -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $fullname }}
  labels:
    {{- include "atelier.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
data:
  # 70 % of the container's memory: the rest is for the copy that rewriting the append-only file makes.
  redis.conf: |
    dir /data
    appendonly yes
    appendfsync {{ .fsync }}
    save ""
    maxmemory {{ div (mul $limit 7) 10 }}mb
    maxmemory-policy noeviction
    # a job's record stays one list of bytes, in half the memory of a table
    hash-max-ziplist-value 4096
  {{- if .users }}
  users.acl: |
    {{- $root.Files.Get "files/users.acl" | trim | nindent 4 }}
  {{- end }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $fullname }}
  labels:
    {{- include "atelier.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
spec:
  clusterIP: None
  selector: {{- $labels | nindent 4 }}
  ports:
    - {name: redis, port: 6379, targetPort: redis}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $fullname }}
  labels:
    {{- include "atelier.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
spec:
  serviceName: {{ $fullname }}
  replicas: 1
  selector:
    matchLabels: {{- $labels | nindent 6 }}
  template:
    metadata:
      labels: {{- include "atelier.podLabels" (list $root .name .settings) | nindent 8 }}
      annotations:
        {{- with .settings.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- if .users }}
        checksum/users: {{ print .known ($root.Files.Get "files/users.acl") | sha256sum }}
        {{- end }}
    spec:
      serviceAccountName: {{ include "atelier.serviceAccountName" $root }}
      automountServiceAccountToken: false
      enableServiceLinks: false
      terminationGracePeriodSeconds: 60
      {{- include "atelier.scheduling" (list $root .settings) | indent 6 }}
      securityContext:
        runAsNonRoot: true
        runAsUser: 999
        runAsGroup: 999
        fsGroup: 999
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile: {type: RuntimeDefault}
      containers:
        - name: redis
          image: {{ $root.Values.redis.image }}
          imagePullPolicy: {{ $root.Values.redis.pullPolicy }}
          # The password goes from a file into a file in memory: no command line and no environment shows it.
          command: [sh, -ec]
          args:
            - |
              umask 077
              secrets=/run/secrets/redis
              {{- if .users }}
              # Pods that serve or work are the default user, with the rights of `service`: so are those of an older version.
              # A Secret without the other passwords leaves that user everything, as before there were others.
              digest() { printf %s "$(cat "$secrets/$1")" | sha256sum | cut -d ' ' -f 1; }
              if [ -s $secrets/scaler-password ] && [ -s $secrets/operator-password ]; then
                { cat /etc/redis/redis.conf
                  sed -n -e "s/#SERVICE/#$(digest password)/" -e "s/#SCALER/#$(digest scaler-password)/" \
                    -e "s/#OPERATOR/#$(digest operator-password)/" -e '/^user default /d' -e p -e 's/^user service /user default /p' \
                    /etc/redis/users.acl
                } > /run/redis/redis.conf
                exec valkey-server /run/redis/redis.conf
              fi
              {{- end }}
              { cat /etc/redis/redis.conf; printf 'requirepass %s\n' "$(cat $secrets/password)"; } > /run/redis/redis.conf
              exec valkey-server /run/redis/redis.conf
          securityContext: {{- toYaml $root.Values.containerSecurityContext | nindent 12 }}
          ports:
            - {name: redis, containerPort: 6379}
          livenessProbe:
            tcpSocket: {port: redis}
            periodSeconds: 10
            failureThreshold: 6
          readinessProbe:
            exec:
              command: [sh, -c, 'REDISCLI_AUTH="$(cat /run/secrets/redis/password)" valkey-cli ping | grep -q PONG']
            periodSeconds: 5
            timeoutSeconds: 3
          resources: {{- toYaml .settings.resources | nindent 12 }}
          volumeMounts:
            - {name: data, mountPath: /data}
            - {name: configuration, mountPath: /etc/redis, readOnly: true}
            - {name: password, mountPath: /run/secrets/redis, readOnly: true}
            - {name: run, mountPath: /run/redis}
      volumes:
        - name: configuration
          configMap: {name: {{ $fullname }}}
        - name: password
          projected:
            defaultMode: 0440
            sources:
              - secret:
                  name: {{ include "atelier.secretName" $root }}
                  items: [{key: {{ .passwordKey }}, path: password}]
              {{- if .users }}
              - secret:
                  name: {{ include "atelier.secretName" $root }}
                  items:
                    - {key: redis-scaler-password, path: scaler-password}
                    - {key: redis-operator-password, path: operator-password}
                  optional: true
              {{- end }}
        - name: run
          emptyDir: {medium: Memory, sizeLimit: 1Mi}
  volumeClaimTemplates:
    - metadata: {name: data}
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .settings.persistence.storageClass }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests: {storage: {{ .settings.persistence.size }}}
{{- $name := .name }}
{{- with .settings.podDisruptionBudget }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $fullname }}
  labels:
    {{- include "atelier.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $name }}
spec:
  {{- toYaml . | nindent 2 }}
  selector:
    matchLabels: {{- $labels | nindent 6 }}
{{- end }}
{{- end -}}
