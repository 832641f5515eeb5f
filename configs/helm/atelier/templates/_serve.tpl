{{/* The Serve configuration: configs/production.yaml with the values merged in, checked against the worker groups and
     the catalog. Its main application takes `serve.args` and `serve.scaling`. A group of base models is an application
     where pods have a place of its name, and takes those of `serve.groups`; one that the file lacks is like its last. */}}

{{- define "atelier.serveConfig" -}}
{{- $config := .Files.Get "files/production.yaml" | fromYaml -}}
{{- $pools := include "atelier.pools" . | fromYamlArray -}}
{{- $offered := dict -}}
{{- range $pools -}}
{{- $offered = merge $offered .resources -}}
{{- end -}}
{{- $names := list -}}
{{- $last := dict -}}
{{- range $config.applications -}}
{{- $names = append $names .name -}}
{{- $last = . -}}
{{- end -}}
{{- $known := $config.applications -}}
{{- range $name := keys .Values.serve.groups | sortAlpha -}}
{{- if not (hasKey $offered $name) -}}
{{- fail (printf "serve.groups.%s: no pods are meant for it: give a worker group `places: {%s: 1}`" $name $name) -}}
{{- end -}}
{{- if not (has $name $names) -}}
{{- $known = append $known ($last | toJson | replace $last.name $name | fromJson) -}}
{{- end -}}
{{- end -}}
{{- $applications := list -}}
{{- $places := dict -}}
{{- $groups := list -}}
{{- range $application := $known -}}
{{- $isGroup := eq $application.import_path "deployments.app:build_group" -}}
{{- if or (not $isGroup) (hasKey $offered $application.name) -}}
{{- $own := ternary (default (dict) (get $.Values.serve.groups $application.name)) $.Values.serve $isGroup -}}
{{- $values := ternary (printf "serve.groups.%s" $application.name) "serve" $isGroup -}}
{{- $args := mustMergeOverwrite $application.args (deepCopy (default (dict) $own.args)) -}}
{{- if $isGroup -}}
{{- $groups = append $groups $application.name -}}
{{- else if $args.generator -}}
{{- $groups = append $groups "default" -}}
{{- end -}}
{{- $scaled := list -}}
{{- range $deployment := $application.deployments -}}
{{- $asked := default (dict) (ternary $args (get $args $deployment.name) $isGroup) -}}
{{- $scaling := default (dict) (get (default (dict) $own.scaling) $deployment.name) -}}
{{- if eq (toString $asked.replicas) "auto" -}}
{{- $_ := set $deployment "autoscaling_config" (mustMergeOverwrite $deployment.autoscaling_config (deepCopy $scaling)) -}}
{{- $scaled = append $scaled $deployment -}}
{{- else if $scaling -}}
{{- fail (printf "%s.scaling.%s: needs replicas: auto among its args" $values $deployment.name) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $application "deployments" $scaled -}}
{{- $applications = append $applications $application -}}
{{- range $deployment := ternary (list "generator") (list "ingress" "generator" "upscaler" "housekeeper") $isGroup -}}
{{- with ternary $args (get $args $deployment) $isGroup -}}
{{- $asked := . -}}
{{- $place := ternary $application.name $deployment $isGroup -}}
{{- $where := ternary (printf "%s.args" $values) (printf "%s.args.%s" $values $deployment) $isGroup -}}
{{- if ne (toJson $asked.resources) (toJson (dict $place 1)) -}}
{{- fail (printf "%s.resources: ask for {%s: 1}, a place on the pods meant for it" $where $place) -}}
{{- end -}}
{{- $bounds := dict -}}
{{- range $scaled -}}
{{- if eq .name $deployment -}}
{{- $bounds = .autoscaling_config -}}
{{- end -}}
{{- end -}}
{{- $scaling := printf "%s.scaling.%s" $values $deployment -}}
{{- $_ := set $places $place (dict "where" $where "scaling" $scaling "asked" $asked "bounds" $bounds) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $_ := set $config "applications" $applications -}}
{{- $_ := set $config "proxy_location" (ternary "EveryNode" "HeadOnly" (gt (len .Values.workerGroups) 0)) -}}
{{- $_ := set $config "pools" $pools -}}
{{- include "atelier.checkPools" (list $places $pools) -}}
{{- include "atelier.checkDrains" (list $ $places) -}}
{{- include "atelier.checkCatalog" (list (dig "base_models" list (default (dict) .Values.catalog)) $groups) -}}
{{- toYaml $config -}}
{{- end -}}

