{{/* The Serve configuration: configs/production.yaml with the values merged in, checked against the worker groups. Its main
     application has `serve.args` and `serve.scaling`; one of further generators, by its name, those of `serve.groups`. */}}

{{- define "atelier.serveConfig" -}}
{{- $config := .Files.Get "files/production.yaml" | fromYaml -}}
{{- $applications := list -}}
{{- $places := dict -}}
{{- $groups := list -}}
{{- range $application := $config.applications -}}
{{- $isGroup := eq $application.import_path "deployments.app:build_group" -}}
{{- $own := $.Values.serve -}}
{{- if $isGroup -}}
{{- $own = default (dict) (get $.Values.serve.groups $application.name) -}}
{{- $groups = append $groups $application.name -}}
{{- end -}}
{{- if ne (toString $own.enabled) "false" -}}
{{- $args := mustMergeOverwrite $application.args (deepCopy (default (dict) $own.args)) -}}
{{- $scaled := list -}}
{{- range $deployment := $application.deployments -}}
{{- $asked := default (dict) (ternary $args (get $args $deployment.name) $isGroup) -}}
{{- $scaling := default (dict) (get (default (dict) $own.scaling) $deployment.name) -}}
{{- if eq (toString $asked.replicas) "auto" -}}
{{- $_ := set $deployment "autoscaling_config" (mustMergeOverwrite $deployment.autoscaling_config (deepCopy $scaling)) -}}
{{- $scaled = append $scaled $deployment -}}
{{- else if $scaling -}}
{{- fail (printf "%s.scaling.%s: needs replicas: auto among its args" (ternary (printf "serve.groups.%s" $application.name) "serve" $isGroup) $deployment.name) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $application "deployments" $scaled -}}
{{- $applications = append $applications $application -}}
{{- range $deployment := ternary (list "generator") (list "ingress" "generator" "upscaler" "housekeeper") $isGroup -}}
{{- with ternary $args (get $args $deployment) $isGroup -}}
{{- $asked := . -}}
{{- $name := ternary $application.name $deployment $isGroup -}}
{{- $place := ternary (keys (default (dict) $asked.resources) | first) $deployment $isGroup -}}
{{- $where := ternary (printf "serve.groups.%s.args" $application.name) (printf "serve.args.%s" $deployment) $isGroup -}}
{{- if or (ne (toJson $asked.resources) (toJson (dict $place 1))) (hasKey $places $place) -}}
{{- fail (printf "%s.resources: ask for {%s: 1}, a place on the pods meant for it" $where $name) -}}
{{- end -}}
{{- $bounds := ternary $asked.replicas (dict) (kindIs "map" $asked.replicas) -}}
{{- range $scaled -}}
{{- if eq .name $deployment -}}
{{- $bounds = .autoscaling_config -}}
{{- end -}}
{{- end -}}
{{- $_ := set $places $place (dict "name" $name "where" $where "asked" $asked "bounds" $bounds) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := .Values.serve.groups -}}
{{- if not (has $name $groups) -}}
{{- fail (printf "serve.groups.%s: '%s' not allowed: configs/production.yaml has no such application" $name $name) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $config "applications" $applications -}}
{{- $_ := set $config "proxy_location" (ternary "EveryNode" "HeadOnly" (gt (len .Values.workerGroups) 0)) -}}
{{- $_ := set $config "pools" (include "atelier.pools" . | fromYamlArray) -}}
{{- include "atelier.checkPools" (list $places $config.pools) -}}
{{- include "atelier.checkDrains" (list $ $places) -}}
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

{{/* Every replica must have a place at its largest number, and a pod with all places taken must hold them. Takes (list $places
     $pools): by the name of a place, the one deployment that asks for it. */}}
{{- define "atelier.checkPools" -}}
{{- $places := index . 0 -}}
{{- $pools := index . 1 -}}
{{- range $place, $deployment := $places -}}
{{- $replicas := default 1 $deployment.asked.replicas -}}
{{- with $deployment.bounds -}}
{{- $replicas = default 1 .max_replicas -}}
{{- if gt (int .min_replicas) (int $replicas) -}}
{{- fail (printf "%s: min_replicas %d is above max_replicas %d" $deployment.name (int .min_replicas) (int $replicas)) -}}
{{- end -}}
{{- end -}}
{{- $count := 0 -}}
{{- range $pool := $pools -}}
{{- $count = add $count (mul $pool.nodes (dig "resources" $place 0 $pool)) -}}
{{- end -}}
{{- if lt (int $count) (int $replicas) -}}
{{- fail (printf "%s: %d replicas at most, but the worker groups have places for %d" $deployment.name (int $replicas) (int $count)) -}}
{{- end -}}
{{- end -}}
{{- range $pool := $pools -}}
{{- $cpus := 0.0 -}}
{{- $gpus := 0.0 -}}
{{- range $place, $count := $pool.resources -}}
{{- if not (hasKey $places $place) -}}
{{- fail (printf "worker group %s: place '%s' not allowed: no deployment asks for it" $pool.name $place) -}}
{{- end -}}
{{- $asked := (get $places $place).asked -}}
{{- $cpus = addf $cpus (mulf $count (default 0.1 $asked.num_cpus)) -}}
{{- $gpus = addf $gpus (mulf $count (default 0 $asked.num_gpus)) -}}
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
{{- $deployments := index . 1 -}}
{{- $head := dict "places" $root.Values.head.places "terminationGracePeriodSeconds" (include "atelier.headGrace" $root) -}}
{{- range $name, $group := merge (dict "head" $head) $root.Values.workerGroups -}}
{{- range $place, $_ := $group.places -}}
{{- $deployment := get $deployments $place -}}
{{- $drain := default 0 $deployment.asked.drain_s -}}
{{- if gt (addf $drain 15) ($group.terminationGracePeriodSeconds | float64) -}}
{{- fail (printf "%s: terminationGracePeriodSeconds %v is less than 15 s above the %v of %s.drain_s" (ternary "head" (printf "worker group %s" $name) (eq $name "head")) $group.terminationGracePeriodSeconds $drain $deployment.where) -}}
{{- end -}}
{{- if gt ($drain | float64) ($root.Values.ray.clusterDeletionDelaySeconds | float64) -}}
{{- fail (printf "ray.clusterDeletionDelaySeconds %v is less than the %v of %s.drain_s" $root.Values.ray.clusterDeletionDelaySeconds $drain $deployment.where) -}}
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
