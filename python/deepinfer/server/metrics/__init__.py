"""What a server tells of itself: numbers for Prometheus, traces for OpenTelemetry.

Owns: front counters (`front`), the engine's snapshot as Prometheus text (`engine`, `snapshots`), other engines' names (`vllm`), the whole
page (`exposition`), spans (`tracing`). Never touches: the engine's counters themselves, a request's text.

Labels are bounded: model, engine process, route, status, finish reason, names of tenants in the file, and what the engine numbers
(groups, positions of drafts). Buckets are fixed. Nothing is counted a token at a time.
"""