{{/* Jobs of a base model without generators would wait for ever, and generators without a base model do not start.
     Takes (list $baseModels $groups), the groups that have generators; a catalog in the image cannot be read here. */}}
{{- define "atelier.checkCatalog" -}}
{{- $groups := index . 1 -}}
{{- with index . 0 -}}
{{- $named := list -}}
{{- range . -}}
{{- $group := default "default" .group -}}
{{- $named = append $named $group -}}
{{- if not (has $group $groups) -}}
{{- fail (printf "catalog: the base model %s is of the group %s, and no pods are meant for it: give a worker group `places: {%s: 1}`" .id $group (ternary "generator" $group (eq $group "default"))) -}}
{{- end -}}
{{- end -}}
{{- range $groups -}}
{{- if not (has . $named) -}}
{{- fail (printf "catalog: no base model is of the group %s, whose generators would not start: leave out %s" . (ternary "them, by `serve.args.generator: null`, and their worker group" "its worker group" (eq . "default"))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The nodes that the Ray pods of the values make, in the words of the Serve file's `pools:`. */}}
{{- define "atelier.pools" -}}
{{- $pools := list -}}
{{- if .Values.head.places -}}
{{- $pools = append $pools (dict "name" "head" "nodes" 1 "cpus" .Values.head.cpus "resources" .Values.head.places) -}}
{{- end -}}
{{- range $name, $group := .Values.workerGroups -}}
{{- $cpus := include "atelier.cpus" (default $group.resources.requests.cpu $group.resources.limits.cpu) | float64 -}}
{{- $pool := dict "name" $name "nodes" $group.maxReplicas "cpus" $cpus "resources" $group.places -}}
{{- if $group.gpus -}}
{{- $_ := set $pool "gpus" $group.gpus -}}
{{- end -}}
{{- $pools = append $pools $pool -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end -}}

{{/* Every replica must have a place at its largest number, and a pod with all places taken must hold them. Takes
     (list $places $pools): by the name of a place, the one deployment that asks for it. */}}
{{- define "atelier.checkPools" -}}
{{- $places := index . 0 -}}
{{- $pools := index . 1 -}}
{{- range $place, $deployment := $places -}}
{{- $replicas := default 1 $deployment.asked.replicas -}}
{{- $value := printf "%s.replicas" $deployment.where -}}
{{- with $deployment.bounds -}}
{{- $replicas = default 1 .max_replicas -}}
{{- $value = printf "%s.max_replicas" $deployment.scaling -}}
{{- if gt (int .min_replicas) (int $replicas) -}}
{{- fail (printf "%s.min_replicas %d is above max_replicas %d" $deployment.scaling (int .min_replicas) (int $replicas)) -}}
{{- end -}}
{{- end -}}
{{- $count := 0 -}}
{{- range $pool := $pools -}}
{{- $count = add $count (mul $pool.nodes (dig "resources" $place 0 $pool)) -}}
{{- end -}}
{{- if lt (int $count) (int $replicas) -}}
{{- fail (printf "%s: %d replicas at most, but workerGroups.*.maxReplicas and .places hold %d" $value (int $replicas) (int $count)) -}}
{{- end -}}
{{- end -}}
{{- range $pool := $pools -}}
{{- $group := ternary "head" (printf "workerGroups.%s" $pool.name) (eq $pool.name "head") -}}
{{- $cpus := 0.0 -}}
{{- $gpus := 0.0 -}}
{{- range $place, $count := $pool.resources -}}
{{- if not (hasKey $places $place) -}}
{{- fail (printf "%s.places: '%s' not allowed: no deployment asks for it" $group $place) -}}
{{- end -}}
{{- $asked := (get $places $place).asked -}}
{{- $cpus = addf $cpus (mulf $count (default 0.1 $asked.num_cpus)) -}}
{{- $gpus = addf $gpus (mulf $count (default 0 $asked.num_gpus)) -}}
{{- end -}}
{{- if gt $cpus (addf $pool.cpus 0.0001) -}}
{{- fail (printf "%s.places ask for %v CPUs, a pod has %v" $group $cpus $pool.cpus) -}}
{{- end -}}
{{- if gt $gpus (addf (default 0 (get $pool "gpus")) 0.0001) -}}
{{- fail (printf "%s.places ask for %v GPUs, a pod has %v" $group $gpus (default 0 (get $pool "gpus"))) -}}
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
{{- fail (printf "%s.terminationGracePeriodSeconds %v is less than 15 s above the %v of %s.drain_s" (ternary "head" (printf "workerGroups.%s" $name) (eq $name "head")) $group.terminationGracePeriodSeconds $drain $deployment.where) -}}
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
