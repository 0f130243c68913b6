{{- define "schedsvc.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 52 | trimSuffix "-" }}
{{- end }}

{{/* The name of every object. The claim of the state is named after it, so it has no version. */}}
{{- define "schedsvc.fullname" -}}
{{- $name := include "schedsvc.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "schedsvc.image" -}}
{{- with .Values.image }}
{{- .repository }}:{{ default $.Chart.AppVersion .tag }}{{ with .digest }}@{{ . }}{{ end }}
{{- end }}
{{- end }}

{{/* What selects the pod: no upgrade may change it. */}}
{{- define "schedsvc.selector" -}}
app.kubernetes.io/name: {{ include "schedsvc.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "schedsvc.labels" -}}
{{ include "schedsvc.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* IPv4, IPv6 or both for a Service; the pod listens on both. */}}
{{- define "schedsvc.families" -}}
{{- with .Values.service.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.service.ipFamilies }}
ipFamilies: {{ toJson . }}
{{- end }}
{{- end }}

{{/* "true" if the values name no caller: then one principal has the token of a secret. */}}
{{- define "schedsvc.hasOwnToken" -}}
{{- $auth := default dict .Values.config.auth }}
{{- $certified := and .Values.tls.secretName .Values.tls.clientCA }}
{{- not (or $auth.principals $certified .Values.cluster.enabled) }}
{{- end }}

{{/* The configuration of the scheduler, with what has to agree with the pod. */}}
{{- define "schedsvc.config" -}}
{{- $keys := list "listeners" "metrics" "state" "edge" "record" }}
{{- if .Values.cluster.enabled }}
{{- $keys = append $keys "cluster" }}
{{- end }}
{{- range $key := $keys }}
{{- if hasKey $.Values.config $key }}
{{- fail (printf "config.%s: the chart writes it, or its pod has no place for it; remove it" $key) }}
{{- end }}
{{- end }}
{{- $operators := dict "unix" "/run/schedsvc/schedsvc.sock" "mode" "0600" "auth" "none" }}
{{- $callers := dict "tcp" "0.0.0.0:7600" }}
{{- if .Values.tls.secretName }}
{{- $tls := dict "cert" "/etc/schedsvc-tls/tls.crt" "key" "/etc/schedsvc-tls/tls.key" }}
{{- if .Values.tls.clientCA }}
{{- $_ := set $tls "client_ca" "/etc/schedsvc-tls/ca.crt" }}
{{- end }}
{{- $_ := set $callers "tls" $tls }}
{{- end }}
{{- $name := include "schedsvc.fullname" . }}
{{- $namespaced := printf "%s.%s" $name .Release.Namespace }}
{{- $hosts := concat (list $name $namespaced (printf "%s.svc" $namespaced)) .Values.metrics.hosts }}
{{- $own := dict "listeners" (list $operators $callers) "metrics" (dict "listen" "0.0.0.0:7690" "hosts" $hosts) "state" (dict "file" "/var/lib/schedsvc/state.db") }}
{{- if eq (include "schedsvc.hasOwnToken" .) "true" }}
{{- $gate := dict "name" "gate" "env" "GATE_TOKEN" "pools" (list "*") }}
{{- $_ := set $own "auth" (dict "principals" (list $gate)) }}
{{- end }}
{{- if .Values.tenantsConfigMap }}
{{- if hasKey .Values.config "tenants_dir" }}
{{- fail "config.tenants_dir: tenantsConfigMap sets it; remove one of the two" }}
{{- end }}
{{- $_ := set $own "tenants_dir" "/etc/schedsvc-tenants" }}
{{- end }}
{{- if .Values.cluster.enabled }}
{{- $auth := default dict .Values.config.auth }}
{{- if not $auth.principals }}
{{- fail "cluster.enabled: list the gates in config.auth.principals, since members call one another at the same port" }}
{{- end }}
{{- $member := dict "name" "member" "token_file" "/etc/schedsvc-cluster/member.token" "member" true }}
{{- $_ := set $own "auth" (dict "principals" (append $auth.principals $member)) }}
{{- $_ := set $own "cluster" (include "schedsvc.cluster" . | fromYaml) }}
{{- end }}
{{- merge $own .Values.config | toYaml }}
{{- end }}

{{/* The section `cluster`. A pod's name is the name of its member. */}}
{{- define "schedsvc.cluster" -}}
{{- $fullname := include "schedsvc.fullname" . }}
name: {{ $fullname }}
store:
  urls:
    {{- toYaml .Values.cluster.storeUrls | nindent 4 }}
  password_file: /etc/schedsvc-cluster/store.password
  {{- if .Values.cluster.storeCA }}
  tls: {ca: /etc/schedsvc-cluster/store-ca.crt}
  {{- end }}
set: main
role: auto
advertise: {{ printf "{member}.%s-members.%s.svc:7600" $fullname .Release.Namespace | quote }}
secret_file: /etc/schedsvc-cluster/cluster.secret
leader:
  token_file: /etc/schedsvc-cluster/member.token
  {{- if .Values.tls.secretName }}
  tls:
    {{- if .Values.tls.clientCA }}
    ca: /etc/schedsvc-tls/ca.crt
    cert: /etc/schedsvc-tls/tls.crt
    key: /etc/schedsvc-tls/tls.key
    {{- else }} {}
    {{- end }}
  {{- end }}
{{- end }}

{{/* The targets of all members, as clients list them. */}}
{{- define "schedsvc.targets" -}}
{{- $members := printf "%s-members.%s.svc:7600" (include "schedsvc.fullname" .) .Release.Namespace }}
{{- range $i := until (int .Values.replicaCount) }}
{{- if $i }},{{ end }}{{ include "schedsvc.fullname" $ }}-{{ $i }}.{{ $members }}
{{- end }}
{{- end }}

{{/* Kubernetes' own gRPC probe speaks no TLS; then the command asks at the Unix socket. */}}
{{- define "schedsvc.probe" -}}
{{- if .root.Values.tls.secretName -}}
exec:
  command: [/opt/schedsvc/bin/schedsvc, health, {{ .service }}]
timeoutSeconds: 5
{{- else -}}
grpc:
  port: 7600
  service: {{ .service }}
timeoutSeconds: 3
{{- end }}
{{- end }}

{{/* Seconds of the drain and ten more; Kubernetes kills after that. */}}
{{- define "schedsvc.grace" -}}
{{- $limits := default dict .Values.config.limits }}
{{- $drain := 25000 }}
{{- if hasKey $limits "drain_ms" }}
{{- $drain = int64 $limits.drain_ms }}
{{- end }}
{{- add 10 (div (add $drain 999) 1000) }}
{{- end }}
