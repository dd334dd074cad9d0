{{/* Names, labels and the parts that pods of all roles have in common. */}}

{{- define "catenary.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "catenary.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "catenary.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "component" "gateway") */}}
{{- define "catenary.selectorLabels" -}}
app.kubernetes.io/name: {{ include "catenary.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "catenary.labels" -}}
{{ include "catenary.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: catenary
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "catenary.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "catenary.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "catenary.image" -}}
{{- $image := .root.Values.image -}}
{{- $name := printf "%s-%s" $image.repository .component -}}
{{- with .own.imageVariant }}{{ $name = printf "%s-%s" $name . }}{{ end -}}
{{- if $image.registry }}{{ $name = printf "%s/%s" $image.registry $name }}{{ end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* host:port of every scheduler, as YAML list. */}}
{{- define "catenary.schedulerAddresses" -}}
{{- $full := include "catenary.fullname" . -}}
{{- range $i := until (int .Values.scheduler.replicas) }}
- {{ printf "%s-scheduler-%d.%s-scheduler.%s.svc:8004" $full $i $full $.Release.Namespace }}
{{- end }}
{{- end -}}

{{/* Most agents there can be; 0 unless a class scales. */}}
{{- define "catenary.mostAgents" -}}
{{- $most := 0 -}}{{- $scales := false -}}
{{- range .Values.agents -}}
{{- $own := default dict .autoscaling -}}
{{- if $own.enabled -}}{{- $scales = true -}}{{- $most = add $most (int $own.maxReplicas) -}}
{{- else -}}{{- $most = add $most (int .replicas) -}}{{- end -}}
{{- end -}}
{{- ternary $most 0 $scales -}}
{{- end -}}

{{/* Agents to begin with. */}}
{{- define "catenary.fewestAgents" -}}
{{- $fewest := 0 -}}
{{- range .Values.agents -}}
{{- $own := default dict .autoscaling -}}
{{- $fewest = add $fewest (ternary (int (default 1 $own.minReplicas)) (int .replicas) (default false $own.enabled)) -}}
{{- end -}}
{{- max $fewest 1 -}}
{{- end -}}

{{/* Where certificates come from: own, csi, secrets; none is what `insecure` makes of it. */}}
{{- define "catenary.tlsMode" -}}
{{- if not .Values.insecure -}}
{{- .Values.tls.mode -}}
{{- else if ne .Values.tls.mode "own" -}}
{{- fail "insecure: contradicts tls.mode, which is set as well" -}}
{{- else -}}
none
{{- end -}}
{{- end -}}

{{/* The Secret with the file of API keys, if there are any: one of ours, or a generated one. */}}
{{- define "catenary.keysSecret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- .Values.apiKeys.existingSecret -}}
{{- else if not .Values.insecure -}}
{{- include "catenary.fullname" . }}-keys
{{- end -}}
{{- end -}}

{{/* Where KEDA's API key is, if there is one. */}}
{{- define "catenary.kedaKey" -}}
{{- if .Values.keda.apiKey.existingSecret -}}
{name: {{ .Values.keda.apiKey.existingSecret }}, key: {{ .Values.keda.apiKey.key }}}
{{- else if and (not .Values.apiKeys.existingSecret) (not .Values.insecure) -}}
{name: {{ include "catenary.fullname" . }}-keys, key: view-key}
{{- end -}}
{{- end -}}

{{/* The Secret with the password of Redis, if it has one: one of ours, or a generated one. */}}
{{- define "catenary.redisSecret" -}}
{{- if .Values.redis.existingSecret -}}
{{- .Values.redis.existingSecret -}}
{{- else if .Values.redis.bundled.enabled -}}
{{- include "catenary.fullname" . }}-redis
{{- end -}}
{{- end -}}

{{/* DNS names of the gateways' Services. */}}
{{- define "catenary.gatewayNames" -}}
{{- $service := printf "%s-gateway" (include "catenary.fullname" .) -}}
{{- concat (list $service (printf "%s.%s" $service .Release.Namespace) (printf "%s.%s.svc" $service .Release.Namespace)) .Values.tls.gatewayDnsNames | join "," -}}
{{- end -}}

{{/* A user of its own for every role, on top of what all pods have in common. */}}
{{- define "catenary.podSecurityContext" -}}
{{- $user := int (index .root.Values.users .component) -}}
{{- toYaml (merge (deepCopy .root.Values.podSecurityContext) (dict "runAsUser" $user)) -}}
{{- end -}}

{{/* A container that gets the pod's certificate from the chart's authority and, unless it is Redis's,
     renews it: (dict "root" $ "component" ...). The token is in no other container of the pod. */}}
{{- define "catenary.enrolContainer" -}}
{{- $stays := ne .component "redis" -}}
- name: certificate
  image: {{ include "catenary.image" (dict "root" .root "component" "scheduler" "own" dict) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command:
    - catenaryd
    - enrol
    - {{ .component }}
    - $(POD_NAME)
    - --authority={{ include "catenary.fullname" .root }}-authority.{{ .root.Release.Namespace }}.svc:8006
    - --token-file=/catenary/token/secret
    - --out=/catenary/tls
    {{- if $stays }}
    - --stay
    {{- end }}
  env:
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    - {name: CATENARY_LOG_JSON, value: "true"}
  securityContext:
    {{- toYaml .root.Values.containerSecurityContext | nindent 4 }}
  {{- if $stays }}
  restartPolicy: Always
  startupProbe:
    exec: {command: [test, -s, /catenary/tls/tls.crt]}
    periodSeconds: 1
    failureThreshold: 300
  {{- end }}
  resources:
    {{- toYaml .root.Values.authority.enrolResources | nindent 4 }}
  volumeMounts:
    - {name: tls, mountPath: /catenary/tls}
    - {name: token, mountPath: /catenary/token, readOnly: true}
    - {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "catenary.enrolVolumes" -}}
- name: tls
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
- name: token
  secret:
    secretName: {{ include "catenary.fullname" .root }}-tokens
    defaultMode: 0440
    items: [{key: {{ .component }}, path: secret}]
{{- end -}}

{{/* TLS settings of a role, for its section of catenary.yaml: (dict "root" $ "component" ...) */}}
{{- define "catenary.tlsSettings" -}}
{{- if eq (include "catenary.tlsMode" .root) "none" -}}
insecure: true
{{- else if has (include "catenary.tlsMode" .root) (list "own" "csi") -}}
tls_cert_file: /catenary/tls/tls.crt
tls_key_file: /catenary/tls/tls.key
tls_ca_file: /catenary/tls/ca.crt
{{- else -}}
tls_ca_file: /catenary/tls/ca.pem
{{- end -}}
{{- if and (eq .component "gateway") (ne (include "catenary.tlsMode" .root) "none") -}}
{{- if .root.Values.tls.endpointsInsecure }}
endpoints_insecure: true
{{- else if .root.Values.tls.endpointSecret }}
endpoint_cert_file: /catenary/endpoint/tls.crt
endpoint_key_file: /catenary/endpoint/tls.key
{{- end }}
{{- end -}}
{{- end -}}

{{/* What the processes of all roles are told. */}}
{{- define "catenary.commonSettings" -}}
cluster: {{ .root.Values.cluster }}
log_json: true
metrics_host: 0.0.0.0
metrics_port: 8002
health_host: 0.0.0.0
health_port: 8005
model_repository: {{ .root.Values.modelRepository.mountPath }}
scheduler_groups: {{ .root.Values.scheduler.groups }}
trace_sample_ratio: {{ .root.Values.telemetry.traceSampleRatio }}
{{- with .root.Values.telemetry.otlpEndpoint }}
otlp_endpoint: {{ . | quote }}
{{- end }}
{{ include "catenary.tlsSettings" . }}
{{- end -}}

{{/* Environment: what differs from pod to pod. (dict "root" $ "component" ... "own" values of it) */}}
{{- define "catenary.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: CATENARY_{{ .component | upper }}_ID
  value: $(POD_NAME)
{{- if ne .component "scheduler" }}
- name: CATENARY_TRANSPORT_HOST
  value: $(POD_IP)
{{- end }}
{{- if eq (include "catenary.tlsMode" .root) "secrets" }}
- name: CATENARY_TLS_CERT_FILE
  value: /catenary/tls/{{ .component }}-$(POD_NAME).pem
- name: CATENARY_TLS_KEY_FILE
  value: /catenary/tls/{{ .component }}-$(POD_NAME)-key.pem
{{- end }}
{{- with .root.Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- with .own.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "catenary.volumeMounts" -}}
- {name: config, mountPath: /etc/catenary, readOnly: true}
- {name: run, mountPath: /catenary/run}
- {name: tmp, mountPath: /tmp}
{{- if eq .component "agent" }}
- {name: models, mountPath: {{ .root.Values.modelRepository.mountPath }}}
{{- else if include "catenary.hasModels" .root }}
- name: models
  mountPath: {{ .root.Values.modelRepository.mountPath }}
  readOnly: true
  {{- with .root.Values.modelRepository.subPath }}
  subPath: {{ . }}
  {{- end }}
{{- end }}
{{- if ne (include "catenary.tlsMode" .root) "none" }}
- {name: tls, mountPath: /catenary/tls, readOnly: true}
{{- end }}
{{- if and (eq .component "gateway") (include "catenary.ownEndpointCertificate" .root) }}
- {name: endpoint, mountPath: /catenary/endpoint, readOnly: true}
{{- end }}
{{- if and (include "catenary.keysSecret" .root) (has .component (list "gateway" "scheduler")) }}
- {name: api-keys, mountPath: /catenary/keys, readOnly: true}
{{- end }}
{{- if eq .component "scheduler" }}
{{- if include "catenary.redisSecret" .root }}
- {name: redis-password, mountPath: /catenary/redis, readOnly: true}
{{- end }}
{{- if and .root.Values.redis.caSecret (not .root.Values.redis.bundled.enabled) }}
- {name: redis-ca, mountPath: /catenary/redis-ca, readOnly: true}
{{- end }}
{{- end }}
{{- with .own.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "catenary.volumes" -}}
- name: config
  configMap: {name: {{ include "catenary.fullname" .root }}}
- name: run
  emptyDir: {}
- name: tmp
  emptyDir: {}
{{- if eq .component "agent" }}
# What the agent has fetched of the models; see docs/model-store.md.
- name: models
  {{- default (dict "emptyDir" dict) .own.modelCache | toYaml | nindent 2 }}
{{- else if include "catenary.hasModels" .root }}
- name: models
  {{- if .root.Values.modelRepository.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .root.Values.modelRepository.existingClaim }}, readOnly: true}
  {{- else }}
  {{- toYaml .root.Values.modelRepository.volume | nindent 2 }}
  {{- end }}
{{- end }}
{{- if eq (include "catenary.tlsMode" .root) "csi" }}
- name: tls
  csi:
    driver: csi.cert-manager.io
    readOnly: true
    volumeAttributes:
      csi.cert-manager.io/issuer-name: {{ required "tls.issuer.name: the issuer of tls.mode=csi" .root.Values.tls.issuer.name | quote }}
      csi.cert-manager.io/issuer-kind: {{ .root.Values.tls.issuer.kind }}
      csi.cert-manager.io/issuer-group: {{ .root.Values.tls.issuer.group }}
      csi.cert-manager.io/uri-sans: {{ printf "spiffe://catenary/%s/%s/${POD_NAME}" .root.Values.cluster .component }}
      csi.cert-manager.io/dns-names: {{ include "catenary.dnsNames" . | quote }}
      csi.cert-manager.io/duration: {{ .root.Values.tls.duration }}
      csi.cert-manager.io/renew-before: {{ .root.Values.tls.renewBefore }}
      csi.cert-manager.io/key-usages: digital signature,key encipherment,server auth,client auth
      csi.cert-manager.io/fs-group: {{ .root.Values.podSecurityContext.fsGroup | quote }}
{{- else if eq (include "catenary.tlsMode" .root) "own" }}
{{ include "catenary.enrolVolumes" . }}
{{- else if eq (include "catenary.tlsMode" .root) "secrets" }}
- name: tls
  secret:
    secretName: {{ required (printf "tls.secrets.%s: the Secret of tls.mode=secrets" .component) (index .root.Values.tls.secrets .component) }}
    defaultMode: 0440
{{- end }}
{{- if and (eq .component "gateway") (include "catenary.ownEndpointCertificate" .root) }}
- name: endpoint
  secret: {secretName: {{ .root.Values.tls.endpointSecret }}, defaultMode: 0440}
{{- end }}
{{- if and (include "catenary.keysSecret" .root) (has .component (list "gateway" "scheduler")) }}
- name: api-keys
  secret:
    secretName: {{ include "catenary.keysSecret" .root }}
    defaultMode: 0440
    items: [{key: {{ .root.Values.apiKeys.key }}, path: keys.json}]
{{- end }}
{{- if eq .component "scheduler" }}
{{- with include "catenary.redisSecret" .root }}
- name: redis-password
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- if and .root.Values.redis.caSecret (not .root.Values.redis.bundled.enabled) }}
- name: redis-ca
  secret: {secretName: {{ .root.Values.redis.caSecret }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- with .own.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Names in a pod's certificate: its role (clients demand it), its own name as a sender of frames is
     told it, and the Services people dial. */}}
{{- define "catenary.dnsNames" -}}
{{- $cluster := .root.Values.cluster -}}
{{- $names := list (printf "%s.%s.catenary.internal" .component $cluster) -}}
{{- if ne .component "scheduler" -}}
{{- $names = append $names (printf "${POD_NAME}.peer.%s.catenary.internal" $cluster) -}}
{{- end -}}
{{- if eq .component "gateway" -}}
{{- $names = append $names (include "catenary.gatewayNames" .root) -}}
{{- end -}}
{{- join "," $names -}}
{{- end -}}

{{- define "catenary.hasModels" -}}
{{- if or .Values.modelRepository.existingClaim .Values.modelRepository.volume }}yes{{ end -}}
{{- end -}}

{{/* Probes: liveness asks only whether the process lives; a full queue never restarts it. */}}
{{- define "catenary.probes" -}}
startupProbe:
  grpc: {port: 8005, service: live}
  periodSeconds: 2
  failureThreshold: {{ div (max 60 (int .startupSeconds)) 2 }}
livenessProbe:
  grpc: {port: 8005, service: live}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc: {port: 8005, service: ready}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end -}}

{{/* Everything of a pod but its container. (dict "root" $ "component" ... "own" ...) */}}
{{- define "catenary.podCommon" -}}
serviceAccountName: {{ include "catenary.serviceAccountName" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- include "catenary.podSecurityContext" . | nindent 2 }}
# Taken out of the Service, drained, stopped: in this order, and with time to spare.
terminationGracePeriodSeconds: {{ add (int .own.preStopSeconds) (int .own.drainTimeoutSeconds) 15 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .own.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- if .own.topologySpreadConstraints }}
  {{- toYaml .own.topologySpreadConstraints | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "catenary.selectorLabels" . | nindent 8 }}
{{- end }}
volumes:
  {{- include "catenary.volumes" . | nindent 2 }}
{{- if eq (include "catenary.tlsMode" .root) "own" }}
initContainers:
  {{- include "catenary.enrolContainer" . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "catenary.containerCommon" -}}
image: {{ include "catenary.image" . }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command: [catenaryd, --config, /etc/catenary/catenary.yaml, {{ .component }}]
securityContext:
  {{- toYaml .root.Values.containerSecurityContext | nindent 2 }}
{{- if .own.preStopSeconds }}
lifecycle:
  preStop: {sleep: {seconds: {{ .own.preStopSeconds }}}}
{{- end }}
volumeMounts:
  {{- include "catenary.volumeMounts" . | nindent 2 }}
{{- end -}}

{{- define "catenary.podAnnotations" -}}
checksum/config: {{ include (print .root.Template.BasePath "/configmap.yaml") .root | sha256sum }}
{{- with .root.Values.commonAnnotations }}
{{ toYaml . }}
{{- end }}
{{- with .own.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Pods ask the chart's authority for certificates. */}}
{{- define "catenary.authorityEgress" -}}
{{- if eq (include "catenary.tlsMode" .) "own" }}
- to:
    {{- include "catenary.peers" (list (include "catenary.selectorLabels" (dict "root" . "component" "authority") | fromYaml)) | nindent 4 }}
  ports:
    - {port: 8006, protocol: TCP}
{{- end }}
{{- end -}}

{{/* NetworkPolicyPeers of a list of labels. */}}
{{- define "catenary.peers" -}}
{{- range . }}
- podSelector:
    matchLabels:
      {{- toYaml . | nindent 6 }}
{{- end }}
{{- end -}}

{{- define "catenary.dnsEgress" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end -}}

{{- define "catenary.collectorEgress" -}}
{{- if .Values.telemetry.otlpEndpoint }}
- {{- with .Values.networkPolicy.collector }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - {port: {{ regexFind "[0-9]+$" (trimSuffix "/" .Values.telemetry.otlpEndpoint) | default "4317" }}, protocol: TCP}
{{- end }}
{{- end -}}

{{/* What ports with gRPC say of themselves, for meshes and load balancers. */}}
{{- define "catenary.grpcProtocol" -}}
{{- ternary "https" "kubernetes.io/h2c" (eq (include "catenary.endpointsHaveTls" .) "yes") -}}
{{- end -}}

{{- define "catenary.endpointsHaveTls" -}}
{{- if and (ne (include "catenary.tlsMode" .) "none") (not .Values.tls.endpointsInsecure) }}yes{{ end -}}
{{- end -}}

{{/* An endpoint with a certificate of its own. */}}
{{- define "catenary.ownEndpointCertificate" -}}
{{- if and (include "catenary.endpointsHaveTls" .) .Values.tls.endpointSecret }}yes{{ end -}}
{{- end -}}
