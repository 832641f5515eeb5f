{{/* The Serve configuration: configs/production.yaml with the values merged in, checked against the worker groups. */}}

{{- define "atelier.serveConfig" -}}
{{- $config := .Files.Get "files/production.yaml" | fromYaml -}}
{{- $application := first $config.applications -}}
{{- $args := mustMergeOverwrite $application.args (deepCopy .Values.serve.args) -}}
{{- $_ := set $application "args" $args -}}
{{- $scaled := list -}}
{{- range $deployment := $application.deployments -}}
{{- if eq (toString (dig $deployment.name "replicas" 1 $args)) "auto" -}}
{{- $own := deepCopy (default (dict) (get $.Values.serve.scaling $deployment.name)) -}}
{{- $_ := set $deployment "autoscaling_config" (mustMergeOverwrite $deployment.autoscaling_config $own) -}}
{{- $scaled = append $scaled $deployment -}}
{{- else if hasKey $.Values.serve.scaling $deployment.name -}}
{{- fail (printf "serve.scaling.%s: needs serve.args.%s.replicas: auto" $deployment.name $deployment.name) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $application "deployments" $scaled -}}
{{- $_ := set $config "applications" (list $application) -}}
{{- $_ := set $config "proxy_location" (ternary "EveryNode" "HeadOnly" (gt (len .Values.workerGroups) 0)) -}}
{{- $_ := set $config "pools" (include "atelier.pools" . | fromYamlArray) -}}
{{- include "atelier.checkPools" (list $args $config.pools $scaled) -}}
{{- include "atelier.checkDrains" (list $ $args) -}}
{{- toYaml $config -}}
{{- end -}}

{{/* The nodes that the Ray pods of the values make, in the words of the Serve file's `pools:`. */}}
{{- define "atelier.pools" -}}
{{- $pools := list -}}
{{- if .Values.head.places -}}
{{- $pools = append $pools (dict "name" "head" "nodes" 1 "cpus" .Values.head.cpus "resources" .Values.head.places) -}}
{{- end -}}
{{- range $name, $group := .Values.workerGroups -}}
{{- $cpus := include "atelier.cpus" $group.resources.limits.cpu | float64 -}}
{{- $pool := dict "name" $name "nodes" $group.maxReplicas "cpus" $cpus "resources" $group.places -}}
{{- if $group.gpus -}}
{{- $_ := set $pool "gpus" $group.gpus -}}
{{- end -}}
{{- $pools = append $pools $pool -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end -}}

{{/* Every replica must have a place at its largest number, and a pod with all places taken must hold them. */}}
{{- define "atelier.checkPools" -}}
{{- $args := index . 0 -}}
{{- $pools := index . 1 -}}
{{- $scaled := index . 2 -}}
{{- range $deployment := list "ingress" "generator" "upscaler" "housekeeper" -}}
{{- $asked := default (dict) (get $args $deployment) -}}
{{- $replicas := default 1 (get $asked "replicas") -}}
{{- $bounds := ternary $replicas (dict) (kindIs "map" $replicas) -}}
{{- range $entry := $scaled -}}
{{- if eq $entry.name $deployment -}}
{{- $bounds = $entry.autoscaling_config -}}
{{- end -}}
{{- end -}}
{{- if $bounds -}}
{{- $replicas = default 1 $bounds.max_replicas -}}
{{- if gt (int $bounds.min_replicas) (int $replicas) -}}
{{- fail (printf "%s: min_replicas %d is above max_replicas %d" $deployment (int $bounds.min_replicas) (int $replicas)) -}}
{{- end -}}
{{- end -}}
{{- if ne (toString (dig "resources" $deployment 0 $asked)) "1" -}}
{{- fail (printf "serve.args.%s.resources: ask for {%s: 1}, a place on the pods meant for it" $deployment $deployment) -}}
{{- end -}}
{{- $places := 0 -}}
{{- range $pool := $pools -}}
{{- $places = add $places (mul $pool.nodes (dig "resources" $deployment 0 $pool)) -}}
{{- end -}}
{{- if lt (int $places) (int $replicas) -}}
{{- fail (printf "%s: %d replicas at most, but the worker groups have places for %d" $deployment (int $replicas) (int $places)) -}}
{{- end -}}
{{- end -}}
{{- range $pool := $pools -}}
{{- $cpus := 0.0 -}}
{{- $gpus := 0.0 -}}
{{- range $deployment, $places := $pool.resources -}}
{{- $asked := default (dict) (get $args $deployment) -}}
{{- $cpus = addf $cpus (mulf $places (default 0.1 (get $asked "num_cpus"))) -}}
{{- $gpus = addf $gpus (mulf $places (default 0 (get $asked "num_gpus"))) -}}
{{- end -}}
{{- if gt $cpus (addf $pool.cpus 0.0001) -}}
{{- fail (printf "worker group %s: its places ask for %v CPUs, a pod has %v" $pool.name $cpus $pool.cpus) -}}
{{- end -}}
{{- if gt $gpus (addf (default 0 (get $pool "gpus")) 0.0001) -}}
{{- fail (printf "worker group %s: its places ask for %v GPUs, a pod has %v" $pool.name $gpus (default 0 (get $pool "gpus"))) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* How long the head may take to end, in seconds. */}}
{{- define "atelier.headGrace" -}}
60
{{- end -}}

{{/* A pod must outlive the drains of its deployments by the 15 s after Ray's own, and an old cluster those of all. */}}
{{- define "atelier.checkDrains" -}}
{{- $root := index . 0 -}}
{{- $args := index . 1 -}}
{{- $head := dict "places" $root.Values.head.places "terminationGracePeriodSeconds" (include "atelier.headGrace" $root) -}}
{{- range $name, $group := merge (dict "head" $head) $root.Values.workerGroups -}}
{{- range $deployment, $places := $group.places -}}
{{- $drain := dig $deployment "drain_s" 0 $args -}}
{{- if gt (addf $drain 15) ($group.terminationGracePeriodSeconds | float64) -}}
{{- fail (printf "%s: terminationGracePeriodSeconds %v is less than 15 s above the %v of serve.args.%s.drain_s" (ternary "head" (printf "worker group %s" $name) (eq $name "head")) $group.terminationGracePeriodSeconds $drain $deployment) -}}
{{- end -}}
{{- if gt ($drain | float64) ($root.Values.ray.clusterDeletionDelaySeconds | float64) -}}
{{- fail (printf "ray.clusterDeletionDelaySeconds %v is less than the %v of serve.args.%s.drain_s" $root.Values.ray.clusterDeletionDelaySeconds $drain $deployment) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A Kubernetes quantity of CPUs as a number. */}}
{{- define "atelier.cpus" -}}
{{- $text := toString . -}}
{{- if hasSuffix "m" $text -}}
{{- divf (trimSuffix "m" $text | float64) 1000 -}}
{{- else -}}
{{- $text -}}
{{- end -}}
{{- end -}}

{{/* A Kubernetes quantity of memory in MiB. */}}
{{- define "atelier.mebibytes" -}}
{{- $text := toString . -}}
{{- if hasSuffix "Gi" $text -}}
{{- mulf (trimSuffix "Gi" $text | float64) 1024 | int -}}
{{- else if hasSuffix "Mi" $text -}}
{{- trimSuffix "Mi" $text -}}
{{- else -}}
{{- fail (printf "memory %s: write it in Mi or Gi" $text) -}}
{{- end -}}
{{- end -}}
